"""Where two traced runs of the same requests part, in a form for a result file."""

from typing import Any

import numpy as np

from agent import oracle
from agent.tools.traces import Run, Trace, compare

PAIRS = (("determinism", "decode", "decode again"), ("batch", "decode", "alone"), ("phase", "decode", "prefill"), ("engine", "decode", "packed"),
         ("engine, prefill", "prefill", "packed"))
"""(what is compared, left run, right run)"""
MOST_REQUESTS, TOKENS = 9, 24


def choose(requests: list[dict[str, Any]], rows: int) -> list[dict[str, Any]]:
    """Short requests first, a few sampled tokens of each, together no more than `rows` tokens."""
    chosen, total = [], 0
    for request in sorted(requests, key=lambda r: (len(r["prompt"]) < 8, len(r["prompt"]))):
        short = {"prompt": request["prompt"], "tokens": request["tokens"][:TOKENS]}
        length = len(short["prompt"]) + len(short["tokens"])
        if total + length <= rows and len(chosen) < MOST_REQUESTS:
            chosen.append(short)
            total += length
    return chosen


def runs(count: int) -> dict[str, Run]:
    """The runs of `count` requests that PAIRS names."""
    everyone, alone = tuple(range(count)), tuple(range(min(2, count)))
    return {
        "decode": Run("rollout", "decode", everyone), "decode again": Run("rollout", "decode again", everyone, turn=1),
        "alone": Run("rollout", "alone", alone, (("groups", tuple((i,) for i in range(len(alone)))),)),
        "prefill": Run("rollout", "prefill", everyone, (("mode", "prefill"),)),
        "packed": Run("training", "packed", everyone, (("layout", "packed"), ("micro_batch", count)))}


def part(left: Trace, right: Trace, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """The first unequal site, its first row as [request, position, prompt length], and all unequal sites with their row counts."""
    found = compare(left, right)
    unequal = [count for count in found.counts if count.differing]
    where = None
    if found.first:
        row = int(np.flatnonzero(found.unequal)[0])
        starts = np.cumsum([0, *(len(r["prompt"]) + len(r["tokens"]) for r in requests)])
        request = int(np.searchsorted(starts, row, side="right")) - 1
        where = [request, int(row - starts[request]), len(requests[request]["prompt"])]
    return {"first": found.first.key if found.first else None, "operator": found.first.operator if found.first else None, "first_row": where,
            "unequal_sites": [f"{c.site} {c.differing}/{c.rows}" for c in unequal[:60]], "sites": len(found.counts),
            "without_rows": [c.site for c in found.counts if not c.rows][:20], "only_one_side": found.only_one[:40]}


def tokens(left: oracle.Table, right: oracle.Table, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """First token that differs, how the differing ones spread over requests, and the share of requests' first tokens that differ."""
    a, b = oracle.overlap(left, right)
    unequal = a.bits() != b.bits()
    if not unequal.any():
        return {}
    request, position = (a.key[unequal] >> 32), a.key[unequal] & 0xFFFFFFFF
    first = int(request[0])
    return {"first": f"request {first}, token {int(position[0])} after {len(requests[first]['prompt'])} prompt tokens: "
                     f"{a.logprob[unequal][0]:.6f} {b.logprob[unequal][0]:.6f}",
            "requests_differing": len(np.unique(request)), "first_tokens_differing": int((position == 0).sum())}

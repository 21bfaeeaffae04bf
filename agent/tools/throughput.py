"""Stock and candidate rollout, timed in turns (ABAB...) so that a machine that drifts cannot favour one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agent.draw import Draw
from agent.errors import JobFailed
from agent.oracle import Timed, throughput
from agent.session import Session
from agent.verdict import ThroughputResult
from consistency.conditions import Timing


def measure_throughput(stock: Session, candidate: Session, timing: Timing, draw: Draw,
                       on_pair: Callable[[ThroughputResult | None], None] = lambda _: None) -> tuple[ThroughputResult | None, list[str]]:
    """One warm-up run of each, then `timing.pairs` pairs on new prompts; nothing else of ours may be busy meanwhile.

    Returns the result, or None and the objections to it. Raises JobFailed if an engine dies.
    """
    tokens = timing.requests * timing.new_tokens
    pairs: list[tuple[Timed, Timed]] = []
    for number in range(-1, timing.pairs):
        prompts = draw.equal_length(f"throughput {number}", timing.requests, timing.prompt_tokens)
        step = {"kind": "throughput", "requests": [{"prompt": prompt} for prompt in prompts], "max_tokens": timing.new_tokens}
        pair = (_timed(stock, step), _timed(candidate, step))
        if number >= 0:
            pairs.append(pair)
        on_pair(throughput(pairs, tokens)[0] if pairs else None)
    return throughput(pairs, tokens)


def _timed(session: Session, step: dict[str, Any]) -> Timed:
    answer = session.run(step)
    tokens = answer.data.get("tokens")
    if not isinstance(tokens, int):
        raise JobFailed(f"the answer to 'throughput' has no token count but {tokens!r}", session.directory)
    return Timed(tokens, answer.wall_seconds)

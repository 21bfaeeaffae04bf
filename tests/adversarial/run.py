"""Runs every candidate through `verify` and says which rule refused it; with `--engines`, on vLLM and transformers instead of the toy engine.

    python -m tests.adversarial.run [--engines] [--only WORD] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from agent.checkpoint import seeded
from agent.errors import JobFailed
from agent.kernel_source import inspect_kernels
from agent.tools.verify import VerifyRequest, verify
from agent.verdict import VerifyReport
from consistency.contract import Contract
from consistency.models.catalog import FAMILIES
from sandboxes import Capabilities, Limits, Sandbox, choose
from tests.adversarial.table import CANDIDATES, HONEST, KERNELS, Candidate, groups

FAMILY = "qwen3"
TOY = Path(__file__).with_name("toy_job.py")
PROCESSES, DISK_BYTES = 40, 96 << 20
"""Limits that the candidates run into quickly; an honest job stays far below."""


class Tight(Sandbox):
    """The machine's sandbox with low limits and, unless `engines`, the toy engine in place of the real ones."""

    def __init__(self, inner: Sandbox, engines: bool) -> None:
        self.inner, self.engines = inner, engines

    def start(self, argv: Sequence[str], directory: Path, environment: Mapping[str, str], limits: Limits):
        limits = replace(limits, processes=PROCESSES, disk_bytes=DISK_BYTES)
        if self.engines:
            return self.inner.start(argv, directory, environment, limits)
        engine = argv[2].rsplit(".", 1)[1]
        return self.inner.start([sys.executable, str(TOY), engine, *argv[3:]], directory, environment,
                                replace(limits, readable=(*limits.readable, TOY)))

    def capabilities(self) -> Capabilities:
        return self.inner.capabilities()


@dataclass(frozen=True)
class Outcome:
    """What became of one candidate."""

    candidate: Candidate
    rules: list[str]
    """of the verdict, with the look at the source left out"""
    refused_by: list[str]
    """the reasons of the candidate's rule that are about it"""
    source: list[str]
    """objections to its source"""
    seconds: float
    report: VerifyReport | None

    @property
    def rejected(self) -> bool:
        return bool(self.refused_by) and not (self.report and self.report.verdict.exact)

    @property
    def by_name(self) -> bool:
        return self.rejected and self.candidate.rule in self.rules and bool(self.source) == self.candidate.source


def judge(group: tuple[Candidate, ...], scratch: Path, engines: bool = False, sandbox: Sandbox | None = None) -> list[Outcome]:
    """Verifies the exact contract with the group's kernels in place. `scratch` is new; its `evidence` folder keeps what verify leaves."""
    kernels = scratch / "kernels"
    kernels.mkdir(parents=True)
    exact = dict.fromkeys(FAMILIES[FAMILY].operators, "exact")
    contract = Contract(exact, exact)
    for candidate in group:
        shutil.copy(CANDIDATES / f"{candidate.file}.py", kernels)
        for side, operator, function in candidate.bindings:
            contract = contract.with_(operator, f"kernels:{candidate.file}.{function}", side)
    request = VerifyRequest(family=FAMILY, checkpoint=checkpoint(scratch, engines), contract=contract, kernels=kernels,
                            directory=scratch / "evidence", level="full" if any(c.level == "full" for c in group) else "quick")
    begun, report, died = time.monotonic(), None, ""
    # Its own test shows that this line refuses them; here it is lifted, so that what stands behind it has to.
    with mock.patch("agent.tools.verify.inspect_kernels", lambda folder: []):
        try:
            report = verify(request, sandbox=Tight(sandbox or choose(), engines))
        except JobFailed as error:
            died = str(error)
    seconds = time.monotonic() - begun
    return [Outcome(c, report.verdict.rules if report else [], _reasons(c, group, report) if report else [died], _at_source(c), seconds, report)
            for c in group]


def _reasons(candidate: Candidate, group: tuple[Candidate, ...], report: VerifyReport) -> list[str]:
    """What the report says against this candidate: in a shared verify, only lines that name its file, or the one rule that no other breaks."""
    verdict = report.verdict
    if candidate.rule == "mismatch":
        found = [c for c in verdict.conditions if c.mismatches and c.name == (candidate.condition or c.name)]
        return [f"{c.name}: {c.mismatches} of {c.tokens} log-probabilities differ" for c in found]
    if candidate.rule not in verdict.rules:
        return []
    shared = [c for c in group if c.rule == candidate.rule and c is not candidate]
    lines = [reason for reason in verdict.reasons if f"{candidate.file}.py" in reason]
    if shared or candidate.group == "attempts":
        return lines
    return lines or list(verdict.reasons)


def _at_source(candidate: Candidate) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(CANDIDATES / f"{candidate.file}.py", folder)
        return list(inspect_kernels(Path(folder)))


def checkpoint(scratch: Path, engines: bool) -> Path:
    if engines:
        return seeded(FAMILY, "tiny")
    folder = scratch / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512, "eos_token_id": 2}), encoding="utf-8")
    return folder


def group_of(candidate: Candidate, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    return next(group for group in groups(candidates) if candidate in group)


def run(candidates: tuple[Candidate, ...], engines: bool) -> Iterator[Outcome]:
    for group in groups(candidates):
        with tempfile.TemporaryDirectory(prefix="adversarial-") as scratch:
            yield from judge(group, Path(scratch), engines)


def table(rows: dict[str, dict], engines: bool, seconds: float) -> dict:
    """The committed result."""
    from bench.cpu import stamp

    named = [row for name, row in rows.items() if name != HONEST.file]
    return {**stamp(), "command": "python -m tests.adversarial.run" + (" --engines" if engines else ""),
            "note": "each outcome is of the last call that ran its candidate",
            "engine": "vllm and transformers, qwen3 tiny" if engines else "toy", "sandbox": choose().capabilities().name,
            "candidates": len(named), "rejected_by_name": sum(row["as_expected"] for row in named),
            "honest_passes": rows.get(HONEST.file, {}).get("as_expected"), "seconds": round(seconds, 1), "outcomes": list(rows.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", action="store_true", help="vLLM and transformers instead of the toy engine")
    parser.add_argument("--only", default="", help="candidates whose file contains this")
    parser.add_argument("--out", type=Path, help="write the table here as JSON; outcomes of others that it holds are kept")
    options = parser.parse_args()
    rows: dict[str, dict] = {}
    if options.out and options.out.exists():
        rows = {row["candidate"]: row for row in json.loads(options.out.read_text(encoding="utf-8"))["outcomes"]}
    chosen = tuple(c for c in (*KERNELS, HONEST) if options.only in c.file)
    for outcome in run(chosen, options.engines):
        c = outcome.candidate
        fine = outcome.report is not None and outcome.report.verdict.exact if c is HONEST else outcome.by_name
        rows[c.file] = {"candidate": c.file, "row": c.row, "what": c.what, "expected": c.rule, "rules": outcome.rules, "as_expected": fine,
                        "refused_at_source": outcome.source[:1], "said": [line[:300] for line in outcome.refused_by[:2]],
                        "together_with": [other.file for other in group_of(c, chosen) if other is not c], "seconds": round(outcome.seconds, 1)}
        print(f"{'right' if fine else 'WRONG':6} {outcome.seconds:6.1f} s  {c.file}: {', '.join(outcome.rules) or 'no rule'}; expected "
              f"{c.rule or 'none'}; {' '.join(outcome.refused_by[:1])[:200]}", flush=True)
        result = table(rows, options.engines, sum(row["seconds"] / (1 + len(row["together_with"])) for row in rows.values()))
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            draft = options.out.with_suffix(".part")
            draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            draft.replace(options.out)
    print({k: v for k, v in result.items() if k in ("candidates", "rejected_by_name", "honest_passes", "seconds", "sandbox")})


if __name__ == "__main__":
    main()

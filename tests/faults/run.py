"""Runs every fault through one pair of engines per family and compares what localize says with the table.

    python -m tests.faults.run [--only WORD] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from agent.checkpoint import seeded
from agent.model_facts import read_facts
from agent.tools.divergence import LocalizeReport
from agent.tools.engines import ENGINES, EnginePair
from agent.tools.localize import DIMENSIONS, locate
from agent.tools.weights import moved_checkpoint
from bench.cpu import stamp
from consistency.contract import Contract
from consistency.models.catalog import FAMILIES
from tests.faults.table import FAULTS, KERNELS, Fault


@dataclass(frozen=True)
class Outcome:
    """What localize said about one fault."""

    fault: str
    corpus: str
    family: str
    side: str
    expected: tuple[str, str, str]
    """dimension, operator, cause"""
    found: tuple[str, str, str] | None
    """None: it called everything equal"""
    site: str
    detail: str
    deviating: list[str]
    confirmed: bool
    substituted_with: str | None
    max_ulps: int
    seconds: float

    @property
    def right(self) -> bool:
        """Operator and dimension; the fault's side must be the one that was substituted."""
        return self.found is not None and self.found[:2] == self.expected[:2] and self.confirmed and self.deviating == [self.side]

    @property
    def cause_right(self) -> bool:
        return self.found is not None and self.found[2] == self.expected[2]


def exact_contract(family: str) -> Contract:
    return Contract(*(dict.fromkeys(FAMILIES[family].operators, "exact") for _ in ENGINES))


def run(faults: tuple[Fault, ...] = FAULTS, say: Callable[[str], None] = lambda _: None) -> Iterator[Outcome]:
    """Outcomes in the order of the table. One family's engines at a time."""
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        for family in dict.fromkeys(fault.family for fault in faults):
            checkpoint = seeded(family, "tiny")
            with EnginePair(family, checkpoint, KERNELS, exact_contract(family), Path(scratch) / family) as pair:
                pair.wait()
                clean = locate(pair, exact_contract(family), read_facts(checkpoint))
                if clean.divergences:
                    raise AssertionError(f"{family} is not exact without a fault: {clean.divergences[0].site}")
                say(f"{family} is exact without a fault, {clean.seconds:.1f} s")
                for fault in faults:
                    if fault.family == family:
                        yield _one(pair, fault, pair.directory)  # all that its jobs see of this machine's files


def _one(pair: EnginePair, fault: Fault, scratch: Path) -> Outcome:
    begun = time.monotonic()
    contract = exact_contract(fault.family)
    if fault.kernel:
        contract = contract.with_(fault.operator, f"kernels:{fault.kernel}", fault.side)
    if fault.stale:
        _update_all_but(pair, fault, scratch)
    report = locate(pair, contract, read_facts(pair.checkpoint))
    _restore(pair)
    return _outcome(fault, report, time.monotonic() - begun)


def _update_all_but(pair: EnginePair, fault: Fault, scratch: Path) -> None:
    """New weights on both sides, of which one side does not take over one parameter."""
    new, partly = scratch / f"{fault.family}-new", scratch / f"{fault.family}-{fault.stale}"
    if not new.exists():
        moved_checkpoint(pair.checkpoint, new)
    shutil.copytree(new, partly)
    _put_back(partly / "model.safetensors", pair.checkpoint / "model.safetensors", fault.stale)
    for engine in ENGINES:
        pair.write_weights(engine, partly if engine == fault.side else new)
        pair.holds[engine] = new


def _put_back(target: Path, source: Path, parameter: str) -> None:
    """Copies one parameter's bytes between two checkpoints of the same layout."""
    old, new = source.read_bytes(), bytearray(target.read_bytes())
    length = int.from_bytes(old[:8], "little")
    entries = json.loads(old[8:8 + length])
    name = next(n for n in entries if n.partition(".")[2] == parameter.partition(".")[2])
    start, end = (8 + length + offset for offset in entries[name]["data_offsets"])
    new[start:end] = old[start:end]
    target.write_bytes(new)


def _restore(pair: EnginePair) -> None:
    """The clean state that the next fault is injected into."""
    pair.bind(exact_contract(pair.family))
    for engine in ENGINES:
        if pair.holds[engine] is not None:
            pair.write_weights(engine, None)
    pair.keep(exact_contract(pair.family))


def _outcome(fault: Fault, report: LocalizeReport, seconds: float) -> Outcome:
    expected = (fault.dimension, fault.operator, fault.cause)
    if not report.divergences:
        return Outcome(fault.name, fault.corpus, fault.family, fault.side, expected, None, "", "", [], False, None, 0, seconds)
    first = min(report.divergences, key=lambda d: DIMENSIONS.index(d.dimension))
    found = (first.dimension, first.operator, first.cause)
    if fault.stale and fault.stale not in first.cause_detail:
        found = (*found[:2], f"{first.cause}, but not of {fault.stale}")
    return Outcome(fault.name, fault.corpus, fault.family, fault.side, expected, found, first.site, first.cause_detail, first.deviating,
                   first.confirmed, first.substituted_with, first.max_ulps, seconds)


def table(outcomes: list[Outcome], seconds: float) -> dict:
    """The committed result."""
    return {**stamp(), "faults": len(outcomes), "right": sum(o.right for o in outcomes), "cause_right": sum(o.cause_right for o in outcomes),
            "silent": sum(o.found is None for o in outcomes), "seconds": round(seconds, 1),
            "outcomes": [{**asdict(o), "seconds": round(o.seconds, 2), "right": o.right, "cause_right": o.cause_right} for o in outcomes]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--out", type=Path, help="write the table here as JSON")
    options = parser.parse_args()
    begun = time.monotonic()
    outcomes = []
    for o in run(tuple(f for f in FAULTS if options.only in f.name), lambda line: print(line, flush=True)):
        outcomes.append(o)
        mark = "right" if o.right and o.cause_right else "right, other cause" if o.right else "SILENT" if o.found is None else "WRONG"
        print(f"{mark:18} {o.seconds:5.1f} s  {o.fault}: {' '.join(o.found or ('nothing',))} at {o.site} on {o.deviating} ({o.substituted_with}); "
              f"expected {' '.join(o.expected)} on {o.side}; {o.detail}", flush=True)
    result = table(outcomes, time.monotonic() - begun)
    spent = sum(resource.getrusage(who).ru_utime + resource.getrusage(who).ru_stime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print({**{k: v for k, v in result.items() if k in ("faults", "right", "cause_right", "silent", "seconds")}, "cpu_seconds": round(spent)})
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""`localize`: per dimension, the first operator whose output differs although its input is equal, confirmed by substitution."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agent.draw import Draw
from agent.errors import UserError
from agent.model_facts import ModelFacts, read_facts
from agent.tools.diagnose import Diagnosis
from agent.tools.divergence import Divergence, LocalizeReport
from agent.tools.engines import EnginePair
from agent.tools.traces import Comparison, Run, compare
from consistency.conditions import Dimension
from consistency.contract import Contract
from consistency.models.catalog import FAMILIES, Family
from sandboxes import Sandbox

DIMENSIONS: tuple[Dimension, ...] = ("determinism", "batch", "phase", "engine")
LENGTHS = (1, 2, 3, 5, 7, 9, 12, 15, 16, 17, 20, 31, 33, 40, 63, 65, 129)
"""prompt lengths: around every border that a kernel or a scan's chunk has at these sizes; together above 256 rows"""
NEW_TOKENS = 8
ALONE = (1, 7, 8, 9, 13, 15)
"""the requests that also run without neighbours"""
MOVED = (1, 7, 12)
"""the requests that also run after the weights were written anew"""
CHUNK = 15
PATIENCE = 25.0
"""seconds, with both engines up, after which no further divergence behind the first of a dimension is looked for"""
DEPTH = 12
"""most divergences per dimension"""


class LocalizeRequest(BaseModel):
    family: str
    """as listed by `agent models`"""
    scale: str = "tiny"
    checkpoint: Path
    """folder of a Hugging Face checkpoint that both engines load"""
    contract: Contract
    kernels: Path | None = None
    """folder that `kernels:` names refer to"""
    work_dir: Path
    """new or empty; keeps job files, logs and a case folder per divergence"""
    dimensions: list[Dimension] | None = None
    """None: all that one machine can run"""
    seed: str = "localize"
    """of the prompts and the sampling; the same seed gives the same ones"""


def localize(request: LocalizeRequest, progress: Callable[[Any], None] = lambda _: None, sandbox: Sandbox | None = None) -> LocalizeReport:
    """Traces both engines under every schedule of each dimension and explains the first difference.

    Raises UserError for an unknown family or dimension, or an unusable checkpoint, and JobFailed if an engine dies. Leaves no process behind.
    """
    if request.family not in FAMILIES:
        raise UserError(f"unknown model '{request.family}'; known: {', '.join(FAMILIES)}")
    if unknown := set(request.dimensions or ()) - set(DIMENSIONS):
        raise UserError(f"localize cannot trace '{sorted(unknown)[0]}'; known: {', '.join(DIMENSIONS)}")
    begun = time.monotonic()
    facts = read_facts(request.checkpoint)
    with EnginePair(request.family, request.checkpoint, request.kernels, request.contract, request.work_dir, sandbox) as pair:
        pair.wait(lambda: progress("starting both engines"))
        return locate(pair, request.contract, facts, request.dimensions, request.seed, progress, begun)


def locate(pair: EnginePair, contract: Contract, facts: ModelFacts, dimensions: list[Dimension] | None = None, seed: str = "localize",
           progress: Callable[[Any], None] = lambda _: None, begun: float | None = None) -> LocalizeReport:
    """The same on engines that run already; whatever contract and weights they held before is the state that is examined."""
    return _Localization(pair, contract, facts, dimensions or list(DIMENSIONS), seed, progress, time.monotonic() if begun is None else begun).run()


class _Localization:
    def __init__(self, pair: EnginePair, contract: Contract, facts: ModelFacts, dimensions: list[Dimension], seed: str,
                 progress: Callable[[Any], None], begun: float) -> None:
        self.pair, self.contract, self.dimensions, self.progress, self.begun = pair, contract, dimensions, progress, begun
        self.ready = time.monotonic()
        self.family: Family = FAMILIES[pair.family]
        self.draw = Draw(facts, seed)
        self.report = LocalizeReport(divergences=[], exact_dimensions=[], seconds=0.0)
        self.config = json.loads((pair.checkpoint / "config.json").read_text(encoding="utf-8"))

    def run(self) -> LocalizeReport:
        self.progress("sampling")
        self.pair.sample(self.contract, [self.draw.equal_length(f"localize {i}", 1, n)[0] for i, n in enumerate(LENGTHS)], NEW_TOKENS,
                          self.draw.sampling_seed("localize"))
        everything = {name: self._pairs(name) for name in self.dimensions}
        self.progress("tracing")
        runs = [run for pairs in everything.values() for pair in pairs for run in pair]
        # Repetitions last: what other schedules leave behind must not show in them.
        self.pair.fetch([(run, self.contract) for run in sorted(runs, key=lambda run: run.turn)])
        reached = self.contract
        for name, pairs in everything.items():
            self.progress(f"comparing {name}")
            reached = self._chain(name, pairs, self.contract)
        if "engine" in self.dimensions:
            self._after_weight_update(reached)
        found = {d.dimension for d in self.report.divergences}
        self.report.exact_dimensions = [name for name in self.dimensions if name not in found]
        self.report.seconds = time.monotonic() - self.begun
        return self.report

    # ---- which runs are compared ------------------------------------------------------------------------------------

    def _pairs(self, dimension: Dimension) -> list[tuple[Run, Run]]:
        everyone, some = tuple(range(len(LENGTHS))), ALONE
        decode = Run("rollout", "decode", everyone)
        packed = Run("training", "packed", everyone, (("layout", "packed"), ("micro_batch", len(everyone))))
        if dimension == "determinism":
            return [(run, Run(run.engine, f"{run.label}, again", run.requests, run.options, turn=1)) for run in (decode, packed)]
        if dimension == "batch":
            alone = Run("rollout", "decode, alone", some, (("groups", tuple((i,) for i in range(len(some)))),))
            return [(alone, decode), (Run("training", "alone", some, (("layout", "alone"),)), packed),
                    (packed, Run("training", "padded", everyone, (("layout", "padded"), ("micro_batch", 6))))]
        if dimension == "phase":
            pairs = [(decode, Run("rollout", "prefill", everyone, (("mode", "prefill"),))),
                     (decode, Run("rollout", "prefill in chunks", everyone, (("chunk", CHUNK), ("stagger", 1)))),
                     (decode, Run("rollout", "decode, preempted", some, (("preempt_every", 3),)))]
            if "prefix_cache" not in self.family.cannot:
                pairs.append((decode, Run("rollout", "decode, prefix cached", some, (("prefix_cache", "warm"),))))
            return pairs
        return [(decode, packed)]

    # ---- the search -------------------------------------------------------------------------------------------------

    def _chain(self, dimension: Dimension, pairs: list[tuple[Run, Run]], contract: Contract) -> Contract:
        """Reports the first divergence, then the next one that is left once that is substituted, and so on; returns the last contract."""
        for order in range(DEPTH):
            found = self._first(dimension, pairs, contract, order == 0)
            if found is None:
                break
            contract, divergence = self._examine(dimension, pairs, found, contract, order)
            self.report.divergences.append(divergence)
            if not divergence.confirmed or divergence.next_site is None or time.monotonic() - self.ready > PATIENCE:
                break
        return contract

    def _first(self, dimension: str, pairs: list[tuple[Run, Run]], contract: Contract, keep: bool = False) -> Comparison | None:
        """The comparison whose first unequal site comes first in the model; None if all are equal."""
        self.pair.fetch([(run, contract) for pair in pairs for run in pair])
        compared = [compare(self.pair.trace(left, contract), self.pair.trace(right, contract)) for left, right in pairs]
        for found in compared:
            label = f"{dimension}: {found.left.run.label} against {found.right.run.label}"
            if found.only_one:
                self._note(f"{label}: only one side has {', '.join(found.only_one[:3])}")
            if silent := [count.site for count in found.counts if not count.rows]:
                self._note(f"{label}: no row in common at {', '.join(silent[:3])}")
        unequal = [found for found in compared if found.first]
        first = min(unequal, key=lambda found: found.first.order, default=None)
        if keep:
            self.report.sites[dimension] = (first or compared[0]).counts
        return first

    def _examine(self, dimension: Dimension, pairs: list[tuple[Run, Run]], found: Comparison, contract: Contract,
                 order: int) -> tuple[Contract, Divergence]:
        """One divergence: its numbers and cause, then the substitution that has to make it move."""
        site = found.first
        assert site is not None
        self.progress(f"{dimension}: {site.key} ({site.operator}) differs; naming the cause")
        diagnosis = Diagnosis(self.pair, self.config, found, contract, dimension, f"{dimension}-{order}-{site.key}")
        divergence = diagnosis.divergence(order)
        for candidate, name, sides in diagnosis.substitutions():
            self.progress(f"{dimension}: {site.operator} substituted with {name} on {' and '.join(sides)}")
            left = self._first(dimension, pairs, candidate)
            if left is None or left.first.order > site.order:
                divergence.confirmed, divergence.substituted_with, divergence.deviating = True, name, list(sides)
                divergence.next_site = left.first.key if left else None
                return candidate, divergence
        return contract, divergence

    def _after_weight_update(self, contract: Contract) -> None:
        """Another checkpoint is written over the running one and back; both engines must follow, and come back."""

    def _note(self, line: str) -> None:
        if line not in self.report.notes:
            self.report.notes.append(line)


__all__ = ["Divergence", "LocalizeReport", "LocalizeRequest", "localize"]

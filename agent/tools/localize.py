"""`localize`: per dimension, the first operator whose output differs although its input is equal, confirmed by substitution."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agent.device import Setup
from agent.draw import Draw
from agent.errors import StepFailed, UserError
from agent.model_facts import ModelFacts, read_facts
from agent.session import Engine
from agent.tools.diagnose import Diagnosis
from agent.tools.divergence import Divergence, LocalizeReport
from agent.tools.engines import ENGINES, EnginePair
from agent.tools.traces import LOGPROB, Comparison, Run, Site, compare
from agent.tools.weights import moved_checkpoint
from consistency.conditions import Dimension
from consistency.contract import Contract
from consistency.models.catalog import FAMILIES, Family
from sandboxes import Sandbox

DIMENSIONS: tuple[Dimension, ...] = ("determinism", "batch", "phase", "engine")
LENGTHS = (1, 2, 3, 5, 7, 9, 12, 15, 16, 17, 20, 31, 33, 40, 63, 65, 129)
"""prompt lengths: around every border that a kernel or a scan's chunk has at these sizes; together above 256 rows"""
NEW_TOKENS = 6
ALONE = (1, 7, 8, 13, 15)
"""the requests that the rollout also runs without neighbours; training runs all of them so"""
MOVED = (1, 7, 12)
"""the requests that also run after the weights were written anew"""
LONG = (8, 11, 13, 15, 16)
"""the requests that are prefilled in chunks or read from the prefix cache, which holds whole blocks of 128 tokens"""
CHUNK = 15
HAPPENED = {"preempt_every": "preemptions", "chunk": "prefill_chunks", "prefix_cache": "cached_tokens"}
"""option of a run -> counter that says whether the engine did it"""
PATIENCE = {"cpu": 38.0, "cuda": 240.0}
"""device -> seconds, with both engines up, after which no further divergence behind the first of a dimension is looked for"""
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
    graphs: bool = False
    """on a GPU: trace inside CUDA graphs instead of eagerly; a rollout is then started anew for every substitution"""
    repros: bool = True
    """also cut each divergence down while the engines are up, which spares `repro` their start"""


def localize(request: LocalizeRequest, progress: Callable[[Any], None] = lambda _: None, sandbox: Sandbox | None = None) -> LocalizeReport:
    """Traces both engines under every schedule of each dimension and explains the first difference.

    Raises UserError for an unknown family or dimension, an unusable checkpoint or a used folder, and JobFailed if an engine dies. Leaves no
    process behind.
    """
    if request.family not in FAMILIES:
        raise UserError(f"unknown model '{request.family}'; known: {', '.join(FAMILIES)}")
    if unknown := set(request.dimensions or ()) - set(DIMENSIONS):
        raise UserError(f"localize cannot trace '{sorted(unknown)[0]}'; known: {', '.join(DIMENSIONS)}")
    if (request.work_dir / "jobs").exists():
        raise UserError(f"{request.work_dir} holds an earlier call's jobs; give a new folder")
    begun = time.monotonic()
    facts = read_facts(request.checkpoint)
    setup = Setup(request.family, request.scale, request.checkpoint)
    with EnginePair(request.family, request.checkpoint, request.kernels, request.contract, request.work_dir, sandbox, setup,
                    graphs=request.graphs) as pair:
        pair.wait(lambda: progress("starting both engines"))
        report = locate(pair, request.contract, facts, request.dimensions, request.seed, progress, begun)
        if request.repros:
            build_repros(pair, report, progress)
        report.seconds = time.monotonic() - begun
        return report


def build_repros(pair: EnginePair, report: LocalizeReport, progress: Callable[[Any], None] = lambda _: None) -> None:
    """Fills `repro/` in the evidence of every divergence that has any, on both engines at the same time."""
    tickets = []
    for divergence in report.divergences:
        if not divergence.evidence:
            continue
        evidence = Path(divergence.evidence)
        engine: Engine = "rollout" if any(side.startswith("rollout") for side in divergence.sides) else "training"
        session = pair.sessions[engine]
        built = session.directory / "cases" / evidence.name / "repro"
        step = {"kind": "operator", "action": "build", "case": str(built.parent), "folder": str(built)}
        tickets.append((session, session.submit(step), built, evidence / "repro"))
    for session, ticket, built, target in tickets:
        progress(f"cutting down {target.parent.name}")
        try:
            session.wait(ticket)
            shutil.copytree(built, target)
        except (StepFailed, OSError) as error:
            report.notes.append(f"{target.parent.name}: no repro was made: {str(error).splitlines()[0]}")


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
        self.doubted: set[str] = set()
        self.config = json.loads((pair.checkpoint / "config.json").read_text(encoding="utf-8"))

    def run(self) -> LocalizeReport:
        self.progress("sampling")
        self.pair.sample(self.contract, [self.draw.equal_length(f"localize {i}", 1, n)[0] for i, n in enumerate(LENGTHS)], NEW_TOKENS,
                          self.draw.sampling_seed("localize"))
        everything: dict[Dimension, list[tuple[Run, Run]]] = {name: self._pairs(name) for name in self.dimensions}
        self.progress("tracing")
        runs = [run for pairs in everything.values() for pair in pairs for run in pair]
        # Repetitions last: what other schedules leave behind must not show in them.
        self.pair.fetch([(run, self.contract) for run in sorted(runs, key=lambda run: run.turn)])
        for name, pairs in everything.items():
            self.progress(f"comparing {name}")
            reached, equal = self._chain(name, pairs, self.contract)
            if name == "engine" and equal:
                self._after_weight_update(reached)
        unequal = {d.dimension for d in self.report.divergences} | self.doubted
        self.report.exact_dimensions = [name for name in self.dimensions if name not in unequal]
        self.report.seconds = time.monotonic() - self.begun
        return self.report

    # ---- which runs are compared ------------------------------------------------------------------------------------

    def _pairs(self, dimension: Dimension) -> list[tuple[Run, Run]]:
        everyone, some = tuple(range(len(LENGTHS))), ALONE
        decode = Run("rollout", "decode", everyone)
        packed = Run("training", "packed", everyone, (("layout", "packed"), ("micro_batch", len(everyone))))
        unscored = ("logprobs", False)  # of the trace alone; log-probabilities would need a second forward
        if dimension == "determinism":
            return [(decode, Run("rollout", "decode, again", everyone, turn=1)),
                    (packed, Run("training", "packed, again", everyone, (*packed.options, unscored), turn=1))]
        if dimension == "batch":
            alone = Run("rollout", "decode, alone", some, (("groups", tuple((i,) for i in range(len(some)))),))
            return [(alone, decode), (Run("training", "alone", everyone, (("layout", "alone"), unscored)), packed),
                    (packed, Run("training", "padded", everyone, (("layout", "padded"), ("micro_batch", 6), unscored)))]
        if dimension == "phase":
            pairs = [(decode, Run("rollout", "prefill", everyone, (("mode", "prefill"),))),
                     (decode, Run("rollout", "prefill in chunks", LONG, (("chunk", CHUNK), ("stagger", 1)))),
                     (decode, Run("rollout", "decode, preempted", some, (("preempt_every", 3),)))]
            if "prefix_cache" not in self.family.cannot:
                pairs.append((decode, Run("rollout", "decode, prefix cached", LONG, (("prefix_cache", "warm"),))))
            return pairs
        return [(decode, packed)]

    # ---- the search -------------------------------------------------------------------------------------------------

    def _chain(self, dimension: Dimension, pairs: list[tuple[Run, Run]], contract: Contract, begin: int = 0) -> tuple[Contract, bool]:
        """Reports the first divergence, then the next one that is left once that is substituted, and so on.

        Returns the last contract and whether all is equal under it.
        """
        for order in range(begin, DEPTH):
            found = self._first(dimension, pairs, contract, order == 0)
            if found is None:
                return contract, True
            contract, divergence = self._examine(dimension, pairs, found, contract, order)
            self.report.divergences.append(divergence)
            if not divergence.confirmed or time.monotonic() - self.ready > PATIENCE[self.pair.setup.device]:
                return contract, divergence.confirmed and divergence.next_site is None
        return contract, False

    def _first(self, dimension: str, pairs: list[tuple[Run, Run]], contract: Contract, keep: bool = False) -> Comparison | None:
        """The comparison whose first unequal site comes first in the model; None if all are equal."""
        self.pair.fetch([(run, contract) for pair in pairs for run in pair])
        compared = [compare(self.pair.trace(left, contract), self.pair.trace(right, contract)) for left, right in pairs]
        for found in compared:
            label = f"{dimension}: {found.left.run.label} against {found.right.run.label}"
            if lonely := [key for key in found.only_one if key != LOGPROB]:
                self._note(f"{label}: only one side has {', '.join(lonely[:3])}")
            if silent := [count.site for count in found.counts if not count.rows]:
                self._doubt(dimension, f"{label}: no row in common at {', '.join(silent[:3])}")
            for option, _ in found.right.run.options:
                if option in HAPPENED and not found.right.counters.get(HAPPENED[option]):
                    self._doubt(dimension, f"{label}: the engine counts no {HAPPENED[option].replace('_', ' ')}")
        unequal = [(found.first.order, number, found) for number, found in enumerate(compared) if found.first]
        first = min(unequal)[2] if unequal else None
        if keep:
            self.report.sites[dimension] = (first or compared[0]).counts
        return first

    def _examine(self, dimension: Dimension, pairs: list[tuple[Run, Run]], found: Comparison, contract: Contract,
                 order: int) -> tuple[Contract, Divergence]:
        """One divergence: its numbers and cause, then the substitution under which it has to move."""
        site = found.first
        assert site is not None
        self.progress(f"{dimension}: {site.key} ({site.operator}) differs; naming the cause")
        diagnosis = Diagnosis(self.pair, self.config, found, contract, dimension, f"{dimension}-{order}-{site.key}")
        divergence = diagnosis.divergence(order)
        if diagnosis.foreign:
            return self._reload(dimension, pairs, contract, divergence, diagnosis)
        for candidate, name, engines in diagnosis.substitutions():
            self.progress(f"{dimension}: {site.operator} substituted with {name} on {' and '.join(engines)}")
            if self._moved(divergence, site, dimension, pairs, candidate):
                divergence.substituted_with, divergence.deviating = name, list(engines)
                return candidate, divergence
        return self._blame_producer(dimension, pairs, contract, divergence, diagnosis) if diagnosis.unlike_alone else (contract, divergence)

    def _blame_producer(self, dimension: Dimension, pairs: list[tuple[Run, Run]], contract: Contract, divergence: Divergence,
                        diagnosis: Diagnosis) -> tuple[Contract, Divergence]:
        """An operator that is right alone and wrong in the engine read something else than was recorded: who wrote it?"""
        for producer in reversed(diagnosis.producers):
            for candidate, name, engines in diagnosis.substitutions(producer.operator):
                self.progress(f"{dimension}: {producer.operator}, which feeds {divergence.operator}, substituted with {name}")
                if self._moved(divergence, diagnosis.site, dimension, pairs, candidate):
                    places = " or ".join(site.key for site in diagnosis.producers if site.operator == producer.operator)
                    divergence.cause_detail = (f"the result of {producer.operator} at {places} is overwritten before {divergence.operator} at "
                                               f"{divergence.site} reads it: a buffer is used twice")
                    divergence.operator, divergence.site, divergence.cause = producer.operator, producer.key, "stale state"
                    divergence.substituted_with, divergence.deviating = name, list(engines)
                    return candidate, divergence
        return contract, divergence

    def _moved(self, divergence: Divergence, site: Site, dimension: str, pairs: list[tuple[Run, Run]], candidate: Contract) -> bool:
        """Whether the first divergence is gone or later now; if so, the divergence is confirmed."""
        left = self._first(dimension, pairs, candidate)
        after = left.first if left else None
        if after is not None and after.order <= site.order:
            return False
        divergence.confirmed, divergence.next_site = True, after.key if after else None
        return True

    def _reload(self, dimension: Dimension, pairs: list[tuple[Run, Run]], contract: Contract, divergence: Divergence,
                diagnosis: Diagnosis) -> tuple[Contract, Divergence]:
        """Weights are substituted by writing the checkpoint anew, if need be with the exact operator in place first: it may be what spoils them."""
        attempts = [(contract, "reload", [])] + [(c, f"{name}, then reload", engines) for c, name, engines in diagnosis.substitutions()]
        for candidate, name, bound in attempts:
            before = self.pair.fingerprints()
            self.pair.bind(candidate)
            for engine in ENGINES:
                self.progress(f"{dimension}: weights of the {engine} written anew")
                self.pair.write_weights(engine, self.pair.holds[engine])
            after = self.pair.fingerprints()
            stale = [e for e in ENGINES if any(before[e][n] != after[e][n] for n in diagnosis.foreign)]
            if self._moved(divergence, diagnosis.site, dimension, pairs, candidate):
                divergence.substituted_with, divergence.deviating = name, list(dict.fromkeys([*stale, *bound]))
                return candidate, divergence
        return contract, divergence

    def _after_weight_update(self, contract: Contract) -> None:
        """Another checkpoint is written over the running one, then the first one back; both engines must follow."""
        if self.pair.follows_updates(contract):
            return
        begin = max((d.order + 1 for d in self.report.divergences), default=1)
        found = len(self.report.divergences)
        other = self.pair.directory / "other-weights"
        if not other.exists() and not moved_checkpoint(self.pair.checkpoint, other):
            self._note("no weight update was tried: the checkpoint is too large for a second one")
            return
        known = self.pair.fingerprints()
        decode, packed = self._pairs("engine")[0]
        runs = [Run(run.engine, run.label, MOVED, run.options) for run in (decode, packed)]
        self.pair.fetch([(run, contract) for run in runs])
        still = {run.engine: self.pair.trace(run, contract).prints[LOGPROB] for run in runs}
        for weights, checkpoint in (("updated", other), ("reloaded", None)):
            self.progress(f"comparing engine, weights {weights}")
            self.pair.bind(contract)
            for engine in ENGINES:
                self.pair.write_weights(engine, checkpoint)
            here = (Run("rollout", f"decode, weights {weights}", MOVED, decode.options, weights),
                    Run("training", f"packed, weights {weights}", MOVED, packed.options, weights))
            contract, _ = self._chain("engine", [here], contract, begin)
            for run in here:
                followed = (self.pair.trace(run, contract).prints[LOGPROB] != still[run.engine]).any()
                if followed != (weights == "updated"):
                    self._note(f"{run.engine}: log-probabilities " + ("do not move with the weights" if weights == "updated" else "do not come back"))
            prints = self.pair.fingerprints()
            names = prints["rollout"].keys() & prints["training"].keys()
            for name in sorted(names):
                equal = prints["rollout"][name] == prints["training"][name]
                if not equal and known["rollout"][name] == known["training"][name]:
                    self._note(f"{name}: the engines hold different values once weights are {weights}")
        if len(self.report.divergences) == found:
            self.pair.follows_updates(contract, known=True)

    def _doubt(self, dimension: str, line: str) -> None:
        """Something was not compared, so the dimension cannot be called exact."""
        self.doubted.add(dimension)
        self._note(line)

    def _note(self, line: str) -> None:
        if line not in self.report.notes:
            self.report.notes.append(line)


__all__ = ["Divergence", "LocalizeReport", "LocalizeRequest", "localize"]

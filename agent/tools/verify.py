"""`verify`: runs the matrix on both engines, compares the raw arrays here, in the parent, and writes the verdict."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from agent import oracle, plan
from agent.arrays import BadArrays, LogProbs
from agent.device import Setup, held
from agent.draw import Draw
from agent.errors import JobFailed, StepFailed, UserError
from agent.files import write_atomic
from agent.kernel_source import inspect_kernels
from agent.model_facts import read_facts
from agent.oracle import Table
from agent.rules import Objection
from agent.session import Answer, Session
from agent.tools import selftest
from agent.tools.processes import TIMED, Roster, without_explained
from agent.tools.throughput import Run, Timings, measure_throughput, paired, timed_alone
from agent.tracks import Track, run_tracks
from agent.verdict import AccuracyResult, ConditionResult, ControlResult, Difference, ThroughputResult, VerifyReport
from consistency.conditions import MATRICES, Condition, Control, Probe, Process
from consistency.contract import Contract
from consistency.models.catalog import FAMILIES
from sandboxes import Sandbox, choose

MAY_DIFFER = ("plugin", "contract", "kernels")
"""Top-level fields of the resolved configuration in which stock and candidate are meant to differ."""
TIMED_CONDITION = "timed runs against the loss"
TIMED_REQUESTS = 4
"""Requests of each timed run whose log-probabilities are compared, drawn afterwards."""
STARTS = 2
"""engines that start at the same time on a GPU: they share its memory, and the processor while they compile"""
HEARTBEAT_SECONDS = 0.5


class VerifyRequest(BaseModel):
    family: str
    """as listed by `agent models`"""
    scale: str = "tiny"
    checkpoint: Path
    """folder of a Hugging Face checkpoint that both engines load"""
    contract: Contract
    kernels: Path | None = None
    """folder that `kernels:` names refer to"""
    level: Literal["quick", "full"] = "full"
    target_throughput: float = 0.913
    """least acceptable share of stock's throughput"""
    directory: Path
    """new or empty; keeps job files, logs, raw arrays and report.json"""
    seed: str | None = None
    """repeats the prompts of an earlier report; None: fresh ones, which a final verdict needs"""


@dataclass(frozen=True)
class VerifyProgress:
    """Where a verify stands. Sent after each event and about twice a second; the callback may raise to stop it."""

    phase: Literal["engines", "compare", "throughput", "done"]
    condition: str
    """what was decided last, or the process that starts"""
    done: int
    """conditions decided"""
    conditions: int
    tokens: int
    """log-probabilities compared so far"""
    mismatches: int
    ratio: float | None


def verify(request: VerifyRequest, progress: Callable[[VerifyProgress], None] = lambda _: None, sandbox: Sandbox | None = None) -> VerifyReport:
    """Runs one level of the matrix and returns the report, also written to `report.json`.

    Raises UserError for an unknown family or scale, an unusable checkpoint or a used directory, and JobFailed if an engine dies.
    Leaves no process behind, however it ends.
    """
    return _Verification(request, progress, sandbox or choose()).run()


class _Verification:
    def __init__(self, request: VerifyRequest, progress: Callable[[VerifyProgress], None], sandbox: Sandbox) -> None:
        if request.family not in FAMILIES:
            raise UserError(f"unknown model '{request.family}'; known: {', '.join(FAMILIES)}")
        if (request.scale, request.level) not in MATRICES:
            raise UserError(f"no verification matrix for scale '{request.scale}'; there is one for {', '.join(sorted({s for s, _ in MATRICES}))}")
        try:
            request.directory.mkdir(parents=True, exist_ok=True)
            used = any(request.directory.iterdir())
        except OSError as error:
            raise UserError(f"{request.directory} cannot be used for the evidence ({error.strerror}); give a new folder") from None
        if used:
            raise UserError(f"{request.directory} is not empty; give a new folder for the evidence")
        self.request, self.sandbox, self.progress = request, sandbox, progress
        self.family = FAMILIES[request.family]
        self.matrix = MATRICES[request.scale, request.level]
        self.model = read_facts(request.checkpoint)
        self.draw = Draw(self.model, request.seed)
        self.prompts = {name: self.draw.prompts(name, wanted) for name, wanted in self.matrix.sets.items()}
        self.results: dict[Condition, ConditionResult] = {
            c: ConditionResult(name=c.name, dimension=c.dimension, ran=False, excused=True, reason=self.family.cannot[c.requires])
            for c in self.matrix.conditions if c.requires in self.family.cannot}
        self.plan = plan.probes(self.matrix, [c for c in self.matrix.conditions if c not in self.results])
        for process in TIMED if self.matrix.timing else ():
            self.plan.setdefault(process, [])
        setup = Setup(request.family, request.scale, request.checkpoint)
        self.roster = Roster(setup, request.contract, request.kernels, request.checkpoint, self.matrix.timing is not None)
        self.order = self.roster.order(self.plan)
        self.alive: set[Process] = set()
        self.starting: set[Process] = set()
        self.finished: set[Process] = set()
        self.timed: dict[Process, list[Run]] = {}
        self.configured: dict[Process, list[Any]] = {}
        self.sampled: dict[str, dict[int, list[int]]] = {}
        self.tables: dict[Probe, Table] = {}
        self.counters: dict[Probe, dict[str, Any]] = {}
        self.failed: dict[Probe, str] = {}
        self.void: list[Objection] = []
        self.inexact: list[Objection] = []
        self.extra: list[ConditionResult] = []
        self.weights: dict[Process, str] = {}
        self.environment: dict[str, dict] = {"sandbox": asdict(sandbox.capabilities())}
        self.sessions: dict[Process, Session] = {}
        self.ratio: float | None = None
        self.last = ("engines", "")
        self.spoke = 0.0

    def run(self) -> VerifyReport:
        request, begun = self.request, time.monotonic()
        self.void += inspect_kernels(request.kernels) if request.kernels else []
        if selftest.needed(self.roster.setup) and not self.void:
            self._say("engines", "self-test")
            said, objections = selftest.selftest(self.roster.setup, request.directory / "jobs" / "self-test", self.sandbox, self._heartbeat)
            self.environment["self-test"] = said
            self.inexact += objections
        throughput = None if self.void else self._measure()
        accuracy = None if self.void and not self.tables else self._accuracy()
        controls = [self._control(control) for control in self.matrix.controls]
        tokens, baseline = self._against_the_loss()
        absent = [ConditionResult(name=c.name, dimension=c.dimension, ran=False, reason="its processes did not get that far")
                  for c in self.matrix.conditions if c not in self.results]
        verdict = oracle.decide([*(self.results[c] for c in self.matrix.conditions if c in self.results), *absent, *self.extra], controls,
                                void=self.void, inexact=self.inexact, accuracy=accuracy, tokens=tokens, least_tokens=self.matrix.least_tokens)
        report = VerifyReport(
            family=request.family, scale=request.scale, level=request.level, verdict=verdict, baseline=baseline,
            throughput=throughput, target_throughput=request.target_throughput, accuracy=accuracy, controls=controls,
            contract=request.contract.as_dict(), seed=self.draw.seed, environment=self.environment,
            harness=harness(), evidence=str(request.directory), seconds=time.monotonic() - begun)
        prompts = {name: [prompt.tokens for prompt in drawn] for name, drawn in self.prompts.items()}
        write_atomic(request.directory / "prompts.json", json.dumps(prompts).encode())
        write_atomic(request.directory / "report.json", report.model_dump_json(indent=1).encode())
        self._say("done", "")
        return report

    def _measure(self) -> ThroughputResult | None:
        """Runs every process. One that dies ends the verify, unless what was found by then is a reason to refuse the candidate."""
        throughput = None
        try:
            with held(self.roster.setup.gpu), ExitStack() as stack:
                tracks = [self._track(process, stack) for process in self.order]
                run_tracks(tracks, max(2, len(os.sched_getaffinity(0))), self._heartbeat)
                throughput = self._throughput()
                for session in self.sessions.values():
                    session.end()
        except JobFailed as error:
            found = self._findings()
            if not found and not self.void:
                raise
            self.void += [*found, Objection("job_ended", error.reason)]
        else:
            self.void += self._findings()
        return throughput

    def _findings(self) -> list[Objection]:
        """What the jobs did besides answering, and files in the evidence that nobody of us put there."""
        found = [finding.within(process) for process, session in self.sessions.items() for finding in session.findings()]
        foreign = sorted(path.name for path in self.request.directory.iterdir() if path.name != "jobs")
        return found + [Objection("harness_files_changed", f"{name} in the evidence folder is not the parent's") for name in foreign]

    def _track(self, process: Process, stack: ExitStack) -> Track:
        """One process, from its start to its last probe. The timed ones stay for the throughput measurement."""
        yield partial(self._may_start, process)
        self._say("engines", process)
        self.alive.add(process)
        self.starting.add(process)
        session = stack.enter_context(Session(self.roster.job(process), self.request.directory / "jobs" / process.replace(" ", "-"),
                                              sandbox=self.sandbox, **self.roster.session(process)))
        self.sessions[process] = session
        yield partial(session.ready, session.start)
        self.starting.remove(process)
        started = session.collect(session.start).data
        self.environment[process] = {name: started.get(name) for name in ("environment", "engine", "seconds")}
        self.void += _not_as_asked(session, process)
        weights = "loaded"
        for probe in self.plan[process]:
            yield partial(self._can_run, probe)
            try:
                if probe.weights != weights:
                    yield from self._move_weights(session, probe.weights)
                    weights = self.weights[process] = probe.weights
                answer = yield from _ask(session, self._step(probe))
            except StepFailed as error:
                if probe.step == "generate":
                    raise
                self.failed[probe] = error.reason
            else:
                self._take(probe, answer)
            self._decide_conditions()
        self.finished.add(process)
        if self.matrix.timing and process in TIMED and self.roster.apart:
            self.timed[process] = timed_alone(session, self.matrix.timing, self.draw, lambda: self._say("throughput", process))
            self.configured[process] = [started.get("engine"), session.run({"kind": "step_config"}).data.get("engine")]
        if not self.roster.stays(process):
            session.end()
            yield session.ended
            session.close()
            self.alive.discard(process)

    def _may_start(self, process: Process) -> bool:
        """On a GPU engines start in order, two at a time, as there is room; the timed ones while nothing else is busy, since stock picks the settings
        of some kernels by timing them."""
        if self.roster.setup.device == "cpu":
            return True
        before = self.order[: self.order.index(process)]
        if process in TIMED:
            quiet = all(p in self.finished for p in before)
        else:
            timing = self.roster.apart and any(p in self.alive for p in TIMED)
            quiet = len(self.starting) < STARTS and all(p in self.sessions for p in before) and not timing
        return quiet and self.roster.room(process, self.alive)

    def _can_run(self, probe: Probe) -> bool:
        return probe.step == "generate" or probe.requests in self.sampled

    def _step(self, probe: Probe) -> dict[str, Any]:
        prompts, wanted = self.prompts[probe.requests], self.matrix.sets[probe.requests]
        if probe.step == "generate":
            return plan.generate_step(probe, prompts, wanted, self.draw.sampling_seed(probe.requests))
        step = plan.scoring_step(probe, prompts, self._covered(probe), self.model)
        if step.get("grad") and not self.roster.setup.gradients:
            step["grad"] = False
            self.environment["gradients"] = {"off": "they do not fit the device beside the weights; scale slice compares both"}
        return step

    def _covered(self, probe: Probe) -> dict[int, list[int]]:
        return plan.covered(probe, self.prompts[probe.requests], self.sampled[probe.requests])

    def _move_weights(self, session: Session, weights: str) -> Generator[Callable[[], bool], None, None]:
        if weights == "updated":
            yield from _ask(session, {"kind": "perturb", "parameter": None, "ulps": 1})
        else:
            yield from _ask(session, {"kind": "reload", "checkpoint": None})

    def _take(self, probe: Probe, answer: Answer) -> None:
        """Checks an answer and keeps it, or keeps what is wrong with it."""
        self.counters[probe] = answer.data
        try:
            found = LogProbs.from_arrays(answer.arrays)
            if probe.step == "generate":
                self.sampled[probe.requests] = self._sampled(probe.requests, found)
            covered = self._covered(probe)
            table, objections = oracle.arrange(found, dict(enumerate(covered.values())))
        except BadArrays as error:
            table, objections = None, [Objection("incomplete_answer", str(error))]
        if table is None:
            if probe.step == "generate":
                raise JobFailed(f"the rollout's sample cannot be used: {'; '.join(objections)}", self.sessions[probe.process].directory)
            self.failed[probe] = "; ".join(objections)
            self.void += [objection.within(f"{probe.process}, {probe.step}") for objection in objections]
        else:
            self.inexact += [objection.within(f"{probe.process}, {probe.step}") for objection in oracle.not_finite(table)]
            self.tables[probe] = table.renumber(list(covered))

    def _sampled(self, name: str, found: LogProbs) -> dict[int, list[int]]:
        """Request -> sampled tokens. Raises BadArrays unless every request has as many tokens of the vocabulary as were asked for."""
        wanted = self.matrix.sets[name]
        return self._complete(found, wanted.count, wanted.new_tokens)

    def _complete(self, found: LogProbs, count: int, new_tokens: int) -> dict[int, list[int]]:
        tokens: dict[int, list[int]] = {}
        for request in range(count):
            mine = found.request == request
            tokens[request] = found.token[mine][np.argsort(found.position[mine], kind="stable")].tolist()
            if len(tokens[request]) != new_tokens or not all(0 <= t < self.model.vocabulary for t in tokens[request]):
                raise BadArrays(f"request {request} has {len(tokens[request])} tokens, {new_tokens} of the vocabulary were asked for")
        return tokens

    def _decide_conditions(self) -> None:
        for condition in self.matrix.conditions:
            pair = (condition.left, condition.right)
            if condition not in self.results and all(probe in self.tables or probe in self.failed for probe in pair):
                self.results[condition] = self._decide(condition)
                self._say("compare", condition.name)

    def _decide(self, condition: Condition) -> ConditionResult:
        result = ConditionResult(name=condition.name, dimension=condition.dimension, ran=False)
        for probe in (condition.left, condition.right):
            if probe in self.failed:
                return result.model_copy(update={"reason": self.failed[probe]})
        covered = len(plan.selected(self.prompts[condition.right.requests], condition.right.select, condition.right.count))
        if objection := oracle.took_place(condition, self.counters[condition.right], covered):
            self.void.append(objection.within(f"'{condition.name}'"))
            return result.model_copy(update={"reason": objection})
        if objection := oracle.settings_differ(condition, *(self.environment[p.process]["engine"] for p in (condition.left, condition.right))):
            self.void.append(objection.within(f"'{condition.name}'"))
            return result.model_copy(update={"reason": objection})
        chosen = plan.selected(self.prompts[condition.left.requests], condition.only)
        left, right = (self.tables[probe].of(chosen) for probe in (condition.left, condition.right))
        tokens, _ = oracle.compare(left, right)
        found = oracle.difference(left, right)
        return result.model_copy(update={"ran": True, "tokens": tokens, **found.model_dump()})

    def _control(self, control: Control) -> ControlResult:
        for probe in (control.before, control.after):
            if probe not in self.tables:
                return ControlResult(name=control.name, ran=False, reason=self.failed.get(probe, "its step was not reached"))
        tokens, mismatches = oracle.compare(self.tables[control.before], self.tables[control.after])
        return ControlResult(name=control.name, ran=True, tokens=tokens, mismatches=mismatches)

    def _against_the_loss(self) -> tuple[int, Difference | None]:
        """Sampled tokens compared with the loss, and how far apart the two are; also objects to flat log-probabilities."""
        rollout, training = self.tables.get(self.matrix.sampled), self.tables.get(self.matrix.loss)
        if rollout is not None:
            self.void += oracle.flat(rollout, self.model.vocabulary)
        if rollout is None or training is None:
            return 0, None
        self.void += oracle.flat(training, self.model.vocabulary)
        return oracle.compare(rollout, training)[0], oracle.difference(rollout, training)

    def _accuracy(self) -> AccuracyResult | None:
        """None if this level has none, or if it could not be measured, which is an objection."""
        if self.matrix.accuracy is None:
            return None
        tables = []
        for name in ("reference", "stock", "candidate"):
            probe = getattr(self.matrix.accuracy, name)
            if probe not in self.tables:
                self.void.append(Objection("accuracy", f"accuracy: {self.failed.get(probe, 'its step was not reached')}"))
                return None
            tables.append(self.tables[probe])
        return oracle.accuracy(*tables)

    def _throughput(self) -> ThroughputResult | None:
        if self.matrix.timing is None:
            return None
        stock, candidate = (self.sessions[process] for process in TIMED)
        self.environment["machine"] = {"load": os.getloadavg()[0], "cores": os.cpu_count()}
        if self.roster.apart:
            measured = paired(self.timed[TIMED[0]], self.timed[TIMED[1]], self.matrix.timing)
            self._pair(measured.result)
        else:
            self._say("throughput", "warm-up")
            measured = measure_throughput(stock, candidate, [self.sessions["training"]], self.matrix.timing, self.draw, self._pair)
            self.configured = {process: [s.started.get("engine"), s.run({"kind": "step_config"}).data.get("engine")]
                               for process, s in zip(TIMED, (stock, candidate), strict=True)}
        self.void += measured.objections
        # Asked again when all is done: what was switched off after the start counts as much.
        for left, right in zip(self.configured[TIMED[0]], self.configured[TIMED[1]], strict=True):
            if self.roster.setup.device == "cuda" and left and right:
                left, right, lines = without_explained(left, right)
                self.environment["explained differences of the timed engines"] = {line.partition(":")[0]: line for line in lines}
            self.void += oracle.configuration_objections(left, right, MAY_DIFFER)
        self.extra.append(self._timed_against_the_loss(measured))
        return measured.result

    def _timed_against_the_loss(self, measured: Timings) -> ConditionResult:
        """Some requests of every timed run, scored by training: an implementation that is exact only while it is not timed shows here."""
        assert self.matrix.timing is not None
        result = ConditionResult(name=TIMED_CONDITION, dimension="engine", ran=False)
        requests: list[dict[str, Any]] = []
        values: list[np.ndarray] = []
        for number, (prompts, found) in enumerate(measured.answers):
            try:
                sampled = self._complete(found, len(prompts), self.matrix.timing.new_tokens)
            except BadArrays as error:
                return result.model_copy(update={"reason": str(error)})
            for i in self.draw.some(f"timed {number}", TIMED_REQUESTS, len(prompts)):
                mine = np.flatnonzero(found.request == i)
                values.append(found.logprob[mine[np.argsort(found.position[mine], kind="stable")]])
                requests.append({"prompt": prompts[i], "tokens": sampled[i]})
        training, loss = self.sessions["training"], self.matrix.loss
        try:
            if self.weights.get("training", "loaded") == "updated":
                training.run({"kind": "reload", "checkpoint": None})
            answer = training.run({"kind": "forward", "requests": requests, "layout": loss.layout, "micro_batch": loss.micro_batch,
                                   "mode": loss.mode, "grad": False})
            scored, objections = oracle.arrange(LogProbs.from_arrays(answer.arrays), {i: r["tokens"] for i, r in enumerate(requests)})
        except (StepFailed, BadArrays) as error:
            return result.model_copy(update={"reason": str(error).splitlines()[0]})
        if scored is None:
            self.void += [objection.within(TIMED_CONDITION) for objection in objections]
            return result.model_copy(update={"reason": "; ".join(objections)})
        rollout = Table(scored.key, np.concatenate(values))
        return result.model_copy(update={"ran": True, "tokens": len(scored.key), **oracle.difference(rollout, scored).model_dump()})

    def _pair(self, so_far: ThroughputResult | None) -> None:
        self.ratio = so_far.ratio if so_far else None
        self._say("throughput", "")

    def _heartbeat(self) -> None:
        if time.monotonic() - self.spoke > HEARTBEAT_SECONDS:
            self._say(*self.last)

    def _say(self, phase: Any, condition: str) -> None:
        self.last, self.spoke = (phase, condition), time.monotonic()
        results = self.results.values()
        self.progress(VerifyProgress(phase, condition, len(self.results), len(self.matrix.conditions), sum(r.tokens for r in results),
                                     sum(r.mismatches for r in results), self.ratio))


def _not_as_asked(session: Session, process: Process) -> list[Objection]:
    """Settings that the engine reports with another value than the parent asked for."""
    reported = session.started.get("engine") or {}
    return [Objection("config_changed", f"{process}: {name} is {values[name]!r}, {value!r} was asked for")
            for name, value in session.job.settings.items() if name not in MAY_DIFFER
            for values in (reported, reported.get("live") or {}) if values.get(name) not in (None, value)]


def harness() -> str:
    """sha256 over the sources of this project, so that a reader can tell which oracle gave a verdict."""
    root = Path(__file__).resolve().parents[2]
    sources = sorted(path for room in ("agent", "consistency", "sandboxes") for path in (root / room).rglob("*.py"))
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.relative_to(root)}\0{source.stat().st_size}\0".encode() + source.read_bytes())
    return digest.hexdigest()


def _ask(session: Session, step: dict[str, Any]) -> Generator[Callable[[], bool], None, Answer]:
    ticket = session.submit(step)
    yield partial(session.ready, ticket)
    return session.collect(ticket)

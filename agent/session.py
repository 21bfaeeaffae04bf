"""The parent's end of the job protocol: one engine process, spoken to through files in its folder."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agent import arrays, checkpoint
from agent.errors import JobFailed, StepFailed
from agent.files import write_atomic
from agent.rules import Objection
from consistency.contract import Contract
from sandboxes import Limits, Sandbox, choose

LOG_LINES = 30
"""Lines of a job's log that an error carries."""
NOTES = "refused.jsonl"
"""Beside the answers: what the job's guard refused to candidate code."""
GRACE_SECONDS = 30.0
"""How long a job may take to end by itself. One that is killed instead cannot be seen to leave processes behind."""

Engine = Literal["rollout", "training"]


@dataclass(frozen=True)
class Job:
    """What one engine process is started with; becomes `job.json`."""

    engine: Engine
    family: str
    checkpoint: Path
    contract: Contract
    kernels: Path | None = None
    """folder of candidate kernels; None: the contract names none"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`engine` of the protocol: plugin, threads, max_num_seqs, ..."""

    def dumps(self) -> bytes:
        return json.dumps({
            "family": self.family,
            "checkpoint": str(self.checkpoint.resolve()),
            "contract": self.contract.as_dict(),
            "kernels": None if self.kernels is None else str(self.kernels.resolve()),
            "engine": dict(self.settings),
        }, indent=1).encode()


@dataclass(frozen=True)
class Answer:
    """What a job answered to one step."""

    kind: str
    data: dict[str, Any]
    """the answer's fields, counters among them"""
    arrays: dict[str, np.ndarray]
    seconds: float
    """as the job measured it"""
    wall_seconds: float
    """as the parent saw it, from the moment the job could begin; includes polling"""


@dataclass(frozen=True)
class Ticket:
    """A step that was handed to a job; -1 is its start."""

    number: int
    kind: str
    submitted: float
    timeout: float


class Session:
    """One job. Steps run in the order they are submitted; several may wait in the queue.

    Use it as a context manager: leaving the block, also by KeyboardInterrupt, ends the process and everything it started.
    """

    def __init__(self, job: Job, directory: Path, *, sandbox: Sandbox | None = None, environment: Mapping[str, str] | None = None,
                 limits: Limits | None = None, start_timeout: float = 300.0, step_timeout: float = 300.0) -> None:
        """Starts the process and returns at once; `wait(session.start)` waits for the engine.

        `directory` is new or empty. The job sees its checkpoint and kernels besides what `limits` name. `start_timeout` and `step_timeout` are
        seconds. Raises JobFailed if the process cannot be started.
        """
        self.job = job
        self.directory = directory.resolve()
        self.step_timeout = step_timeout
        self.started: dict[str, Any] = {}
        self._next = 0
        self._written: dict[str, bytes] = {}
        self._early: list[Objection] = []
        self._end_by: float | None = None
        self._last_answer = time.monotonic()
        for folder in ("steps", "out"):
            (self.directory / folder).mkdir(parents=True)
        self._write("job.json", job.dumps())
        argv = [sys.executable, "-m", f"consistency.jobs.{job.engine}", str(self.directory)]
        self.start = Ticket(-1, "start", time.monotonic(), start_timeout)
        try:
            self._handle = (sandbox or choose()).start(argv, self.directory, {**_caches(), **(environment or {})},
                                                       _with_inputs(job, limits or Limits()))
        except OSError as error:
            raise JobFailed(f"the {job.engine} job cannot be started: {error}", self.directory) from error

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(gently=kind is None)

    def submit(self, step: Mapping[str, Any], timeout: float | None = None) -> Ticket:
        """Queues one step. `timeout` in seconds counts from the moment the step before it is done."""
        ticket = Ticket(self._next, str(step["kind"]), time.monotonic(), self.step_timeout if timeout is None else timeout)
        if self._answer_path(ticket).exists():
            self._early.append(Objection("harness_files_changed", f"the answer to step {ticket.number} was there before its question"))
        self._write(f"steps/{ticket.number:04d}.json", json.dumps(step).encode())
        self._next += 1
        return ticket

    def ready(self, ticket: Ticket) -> bool:
        """Whether the answer is there. Raises JobFailed, after ending the job, if it died or is past the ticket's timeout."""
        path = self._answer_path(ticket)
        if path.exists():
            return True
        code = self._handle.poll()
        if path.exists():
            return True
        late = time.monotonic() - max(ticket.submitted, self._last_answer) > ticket.timeout
        if code is None and not late:
            return False
        self._handle.kill()
        rule = ""
        if self._handle.timed_out:
            reason = "was stopped at the sandbox's wall clock"
        elif self._handle.breach:
            rule, found = self._handle.breach
            reason = f"was stopped because {found} [{rule}],"
        elif code is None:
            reason = f"gave no answer within {ticket.timeout:.0f} s"
        else:
            reason = f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code}"
        raise JobFailed(f"the {self.job.engine} job {reason} during '{ticket.kind}'", self.directory, self.log_tail(), rule)

    def wait(self, ticket: Ticket, on_wait: Callable[[], None] | None = None) -> Answer:
        """Blocks until the answer is there; `on_wait` is called about ten times a second meanwhile.

        Tickets are waited for in the order of their steps. Raises JobFailed as `ready` does or if the answer is malformed, and
        StepFailed if the job reports that the step failed.
        """
        nap, called = 0.002, 0.0
        while not self.ready(ticket):
            if on_wait and time.monotonic() - called > 0.1:
                on_wait()
                called = time.monotonic()
            time.sleep(nap)
            nap = min(nap * 1.5, 0.01)
        return self.collect(ticket)

    def collect(self, ticket: Ticket) -> Answer:
        """The answer of a ticket that is `ready`. Raises as `wait` does."""
        now = time.monotonic()
        begun = max(ticket.submitted, self._last_answer)
        self._last_answer = now
        path = self._answer_path(ticket)
        try:
            data = json.loads(path.read_bytes())
            if data.get("ok") is False:
                kind = JobFailed if ticket is self.start else StepFailed
                raise kind(f"the {self.job.engine} job failed in '{ticket.kind}': {data.get('error', 'no reason given')}", self.directory,
                           str(data.get("traceback", "")) or self.log_tail())
            seconds = float(data["seconds"])
            found = path.with_suffix(".safetensors")
            raw = arrays.read(found) if found.exists() else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise JobFailed(f"the {self.job.engine} job's answer to '{ticket.kind}' cannot be read ({error})", self.directory,
                            self.log_tail()) from error
        if ticket is self.start:
            self.started = data
        return Answer(ticket.kind, data, raw, seconds, now - begun)

    def run(self, step: Mapping[str, Any], timeout: float | None = None, on_wait: Callable[[], None] | None = None) -> Answer:
        """`submit` and `wait`, after waiting for the engine's start if nobody has."""
        if not self.started:
            self.wait(self.start, on_wait)
        return self.wait(self.submit(step, timeout), on_wait)

    def end(self) -> None:
        """Asks the job to end after the steps it was given; does not wait for it."""
        if self._end_by is None and self._handle.poll() is None:
            self.submit({"kind": "end"})
            self._end_by = time.monotonic() + GRACE_SECONDS

    def ended(self) -> bool:
        """Whether a job that was asked to end is gone, or has had its time to go."""
        return self._handle.poll() is not None or time.monotonic() > (self._end_by or math.inf)

    def close(self, gently: bool = True) -> None:
        """Ends the job: by its `end` step if `gently`, and by force if that takes too long. Harmless when it is gone already."""
        if gently:
            self.end()
            while not self.ended():
                time.sleep(0.01)
        self._handle.kill()

    def cpu_seconds(self) -> float:
        """Processor time that the job has used so far."""
        return self._handle.cpu_seconds()

    def findings(self) -> list[Objection]:
        """What this job did besides answering, as far as it shows: call it once the job has ended."""
        found = [*self._early, *(note for note in _notes(self.directory / "out" / NOTES))]
        if self._handle.breach:
            found.append(Objection(*self._handle.breach))
        if self._handle.left:
            found.append(Objection("left_processes", f"{len(self._handle.left)} outlived it: {', '.join(sorted(set(self._handle.left)))}"))
        there = {"job.json", *(f"steps/{path.name}" for path in (self.directory / "steps").iterdir())}
        for name in sorted(there | set(self._written)):
            path = self.directory / name
            if name not in self._written or not path.is_file() or path.read_bytes() != self._written[name]:
                found.append(Objection("harness_files_changed", f"{name} is not what the parent wrote"))
        return found

    def log_tail(self) -> str:
        """Last lines of the job's log."""
        try:
            with (self.directory / "log").open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - 16_384))
                text = log.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-LOG_LINES:])

    def _write(self, name: str, data: bytes) -> None:
        self._written[name] = data
        write_atomic(self.directory / name, data)

    def _answer_path(self, ticket: Ticket) -> Path:
        return self.directory / "out" / ("start.json" if ticket.number < 0 else f"{ticket.number:04d}.json")


def _notes(path: Path) -> Iterator[Objection]:
    """What `consistency.guard` wrote in the job. A line that is not its own is an objection too."""
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                note = json.loads(line)
                yield Objection(note["rule"], str(note["detail"]))
            except (ValueError, KeyError, TypeError):
                yield Objection("harness_files_changed", f"{NOTES} holds a line that is none")


def _with_inputs(job: Job, limits: Limits) -> Limits:
    """The job's own inputs made visible. A job without foreign code may fill vLLM's cache; one with it could leave something there for others."""
    inputs = [job.checkpoint, *(path.resolve() for path in job.checkpoint.glob("*") if path.is_symlink())]
    inputs += [job.kernels] if job.kernels else []
    cache = Path(_caches()["VLLM_CACHE_ROOT"])
    cache.mkdir(parents=True, exist_ok=True)
    return replace(limits, readable=(*limits.readable, *inputs, *([cache] if job.kernels else [])),
                   writable=(*limits.writable, *([] if job.kernels else [cache])))


def _caches() -> dict[str, str]:
    """vLLM's descriptions of its model classes are kept between jobs: without them an engine start takes twice as long.

    Compiled code is not: vLLM's key for it does not see a contract, so one contract could run what was compiled for another.
    """
    return {"VLLM_CACHE_ROOT": str(checkpoint.cache().parent / "vllm"), "VLLM_DISABLE_COMPILE_CACHE": "1"}

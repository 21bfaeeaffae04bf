"""Both engines of a family, kept running while contracts, weights and schedules change; every trace is made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from agent.device import Setup, held
from agent.errors import UserError
from agent.session import Answer, Engine, Job, Session, Ticket
from agent.tools.traces import Run, Trace
from consistency.contract import SIDES, Contract
from sandboxes import Sandbox

ENGINES: tuple[Engine, Engine] = ("rollout", "training")
DUMP_BYTES = 1 << 28
"""Whole rows are kept at every site of a trace while they stay below this; above, at the sites that a divergence needs."""


class EnginePair:
    """A rollout and a training job, started together. A context manager that ends both."""

    def __init__(self, family: str, checkpoint: Path, kernels: Path | None, contract: Contract, directory: Path,
                 sandbox: Sandbox | None = None, setup: Setup | None = None, settings: Mapping[Engine, Mapping[str, Any]] | None = None,
                 only: Sequence[Engine] = ENGINES, graphs: bool = False) -> None:
        """Starts the processes and returns at once. `directory` is new or empty. Raises JobFailed if a process cannot be started and UserError
        if they do not fit the device.

        setup: the device and the sizes; None: scale tiny on the CPU. settings: per engine, in place of what `setup` says. On a GPU the rollout
        runs eagerly, or with `graphs` in CUDA graphs that also write fingerprints. A graph keeps the implementations that were bound when it was
        captured, so such a rollout is started anew for each contract.
        """
        self.family, self.checkpoint, self.directory = family, checkpoint, directory
        self.requests: list[dict[str, Any]] = []
        self.lengths: list[int] = []
        self.holds: dict[Engine, Path | None] = dict.fromkeys(ENGINES)
        """checkpoint that an engine's weights come from; None: the one it was started with"""
        self._bound: dict[Engine, tuple] = {engine: _binding(contract, engine) for engine in ENGINES}
        self._epoch = dict.fromkeys(ENGINES, 0)
        self._traces: dict[tuple, Trace] = {}
        self._followed: set[_Hashable] = set()
        self._dump: dict[Engine, list[str]] = {"rollout": [], "training": []}
        self._stack = ExitStack()
        self.sessions: dict[Engine, Session] = {}
        self.setup = setup or Setup(family, "tiny", checkpoint)
        if not self.setup.fit("rollout" in only, "training" in only, gradients=False):
            raise UserError(f"rollout and training of {family} at scale {self.setup.scale} do not fit one {self.setup.gpu} together, as tracing both "
                            "needs; take a smaller scale, which has the same operators")
        self._stack.enter_context(held(self.setup.gpu))
        self.kernels, self.sandbox, self.settings, self.starts = kernels, sandbox, settings or {}, 0
        self.graphs = graphs and self.setup.device == "cuda"
        for engine in only:
            self._start(engine, contract)

    def _start(self, engine: Engine, contract: Contract) -> None:
        mode: dict[str, Any] = {}
        if self.setup.device == "cuda":
            mode = {"compile": False, "trace": True} if self.graphs else {"eager": True}
        base = self.setup.rollout(**mode) if engine == "rollout" else self.setup.training()
        job = Job(engine, self.family, self.checkpoint, contract, self.kernels, {**base, **(self.settings.get(engine) or {})})
        directory = self.directory / "jobs" / (engine if engine not in self.sessions else f"{engine}-{self.starts}")
        self.starts += 1
        session = Session(job, directory, sandbox=self.sandbox, **self.setup.session(self.kernels, [self.directory.resolve()]))
        self.sessions[engine] = self._stack.enter_context(session)

    def _rebind(self, engine: Engine, contract: Contract) -> None:
        """Waits until the engine holds other implementations."""
        self._bound[engine] = _binding(contract, engine)
        if engine == "training" or not self.graphs:
            self.ask(engine, {"kind": "bind", "contract": contract.as_dict()})
            return
        self.sessions[engine].close()
        self._start(engine, contract)
        if self.holds[engine] is not None:
            self.ask(engine, {"kind": "reload", "checkpoint": str(self.holds[engine])})

    def __enter__(self) -> EnginePair:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    def wait(self, on_wait: Callable[[], None] | None = None) -> None:
        """Until both engines are up. Raises JobFailed."""
        for session in self.sessions.values():
            if not session.started:
                session.wait(session.start, on_wait)

    def sample(self, contract: Contract, prompts: Sequence[list[int]], tokens: int, seed: int) -> None:
        """Fixes the requests that all traces are made of; done once per pair of engines."""
        if self.requests:
            return
        self.bind(contract)
        answer = self.ask("rollout", {"kind": "generate", "requests": [{"prompt": p} for p in prompts], "max_tokens": tokens, "seed": seed,
                                      "temperature": 1.0})
        mine = answer.arrays["request"]
        self.requests = [{"prompt": prompt, "tokens": answer.arrays["token"][mine == i].tolist()} for i, prompt in enumerate(prompts)]
        self.lengths = [len(r["prompt"]) + len(r["tokens"]) for r in self.requests]
        short = self.requests[int(np.argmin(self.lengths))]
        for engine in ENGINES:
            sites = self.ask(engine, {"kind": "trace", "requests": [short]}).data["sites"]
            keys = [site["key"] for site in sites]
            arrays = self.ask(engine, {"kind": "trace", "requests": [short], "dump": keys}).arrays
            row = sum(array.nbytes / len(array) for name, array in arrays.items() if name.startswith("dump/"))
            self._dump[engine] = keys if row * sum(self.lengths) < DUMP_BYTES else []

    # ---- steps ------------------------------------------------------------------------------------------------------

    def ask(self, engine: Engine, step: dict[str, Any]) -> Answer:
        return self.sessions[engine].run(step)

    def both(self, step: dict[str, Any]) -> dict[Engine, Answer]:
        """The same step on both, at the same time."""
        tickets = [self.sessions[engine].submit(step) for engine in ENGINES]
        return {engine: self.sessions[engine].wait(ticket) for engine, ticket in zip(ENGINES, tickets, strict=True)}

    def bind(self, contract: Contract) -> None:
        for engine in ENGINES:
            if self._bound[engine] != _binding(contract, engine):
                self._rebind(engine, contract)

    def fetch(self, wanted: Sequence[tuple[Run, Contract]], dump: Sequence[str] = ()) -> None:
        """Makes the traces that are not there yet, on both engines at the same time. All must be for the weights the engines hold now."""
        tickets: list[tuple[Session, Ticket, tuple | None, Run]] = []
        for run, contract in dict.fromkeys((run, _Hashable(contract)) for run, contract in wanted):
            key = self._key(run, contract.contract)
            if key in self._traces and not set(dump) - set(self._traces[key].dumps):
                continue
            binding = _binding(contract.contract, run.engine)
            if self._bound[run.engine] != binding and self.graphs and run.engine == "rollout":
                self._collect(tickets)
                tickets.clear()
                self._rebind(run.engine, contract.contract)
            session = self.sessions[run.engine]
            if self._bound[run.engine] != binding:
                tickets.append((session, session.submit({"kind": "bind", "contract": contract.contract.as_dict()}), None, run))
                self._bound[run.engine] = binding
            tickets.append((session, session.submit(run.step(self.requests, list(dump) or self._dump[run.engine])), key, run))
        self._collect(tickets)

    def _collect(self, tickets: Sequence[tuple[Session, Ticket, tuple | None, Run]]) -> None:
        for session, ticket, key, run in tickets:
            answer = session.wait(ticket)
            if key is not None:
                self._traces[key] = Trace(run, answer, self.lengths)

    def trace(self, run: Run, contract: Contract) -> Trace:
        """A trace that was fetched."""
        return self._traces[self._key(run, contract)]

    def follows_updates(self, contract: Contract, known: bool = False) -> bool:
        """Whether a contract was already seen to follow a weight update on these engines; `known` says that it was."""
        if known:
            self._followed.add(_Hashable(contract))
        return _Hashable(contract) in self._followed

    def keep(self, contract: Contract) -> None:
        """Drops the traces of other contracts and of earlier weights; each holds every operator's rows."""
        bindings = {engine: _binding(contract, engine) for engine in ENGINES}
        self._traces = {key: trace for key, trace in self._traces.items()
                        if key[1] == bindings[key[0].engine] and key[2] == self._epoch[key[0].engine]}

    # ---- weights ----------------------------------------------------------------------------------------------------

    def fingerprints(self) -> dict[Engine, dict[str, int]]:
        return {engine: answer.data["weights"] for engine, answer in self.both({"kind": "weights"}).items()}

    def write_weights(self, engine: Engine, checkpoint: Path | None) -> None:
        """Writes a checkpoint, by default the one the engines were started with, over the running weights; earlier traces no longer hold."""
        self.ask(engine, {"kind": "reload", "checkpoint": None if checkpoint is None else str(checkpoint.resolve())})
        self.holds[engine] = checkpoint
        self.forget(engine)

    def forget(self, engine: Engine) -> None:
        """Traces made so far are not those of the weights that the engine holds now."""
        self._epoch[engine] += 1

    def _key(self, run: Run, contract: Contract) -> tuple:
        return run, _binding(contract, run.engine), self._epoch[run.engine]


class _Hashable:
    """A contract as part of a key; contracts hold dicts."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.parts = tuple(_binding(contract, engine) for engine in SIDES)

    def __hash__(self) -> int:
        return hash(self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable) and self.parts == other.parts


def _binding(contract: Contract, engine: str) -> tuple:
    return tuple(sorted(getattr(contract, engine).items()))

"""One divergence looked at closely: its operator asked alone, its cause named, and what to substitute."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np

from agent.errors import StepFailed
from agent.session import Engine
from agent.tools.divergence import Divergence, Probe
from agent.tools.engines import ENGINES, EnginePair
from agent.tools.evidence import write_case
from agent.tools.semantics import explain_logprobs
from agent.tools.traces import LOGPROB, Comparison, Site
from consistency.conditions import Dimension
from consistency.contract import STOCK, Contract
from consistency.operators import catalog
from consistency.repro.calls import describe


class Diagnosis:
    """What is known about the first unequal site of a comparison before anything is substituted."""

    def __init__(self, pair: EnginePair, config: dict, found: Comparison, contract: Contract, dimension: Dimension, name: str) -> None:
        assert found.first is not None
        self.pair, self.found, self.contract, self.site = pair, found, contract, found.first
        self.dimension: Dimension = dimension
        self.engines: tuple[Engine, Engine] = (found.left.run.engine, found.right.run.engine)
        self.implementations = [getattr(contract, engine).get(self.site.operator, STOCK) for engine in self.engines]
        self.evidence = ""
        self.foreign: list[str] = []
        """parameters of the operator in which the two engines do not agree"""
        self.producers: list[Site] = []
        """the sites that feed the operator"""
        self.probes: list[Probe] = []
        self.equals_exact: dict[Engine, bool | None] = {}
        self.explained: dict[str, Any] = {"cause": "unknown", "detail": "", "elements": 0, "differing": 0, "max_abs": 0.0, "max_ulps": 0,
                                          "deviating": None}
        if self.site.key == LOGPROB:
            self.explained |= explain_logprobs(found)
        elif (call := describe(pair.family, config, self.site.key)) is not None:
            self._look(call, name)

    def _look(self, call: Any, name: str) -> None:
        pair, needed = self.pair, [*call.sites, self.site.key]
        self.producers = [site for site in self.found.left.sites if site.key in call.sites]
        pair.fetch([(trace.run, self.contract) for trace in (self.found.left, self.found.right)], needed)
        left, right = (pair.trace(trace.run, self.contract) for trace in (self.found.left, self.found.right))
        found = Comparison(left, right, self.found.counts, self.site, self.found.unequal, [])
        names = list(call.parameters.values())
        live = {engine: pair.ask(engine, {"kind": "operator", "action": "parameters", "names": names}).arrays if names else {}
                for engine in set(self.engines)}
        parameters = [live[engine] for engine in self.engines]
        self.foreign = [n for n in names if parameters[0][n].tobytes() != parameters[1][n].tobytes()]
        directory = pair.directory / "cases" / name
        if not write_case(directory, pair.family, pair.setup.device, call, found, pair.requests, parameters, self.implementations):
            return
        self.evidence = str(directory)
        self._ask_alone(name)

    def _ask_alone(self, name: str) -> None:
        """The probes on each side's own process, and the cause in the training job, which has torch and little else to do."""
        for engine in ENGINES:
            shutil.copytree(self.evidence, self.pair.sessions[engine].directory / "cases" / name, dirs_exist_ok=True)
        tickets = []
        for side, engine in enumerate(self.engines):
            step = {"kind": "operator", "action": "probe", "case": self._path(engine, name), "side": side}
            tickets.append((side, engine, self.pair.sessions[engine].submit(step)))
        explaining = self.pair.sessions["training"].submit({"kind": "operator", "action": "explain", "case": self._path("training", name)})
        for side, engine, ticket in tickets:
            try:
                answer = self.pair.sessions[engine].wait(ticket).data["probes"]
            except StepFailed as error:
                answer = {"as traced": {"equal": None, "detail": error.reason}}
            self.equals_exact[engine] = answer.pop("exact", {}).get("equal")
            label = self._label(side)
            self.probes += [Probe.model_validate({"name": what, "side": label, **said}) for what, said in answer.items()]
        try:
            self.explained |= self.pair.sessions["training"].wait(explaining).data
        except StepFailed as error:
            self.explained["detail"] = error.reason

    def _path(self, engine: Engine, name: str) -> str:
        return str(self.pair.sessions[engine].directory / "cases" / name)

    def _label(self, side: int) -> str:
        run = (self.found.left, self.found.right)[side].run
        return f"{run.engine}, {run.label}"

    def divergence(self, order: int) -> Divergence:
        """Not confirmed yet."""
        count = next(c for c in self.found.counts if c.site == self.site.key)
        row = int(np.flatnonzero(self.found.unequal)[0])
        starts = np.cumsum([0, *self.pair.lengths])
        request = int(np.searchsorted(starts, row, side="right")) - 1
        sides = [self._label(0), self._label(1)]
        said = self._verdict()
        return Divergence(
            dimension=self.dimension, operator=self.site.operator, layer=self.site.layer, site=self.site.key,
            sides=sides[::-1] if said["deviating"] == 0 else sides, cause=said["cause"], cause_detail=said["detail"], elements=said["elements"],
            differing=said["differing"], max_abs=said["max_abs"], max_ulps=said["max_ulps"], confirmed=False, substituted_with=None,
            next_site=None, rows=count.rows, differing_rows=count.differing, first_row=(request, row - int(starts[request])),
            probes=self.probes, order=order, evidence=self.evidence)

    def _verdict(self) -> dict[str, Any]:
        """The cause by arithmetic, unless the operator alone shows that something besides its inputs decides."""
        if self.foreign:
            return self.explained | {"cause": "other input", "detail": f"the engines hold different values of {', '.join(self.foreign)}"}
        unlike = self.unlike_alone
        if len(unlike) == 1 and self.explained["cause"] != "uninitialised":
            what = "an earlier copy of its weights" if "weights" in unlike[0] else "a buffer or a state that is not among its inputs"
            return self.explained | {
                "cause": "stale state", "deviating": [self._label(0), self._label(1)].index(unlike[0]),
                "detail": f"{unlike[0]}: alone, on the same inputs and weights, the operator gives other rows; in the engine it reads {what}"}
        return self.explained

    @property
    def unlike_alone(self) -> list[str]:
        """Sides on which the operator alone does not give what it gave in the engine."""
        return [p.side for p in self.probes if p.name == "as traced" and p.equal is False]

    def substitutions(self, operator: str | None = None) -> Iterator[tuple[Contract, str, list[Engine]]]:
        """(contract, implementation, engines) to try in turn: first only the engine that is off, if that is known."""
        wanted = operator or self.site.operator
        involved: list[Engine] = [engine for engine in ENGINES if engine in self.engines]
        for name in dict.fromkeys(i.name for i in catalog.implementations(wanted, device=self.pair.setup.device) if i.exact):
            open_to: list[Engine] = [e for e in involved if getattr(self.contract, e).get(wanted) != name]
            off: list[Engine] = [e for e in open_to if self.equals_exact.get(e) is False] if operator is None else []
            for engines in ([off] if off and off != open_to else []) + ([open_to] if open_to else []):
                contract = self.contract
                for engine in engines:
                    contract = contract.with_(wanted, name, engine)
                yield contract, name, engines

"""Stand-ins with the behaviour of the real thing and none of its cost, for tests of the loop and of policies."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from agent.errors import JobFailed
from agent.state import RunState
from agent.tools.divergence import Divergence, LocalizeReport, SiteCount
from agent.tools.repro import ReproReport
from agent.toolset import Progress
from agent.verdict import ConditionResult, ControlResult, Difference, ThroughputResult, Verdict, VerifyReport
from consistency.conditions import Dimension
from consistency.contract import Contract

TOKENS = 64


class FakeTools:
    """A little world: per dimension, operators in execution order that differ until both sides bind them to the same implementation.

    `broken` lists implementations that spoil every condition, `crashing` ones that take the engine down, `useless` ones that fix nothing; all as
    `operator=name`.
    `before` is called with the name of each call before it does anything, which is where a test injects a kill, a delay or an exception.
    """

    def __init__(self, world: dict[Dimension, list[str]], *, broken: tuple[str, ...] = (), crashing: tuple[str, ...] = (),
                 useless: tuple[str, ...] = (), ratio: float = 0.97, void: bool = False, before: Callable[[str], None] = lambda name: None):
        self.world, self.broken, self.crashing, self.useless = world, broken, crashing, useless
        self.ratio, self.void, self.before = ratio, void, before
        self.calls: list[str] = []

    def verify(self, contract: Contract, kernels: Path, level: str, progress: Progress) -> VerifyReport:
        self._begin(f"verify {level}", contract)
        conditions = []
        for dimension in self.world:
            bad = TOKENS if self._differing(dimension, contract) or self._uses(self.broken, contract) else 0
            conditions.append(ConditionResult(name=f"{dimension} 1", dimension=dimension, ran=True, tokens=TOKENS, mismatches=bad))
            progress(f"{dimension} 1")
        mismatches = sum(condition.mismatches for condition in conditions)
        return VerifyReport(
            family="nemotron-3.5", scale="tiny", level="full" if level == "full" else "quick",
            verdict=Verdict(exact=mismatches == 0 and not self.void, void=self.void, tokens=TOKENS, mismatches=mismatches, conditions=conditions,
                            reasons=["no negative control"] if self.void else []),
            baseline=Difference(mismatches=mismatches, k3=1e-3 if mismatches else 0.0, max_abs=0.03 if mismatches else 0.0),
            throughput=ThroughputResult(stock=100.0, candidate=100.0 * self.ratio, ratio=self.ratio, spread=(self.ratio - 0.01, self.ratio + 0.01)),
            target_throughput=0.913, accuracy=None, contract=contract.as_dict(), seed="0", environment={}, evidence="", seconds=1.0,
            controls=[ControlResult(name="training weight", ran=True, tokens=TOKENS, mismatches=TOKENS)])

    def localize(self, contract: Contract, kernels: Path, progress: Progress) -> LocalizeReport:
        self._begin("localize", contract)
        found: list[Divergence] = []
        sites: dict[str, list[SiteCount]] = {}
        for dimension, operators in self.world.items():
            differing = self._differing(dimension, contract)
            sites[dimension] = [SiteCount(site=f"{n:03d}.{name}", layer=n, operator=name, rows=40,
                                          differing=40 if differing and n >= operators.index(differing[0]) else 0)
                                for n, name in enumerate(operators)]
            if differing:
                layer = operators.index(differing[0])
                behind = f"{operators.index(differing[1]):03d}.{differing[1]}" if differing[1:] else None
                found.append(Divergence(
                    dimension=dimension, operator=differing[0], layer=layer, site=f"{layer:03d}.{differing[0]}", sides=["rollout", "training"],
                    cause="reduction order", cause_detail="sums in another order", elements=4096, differing=37, max_abs=0.002, max_ulps=3,
                    confirmed=True, substituted_with="exact", next_site=behind))
        exact: list[str] = [d for d in self.world if not self._differing(d, contract)]
        return LocalizeReport(divergences=found, exact_dimensions=exact, seconds=1.0, sites=sites)

    def repro(self, divergence: Divergence, directory: Path, kernels: Path, progress: Progress) -> ReproReport:
        self._begin(f"repro {divergence.operator}", None)
        directory.mkdir(parents=True)
        (directory / "repro.py").write_text(f"{divergence.operator}\n")
        return ReproReport(directory=directory, command="python repro.py", expected_line="37 of 4096 elements differ", exit_code=1, reproduced=True)

    def check_repros(self, directories: list[Path], contract: Contract | None, kernels: Path) -> list[int]:
        operators = [(directory / "repro.py").read_text().strip() for directory in directories]
        self._begin(f"check {' '.join(operators)}", contract)
        return [int(contract is None or not self._fixed(operator, contract)) for operator in operators]

    def _begin(self, call: str, contract: Contract | None) -> None:
        self.before(call)
        self.calls.append(call)
        if contract and self._uses(self.crashing, contract):
            raise JobFailed("the rollout job died with signal 11", Path("jobs/0"), "Segmentation fault")

    def _differing(self, dimension: Dimension, contract: Contract) -> list[str]:
        return [operator for operator in self.world[dimension] if not self._fixed(operator, contract)]

    def _fixed(self, operator: str, contract: Contract) -> bool:
        name = contract.rollout.get(operator)
        return name is not None and name == contract.training.get(operator) and f"{operator}={name}" not in self.useless

    @staticmethod
    def _uses(bindings: tuple[str, ...], contract: Contract) -> bool:
        bound = {f"{operator}={name}" for side in (contract.rollout, contract.training) for operator, name in side.items()}
        return bool(bound & set(bindings))


class KillAt:
    """A `before` hook that ends this process with SIGKILL at the n-th call, as a lost machine would."""

    def __init__(self, call: int):
        self.left = call

    def __call__(self, name: str) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)


class SilentObserver:
    """Shows nothing, remembers the phases."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def step(self, state: RunState, seconds_left: float) -> None:
        self.phases.append(state.phase)

    def tick(self, event: object) -> None:
        return

"""What a run calls: the tools as one object, so that a stand-in can take their place."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from agent.tools.localize import Divergence, LocalizeReport
from agent.tools.repro import ReproReport
from agent.verdict import VerifyReport
from consistency.contract import Contract

Progress = Callable[..., None]


class Tools(Protocol):
    """`EngineTools` runs real engines; `agent.fakes.FakeTools` is the stand-in for tests."""

    def verify(self, contract: Contract, kernels: Path, level: str, progress: Progress) -> VerifyReport:
        """Raises JobFailed if an engine crashes or hangs."""
        ...

    def localize(self, contract: Contract, kernels: Path, progress: Progress) -> LocalizeReport: ...

    def repro(self, divergence: Divergence, directory: Path, progress: Progress) -> ReproReport:
        """Fill `directory`, which is absent."""
        ...

    def check_repro(self, directory: Path, contract: Contract, kernels: Path) -> int:
        """Exit code of the repro under a contract: 1 differs, 0 does not."""
        ...

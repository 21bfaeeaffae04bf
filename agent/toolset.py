"""What a run calls: the tools as one object, so that a stand-in can take their place."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from agent.errors import JobFailed
from agent.tools.divergence import Divergence, LocalizeReport
from agent.tools.localize import LocalizeRequest, localize
from agent.tools.repro import ReproReport, ReproRequest, make_repro
from agent.tools.verify import VerifyRequest, verify
from agent.verdict import VerifyReport
from consistency.contract import Contract
from sandboxes import Limits
from sandboxes.local import LocalSandbox

Progress = Callable[[Any], None]
"""Takes whatever a tool tells about itself; may raise to stop it."""
REPRO_SECONDS = 120.0


class Tools(Protocol):
    """`EngineTools` runs real engines; `agent.fakes.FakeTools` is the stand-in for tests."""

    def verify(self, contract: Contract, kernels: Path, level: str, progress: Progress) -> VerifyReport:
        """Raises JobFailed if an engine crashes or hangs."""
        ...

    def localize(self, contract: Contract, kernels: Path, progress: Progress, dimensions: list[str] | None = None) -> LocalizeReport: ...

    def repro(self, divergence: Divergence, directory: Path, progress: Progress) -> ReproReport:
        """Fill `directory`, which is absent."""
        ...

    def check_repro(self, directory: Path, contract: Contract, kernels: Path) -> int:
        """Exit code of the repro under a contract: 1 differs, 0 does not."""
        ...


class EngineTools:
    """The real tools on one model. Job folders go to `jobs`, numbered in the order of the calls."""

    def __init__(self, family: str, scale: str, checkpoint: Path, target: float, jobs: Path):
        self.family, self.scale, self.checkpoint, self.target, self.jobs = family, scale, checkpoint, target, jobs

    def verify(self, contract: Contract, kernels: Path, level: str, progress: Progress) -> VerifyReport:
        return verify(VerifyRequest(
            family=self.family, scale=self.scale, checkpoint=self.checkpoint, contract=contract, kernels=_filled(kernels),
            level="full" if level == "full" else "quick", target_throughput=self.target, directory=self._folder(f"verify-{level}")), progress)

    def localize(self, contract: Contract, kernels: Path, progress: Progress, dimensions: list[str] | None = None) -> LocalizeReport:
        return localize(LocalizeRequest(
            family=self.family, scale=self.scale, checkpoint=self.checkpoint, contract=contract, kernels=_filled(kernels),
            work_dir=self._folder("localize"), dimensions=dimensions), progress)

    def repro(self, divergence: Divergence, directory: Path, progress: Progress) -> ReproReport:
        return make_repro(ReproRequest(divergence=divergence, directory=directory), progress)

    def check_repro(self, directory: Path, contract: Contract, kernels: Path) -> int:
        """The candidate's code runs in a job process, as everywhere."""
        job = self._folder("check-repro")
        (job / "contract.toml").write_text(contract.dumps(), encoding="utf-8")
        filled = _filled(kernels)
        command = [sys.executable, str(directory / "repro.py"), "--contract", str(job / "contract.toml"),
                   *(["--kernels", str(filled)] if filled else [])]
        handle = LocalSandbox().start(command, job, {}, Limits(wall_seconds=REPRO_SECONDS))
        try:
            while (code := handle.poll()) is None:
                time.sleep(0.05)
        finally:
            handle.kill()
        if code not in (0, 1):
            raise JobFailed(f"the repro ended with exit code {code}", job, (job / "log").read_text(encoding="utf-8", errors="replace")[-2000:])
        return code

    def _folder(self, what: str) -> Path:
        """A folder no call before has used, also not one of a call that was killed."""
        self.jobs.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.name.split("-")[0]) for path in self.jobs.iterdir()), default=-1)
        folder = self.jobs / f"{number:03d}-{what}"
        folder.mkdir()
        return folder


def _filled(kernels: Path) -> Path | None:
    """The folder, if it holds a kernel."""
    return kernels if kernels.is_dir() and any(kernels.glob("*.py")) else None

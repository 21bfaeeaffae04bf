"""What a run calls: the tools as one object, so that a stand-in can take their place."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from agent import isolation
from agent.overlay import Patched, folder_of
from agent.tools.divergence import Divergence, LocalizeReport
from agent.tools.localize import LocalizeRequest, localize
from agent.tools.repro import ReproReport, ReproRequest, check_repros, make_repro
from agent.tools.verify import VerifyRequest, verify
from agent.verdict import VerifyReport
from consistency.contract import Contract
from sandboxes import Choice, Sandbox

Progress = Callable[[Any], None]
"""Takes whatever a tool tells about itself; may raise to stop it."""


class Tools(Protocol):
    """`EngineTools` runs real engines; `agent.fakes.FakeTools` is the stand-in for tests."""

    def verify(self, contract: Contract, kernels: Path, level: str, progress: Progress) -> VerifyReport:
        """Raises JobFailed if an engine crashes or hangs."""
        ...

    def localize(self, contract: Contract, kernels: Path, progress: Progress) -> LocalizeReport: ...

    def repro(self, divergence: Divergence, directory: Path, kernels: Path, progress: Progress) -> ReproReport:
        """Fill `directory`, which is absent. The exit code is the one found while it was made."""
        ...

    def check_repros(self, directories: list[Path], contract: Contract | None, kernels: Path) -> list[int]:
        """Exit codes of repro folders under a contract, or as recorded: 1 differs, 0 does not, 2 cannot run."""
        ...


def make_repros(tools: Tools, wanted: list[tuple[Divergence, Path]], kernels: Path, progress: Progress) -> list[ReproReport]:
    """Make folders and run them once they are whole; a folder counts as a repro only if it fails on its own."""
    # Each is cut down in a process of its own, and most of that is importing torch.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        reports = list(pool.map(lambda pair: tools.repro(pair[0], pair[1], kernels, progress), wanted))
    codes = tools.check_repros([directory for _, directory in wanted], None, kernels)
    return [report.model_copy(update={"exit_code": code, "reproduced": report.reproduced and code == 1})
            for report, code in zip(reports, codes, strict=True)]


class EngineTools:
    """The real tools on one model. Job folders go to `jobs`, numbered in the order of the calls; `evidence` takes that of one verify.

    `sandbox` is the workspace's choice; what the command line says comes first. Raises UserError if it cannot be used.
    A worktree whose consistency.toml names a checkout of an engine is measured with that engine, as its engine.patch leaves it.
    """

    def __init__(self, family: str, scale: str, checkpoint: Path, target: float, jobs: Path, evidence: Path | None = None,
                 sandbox: Choice = "auto"):
        self.inner = isolation.sandbox(sandbox)
        self.family, self.scale, self.checkpoint, self.target, self.jobs, self.evidence = family, scale, checkpoint, target, jobs, evidence
        self.graphs = False
        """localize: trace inside CUDA graphs"""

    def verify(self, contract: Contract, kernels: Path, level: str, progress: Progress) -> VerifyReport:
        engine = Patched.of(kernels.parent)
        report = verify(VerifyRequest(
            family=self.family, scale=self.scale, checkpoint=self.checkpoint, contract=contract, kernels=_filled(kernels),
            level="full" if level == "full" else "quick", target_throughput=self.target,
            directory=self.evidence or self._folder(f"verify-{level}")), progress, self._sandbox(engine, kernels))
        if engine:
            report.environment["checkout"] = engine.facts()
        return report

    def localize(self, contract: Contract, kernels: Path, progress: Progress) -> LocalizeReport:
        folder = self._folder("localize")
        report = localize(LocalizeRequest(
            family=self.family, scale=self.scale, checkpoint=self.checkpoint, contract=contract, kernels=_filled(kernels), work_dir=folder,
            graphs=self.graphs), progress, self._sandbox(Patched.of(kernels.parent), kernels))
        # Whole traces are some 200 MB a call; the cases keep what a repro needs.
        for traces in folder.glob("jobs/*/out"):
            shutil.rmtree(traces, ignore_errors=True)
        return report

    def repro(self, divergence: Divergence, directory: Path, kernels: Path, progress: Progress) -> ReproReport:
        request = ReproRequest(divergence=divergence, directory=directory, kernels=_filled(kernels), check=False)
        return make_repro(request, progress, self._sandbox(Patched.of(kernels.parent), kernels))

    def check_repros(self, directories: list[Path], contract: Contract | None, kernels: Path) -> list[int]:
        engine = self._sandbox(Patched.of(kernels.parent), kernels)
        return [code for code, _ in check_repros(directories, contract, _filled(kernels), engine)]

    def _sandbox(self, engine: Patched | None, kernels: Path) -> Sandbox:
        """Where jobs import the engine that the worktree around `kernels` asks for, or the installed one."""
        return engine.sandbox(folder_of(kernels.parent), self.inner) if engine else self.inner

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

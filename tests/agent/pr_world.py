"""Finished runs of fake tools, for tests of pull requests."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent import state as states
from agent.cli import app
from agent.config import Config
from agent.fakes import FakeTools, SilentObserver
from agent.loop import Run
from agent.policies.playbook import Playbook
from agent.state import load_current
from agent.workspace import Workspace

WORLD = {"engine": ["rms_norm", "linear"], "batch": ["linear"], "phase": []}
HUMAN = "Ann Author <ann@example.org>"


def finish(path: Path, policy=None, tools: FakeTools | None = None, run: str = "r1") -> Workspace:
    """A workspace whose run is over."""
    workspace = Workspace.create(path, Config(model="nemotron-3.5", scale="tiny"))
    states.begin(workspace, run=run, checkpoint="none", device="cpu", policy="playbook", target=0.913)
    Run(workspace, load_current(workspace), policy or Playbook(), tools or FakeTools(WORLD), SilentObserver(), minutes=5, attempts=9).go()
    return workspace


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Made once; `copy_of` gives each test its own."""
    with pytest.MonkeyPatch.context() as patch:
        for role in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{role}_NAME", "Tester")
            patch.setenv(f"GIT_{role}_EMAIL", "tester@example.org")
        return finish(tmp_path_factory.mktemp("finished") / "ws").path


def copy_of(finished: Path, target: Path) -> Workspace:
    shutil.copytree(finished, target, symlinks=True)
    return Workspace.open(target)


def agent(*arguments: object, tools: FakeTools | None = None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], obj=tools or FakeTools(WORLD))


def one_line(result, code: int, *said: str) -> str:
    """One clear line, the exit code, no traceback; returns the line."""
    assert result.exit_code == code, (result.output, result.exception)
    lines = [line for line in result.stderr.strip().splitlines() if line.startswith("agent: ")]
    assert len(lines) == 1 and "Traceback" not in result.output, result.stderr
    assert all(part in lines[0] for part in said), lines[0]
    return lines[0]

import itertools
import shutil
from pathlib import Path

import pytest

from agent import state as states
from agent.config import Config
from agent.llm import branching, calling
from agent.state import RunState
from agent.workspace import Workspace


@pytest.fixture(scope="session")
def git_home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / ".gitconfig").write_text("[user]\n\tname = Tester\n\temail = tester@example.org\n")
    return home


@pytest.fixture(scope="session")
def blank(git_home, tmp_path_factory) -> Path:
    """A workspace without a run, to be copied."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_CONFIG_GLOBAL", str(git_home / ".gitconfig"))
        return Workspace.create(tmp_path_factory.mktemp("blank") / "ws", Config(model="nemotron-3.5", scale="tiny")).path


@pytest.fixture(autouse=True)
def git_identity(monkeypatch, git_home):
    """An identity and nothing else of this machine's git configuration."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(git_home / ".gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture(autouse=True)
def no_keys_and_no_waiting(monkeypatch):
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "CHAT_API_KEY", "ANTHROPIC_BASE_URL", "OPENAI_BASE_URL", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(calling, "PAUSES", (0.01, 0.01))
    numbers = itertools.count(1)
    monkeypatch.setattr(branching, "new_run_id", lambda workspace: f"new{next(numbers)}")  # the real one waits for the next second


@pytest.fixture
def workspace(blank: Path, tmp_path: Path) -> Workspace:
    return Workspace.open(shutil.copytree(blank, tmp_path / "ws"))


@pytest.fixture
def state(workspace) -> RunState:
    """A run that has just begun."""
    return states.begin(workspace, run="r1", checkpoint="none", device="cpu", policy="scripted", target=0.913)

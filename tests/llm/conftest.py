from pathlib import Path

import pytest

from agent import state as states
from agent.config import Config
from agent.llm import calling
from agent.state import RunState
from agent.workspace import Workspace


@pytest.fixture(autouse=True)
def git_identity(monkeypatch, tmp_path_factory):
    """An identity and nothing else of this machine's git configuration."""
    home = tmp_path_factory.mktemp("home")
    (home / ".gitconfig").write_text("[user]\n\tname = Tester\n\temail = tester@example.org\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(home / ".gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


@pytest.fixture(autouse=True)
def no_keys_and_no_waiting(monkeypatch):
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "CHAT_API_KEY", "ANTHROPIC_BASE_URL", "OPENAI_BASE_URL", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(calling, "PAUSES", (0.01, 0.01))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.create(tmp_path / "ws", Config(model="nemotron-3.5", scale="tiny"))


@pytest.fixture
def state(workspace) -> RunState:
    """A run that has just begun."""
    return states.begin(workspace, run="r1", checkpoint="none", device="cpu", policy="scripted", target=0.913)

from pathlib import Path

import pytest
from pr_world import finished  # noqa: F401

from agent.config import Config
from agent.workspace import Workspace


@pytest.fixture(autouse=True)
def git_identity(monkeypatch, tmp_path_factory):
    """An identity and nothing else of this machine's git configuration."""
    home = tmp_path_factory.mktemp("home")
    (home / ".gitconfig").write_text("[user]\n\tname = Tester\n\temail = tester@example.org\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(home / ".gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    return home


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.create(tmp_path / "ws", Config(model="nemotron-3.5", scale="tiny"))

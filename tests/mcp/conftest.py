from pathlib import Path

import pytest

from agent.mcp import devices
from agent.mcp.fakes import FakeTool
from agent.mcp.jobs import Jobs
from agent.server import build


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """This machine's devices do not matter: everything runs on `cpu`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    devices.gpus.cache_clear()
    yield
    devices.gpus.cache_clear()


@pytest.fixture
def fake(tmp_path: Path) -> FakeTool:
    (tmp_path / "fake").mkdir()
    return FakeTool(tmp_path / "fake")


@pytest.fixture
def jobs(tmp_path: Path, fake: FakeTool):
    """Ends what a test leaves running."""
    made = Jobs(tmp_path / "state", fake.command)
    yield made
    for job in made.newest(1000):
        if not job.finished:
            made.cancel(job.record.id)


@pytest.fixture
def server(tmp_path: Path, fake: FakeTool, jobs: Jobs):
    return build(tmp_path / "state", cwd=tmp_path, command=fake.command, skills=tmp_path / "skills")


@pytest.fixture(params=["auto", "legacy"])
def mode(request) -> str:
    """Both protocol eras: 2026-07-28, and the handshake one."""
    return request.param

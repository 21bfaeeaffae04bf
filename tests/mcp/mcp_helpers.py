"""What several of these tests need beside fixtures."""

import os
import subprocess
import sys
import time
from pathlib import Path

from agent.mcp.fakes import FakeTool
from agent.mcp.jobs import Call, Job, Jobs

TOKEN = "a-token-for-tests-only"
SERVE = Path(__file__).with_name("serve_fake.py")


def call(*arguments: str, tool: str = "verify", device: str = "cpu", **fields) -> Call:
    return Call(tool, lambda folder: [tool.removesuffix("_kernel"), *arguments], device, Path("/"), **fields)


def ended(jobs: Jobs, job: Job, within: float = 20.0) -> Job:
    return until(jobs, job, lambda now: now.finished, within)


def until(jobs: Jobs, job: Job, condition, within: float = 20.0) -> Job:
    deadline = time.monotonic() + within
    while not condition(now := jobs.find(job.record.id)):
        assert time.monotonic() < deadline, (now.state, now.log_tail(), (now.folder / "supervisor").read_text())
        time.sleep(0.02)
    return now


def exists(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def patience(seconds: float) -> float:
    """Limits hold on an idle machine; on one with more work than cores everything takes as much longer."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)) * 1.5


def stdio_command(tmp_path: Path, fake: FakeTool) -> list[str]:
    return [sys.executable, str(SERVE), str(fake.folder), "--state", str(tmp_path / "state")]


def start_http(tmp_path: Path, fake: FakeTool, *options: str) -> tuple[subprocess.Popen, str]:
    """A real HTTP server on a free port; returns it with its address."""
    log = (tmp_path / "server.log").open("w+")
    environment = {**os.environ, "AGENT_MCP_TOKEN": TOKEN}
    process = subprocess.Popen([sys.executable, str(SERVE), str(fake.folder), "--http", "--port", "0", "--state", str(tmp_path / "state"), *options],
                               stderr=log, cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 30
    while "MCP on " not in (said := (tmp_path / "server.log").read_text()):
        assert process.poll() is None and time.monotonic() < deadline, said
        time.sleep(0.02)
    return process, said.partition("MCP on ")[2].partition(",")[0]

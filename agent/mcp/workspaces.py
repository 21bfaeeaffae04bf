"""Workspaces that resources may be read from: those that jobs worked on, and those in the server's folder. A short id stands for a path."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from agent import config
from agent.mcp.jobs import KEPT, Jobs

PRIVATE = ".agent"
"""Where a workspace keeps its state, as `agent.workspace` names it; that module needs git, which this server does not."""


def workspace_id(path: Path) -> str:
    """Readable, and different for every path."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", path.name).strip("-")[:40] or "workspace"
    return f"{name}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"


class Workspaces:
    """Looks the workspaces up anew each time; no path that a client sends is ever opened."""

    def __init__(self, jobs: Jobs, cwd: Path):
        self.jobs, self.cwd = jobs, cwd

    def all(self) -> dict[str, Path]:
        """Id -> path, newest job first."""
        used = [Path(job.record.workspace) for job in self.jobs.newest(KEPT) if job.record.workspace]
        here = [self.cwd, *sorted(self.cwd.glob("consistency-*"))]
        return {workspace_id(path): path for path in dict.fromkeys([*used, *here]) if (path / config.FILE).is_file()}

    def find(self, name: str) -> Path:
        """Raises KeyError."""
        return self.all()[name]


def current(path: Path) -> dict[str, Any] | None:
    """State of the workspace's last run; None if it has none that can be read."""
    try:
        run = (path / PRIVATE / "current").read_text(encoding="utf-8").strip()
        return json.loads((path / PRIVATE / "runs" / Path(run).name / "state.json").read_bytes())
    except (OSError, ValueError):
        return None


def checkout(path: Path) -> Path:
    """Where evidence and repros of the last run are: its worktree while it runs, afterwards the workspace itself."""
    state = current(path)
    tree = path / PRIVATE / "worktrees" / Path(str(state["run"])).name / "main" if state else path
    return tree if tree.is_dir() else path

"""job.json: what a job is and how far it got, as written by the server and then only by the job's supervisor. Standard library only."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from agent.mcp.processes import Identity

FILE, LOCK, OUTPUT, LOG = "job.json", "lock", "stdout", "stderr"
LANES = "lanes"


@dataclass
class Record:
    """One job. Times are seconds since the epoch."""

    id: str
    """cannot be guessed"""
    tool: str
    argv: list[str]
    cwd: str
    environment: dict[str, str]
    """added to that of the server"""
    device: str
    """`cpu`, `cuda:N`, or `host` for work that needs no engine; jobs of one device run one after the other"""
    number: int
    """place in the order of all jobs"""
    created: float
    workspace: str | None = None
    started: float | None = None
    """None: still in the queue"""
    ended: float | None = None
    exit_code: int | None = None
    """negative: ended by that signal"""
    cancelled: bool = False
    supervisor: Identity | None = None
    process: Identity | None = None
    files: list[str] = field(default_factory=list)
    """inputs that came with the call, relative to the job's folder"""

    @classmethod
    def load(cls, folder: Path) -> Record:
        """Raises OSError or ValueError if there is no readable record."""
        data = json.loads((folder / FILE).read_bytes())
        for name in ("supervisor", "process"):
            data[name] = Identity(**data[name]) if data[name] else None
        return cls(**data)

    def save(self, folder: Path) -> None:
        """Readers see the old record or the new one, never a part."""
        draft = folder / f".{FILE}"
        draft.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        draft.replace(folder / FILE)

    def lane_entry(self, state: Path) -> Path:
        """The file that stands for this job in its device's queue, from the moment it is created until it ends."""
        return state / LANES / self.device / f"{self.number:09d}-{self.id}"


def alive(folder: Path) -> bool:
    """Whether the job's supervisor or its command holds the lock; the kernel drops it with them, so it cannot be stale."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(handle)


def ahead(state: Path, record: Record) -> list[str]:
    """Ids of the living jobs that have the device before this one does, in order."""
    entry = record.lane_entry(state)
    try:
        names = sorted(other.name for other in entry.parent.iterdir())
    except FileNotFoundError:
        return []
    ids = [name.partition("-")[2] for name in names if name < entry.name]
    return [job for job in ids if alive(state / "jobs" / job)]

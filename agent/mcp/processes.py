"""Processes that outlive the one that started them: who they are, what they started, and how to end all of it. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STEP = 0.01
"""Seconds between two looks at processes that are being ended."""
PATIENCE = 5.0
"""Seconds that killed processes get to disappear; one that hangs in the kernel must not hang its killer."""


@dataclass(frozen=True)
class Identity:
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    started: str
    """boot and start time of the process; two processes with one pid never share it"""


def identify(pid: int) -> Identity | None:
    """None if there is no such process, or only its zombie."""
    started = _started(pid)
    return Identity(pid, started) if started else None


def running(identity: Identity | None) -> bool:
    return identity is not None and identify(identity.pid) == identity


def descendants(pid: int) -> list[int]:
    """Living processes below `pid`, in any process group or session (Linux; elsewhere none are seen)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        if (fields := _stat(entry)) and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, open_ = [], [pid]
    while open_:
        below = children.get(open_.pop(), [])
        found += below
        open_ += below
    return found


def end_below(owner: int, leader: Identity, grace: float) -> None:
    """End the process group of `leader` and everything below `owner`, SIGTERM first and after `grace` seconds SIGKILL."""
    signal_group(leader, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while running(leader) and time.monotonic() < deadline:
        time.sleep(STEP)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        signal_group(leader, signal.SIGKILL)
        rest = descendants(owner)
        for pid in rest:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not rest and not running(leader):
            return
        time.sleep(STEP)


def signal_group(leader: Identity, number: signal.Signals) -> None:
    """Signal the group that `leader` leads, unless the process is another one by now."""
    if running(leader):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, number)


def _started(pid: int) -> str:
    if sys.platform == "linux":
        fields = _stat(Path(f"/proc/{pid}/stat"))
        return f"{_boot()}:{fields[19]}" if fields and fields[0] != "Z" else ""
    shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip()


def _stat(path: Path) -> list[str]:
    """Fields after the command's name, which may itself hold spaces and brackets: state, parent, ..., start time at 19."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""

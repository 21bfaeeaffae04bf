"""A started job as its owner holds it: polled, limited, and ended with everything it started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

from sandboxes import Limits

PATIENCE = 10.0
"""Seconds that killed processes get to disappear; one that hangs in the kernel must not hang the parent."""
GRACE = 1.0
"""Seconds that helper processes get to follow a job that ended by itself, before they count as left behind."""
WATCH_SECONDS = 0.2
DISK_EVERY = 5
"""The folder is measured every so many looks."""
MEMORY_SHARE = 0.9
_TICK, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Group:
    """The processes of one job. A backend says how they are found and ended."""

    def __init__(self, process: subprocess.Popen, scratch: Iterable[Path]) -> None:
        self.process, self.scratch = process, tuple(scratch)
        self.ended = threading.Event()
        self.code: int | None = None
        self.left: tuple[str, ...] = ()
        self._lock = threading.Lock()

    def end(self) -> None:
        """Ends everything and removes the scratch folders. Idempotent, from any thread."""
        with self._lock:
            if self.ended.is_set():
                return
            self.strike()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(PATIENCE)
            self.settle()
            for folder in self.scratch:
                shutil.rmtree(folder, ignore_errors=True)
            self.ended.set()

    def strike(self) -> None:
        """Kills every process of the job but does not reap the first one."""
        raise NotImplementedError

    def settle(self) -> None:
        """After the first process was reaped: sets `code`."""
        self.code = self.process.returncode

    def running(self) -> bool:
        """Looks without reaping: until it is reaped, the number of the process and of its group cannot be given to another one."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def members(self) -> list[int]:
        """The first process and its living descendants (Linux; elsewhere the first one)."""
        found, new = [], [self.process.pid]
        while new:
            found += new
            new = [child for pid in new for child in _children(pid)]
        return found


class JobHandle:
    """One job. When the handle is forgotten, or the interpreter exits, the job ends."""

    def __init__(self, group: Group, directory: Path, limits: Limits) -> None:
        self.timed_out = False
        self.breach: tuple[str, str] | None = None
        self.pid = group.process.pid
        self._group = group
        weakref.finalize(self, group.end)
        threading.Thread(target=_watch, args=(weakref.ref(self), group, directory, limits), daemon=True).start()

    @property
    def left(self) -> tuple[str, ...]:
        return self._group.left

    def poll(self) -> int | None:
        if not self._group.ended.is_set() and self._group.running():
            return None
        self.kill()
        return self._group.code

    def kill(self) -> None:
        self._group.end()

    def cpu_seconds(self) -> float:
        return sum(_used(pid) for pid in self._group.members())


def _watch(handle: weakref.ref[JobHandle], group: Group, directory: Path, limits: Limits) -> None:
    deadline, look = time.monotonic() + limits.wall_seconds, 0
    while not group.ended.wait(min(WATCH_SECONDS, max(0.0, deadline - time.monotonic()))):
        late = time.monotonic() >= deadline
        breach = None if late else _breach(group, directory if look % DISK_EVERY == 0 else None, limits)
        look += 1
        if late or breach:
            if (job := handle()) is not None and group.running():
                job.timed_out, job.breach = late, breach
                job.kill()
            return


def _breach(group: Group, directory: Path | None, limits: Limits) -> tuple[str, str] | None:
    members = group.members()
    if len(members) > limits.processes:
        return "too_many_processes", f"it had {len(members)} processes, {limits.processes} are allowed"
    most = limits.memory_bytes or int(MEMORY_SHARE * _PAGE * os.sysconf("SC_PHYS_PAGES"))
    memory = sum(map(_resident, members))
    if memory > most and len(members) > 1:
        memory = sum(map(_proportional, members))  # slower; forked processes share most of their pages
    if memory > most:
        return "memory_limit", f"it held {memory} bytes of memory, {most} are allowed"
    if directory is not None and (size := folder_bytes(directory)) > limits.disk_bytes:
        return "disk_quota", f"its folder held {size} bytes, {limits.disk_bytes} are allowed"
    return None


def folder_bytes(directory: Path) -> int:
    """Bytes that the files below a folder occupy; links are not followed, files that vanish meanwhile count nothing."""
    total, waiting = 0, [str(directory)]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "?"


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def _proportional(pid: int) -> int:
    """Resident bytes, those shared with other processes counted in part."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return _resident(pid)


def _used(pid: int) -> float:
    """User and system time in seconds, of the process and of its children that are gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICK
    return 0.0

"""Jobs as local processes: own session, own environment, limits, wall clock. Guards against accidents, not against malice."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandboxes import Capabilities, Limits
from sandboxes.handle import GRACE, PATIENCE, Group, JobHandle, kill_all, name_of

PASSED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
MARK = "SANDBOX_JOB"
LAUNCHER = Path(__file__).with_name("limited.py")
ROOT = Path(__file__).resolve().parents[1]


class LocalSandbox:
    """Starts each job in a new session. HOME and TMPDIR are `directory/home` and `directory/tmp`, removed with the job.

    On Linux a job ends with the thread that started it, also when that thread's process is killed.
    """

    def start(self, argv: Sequence[str], directory: Path, environment: Mapping[str, str], limits: Limits) -> JobHandle:
        mark = secrets.token_hex(16)
        scratch = {"HOME": directory / "home", "TMPDIR": directory / "tmp"}
        for folder in scratch.values():
            folder.mkdir(parents=True, exist_ok=True)
        clean = {**clean_environment(), **{name: str(folder.resolve()) for name, folder in scratch.items()}, **environment, MARK: mark}
        with (directory / "log").open("ab") as log:
            process = subprocess.Popen([*limited(os.getpid(), limits), *argv], cwd=directory, env=clean, stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=log, start_new_session=True)
        return JobHandle(LocalGroup(process, mark, scratch.values()), directory, limits)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="local", isolation="process", network=True, filesystem="shared", kills_descendants=sys.platform == "linux",
            not_guarded=("reading and writing any file of this user", "the network", "signals to other processes of this user",
                         "starting processes that drop their environment", "bugs of the operating system or of a device driver"))


def clean_environment() -> dict[str, str]:
    """The few variables of the caller's that a job may see, and where it finds this project."""
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    return {**passed, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}


def limited(owner: int, limits: Limits) -> list[str]:
    """Command line in front of a job's own that sets its limits."""
    return [sys.executable, "-I", "-S", str(LAUNCHER), str(owner), str(limits.file_bytes), str(limits.open_files)]


class LocalGroup(Group):
    """Found by session while it runs; at the end, also those that carry the job's mark in another session (Linux only)."""

    def __init__(self, process: subprocess.Popen, mark: str, scratch) -> None:
        super().__init__(process, scratch)
        self._mark = mark

    def strike(self) -> None:
        if not self.running():
            self._notice_left()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, when only a zombie is left
            os.killpg(self.process.pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while (strays := self._marked()) and time.monotonic() < deadline:
            kill_all(strays)
            time.sleep(0.005)

    def _notice_left(self) -> None:
        deadline = time.monotonic() + GRACE
        while (strays := self._marked()) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.left = tuple(name_of(pid) for pid in strays)

    def _marked(self) -> list[int]:
        """Living processes that inherited the job's mark, whatever group or session they moved to (Linux only)."""
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if wanted in entry.read_bytes().split(b"\0"):  # a zombie's is empty
                    found.append(int(entry.parent.name))
            except OSError:
                continue  # gone, or another user's
        return [pid for pid in found if pid != self.process.pid]

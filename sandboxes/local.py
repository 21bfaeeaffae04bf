"""Jobs as local processes: own session, own environment, limits, wall clock. Guards against accidents, not against malice."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from sandboxes import Capabilities, Limits

PASSED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
MARK = "SANDBOX_JOB"
PATIENCE = 10.0
"""Seconds that killed processes get to disappear; one that hangs in the kernel must not hang the parent."""
_LAUNCHER = Path(__file__).with_name("limited.py")
_ROOT = Path(__file__).resolve().parents[1]


class LocalSandbox:
    """Starts each job in a new session. HOME and TMPDIR are `directory/home` and `directory/tmp`, removed with the job.

    On Linux a job ends with the thread that started it, also when that thread's process is killed.
    """

    def start(self, argv: Sequence[str], directory: Path, environment: Mapping[str, str], limits: Limits) -> LocalHandle:
        mark = secrets.token_hex(16)
        scratch = {"HOME": directory / "home", "TMPDIR": directory / "tmp"}
        for folder in scratch.values():
            folder.mkdir(parents=True, exist_ok=True)
        clean = {name: os.environ[name] for name in PASSED if name in os.environ}
        clean |= {name: str(folder.resolve()) for name, folder in scratch.items()}
        clean |= {"PYTHONPATH": str(_ROOT), "PYTHONSAFEPATH": "1", **environment, MARK: mark}
        launcher = [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), str(limits.file_bytes), str(limits.open_files)]
        with (directory / "log").open("ab") as log:
            process = subprocess.Popen([*launcher, *argv], cwd=directory, env=clean, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       start_new_session=True)
        return LocalHandle(process, mark, limits.wall_seconds, tuple(scratch.values()))

    def capabilities(self) -> Capabilities:
        return Capabilities(isolation="process", network=True, filesystem="shared", kills_descendants=sys.platform == "linux")


class LocalHandle:
    """One local job."""

    def __init__(self, process: subprocess.Popen, mark: str, wall_seconds: float, scratch: tuple[Path, ...]) -> None:
        self.timed_out = False
        self.pid = process.pid
        self._process = process
        self._ended = threading.Event()
        self._belongings = (process, mark, scratch, threading.Lock(), self._ended)
        # Runs when the handle is forgotten and when the interpreter exits, so an unclosed job dies with its owner.
        weakref.finalize(self, _end, *self._belongings)
        threading.Thread(target=_watch, args=(weakref.ref(self), self._ended, wall_seconds), daemon=True).start()

    def poll(self) -> int | None:
        if not self._ended.is_set() and _running(self._process.pid):
            return None
        self.kill()
        return self._process.returncode

    def kill(self) -> None:
        _end(*self._belongings)


def _watch(handle: weakref.ref[LocalHandle], ended: threading.Event, wall_seconds: float) -> None:
    if ended.wait(wall_seconds):
        return
    if (job := handle()) is not None and _running(job.pid):
        job.timed_out = True
        job.kill()


def _running(pid: int) -> bool:
    """Looks without reaping: until it is reaped, the number of the process and of its group cannot be given to another one."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _end(process: subprocess.Popen, mark: str, scratch: tuple[Path, ...], lock: threading.Lock, ended: threading.Event) -> None:
    with lock:
        if ended.is_set():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, when only a zombie is left
            os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while (strays := _marked(mark, process.pid)) and time.monotonic() < deadline:
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        for folder in scratch:
            shutil.rmtree(folder, ignore_errors=True)
        ended.set()


def _marked(mark: str, leader: int) -> list[int]:
    """Living processes that inherited the job's mark, whatever group or session they moved to (Linux only)."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in entry.read_bytes().split(b"\0"):  # a zombie's is empty
                found.append(int(entry.parent.name))
        except OSError:
            continue  # gone, or another user's
    return [pid for pid in found if pid != leader]

"""One small process per job: waits for the device, runs the command, writes down how it ended. It belongs to no server and no client.

`python -m agent.mcp.supervisor STATE JOB LOCK`, where LOCK is the descriptor of the job's lock file, locked by whoever starts this.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from agent.mcp.processes import Identity, end_below, identify
from agent.mcp.record import LOG, OUTPUT, Record, ahead

GRACE = 0.4
"""Seconds between SIGTERM and SIGKILL; a cancelled job is gone within one second."""
QUEUE_POLL = 0.2
"""Seconds between two looks at the queue."""
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CANNOT_START = 127
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Cancelled(Exception):
    """SIGTERM came."""


def main() -> None:
    state, job, lock = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    folder = state / "jobs" / job
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    record = Record.load(folder)
    record.supervisor = identify(os.getpid())
    record.save(folder)
    try:
        while ahead(state, record):
            _pause(QUEUE_POLL)
        _run(record, folder, lock)
    except Cancelled:
        record.cancelled = True
    finally:
        if record.process:
            end_below(os.getpid(), record.process, GRACE if record.cancelled else 0.0)
            _reap(record)
        record.ended = time.time()
        record.save(folder)
        record.lane_entry(state).unlink(missing_ok=True)


def _run(record: Record, folder: Path, lock: int) -> None:
    """Start the command in its own session and wait for it. The command inherits the lock, so that the device stays taken while it lives."""
    with (folder / OUTPUT).open("wb") as output, (folder / LOG).open("wb") as log:
        try:
            process = subprocess.Popen(
                record.argv, cwd=record.cwd, env={**os.environ, **record.environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=log,
                start_new_session=True, pass_fds=(lock,), preexec_fn=partial(_in_the_child, os.getpid()))
        except OSError as error:
            log.write(f"agent: {record.argv[0]} cannot be started in {record.cwd}: {error.strerror}\n".encode())
            record.started, record.exit_code = time.time(), _CANNOT_START
            return
    record.started, record.process = time.time(), identify(process.pid) or Identity(process.pid, "")
    record.save(folder)
    while record.exit_code is None:
        _pause(60.0)
        _reap(record)


def _reap(record: Record) -> None:
    """Collect every child that ended: the command, and its orphans, which this process inherits."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if record.process and ended[0] == record.process.pid:
                record.exit_code = os.waitstatus_to_exitcode(ended[1])


def _pause(seconds: float) -> None:
    """Sleep until the time is up or a child ended. Raises Cancelled on SIGTERM and SIGINT."""
    came = signal.sigtimedwait(WATCHED, seconds)
    if came and came.si_signo != signal.SIGCHLD:
        raise Cancelled


def _in_the_child(parent: int) -> None:
    """Between fork and exec: the command gets ordinary signals, and SIGTERM should this process die."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the call above
        os.kill(os.getpid(), signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if _LIBC:
        _LIBC.prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()

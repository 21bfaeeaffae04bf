"""`python first.py STATUS_FD GRACE COMMAND...`: the first process of a job's own process namespace.

Runs the command, collects orphans, and tells through a pipe that only it holds how the command ended and which processes outlived it. When it
ends, the kernel kills whatever is left in the namespace.
"""

import contextlib
import ctypes
import json
import os
import sys
import time
from pathlib import Path

PR_SET_DUMPABLE = 4


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def others() -> list[str]:
    """Names of the processes besides this one, zombies left out."""
    names = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, state = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            if int(entry.name) != os.getpid() and state.split()[0] != "Z":
                names.append(name)
    return names


def main() -> int:
    status, grace, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(status, False)
    # Without this the job, which has the same user, could reach the pipe through /proc.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)
    child = os.fork()
    if child == 0:
        os.execv(command[0], command)
    while True:
        pid, state = os.wait()
        if pid == child:
            break
    code = os.waitstatus_to_exitcode(state)
    deadline = time.monotonic() + grace
    while (left := others()) and time.monotonic() < deadline:
        time.sleep(0.02)
        reap()
    os.write(status, json.dumps({"code": code, "left": left[:20]}).encode())
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())

"""`python limited.py OWNER FILE_BYTES OPEN_FILES COMMAND...`: limits this process, ties it to its owner, then becomes the command.

A program of its own because code between fork and exec (`preexec_fn`) can deadlock in a parent that has threads.
"""

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def lower(which: int, wanted: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(which, (value, value))


def die_with(owner: int) -> None:
    """The kernel kills this process when the thread that started it ends, so that a killed owner leaves no busy engine (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != owner:
            sys.exit("the owner is gone")


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_FSIZE, int(sys.argv[2]))
    lower(resource.RLIMIT_NOFILE, int(sys.argv[3]))
    try:
        os.execvp(sys.argv[4], sys.argv[4:])
    except OSError as error:
        sys.exit(f"{sys.argv[4]}: {error.strerror}")

"""`python limited.py FILE_BYTES OPEN_FILES COMMAND...`: lowers this process's limits, then becomes the command.

A program of its own because code between fork and exec (`preexec_fn`) can deadlock in a parent that has threads.
"""

import os
import resource
import sys


def lower(which: int, wanted: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(which, (value, value))


if __name__ == "__main__":
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_FSIZE, int(sys.argv[1]))
    lower(resource.RLIMIT_NOFILE, int(sys.argv[2]))
    try:
        os.execvp(sys.argv[3], sys.argv[3:])
    except OSError as error:
        sys.exit(f"{sys.argv[3]}: {error.strerror}")

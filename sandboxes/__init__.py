"""Where jobs run. A sandbox starts one command line in one folder, watches it and removes everything it started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Choice = Literal["auto", "bubblewrap", "local"]


class SandboxUnavailable(Exception):
    """A sandbox that was asked for cannot be used here; the message is one line that says why."""


@dataclass(frozen=True)
class Limits:
    """What one job may use. Address space is left alone: a CUDA process reserves far more than it touches.

    Processes, memory and disk are watched by the parent, several times a second: RLIMIT_NPROC counts every task of the user and does not bind
    root, and no rlimit sees the resident memory or the folder of several processes.
    """

    wall_seconds: float = 1800.0
    """The whole job is killed after this long."""
    file_bytes: int = 16 << 30
    """Largest file that the job can write."""
    open_files: int = 4096
    processes: int = 256
    """Processes alive at a time, threads not counted."""
    memory_bytes: int | None = None
    """Resident memory of all its processes together; None: nine tenths of the machine's."""
    disk_bytes: int = 32 << 30
    """Everything in the job's folder."""
    readable: tuple[Path, ...] = ()
    """What a sandbox with a private file system must show besides Python, the system and the job's folder."""
    writable: tuple[Path, ...] = ()
    """The same, and the job may write there."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend guarantees, recorded in the evidence of every verdict."""

    name: str
    """`local` or `bubblewrap`"""
    isolation: str
    """`process`, `namespaces`, `container`, `host`"""
    network: bool
    """the job can reach the network"""
    filesystem: str
    """`shared`: the job sees the caller's files; `private`: only what it was given"""
    kills_descendants: bool
    """processes that left the job's group are found and killed too"""
    not_guarded: tuple[str, ...]
    """what a malicious job could still do"""


class Handle(Protocol):
    """A started job."""

    timed_out: bool
    """The wall clock ended it."""
    breach: tuple[str, str] | None
    """(rule, what was found) if a limit ended it: `too_many_processes`, `memory_limit` or `disk_quota`"""

    @property
    def left(self) -> tuple[str, ...]:
        """Names of processes that were still there when the job had ended by itself. They are gone now."""
        ...

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs. Once it is not None, nothing that the job started is left."""
        ...

    def kill(self) -> None:
        """Ends the job and everything it started, now; returns when they are gone. May be called at any time, again and again."""
        ...

    def cpu_seconds(self) -> float:
        """Processor time that the job's living processes have used so far."""
        ...


class Sandbox(Protocol):
    """A backend. All of them write stdout and stderr of the job to `directory/log`."""

    def start(self, argv: Sequence[str], directory: Path, environment: Mapping[str, str], limits: Limits) -> Handle:
        """Starts `argv` with `directory` as working folder. The job sees `environment` and a short list of variables, nothing else.

        Raises OSError if the command cannot be started.
        """
        ...

    def capabilities(self) -> Capabilities: ...


def choose(wanted: Choice = "auto") -> Sandbox:
    """The sandbox for jobs on this machine; `auto` is bubblewrap where a trial start works. Raises SandboxUnavailable."""
    from sandboxes import bubblewrap, local

    reason = "" if wanted == "local" else bubblewrap.obstacle()
    if wanted == "bubblewrap" and reason:
        raise SandboxUnavailable(f"sandbox bubblewrap cannot be used: {reason}; `auto` takes the local one")
    return local.LocalSandbox() if wanted == "local" or reason else bubblewrap.BubblewrapSandbox()

"""Where jobs run. A sandbox starts one command line in one folder, watches it and removes everything it started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Limits:
    """What one job may use. Address space is left alone: a CUDA process reserves far more than it touches."""

    wall_seconds: float = 1800.0
    """The whole job is killed after this long."""
    file_bytes: int = 16 << 30
    """Largest file that the job can write."""
    open_files: int = 4096


@dataclass(frozen=True)
class Capabilities:
    """What a backend guarantees, recorded in the evidence of every verdict."""

    isolation: str
    """`process`, `namespaces`, `container`, `host`"""
    network: bool
    """the job can reach the network"""
    filesystem: str
    """`shared`: the job sees the caller's files; `private`: only what it was given"""
    kills_descendants: bool
    """processes that left the job's group are found and killed too"""


class Handle(Protocol):
    """A started job."""

    timed_out: bool
    """The wall clock ended it."""

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs. Once it is not None, nothing that the job started is left."""
        ...

    def kill(self) -> None:
        """Ends the job and everything it started, now; returns when they are gone. May be called at any time, again and again."""
        ...


class Sandbox(Protocol):
    """A backend. All of them write stdout and stderr of the job to `directory/log`."""

    def start(self, argv: Sequence[str], directory: Path, environment: Mapping[str, str], limits: Limits) -> Handle:
        """Starts `argv` with `directory` as working folder. The job sees `environment` and a short list of variables, nothing else.

        Raises OSError if the command cannot be started.
        """
        ...

    def capabilities(self) -> Capabilities: ...

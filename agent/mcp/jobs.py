"""Jobs: tool calls that run as detached processes and are known by their folder alone, so that they survive clients and servers."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from agent.mcp.processes import end_below, running, signal_group
from agent.mcp.record import LANES, LOCK, LOG, OUTPUT, Record, ahead, alive

State = Literal["queued", "running", "completed", "failed", "cancelled", "lost"]
FINISHED: tuple[State, ...] = ("completed", "failed", "cancelled", "lost")

WITH_RESULT = (0, 1, 3)
"""Exit codes of a command that has a result to tell: exact, not exact, out of budget."""
PROGRESS = "@progress "
"""A command may print such a line on stderr, followed by one JSON object: {"text": "batch 3", "done": 3, "of": 12}."""
KEPT = 200
"""Finished jobs whose folders stay."""
MAX_WAITING = 32
"""Jobs that may wait for one device."""
MAX_OUTPUT = 32 * 2**20
TAIL = 8192
"""Bytes at the end of a log in which the last line is looked for."""
CANCEL_SECONDS = 3.0
"""How long a supervisor may take to end its job, which usually takes half a second, before it is killed as well."""
TOKEN = "AGENT_MCP_TOKEN"
"""Environment variable with the bearer token of the HTTP server; no job gets to see it."""
_PACKAGES = Path(__file__).resolve().parents[2]


class JobError(Exception):
    """A request about jobs that cannot be met; the text says what to do instead."""


@dataclass(frozen=True)
class Call:
    """What a job shall do."""

    tool: str
    arguments: Callable[[Path], Sequence[str]]
    """given the job's folder, what follows the command on its command line"""
    device: str
    cwd: Path
    workspace: Path | None = None
    """what the job works on, for those who look for its results"""
    files: Mapping[str, str] = field(default_factory=dict)
    """relative name -> text, written into the job's folder before the start"""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A job as its folder tells it now."""

    record: Record
    folder: Path
    state: State
    waiting_for: tuple[str, ...] = ()
    """jobs that have the device first"""

    @property
    def finished(self) -> bool:
        return self.state in FINISHED

    @property
    def seconds(self) -> float:
        """Wall clock since the start, or since the call while it is queued."""
        begin = self.record.started or self.record.created
        return max(0.0, (self.record.ended or time.time()) - begin)

    @cached_property
    def output(self) -> Any:
        """The JSON that the command printed; None if it printed none."""
        try:
            if (self.folder / OUTPUT).stat().st_size > MAX_OUTPUT:
                return None
            return json.loads((self.folder / OUTPUT).read_bytes())
        except (OSError, ValueError):
            return None

    def log_tail(self) -> str:
        return tail(self.folder / LOG, TAIL)

    def progress(self) -> str:
        """What the command said last about itself: its last progress line, else the last line of its log."""
        last = ""
        for line in reversed(self.log_tail().splitlines()):
            if not line.startswith(PROGRESS):
                last = last or line.strip()
            elif told := _told(line.removeprefix(PROGRESS)):
                return told
        return last

    def error(self) -> str:
        """The command's own one-line error, else the end of its log."""
        lines = [line for line in self.log_tail().splitlines() if line.strip() and not line.startswith(PROGRESS)]
        said = [line for line in lines if line.startswith("agent: ")]
        return said[-1].removeprefix("agent: ") if said else "\n".join(lines[-5:])


class Jobs:
    """All jobs below one folder. Several servers may share it; everything they agree on is in files and locks."""

    def __init__(self, state: Path, command: Sequence[str] | None = None):
        """`command` is what tool arguments are appended to; default: the command line of this package, in this interpreter."""
        self.state = state
        self.command = tuple(command or (sys.executable, "-m", "agent"))
        self._folders = state / "jobs"
        self._supervisors: list[subprocess.Popen] = []
        state.mkdir(parents=True, exist_ok=True)
        state.chmod(0o700)
        self._folders.mkdir(exist_ok=True)

    def submit(self, call: Call) -> Job:
        """Queue one job and return at once; the same call as that of an unfinished job returns that job.

        Raises JobError if too many jobs wait for the device, or if the call holds text that no command line can carry.
        """
        with self._locked():
            waiting = self._lane(call.device)
            for job in waiting:
                if self._same(job, call):
                    return job
            if len(waiting) > MAX_WAITING:
                raise JobError(f"{len(waiting) - 1} jobs wait for {call.device} already; wait for one to end or end one with job_cancel")
            name = secrets.token_hex(16)
            folder = self._folders / name
            argv = [*self.command, *call.arguments(folder)]
            if not all(_plain(text) for text in [*argv, *call.files, *call.files.values()]):
                raise JobError("an argument holds a NUL or half a surrogate pair; send plain text")
            folder.mkdir(mode=0o700)
            for file, text in call.files.items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(text, encoding="utf-8")
            record = Record(
                id=name, tool=call.tool, argv=argv, cwd=str(call.cwd), device=call.device, number=self._next_number(),
                environment={**_ENVIRONMENT, **call.environment}, created=time.time(),
                workspace=str(call.workspace) if call.workspace else None, files=sorted(call.files))
            self._start(record, folder)
            self._prune()
        return self.find(name)

    def find(self, name: str) -> Job:
        """Raises JobError on an id that no job has."""
        folder = self._folders / name
        if not (len(name) == 32 and name.isalnum()) or not folder.is_dir():
            known = ", ".join(f"{job.record.id} ({job.record.tool}, {job.state})" for job in self.newest(3))
            raise JobError(f"there is no job {name[:64]!r}; the newest are: {known or 'none'}")
        try:
            record = Record.load(folder)
        except (OSError, ValueError, TypeError) as error:
            raise JobError(f"job {name} has no readable record ({error}); start the tool again") from None
        return self._seen(record, folder)

    def newest(self, count: int) -> list[Job]:
        """Newest first."""
        found = []
        for folder in self._by_age()[:count]:
            with contextlib.suppress(OSError, ValueError, TypeError):
                found.append(self._seen(Record.load(folder), folder))
        return found

    def waiting(self, device: str) -> int:
        """Jobs that run on a device or wait for it."""
        return len(self._lane(device))

    def cancel(self, name: str) -> Job:
        """End a job with everything it started. Returns once that is done, within about a second; a finished job stays as it is."""
        deadline = time.monotonic() + CANCEL_SECONDS
        told = False
        while not (job := self.find(name)).finished and time.monotonic() < deadline:
            if not told and (supervisor := job.record.supervisor):
                told = True
                signal_group(supervisor, signal.SIGTERM)
            time.sleep(0.01)
        if not job.finished:
            self._kill(job)
        return self.find(name)

    def _kill(self, job: Job) -> None:
        """For a job whose supervisor hangs or is gone."""
        for identity in (job.record.process, job.record.supervisor):
            if identity and running(identity):
                end_below(identity.pid, identity, 0.0)
        job.record.cancelled, job.record.ended = True, time.time()
        job.record.save(job.folder)

    def _start(self, record: Record, folder: Path) -> None:
        """Hand the job to a supervisor in a session of its own, which inherits the lock: from here on the job is alive, or known to be lost."""
        self._supervisors = [process for process in self._supervisors if process.poll() is None]
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            record.save(folder)
            entry = record.lane_entry(self.state)
            entry.parent.mkdir(parents=True, exist_ok=True)
            entry.touch()
            path = os.pathsep.join([str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])])
            environment = {name: value for name, value in os.environ.items() if name != TOKEN}
            with (folder / "supervisor").open("wb") as log:
                self._supervisors.append(subprocess.Popen(
                    [sys.executable, "-m", "agent.mcp.supervisor", str(self.state), record.id, str(lock)], cwd="/", stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, start_new_session=True, pass_fds=(lock,),
                    env={**environment, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}))
        finally:
            os.close(lock)

    def _seen(self, record: Record, folder: Path) -> Job:
        if record.ended is None and not alive(folder):
            record = Record.load(folder)  # it may have ended between the two looks
            if record.ended is None:
                return Job(record, folder, "lost")
        if record.ended is None:
            if record.started is None:
                return Job(record, folder, "queued", tuple(ahead(self.state, record)))
            return Job(record, folder, "running")
        if record.cancelled:
            return Job(record, folder, "cancelled")
        job = Job(record, folder, "completed")
        return job if record.exit_code in WITH_RESULT and job.output is not None else Job(record, folder, "failed")

    def _lane(self, device: str) -> list[Job]:
        """Unfinished jobs of a device, in order."""
        lane, found = self.state / LANES / device, []
        for entry in sorted(lane.iterdir()) if lane.is_dir() else []:
            folder = self._folders / entry.name.partition("-")[2]
            if alive(folder):
                found.append(self._seen(Record.load(folder), folder))
        return [job for job in found if not job.finished]

    def _same(self, job: Job, call: Call) -> bool:
        record = job.record
        return (record.argv, record.cwd) == ([*self.command, *call.arguments(job.folder)], str(call.cwd)) and record.files == sorted(call.files) \
            and all((job.folder / name).read_text(encoding="utf-8") == text for name, text in call.files.items())

    def _by_age(self) -> list[Path]:
        return sorted((folder for folder in self._folders.iterdir() if (folder / LOCK).exists()), key=_age, reverse=True)

    def _prune(self) -> None:
        """Remove the oldest folders of finished jobs, and queue entries of jobs that were lost."""
        for entry in (self.state / LANES).glob("*/*"):
            if not alive(self._folders / entry.name.partition("-")[2]):
                entry.unlink(missing_ok=True)
        for folder in self._by_age()[KEPT:]:
            if not alive(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _next_number(self) -> int:
        path = self.state / "number"
        number = 1 + (int(path.read_text(encoding="ascii")) if path.exists() else 0)
        draft = path.with_name(".number")
        draft.write_text(str(number), encoding="ascii")
        draft.replace(path)
        return number

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.state / LOCK).open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield


_ENVIRONMENT = {"NO_COLOR": "1", "COLUMNS": "160", "PYTHONUNBUFFERED": "1"}
"""A log is read by programs, while it grows."""


def tail(path: Path, size: int) -> str:
    """The last `size` bytes of a text file; empty if there is none."""
    try:
        with path.open("rb") as handle:
            handle.seek(0, os.SEEK_END)
            handle.seek(max(0, handle.tell() - size))
            return handle.read(size).decode(errors="replace")
    except OSError:
        return ""


def _age(folder: Path) -> float:
    try:
        return (folder / LOCK).stat().st_mtime
    except OSError:
        return 0.0


def _plain(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _told(line: str) -> str:
    """A progress object in words; empty if it is not one."""
    try:
        said = json.loads(line)
        count = f" ({said['done']} of {said['of']})" if said.get("of") else ""
        return f"{said.get('text', '')}{count}".strip()
    except (ValueError, KeyError, AttributeError):
        return ""

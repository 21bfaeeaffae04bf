"""Jobs in namespaces of their own (Linux, `bwrap`): no network, a read-only system, nothing of the user's but what the job was given."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sandboxes import Capabilities, Limits
from sandboxes.handle import GRACE, PATIENCE, Group, JobHandle, kill_all
from sandboxes.local import ROOT, clean_environment, limited

FIRST = Path(__file__).with_name("first.py")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "passwd", "group", "nsswitch.conf", "localtime", "OpenCL", "vulkan")
"""Of /etc; keys and passwords stay outside."""
DEVICES = ("nvidia*", "dri", "kfd", "infiniband")
HANDED_OVER = ("job.json", "steps")
"""What the parent writes into the job's folder; the job only reads it."""
PROBE_SECONDS = 20.0
SCRATCH_SHARE = 4
"""/tmp and /dev/shm may each hold one part in so many of the machine's memory."""


class BubblewrapSandbox:
    """Starts each job with user, process, network, IPC and host-name namespaces of its own and no capabilities.

    HOME is `directory/home`, removed with the job; /tmp and /dev/shm are memory of the namespace. The loopback device works.
    """

    def start(self, argv: Sequence[str], directory: Path, environment: Mapping[str, str], limits: Limits) -> JobHandle:
        directory, home = directory.resolve(), directory.resolve() / "home"
        home.mkdir(parents=True, exist_ok=True)
        variables = {**clean_environment(), "HOME": str(home), "TMPDIR": "/tmp", **environment}
        told, says = os.pipe()
        try:
            first = [sys.executable, "-I", "-S", str(FIRST), str(says), str(GRACE)]
            command = [*_namespaces(directory, limits), "--", *first, *limited(1, limits), *argv]
            with (directory / "log").open("ab") as log:
                process = subprocess.Popen(command, cwd=directory, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                           start_new_session=True, pass_fds=(says,))
        except BaseException:
            os.close(told)
            raise
        finally:
            os.close(says)
        return JobHandle(_Namespace(process, told, [home]), directory, limits)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="bubblewrap", isolation="namespaces", network=False, filesystem="private", kills_descendants=True,
            not_guarded=("bugs of the operating system or of a device driver", "other work on the same device: its memory, clocks and time",
                         "processor time and memory bandwidth that others need", "the engine in the job's own process"))


@functools.cache
def obstacle() -> str:
    """Why bubblewrap cannot be used here, or an empty string. Starts a trial job once per process."""
    if sys.platform != "linux":
        return "it needs Linux"
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    with tempfile.TemporaryDirectory(prefix="sandbox-trial-") as scratch:
        directory = Path(scratch)
        # A driver that does not answer inside would turn every GPU job into a failure.
        gpu = [shutil.which("nvidia-smi") or "", "-L"] if Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") else None
        for argv in filter(None, ([sys.executable, "-c", "pass"], gpu)):
            handle = BubblewrapSandbox().start(argv, directory, {}, Limits(wall_seconds=PROBE_SECONDS))
            while (code := handle.poll()) is None:
                time.sleep(0.005)
            if code:
                said = (directory / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
                return f"a trial start failed ({said[-1] if said else f'exit code {code}'})"
    return ""


def _namespaces(directory: Path, limits: Limits) -> list[str]:
    arguments = ["bwrap", "--die-with-parent", "--as-pid-1", "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
                 "--unshare-cgroup-try", "--hostname", "sandbox", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev"]
    for path in sorted(device for pattern in DEVICES for device in Path("/dev").glob(pattern)):
        arguments += ["--dev-bind", str(path), str(path)]
    for path in map(Path, SYSTEM):
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    for path in ("/sys", *(f"/etc/{name}" for name in SETTINGS)):
        arguments += ["--ro-bind-try", path, path]
    for path in ("/tmp", "/dev/shm"):
        arguments += ["--size", str(_memory() // SCRATCH_SHARE), "--tmpfs", path]
    for path in _outermost([*_python(), *limits.readable]):
        arguments += ["--ro-bind", str(path), str(path)]
    for path in [*limits.writable, directory]:
        arguments += ["--bind", str(path.resolve()), str(path.resolve())]
    for path in (directory / name for name in HANDED_OVER):
        if path.exists():
            arguments += ["--ro-bind", str(path), str(path)]
    # What is left of the namespace's own root and /dev is memory that no limit counts.
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(directory)]


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _python() -> list[Path]:
    """The interpreter, its packages, the code that jobs run, and the libraries that the caller's environment names."""
    installed = [Path(p) for p in (sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, *os.environ.get("LD_LIBRARY_PATH", "").split(":")) if p]
    mine = [ROOT / "consistency", ROOT / "sandboxes"]
    foreign = [p for p in installed if ROOT not in (p, *p.parents) or Path(sys.prefix) in (p, *p.parents)]
    return [*mine, Path(sys.executable).resolve().parent, *foreign]


def _outermost(paths: Iterable[Path]) -> list[Path]:
    """Existing paths, resolved, without those that lie in another one or in the system."""
    found = {path.resolve() for path in paths if path.exists()} | {path.absolute() for path in paths if path.exists() and path.is_symlink()}
    system = [Path(name) for name in SYSTEM]
    return sorted(p for p in found if not any(parent in found or parent in system for parent in p.parents) and p != Path("/"))


class _Namespace(Group):
    """bwrap and, behind it, the first process of the namespace, with which all others end."""

    def __init__(self, process: subprocess.Popen, told: int, scratch: Iterable[Path]) -> None:
        super().__init__(process, scratch)
        self._told = told

    def strike(self) -> None:
        if not self.running():
            return  # bwrap ends after the namespace is gone
        begun = time.monotonic()
        while self.running() and (waited := time.monotonic() - begun) < PATIENCE:
            # When bwrap's child, the first process, dies, the kernel kills the whole namespace before bwrap hears of it.
            inner = self.members()[1:2]
            kill_all(inner or ([self.process.pid] if waited > GRACE else []))
            time.sleep(0.005)

    def settle(self) -> None:
        said = b""
        with contextlib.suppress(OSError):
            while select.select([self._told], [], [], 0)[0] and (block := os.read(self._told, 65536)):
                said += block
        os.close(self._told)
        try:
            found = json.loads(said)
            self.code, self.left = int(found["code"]), tuple(map(str, found["left"]))
        except (ValueError, KeyError, TypeError):
            code = self.process.returncode
            self.code = 128 - code if code is not None and code > 128 else code

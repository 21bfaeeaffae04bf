"""Notes what candidate kernels do besides computing, and refuses it: files, network, processes, threads, a look into other objects, patches.

The second of three lines. The first is the parent's look at the source, the third is the sandbox, which holds whatever happens in here. This one
runs in the candidate's own process: it gives an attempt a name and an accidental one a clear error, but native code does not pass through it.

An audit hook (PEP 578) sees the events and cannot be removed. Whose doing an event is, the stack says: the innermost frame outside the standard
library. So a compiler that Triton starts is Triton's, and a socket that a kernel opens through `urllib` is the kernel's.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator
from pathlib import Path

RULES = {
    "file_refused": ("open", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
                     "os.listdir", "os.scandir", "os.utime", "os.chdir", "shutil.", "tempfile.", "mmap.", "glob.",
                     "pathlib.", "os.setxattr", "os.mkfifo", "os.mknod"),
    "network_refused": ("socket.", "urllib.", "http.client.", "ftplib.", "smtplib.", "ssl."),
    "process_refused": ("subprocess.", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "pty.spawn", "os.kill",
                        "os.killpg", "signal."),
    "thread_refused": ("_thread.start_",),
    "environment_refused": ("os.putenv", "os.unsetenv"),
    "native_code_refused": ("ctypes.",),
}
"""rule -> events, or beginnings of events, for which the innermost frame outside the standard library answers"""
DIRECT = {
    "introspection_refused": ("sys._getframe", "sys._current_", "sys.settrace", "sys.setprofile", "sys.addaudithook", "gc.", "sys.monitoring.",
                              "object.__setattr__", "object.__delattr__"),
    "dynamic_code_refused": ("exec", "compile", "code.__new__", "function.__new__", "marshal."),
}
"""The same for the calling frame alone: the standard library does these things for everybody."""
WATCHED = ("torch", "vllm", "transformers", "consistency", "numpy", "safetensors", "triton")
"""Packages whose functions a kernel must not replace, besides the modules below."""
CLOCKS_AND_OUTPUT = ("time", "os", "sys", "json", "builtins", "math", "random", "io", "pathlib", "threading", "subprocess", "socket", "gc", "inspect")
CORE = ("torch", "torch.nn.functional", "torch.nn.modules.module", "torch._tensor", "safetensors.torch", "vllm.v1.", "consistency.")
"""What is looked at again after steps; the whole of WATCHED takes too long for that."""
MOST_NOTES = 200

_stdlib = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_packages = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))


class Guard:
    """Watches one folder of kernels in this process and writes what it finds to a file that it holds open."""

    def __init__(self, kernels: Path, notes: Path) -> None:
        self.folder = str(kernels) + os.sep
        self._out = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._seen: set[tuple[str, str]] = set()
        self._events: dict[str, tuple[str, bool] | None] = {}
        self._before: dict[tuple[str, str, str], object] | None = None
        """As it was before the first kernel came; taking it again for every one would take longer than the kernels do."""
        self._core: dict[tuple[str, str, str], object] | None = None
        sys.addaudithook(self._hook)
        if sys.version_info < (3, 12):
            _announce_threads()

    def _hook(self, event: str, arguments: tuple) -> None:
        if event not in self._events:
            self._events[event] = _rule(event)
        rule = self._events[event]
        if rule is None:
            return
        name, direct = rule
        if frame := self._culprit(_caller(), direct):
            where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            what = f"{event}({', '.join(_short(a) for a in arguments[:2])}) at kernels/{where}"
            self.note(name, what)
            raise PermissionError(f"a kernel may not do this [{name}]: {what}")

    def _culprit(self, frame: types.FrameType | None, direct: bool) -> types.FrameType | None:
        """The kernel's frame if the event is its doing."""
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self.folder):
                return frame
            if name.startswith("<frozen importlib") or name.endswith(("linecache.py", "tokenize.py")):
                return None  # an import, or a traceback that quotes the source
            foreign = not (name == __file__ or name.startswith("<") or (name.startswith(_stdlib) and not any(part in name for part in _packages)))
            if foreign or (direct and not name.startswith("<")):
                return None
            frame = frame.f_back
        return None

    def note(self, rule: str, detail: str) -> None:
        """Written at once: the process may not live to answer."""
        if (rule, detail) not in self._seen and len(self._seen) < MOST_NOTES:
            self._seen.add((rule, detail))
            os.write(self._out, (json.dumps({"rule": rule, "detail": detail[:400]}) + "\n").encode())

    @contextlib.contextmanager
    def importing(self, path: Path) -> Iterator[None]:
        """Around a kernel's import: what it replaced elsewhere is noted."""
        if self._before is None:
            self._before = _functions(_watched())
        try:
            yield
        finally:
            self._compare(self._before, f"importing kernels/{path.name}")

    def started(self) -> None:
        """The engine is up; from here on the core must stay as it is."""
        self._core = _functions(_core())

    def check(self) -> None:
        """Notes what was replaced since the engine came up."""
        if self._core is not None:
            self._compare(self._core, "running")

    def _compare(self, before: dict[tuple[str, str, str], object], when: str) -> None:
        for key, was in list(before.items()):
            module, owner, name = key
            holder = sys.modules.get(module)
            space = vars(holder) if holder is not None else {}
            if owner:
                space = vars(space[owner]) if isinstance(space.get(owner), type) else {}
            now = space.get(name, was)
            if now is was:
                continue
            before[key] = now  # said once
            if self._foreign(module, now):
                by = getattr(getattr(now, "__code__", None), "co_filename", "")
                self.note("patched_outside_operator", f"{'.'.join(filter(None, (module, owner, name)))} replaced while {when}"
                          + (f" by kernels/{Path(by).name}" if by.startswith(self.folder) else ""))

    def _foreign(self, module: str, value: object) -> bool:
        """Not one package's own lazy set-up: the new value is from the kernel's file, or from another package."""
        code = getattr(value, "__code__", None)
        if code is not None and code.co_filename.startswith(self.folder):
            return True
        origin = getattr(value, "__module__", None)
        return not isinstance(origin, str) or origin.split(".")[0] != module.split(".")[0]


_active: Guard | None = None


def arm(kernels: Path, notes: Path) -> None:
    """Watches kernels from `kernels` from now on; `notes` gets a JSON line `{"rule", "detail"}` per finding. Once per process."""
    global _active
    _active = Guard(kernels, notes)


def importing(path: Path) -> contextlib.AbstractContextManager:
    return _active.importing(path) if _active else contextlib.nullcontext()


def started() -> None:
    if _active:
        _active.started()


def check() -> None:
    if _active:
        _active.check()


def _announce_threads() -> None:
    """Python has the event for new threads since 3.12."""
    import _thread

    real = _thread.start_new_thread

    def start_new_thread(function, *arguments, **options):
        sys.audit("_thread.start_new_thread", function)
        return real(function, *arguments, **options)

    _thread.start_new_thread = threading._start_new_thread = start_new_thread


def _caller() -> types.FrameType | None:
    """The frame that raised the event; `sys._getframe` would be an event itself."""
    try:
        raise LookupError
    except LookupError as error:
        here = error.__traceback__.tb_frame
    return here.f_back.f_back


def _rule(event: str) -> tuple[str, bool] | None:
    for table, direct in ((RULES, False), (DIRECT, True)):
        for rule, beginnings in table.items():
            if any(event == b or (b.endswith((".", "_")) and event.startswith(b)) for b in beginnings):
                return rule, direct
    return None


def _short(value: object) -> str:
    if isinstance(value, str | bytes | int | float | tuple | list | os.PathLike) or value is None:
        return repr(value)[:120]
    return type(value).__name__


def _watched() -> list[str]:
    return [name for name in list(sys.modules) if name.partition(".")[0] in WATCHED or name in CLOCKS_AND_OUTPUT]


def _core() -> list[str]:
    return [name for name in list(sys.modules) if _is_core(name)]


def _is_core(name: str) -> bool:
    return name in CLOCKS_AND_OUTPUT or name in CORE or name.startswith(tuple(c for c in CORE if c.endswith(".")))


def _functions(modules: list[str]) -> dict[tuple[str, str, str], object]:
    """(module, class or "", name) -> every function, builtin and class in the modules, and what the classes of core modules define."""
    found: dict[tuple[str, str, str], object] = {}
    for module in modules:
        holder = sys.modules.get(module)
        if not isinstance(holder, types.ModuleType):
            continue
        for name, value in list(vars(holder).items()):
            if issubclass(type(value), type):  # isinstance would ask lazy objects, which then load
                found[module, "", name] = value
                if value.__module__ == module and _is_core(module):
                    for attribute, inner in list(vars(value).items()):
                        if callable(inner) or isinstance(inner, staticmethod | classmethod | property):
                            found[module, name, attribute] = inner
            elif callable(value):
                found[module, "", name] = value
    return found

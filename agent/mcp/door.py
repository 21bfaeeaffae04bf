"""What a client on stdio meets first: it answers the opening questions while the SDK is still being imported.

Importing the MCP SDK takes longer than everything else at a start, most of it for building pydantic models. The answers to `initialize`,
`server/discover` and `tools/list` do not depend on anything but the request and the code, so the door keeps what the SDK answered and, at the next
start, gives the same answer to the same request at once. The SDK gets every message all the same, in order, so that it knows the connection's state;
its own answer to what was answered already goes into the record instead of to the client. Once the SDK serves, the door only passes bytes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.files import write_atomic

OPENING = ("initialize", "server/discover", "tools/list")
"""Methods whose answers follow from the request and the code alone."""
WATCHED = 20
"""First lines of a client that are looked at."""
LONGEST = 2**20
"""Bytes of a line that is looked at; an opening question is short."""
KEPT = 32
"""Answers on record; one client needs two."""
PACKAGES = ("mcp", "mcp_types", "pydantic", "pydantic_core")
CLOSED = b"\0closed\n"
"""Ends the server's stream; no JSON text holds a NUL."""


class Record:
    """Answers that the SDK gave, by request; a file that belongs to one state of the code and of the SDK."""

    def __init__(self, folder: Path):
        self.path = folder / f"{fingerprint()}.json"
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            found = {}
        self.answers: dict[str, Any] = found if isinstance(found, dict) else {}

    def keep(self, key: str, result: Any) -> None:
        """Write down what is new; None for no result. A folder that cannot be written only means that the next start is a slow one."""
        if self.answers.get(key) == result:
            return
        others = [(name, answer) for name, answer in self.answers.items() if name != key]
        self.answers = dict([*others, (key, result)][-KEPT:]) if result is not None else dict(others)
        try:
            write_atomic(self.path, json.dumps(self.answers).encode())
            for old in self.path.parent.glob("*.json"):
                if old != self.path:
                    old.unlink(missing_ok=True)
        except OSError:
            return


def fingerprint() -> str:
    """Changes with this project's sources and with the packages that an answer passes through."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted([*(root / "agent").rglob("*.py"), *(root / "consistency").glob("*.py"), *(root / "consistency" / "models").glob("*.py")]):
        found = path.stat()
        digest.update(f"{path}\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            site = Path(spec.origin).parents[1]
            digest.update(f"{spec.origin}\0{sorted(p.name for p in site.glob(f'{name}-*.dist-info'))}\n".encode())
    return digest.hexdigest()[:32]


class Door:
    """Stands between the client's pipes and descriptors 0 and 1, which the SDK is given when it is ready."""

    def __init__(self, folder: Path):
        """Takes the descriptors over and starts to read. `folder` keeps the record."""
        self.record = Record(folder)
        self._client_in, self._client_out = os.dup(0), os.dup(1)
        read, self._to_server = os.pipe()
        os.dup2(read, 0)
        os.close(read)
        self._from_server, self._server_out = os.pipe()
        os.dup2(2, 1)  # what an import prints is no message
        self._lock = threading.Lock()
        self._opening: str | None = None
        """The handshake that later requests of an older client depend on; empty for one without."""
        self._answered: dict[str | int, str] = {}
        self._asked: dict[str | int, str] = {}
        self._serving, self._watching = False, True
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._inward, self._outward)]
        for thread in self._threads:
            thread.start()

    def serve(self, run: Callable[[], None]) -> None:
        """Hand over to the SDK's `run`, which returns when the client has left; then pass on what is still on its way."""
        with self._lock:
            self._serving = True
        os.dup2(self._server_out, 1)
        run()
        with contextlib.suppress(OSError):  # nobody listens any more
            _write(self._server_out, CLOSED)
        self._threads[1].join(10)

    def _inward(self) -> None:
        """From the client to the server; ends with either."""
        with contextlib.suppress(OSError):
            self._pass_on()
        os.close(self._to_server)

    def _pass_on(self) -> None:
        rest, lines = b"", 0
        while data := os.read(self._client_in, 65536):
            if not self._watching:
                _write(self._to_server, data)
                continue
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                self._look(line)
                _write(self._to_server, line + b"\n")
            lines += len(whole)
            if lines >= WATCHED or len(rest) > LONGEST:
                self._watching = False
                _write(self._to_server, rest)
                rest = b""
        _write(self._to_server, rest)

    def _look(self, line: bytes) -> None:
        """Answer an opening question that is on record, or remember to write the answer down."""
        try:
            message = json.loads(line)
            method, number, params = message["method"], message["id"], message.get("params") or {}
            if method not in OPENING or type(number) not in (int, str) or not isinstance(params, dict):
                return
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return
        if (key := self._key(method, params)) is None:
            return
        with self._lock:
            if self._serving or number in self._answered or key not in self.record.answers:
                self._asked[number] = key
                return
            self._answered[number] = key
            answer = {"jsonrpc": "2.0", "id": number, "result": self.record.answers[key]}
            _write(self._client_out, json.dumps(answer, separators=(",", ":")).encode() + b"\n")

    def _key(self, method: str, params: dict[str, Any]) -> str | None:
        """All that an answer depends on; None for a change of era, which is the SDK's to refuse."""
        meta = params.get("_meta")
        plain = {**params, "_meta": {name: value for name, value in meta.items() if name != "progressToken"}} if isinstance(meta, dict) else params
        text = json.dumps([method, plain], sort_keys=True)
        if method == "initialize":
            if self._opening is not None:
                return None
            self._opening = hashlib.sha256(text.encode()).hexdigest()
            return self._opening
        self._opening = self._opening or ""
        return hashlib.sha256(f"{self._opening}\0{text}".encode()).hexdigest()

    def _outward(self) -> None:
        """From the server to the client. Answers are whole lines, so that one can be held back."""
        rest = b""
        try:
            while data := os.read(self._from_server, 65536):
                over = data.endswith(CLOSED)
                *whole, rest = (rest + data.removesuffix(CLOSED)).split(b"\n")
                for line in whole:
                    if not (self._asked or self._answered) or not self._written_down(line):
                        _write(self._client_out, line + b"\n")
                if over:
                    return
        except OSError:
            os.close(self._from_server)  # the client does not listen any more, and the server is to see that

    def _written_down(self, line: bytes) -> bool:
        """Take an awaited answer into the record; true if the client has it already."""
        try:
            message = json.loads(line)
            number = message.get("id")
        except (ValueError, AttributeError, RecursionError):
            return False
        if "method" in message or type(number) not in (int, str):
            return False
        with self._lock:
            held = number in self._answered
            key = self._answered.pop(number) if held else self._asked.pop(number, None)
            if key is not None:
                self.record.keep(key, message.get("result"))
            return held


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data):]

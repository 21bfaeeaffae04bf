"""The door answers at once what the server behind it has answered before, and otherwise is not there."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters
from mcp_helpers import stdio_command
from test_mcp_transports import META, Wire, request

from agent.mcp import door

HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
INITIALIZED = {"jsonrpc": "2.0", "method": "notifications/initialized"}
TOY = Path(__file__).with_name("toy_server.py")
MARK = "this is from the record"
SLOW = 1.2
"""Seconds the toy server takes to start, so that what comes sooner came from the door."""


class Toy(Wire):
    """`seconds` since its start are in each answer."""

    def __init__(self, folder: Path, seconds: float = 0.0, *more: str):
        self.begun = time.monotonic()
        super().__init__([sys.executable, str(TOY), str(folder), str(seconds), *more])

    def answer(self, number: int, method: str, **params) -> tuple[dict, float]:
        self.send(request(number, method, **params))
        return self.receive(), time.monotonic() - self.begun


def records(folder: Path) -> dict:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


def recorded(folder: Path, within: float = 5.0) -> dict:
    """Written after the client has its answer, so perhaps a moment later."""
    deadline = time.monotonic() + within
    while not list(folder.glob("*.json")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return records(folder)


def test_a_question_that_was_answered_before_is_answered_before_the_server_is_there(tmp_path):
    with Toy(tmp_path) as toy:
        first, _ = toy.answer(1, "tools/list", _meta=META)
        assert first["result"]["said"] == "toy"
    with Toy(tmp_path, SLOW, "changed") as toy:
        again, early = toy.answer("a", "tools/list", _meta={**META, "progressToken": 7})
        assert again == {**first, "id": "a"} and early < SLOW
        other, late = toy.answer("a", "ping")
        assert other["result"]["said"] == "changed" and late > SLOW, "the server's own answer to the first question is held back"
    assert [answer["said"] for answer in recorded(tmp_path).values()] == ["changed"], "and corrects the record"
    with Toy(tmp_path, 0, "refused") as toy:
        toy.answer(1, "tools/list", _meta=META)
        toy.answer(2, "ping")
    assert recorded(tmp_path) == {}, "a refusal is not kept, nor what it contradicts"


@pytest.mark.parametrize(("method", "params"), [
    ("tools/list", {"_meta": {**META, "io.modelcontextprotocol/clientInfo": {"name": "other", "version": "1"}}}), ("tools/list", {"cursor": "x"}),
    ("tools/call", {"name": "verify", "_meta": META}), ("initialize", HELLO)])
def test_another_question_waits_for_the_server(tmp_path, method, params):
    with Toy(tmp_path) as toy:
        toy.answer(1, "tools/list", _meta=META)
    with Toy(tmp_path, 0.3) as toy:
        assert toy.answer(1, method, **params)[1] > 0.3


def test_a_handshake_decides_what_later_answers_are(tmp_path):
    """Two clients that say hello in different words have records of their own, and a change of era is left to the server."""
    for words in (HELLO, {**HELLO, "protocolVersion": "2024-11-05"}):
        with Toy(tmp_path) as toy:
            toy.answer(1, "initialize", **words)
            toy.send(INITIALIZED)
            toy.answer(2, "tools/list")
    assert len(recorded(tmp_path)) == 4
    with Toy(tmp_path, SLOW) as toy:
        assert toy.answer(1, "initialize", **HELLO)[1] < SLOW and toy.answer(2, "tools/list")[1] < SLOW
        assert toy.answer(3, "initialize", **HELLO)[1] > SLOW
    with Toy(tmp_path, 0.3) as toy:
        toy.send(request(1, "server/discover", _meta=META))
        assert toy.answer(2, "initialize", **HELLO)[1] > 0.3 and len(records(tmp_path)) == 5


def test_whatever_else_comes_reaches_the_server(tmp_path):
    lines = [b"{", b"[]", b"7", b"\xff\xfe", b'{"method": "tools/list", "id": null}', b'{"method": "tools/list", "id": true}',
             b'{"method": ["tools/list"], "id": 1}', b'{"id": 1, "method": "tools/list", "params": []}', b"[" * 100_000, b"x" * 3_000_000]
    with Toy(tmp_path) as toy:
        for line in lines:
            toy.send(line)
            assert toy.receive()["id"] in (None, True, 1, "broken")
        for number in range(30):  # beyond the lines that are looked at
            assert toy.answer(number, "tools/list")[0]["id"] == number


def test_a_record_of_other_code_is_not_used_and_goes(tmp_path, monkeypatch):
    (tmp_path / "0123.json").write_text("{}")
    (tmp_path / f"{door.fingerprint()}.json").write_text("{ broken")
    with Toy(tmp_path) as toy:
        assert toy.answer(1, "tools/list", _meta=META)[0]["result"]["said"] == "toy"
    assert [path.stem for path in tmp_path.glob("*.json")] == [door.fingerprint()] and len(records(tmp_path)) == 1
    before = door.fingerprint()
    monkeypatch.setattr(door, "PACKAGES", door.PACKAGES[:1])
    assert door.fingerprint() != before


def test_a_folder_that_cannot_be_written_costs_only_the_time(tmp_path):
    (tmp_path / "file").write_text("")
    for _ in range(2):
        with Toy(tmp_path / "file" / "opening") as toy:
            assert toy.answer(1, "tools/list", _meta=META)[0]["result"]["said"] == "toy"


def test_a_client_that_leaves_at_once_or_stops_listening_ends_the_server(tmp_path):
    with Toy(tmp_path, 0.2):
        pass
    read, write = os.pipe()
    toy = subprocess.Popen([sys.executable, str(TOY), str(tmp_path), "0.2"], stdin=subprocess.PIPE, stdout=write)
    os.close(write)
    os.close(read)
    with contextlib.suppress(BrokenPipeError):
        for number in range(20):
            toy.stdin.write(json.dumps(request(number, "ping")).encode() + b"\n")
            toy.stdin.flush()
            time.sleep(0.05)
        toy.stdin.close()
    assert toy.wait(10) is not None


@pytest.mark.anyio
async def test_the_real_server_through_a_real_client(tmp_path, fake, mode):
    """The second start is what the first one was, and the connection goes on from it. A mark on the record shows who answered."""
    command, opening, seen = stdio_command(tmp_path, fake), tmp_path / "state" / "opening", []
    for _ in range(2):
        async with Client(StdioServerParameters(command=command[0], args=command[1:]), mode=mode) as client:
            tools = (await client.list_tools()).tools
            answer = await client.call_tool("verify", {"model": "qwen3", "wait_s": 20})
            assert answer.structured_content["result"]["verdict"]["exact"], answer
            seen.append((tools, client.protocol_version, client.instructions, client.server_info))
        (path,) = opening.glob("*.json")
        assert path.stem == door.fingerprint() and MARK not in path.read_text(), "the server's own answer corrects the record"
        path.write_text(path.read_text().replace("Compare both engines in every condition", MARK))
    (before, *first), (after, *second) = seen
    assert [tool.title for tool in after if tool.title == MARK] == [MARK] and first == second
    assert [tool.model_dump(exclude={"title"}) for tool in before] == [tool.model_dump(exclude={"title"}) for tool in after]

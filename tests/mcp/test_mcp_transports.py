import asyncio
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_helpers import TOKEN, ended, patience, start_http, stdio_command, until

from agent.errors import UserError
from agent.mcp import auth
from agent.mcp.fakes import FakeTool
from agent.mcp.jobs import Jobs
from agent.server import INSTRUCTIONS, serve

pytestmark = pytest.mark.anyio


@dataclass
class Http:
    """One server for the tests of this module."""

    address: str
    fake: FakeTool
    jobs: Jobs
    pid: int

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the server so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def one_http(tmp_path_factory):
    place = tmp_path_factory.mktemp("http")
    (place / "fake").mkdir()
    fake = FakeTool(place / "fake")
    process, address = start_http(place, fake)
    yield Http(address, fake, Jobs(place / "state", fake.command), process.pid)
    process.terminate()
    assert process.wait(20) in (0, -signal.SIGTERM)


@pytest.fixture
def http(one_http):
    one_http.fake.behave()
    yield one_http
    for job in one_http.jobs.newest(99):
        one_http.jobs.cancel(job.record.id)


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


class Wire:
    """Raw JSON lines to and from a server on stdio."""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=lambda: [self.lines.put(line) for line in self.process.stdout], daemon=True).start()

    def send(self, message: dict | bytes) -> None:
        self.process.stdin.write((message if isinstance(message, bytes) else json.dumps(message).encode()) + b"\n")
        self.process.stdin.flush()

    def receive(self, within: float = 30.0) -> dict:
        return json.loads(self.lines.get(timeout=within))

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        assert self.process.wait(20) == 0


def request(number: int, method: str, **params) -> dict:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


META = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"}}


def headers(method: str, name: str | None = None) -> dict[str, str]:
    """What the newer era wants on HTTP beside the message."""
    return {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2026-07-28", "Mcp-Method": method,
            **({"Mcp-Name": name} if name else {})}


def test_raw_handshake_of_the_older_era(tmp_path, fake, jobs):
    fake.behave(seconds=600, log=("loading",))
    with Wire(stdio_command(tmp_path, fake)) as wire:
        wire.send(request(1, "initialize", protocolVersion="2025-11-25", capabilities={}, clientInfo={"name": "t", "version": "1"}))
        said = wire.receive()["result"]
        assert said["protocolVersion"] == "2025-11-25" and said["instructions"] == INSTRUCTIONS
        assert said["serverInfo"]["name"] == "train-inference-consistency"
        wire.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        wire.send(request(2, "tools/call", name="verify", arguments={"model": "qwen3"}, _meta={"progressToken": "p"}))
        assert wire.receive()["method"] == "notifications/progress"
        wire.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 2}})
        wire.send(request(3, "tools/call", name="job_status", arguments={}))
        answer = wire.receive()
        assert answer["id"] == 3 and answer["result"]["structuredContent"]["state"] == "running"


def test_raw_handshake_of_the_newer_era_with_garbage_and_oversized_input_between(tmp_path, fake):
    with Wire(stdio_command(tmp_path, fake)) as wire:
        wire.send(request(1, "server/discover", _meta=META))
        said = wire.receive()["result"]
        assert "2026-07-28" in said["supportedVersions"]
        assert {"io.modelcontextprotocol/tasks", "io.modelcontextprotocol/skills"} <= said["capabilities"]["extensions"].keys()
        for garbage in (b"{", b"\xff\xfe\x00", b"[]", b'"text"', b'{"jsonrpc": "2.0"}', b"", b"{" * 100_000):
            wire.send(garbage)
        wire.send(request(2, "tools/call", name="patch_kernel", arguments={"diff": "x" * 8_000_000}, _meta=META))
        wire.send(request(3, "no/such/method", _meta=META))
        wire.send(request(4, "tools/list", _meta=META))
        answers = {}
        while 4 not in answers:
            answer = wire.receive()
            answers[answer.get("id")] = answer
        assert answers[2]["result"]["isError"] and "diff" in answers[2]["result"]["content"][0]["text"]
        assert answers[3]["error"]["code"] == -32601
        assert len(answers[4]["result"]["tools"]) == 8
    assert fake.calls == []


async def test_stdio_with_the_real_client(tmp_path, fake, mode):
    command = stdio_command(tmp_path, fake)
    async with Client(StdioServerParameters(command=command[0], args=command[1:]), mode=mode) as client:
        answer = await client.call_tool("verify", {"model": "qwen3"})
        assert answer.structured_content["result"]["verdict"]["exact"]


async def test_http_with_the_real_client(http, mode):
    async with httpx2.AsyncClient(headers=bearer()) as link, Client(streamable_http_client(http.address, http_client=link), mode=mode) as client:
        assert (await client.call_tool("verify", {"model": "qwen3"})).structured_content["state"] == "completed"
        http.fake.behave(seconds=600)
        with pytest.raises(MCPError):
            await client.call_tool("localize", {"model": "qwen3"}, read_timeout_seconds=0.5)
        assert (await client.call_tool("job_status", {})).structured_content["state"] in ("queued", "running")


async def test_http_turns_away_wrong_tokens_foreign_hosts_and_what_is_too_large(http):
    hello = request(1, "tools/list", _meta=META)
    kind = headers("tools/list")
    async with httpx2.AsyncClient(timeout=30) as link:
        async def status(**more: str) -> int:
            return (await link.post(http.address, json=hello, headers={**kind, **more})).status_code

        assert await status(**bearer()) == await status(Authorization=f"bearer {TOKEN}") == 200
        for value in (None, "Bearer wrong", f"Bearer {TOKEN}x", "Bearer", TOKEN, f"Basic {TOKEN}"):
            wrong = {"Authorization": value} if value else {}
            assert await status(**wrong) == 401
        refused = await link.post(http.address, json=hello)
        assert refused.headers["WWW-Authenticate"].startswith("Bearer ") and "Authorization: Bearer TOKEN" in refused.text
        assert await status(**bearer(), Host="evil.example:80") == 421
        assert await status(**bearer(), Origin="https://evil.example") == 403
        large = await link.post(http.address, content=b"x" * (5 * 2**20), headers={**kind, **bearer(), "Content-Type": "application/json"})
        assert large.status_code == 413
        broken = await link.post(http.address, content=b"{", headers={**kind, **bearer(), "Content-Type": "application/json"})
        assert broken.status_code == 400
        assert await status(**bearer()) == 200


async def test_a_running_job_survives_the_restart_of_the_server(tmp_path, fake, jobs):
    fake.behave(seconds=2, log=("half way",))
    process, address = start_http(tmp_path, fake)
    async with httpx2.AsyncClient(headers=bearer()) as link, Client(streamable_http_client(address, http_client=link)) as client:
        job = (await client.call_tool("verify", {"model": "qwen3", "wait_s": 0})).structured_content["job_id"]
        second = (await client.call_tool("run", {"model": "qwen3", "wait_s": 0})).structured_content["job_id"]
        until(jobs, jobs.find(job), lambda now: now.state == "running" and fake.calls)
        fake.behave(seconds=600)
        process.kill()
        process.wait()
    process, address = start_http(tmp_path, fake)
    try:
        async with httpx2.AsyncClient(headers=bearer()) as link, Client(streamable_http_client(address, http_client=link)) as client:
            said = (await client.call_tool("job_status", {"job_id": job, "wait_s": 40})).structured_content
            assert said["state"] == "completed" and said["result"]["verdict"]["exact"]
            assert (await client.call_tool("job_cancel", {"job_id": second})).structured_content["state"] == "cancelled"
    finally:
        process.terminate()
        process.wait()


async def test_fifty_clients_at_once(http):
    """Each on a connection of its own, asking once a second as hosts do.

    The limit is that of a machine with nothing else to do. On one that has more work than cores a wall clock says nothing about the server, and
    the processor time that a call costs it is held instead.
    """
    http.fake.behave(seconds=600)
    before = len(http.jobs.newest(99))
    times: list[float] = []

    async def one(number: int, link: httpx2.AsyncClient) -> None:
        async def tool(name: str, **given) -> dict:
            message = request(number, "tools/call", name=name, arguments=given, _meta=META)
            answer = await link.post(http.address, json=message, headers={**bearer(), **headers("tools/call", name)})
            said = answer.text.rpartition("data: ")[2]
            return json.loads(said)["result"]["structuredContent"]

        job = (await tool("verify", model="qwen3", wait_s=0))["job_id"]
        await asyncio.sleep(number / 50)
        for _ in range(4):
            begun = time.perf_counter()
            said = await tool("job_status", job_id=job)
            times.append(time.perf_counter() - begun)
            assert said["job_id"] == job and said["state"] in ("queued", "running")
            await asyncio.sleep(1)

    async with httpx2.AsyncClient(timeout=60, limits=httpx2.Limits(max_connections=50, max_keepalive_connections=50)) as link:
        used = http.cpu_seconds
        await asyncio.gather(*(one(number, link) for number in range(50)))
        used = (http.cpu_seconds - used) / len(times)
    assert len(http.jobs.newest(99)) == before + 1 and len(times) == 200
    median = statistics.median(times)
    print(f"\nstatus with 50 clients: median {median * 1000:.1f} ms, longest {max(times) * 1000:.1f} ms, {used * 1000:.1f} ms of the server's time")
    assert (used if os.getloadavg()[0] > (os.cpu_count() or 1) else median) < 0.020, (median, used)


async def test_start_to_tool_list_and_idle_memory(tmp_path):
    """As a host sees it from its second start on. A busy machine gets as much longer as it has more work than cores."""
    command = [sys.executable, "-m", "agent", "serve", "--state", str(tmp_path / "state")]
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        with Wire(command) as wire:
            wire.send(request(1, "tools/list", _meta=META))
            assert len(wire.receive()["result"]["tools"]) == 8
            times.append(time.perf_counter() - begun)
            wire.send(request(2, "tools/call", name="models", arguments={}, _meta=META))
            assert wire.receive()["result"]["structuredContent"]["families"]
            resident = int(Path(f"/proc/{wire.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    print(f"\nstart to tool list: {times[0]:.2f} s with nothing on record, then {min(times[1:]):.2f} s; idle {resident:.0f} MiB")
    assert min(times[1:]) < patience(1.0), times
    assert resident < 150, resident


def test_where_the_token_comes_from(tmp_path, monkeypatch):
    monkeypatch.delenv(auth.TOKEN, raising=False)
    made, source = auth.load_token(None, tmp_path)
    assert len(made) >= 40 and source == str(tmp_path / "token") and (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert auth.load_token(None, tmp_path)[0] == made
    monkeypatch.setenv(auth.TOKEN, "x" * 32)
    assert auth.load_token(None, tmp_path) == ("x" * 32, "the environment variable AGENT_MCP_TOKEN")
    assert auth.load_token(tmp_path / "token", tmp_path)[0] == made
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(UserError, match="can be read by others"):
        auth.load_token(tmp_path / "token", tmp_path)
    with pytest.raises(UserError, match="cannot be read"):
        auth.load_token(tmp_path / "none", tmp_path)
    for bad in ("short", "has a space in it, which no header takes", "ü" * 32):
        monkeypatch.setenv(auth.TOKEN, bad)
        with pytest.raises(UserError, match="is not usable"):
            auth.load_token(None, tmp_path)


def test_an_http_server_that_others_can_reach_needs_host_names(tmp_path):
    with pytest.raises(UserError, match="--allow-host"):
        serve(http=True, host="0.0.0.0", state=tmp_path)


def test_a_taken_port_is_one_line(tmp_path, http):
    port = http.address.rpartition(":")[2].partition("/")[0]
    done = subprocess.run([sys.executable, "-m", "agent.server", "--http", "--port", port, "--state", str(tmp_path / "other")],
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "choose another with --port" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_server_on_stdio_at_once(tmp_path, fake, number):
    server = subprocess.Popen(stdio_command(tmp_path, fake), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    server.stdin.write(json.dumps(request(1, "tools/list", _meta=META)).encode() + b"\n")
    server.stdin.flush()
    assert b"job_status" in server.stdout.readline()
    server.send_signal(number)
    assert server.wait(10) == -number and b"Traceback" not in server.stderr.read()


def test_a_job_outlives_a_client_on_stdio_that_is_gone(tmp_path, fake, jobs):
    fake.behave(seconds=1)
    with Wire(stdio_command(tmp_path, fake)) as wire:
        wire.send(request(1, "tools/call", name="verify", arguments={"model": "qwen3"}, _meta=META))
        while not jobs.newest(1):
            time.sleep(0.05)
    assert ended(jobs, jobs.newest(1)[0]).state == "completed"

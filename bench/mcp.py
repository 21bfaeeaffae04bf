"""Figures of the MCP server: start to tool list, idle memory, a status call with 50 clients, cancellation: `python -m bench.mcp`.

No engine runs; the tools are the stand-in of `agent.mcp.fakes`. Figures mean something only on a machine with nothing else to do.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import httpx2

from agent.mcp.fakes import FakeTool
from agent.mcp.jobs import Call, Jobs

ROOT = Path(__file__).resolve().parents[1]
RESULT, PAGE = ROOT / "docs" / "results" / "mcp.json", ROOT / "docs" / "mcp.md"
CLIENTS = 50
TOKEN = "a-token-for-this-benchmark"
META = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"}}
SERVE = """
import sys; from pathlib import Path; from agent.server import serve; from agent.mcp.fakes import FakeTool
serve(http=True, port=0, state=Path(sys.argv[1]), command=FakeTool(Path(sys.argv[2])).command)
"""


def request(method: str, **params) -> dict:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": META}}


def starts(state: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds from the start of `agent serve` to its tool list and to the answer of a first call on stdio, its processor time until then, and its
    memory in MiB a second later. The first start has an empty folder, so that nothing is on record yet."""
    found: dict[str, list[float]] = {"list": [], "call": [], "processor": [], "memory": []}
    for _ in range(rounds):
        begun = time.perf_counter()
        server = subprocess.Popen([sys.executable, "-m", "agent", "serve", "--state", str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert server.stdin and server.stdout
        for name, asked in (("list", request("tools/list")), ("call", request("tools/call", name="models", arguments={}))):
            server.stdin.write(json.dumps(asked).encode() + b"\n")
            server.stdin.flush()
            result = json.loads(server.stdout.readline())["result"]
            assert len(result["tools"]) == 8 if name == "list" else result["structuredContent"]["families"]
            found[name].append(time.perf_counter() - begun)
        found["processor"].append(processor_seconds(server.pid))
        time.sleep(1)
        found["memory"].append(int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
        server.stdin.close()
        server.wait()
    return found


def parts(rounds: int) -> dict[str, float]:
    """Least seconds of a Python process that imports what a start imports, step by step; but for agent.cli, each contains the ones before it."""
    steps = {"python": "pass", "pydantic": "import pydantic", "mcp_types": "import mcp_types",
             "its two protocol versions": "import mcp_types.methods", "mcp": "import mcp", "agent.cli alone": "import agent.cli",
             "this server, built": "from agent.server import build; build()"}
    return {name: round(min(_seconds(code) for _ in range(rounds)), 2) for name, code in steps.items()}


def _seconds(code: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begun


def seconds(times: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(times), 2), "least": round(min(times), 2), "longest": round(max(times), 2), "starts": len(times)}


async def status_calls(address: str, pause: float, calls: int) -> list[float]:
    """Seconds of each status call; every client asks `calls` times with `pause` seconds between, 0 for all at once."""
    times: list[float] = []

    async def one(number: int, link: httpx2.AsyncClient) -> None:
        async def tool(name: str, **given) -> dict:
            headers = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/json, text/event-stream", "Mcp-Method": "tools/call",
                       "MCP-Protocol-Version": "2026-07-28", "Mcp-Name": name}
            answer = await link.post(address, json=request("tools/call", name=name, arguments=given), headers=headers)
            return json.loads(answer.text.rpartition("data: ")[2])["result"]["structuredContent"]

        job = (await tool("verify", model="qwen3", wait_s=0))["job_id"]
        await asyncio.sleep(pause * number / CLIENTS)
        for _ in range(calls):
            begun = time.perf_counter()
            await tool("job_status", job_id=job)
            times.append(time.perf_counter() - begun)
            await asyncio.sleep(pause)

    async with httpx2.AsyncClient(timeout=60, limits=httpx2.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)) as link:
        await asyncio.gather(*(one(number, link) for number in range(CLIENTS)))
    return times


def cancellation(place: Path, rounds: int) -> list[float]:
    """Seconds until a command, its child and its grandchild are gone, all of which ignore SIGTERM."""
    (place / "stubborn").mkdir()
    fake = FakeTool(place / "stubborn")
    fake.behave(stubborn=True, seconds=600)
    jobs, times = Jobs(place / "cancel", fake.command), []
    for number in range(rounds):
        (fake.folder / "pids").unlink(missing_ok=True)
        job = jobs.submit(Call("verify", lambda _, n=number: ["verify", f"--n={n}"], "cpu", place))
        while len(fake.pids) < 2:
            time.sleep(0.01)
        begun = time.perf_counter()
        jobs.cancel(job.record.id)
        times.append(time.perf_counter() - begun)
        assert not any(Path(f"/proc/{pid}").exists() for pid in fake.pids)
    return times


def over_http(place: Path) -> tuple[list[float], list[float], float]:
    """Seconds of each status call, paced and at once, and the server's processor time per call."""
    (place / "fake").mkdir()
    fake = FakeTool(place / "fake")
    fake.behave(seconds=600)
    server = subprocess.Popen([sys.executable, "-c", SERVE, str(place / "http"), str(fake.folder)], stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "AGENT_MCP_TOKEN": TOKEN, "CUDA_VISIBLE_DEVICES": ""})
    assert server.stderr
    address = server.stderr.readline().split()[2].rstrip(",")
    try:
        before = processor_seconds(server.pid)
        paced, burst = asyncio.run(status_calls(address, 1.0, 10)), asyncio.run(status_calls(address, 0.0, 5))
        return paced, burst, (processor_seconds(server.pid) - before) / len(paced + burst)
    finally:
        server.terminate()
        server.wait()
        jobs = Jobs(place / "http")
        for job in jobs.newest(9):
            jobs.cancel(job.record.id)


def milliseconds(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {"median": round(statistics.median(ordered) * 1000, 1), "p95": round(ordered[int(len(ordered) * 0.95)] * 1000, 1),
            "longest": round(ordered[-1] * 1000, 1), "calls": len(ordered)}


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def additions() -> float:
    """How fast this machine is just now; about 0.5 s on an idle server core."""
    begun, total = time.perf_counter(), 0
    for number in range(10_000_000):
        total += number
    return round(time.perf_counter() - begun, 2)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def table(result: dict) -> str:
    """The block of docs/mcp.md that says what was measured."""
    figures, machine = result["figures"], result["hardware"]
    if "a process that imports, s" not in figures:
        return "Not measured since the opening record is there.\n"
    listed, parts = figures["start to tool list, s"], figures["a process that imports, s"]
    calls = figures[f"status call, {CLIENTS} clients once a second, ms"]
    cancelled = figures["cancel a command, its child and its grandchild that ignore SIGTERM, ms"]["median"]
    rows = {
        "start of `agent serve` to tool list, from a client's second start on":
            f"{listed['median']} s (longest of {listed['starts']}: {listed['longest']} s)",
        "start to tool list, nothing on record yet": f"{figures['start to tool list, nothing on record, s']} s",
        "start to the answer of a first call": f"{figures['start to the answer of a first call, s']['median']} s",
        "idle memory": f"{figures['idle memory, MiB']} MiB",
        f"status call, {CLIENTS} clients once a second": f"{calls['median']} ms in the median, {calls['p95']} ms in 95 of 100",
        "cancel a command, its child and its grandchild that ignore SIGTERM": f"{cancelled / 1000:.2f} s",
        "a process that imports one thing more each time": ", ".join(f"{name} {spent} s" for name, spent in parts.items()),
    }
    note = (f"{machine['processor']}, {machine['cores']} cores, load {machine['load before']} before; "
            f"{', '.join(f'{name} {found}' for name, found in result['versions'].items())}; {result['date']}; `{result['command']}`.")
    return "\n".join(["| | measured |", "|---|---|", *(f"| {name} | {found} |" for name, found in rows.items()), "", note]) + "\n"


def fill(text: str, result: dict) -> str:
    """Replace what stands between `<!-- results:mcp -->` and `<!-- end -->`."""
    return re.sub(r"(<!-- results:mcp -->\n).*?(<!-- end -->)", lambda match: match[1] + table(result) + match[2], text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT, help="with the default, docs/mcp.md is filled from it too")
    options = parser.parse_args()
    load, speed = os.getloadavg()[0], additions()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        started = starts(place / "stdio", 7)
        paced, burst, per_call = over_http(place)
        cancels = cancellation(place, 5)
    figures = {
        "start to tool list, s": seconds(started["list"][1:]),
        "start to tool list, nothing on record, s": round(started["list"][0], 2),
        "start to the answer of a first call, s": seconds(started["call"][1:]),
        "processor time until then, s": round(statistics.median(started["processor"]), 2),
        "a process that imports, s": parts(3),
        "idle memory, MiB": round(max(started["memory"]), 1),
        f"status call, {CLIENTS} clients once a second, ms": milliseconds(paced),
        f"status call, {CLIENTS} clients without a pause, ms": milliseconds(burst),
        "processor time of the server per status call, ms": round(per_call * 1000, 2),
        "cancel a command, its child and its grandchild that ignore SIGTERM, ms": milliseconds(cancels),
    }
    result = {
        "command": "python -m bench.mcp", "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "hardware": {"processor": processor(), "cores": os.cpu_count(), "load before": round(load, 2), "ten million additions in Python, s": speed},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("mcp", "pydantic", "uvicorn", "starlette")}},
        "figures": figures,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    if options.out == RESULT:
        PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")


if __name__ == "__main__":
    main()

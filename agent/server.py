"""MCP server over the tools, on stdio or HTTP: `agent serve`. Holds no engine and no torch; every long call is a process of its own."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agent import __version__
from agent.errors import UserError
from agent.mcp.door import Door

if TYPE_CHECKING:  # the SDK is imported once a client can be heard
    from mcp.server.mcpserver import MCPServer
    from starlette.types import ASGIApp

NAME = "train-inference-consistency"
HOST, PORT, PATH = "127.0.0.1", 8321, "/mcp"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_BODY = 4 * 2**20
"""Bytes of one request; a patch of the largest size allowed fits."""

INSTRUCTIONS = """\
Makes the log-probabilities of a rollout engine (vLLM) and a training engine (transformers) equal, bit for bit, and keeps the rollout fast.
Order of work: models -> verify (quick) -> localize -> repro -> patch_kernel -> verify (full). `run` does all of it.
Engine work takes minutes. A call that outlasts wait_s answers with state `queued` or `running` and a job_id: poll job_status with wait_s=45.
The same call again finds the unfinished job instead of starting another; one job at a time has a device, the others wait.
Only a `verify` of level "full" whose verdict is exact and not void proves anything. Ids for run://, evidence://, repro:// and log:// resources are
in consistency://workspaces. The method is explained in skill://train-inference-consistency/SKILL.md."""


def default_state() -> Path:
    """Where jobs are kept unless told otherwise; every server of a user shares it, and with it the devices' queues."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / NAME


def build(state: Path | None = None, *, cwd: Path | None = None, command: Sequence[str] | None = None, skills: Path | None = None) -> MCPServer:
    """A server that is not connected to anything yet.

    `state` keeps the jobs, relative paths in calls start at `cwd`, `command` takes the place of the command line of this package, and `skills`
    that of its skill folders.
    """
    from mcp.server.mcpserver import MCPServer

    from agent.mcp import prompts, resources, tools
    from agent.mcp.calls import Calls
    from agent.mcp.jobs import Jobs
    from agent.mcp.skills import Skills
    from agent.mcp.tasks import Tasks
    from agent.mcp.workspaces import Workspaces

    cwd = (cwd or Path.cwd()).resolve()
    jobs = Jobs((state or default_state()).resolve(), command)
    skill = Skills(skills) if skills else Skills()
    server = MCPServer(NAME, title="Training-inference consistency", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING",
                       extensions=[skill, Tasks(jobs)])
    tools.register(server, jobs, Calls(jobs, cwd))
    resources.register(server, jobs, Workspaces(jobs, cwd))
    skill.register(server)
    prompts.register(server)
    return server


def http_app(server: MCPServer, token: str, host: str = HOST, allowed_hosts: Sequence[str] = ()) -> ASGIApp:
    """The server as an ASGI application that asks for the token and answers only under the allowed host names."""
    from mcp.server.transport_security import TransportSecuritySettings

    from agent.mcp.auth import BearerGate

    names = [name for name in dict.fromkeys([*LOOPBACK, *allowed_hosts])]
    hosts = [f"[{name}]" if ":" in name else name for name in names]
    allowed = [form for name in hosts for form in (name, f"{name}:*")]
    security = TransportSecuritySettings(
        allowed_hosts=allowed, allowed_origins=[f"{scheme}://{form}" for scheme in ("http", "https") for form in allowed])
    return BearerGate(server.streamable_http_app(
        streamable_http_path=PATH, host=host, max_request_body_size=MAX_BODY, transport_security=security), token)


def serve(*, http: bool = False, host: str = HOST, port: int = PORT, allowed_hosts: Sequence[str] = (), token_file: Path | None = None,
          state: Path | None = None, command: Sequence[str] | None = None) -> None:
    """Serve until the client leaves (stdio) or a signal comes (HTTP). Jobs go on after that.

    `command` takes the place of the command line of this package. Raises UserError if the HTTP server cannot be set up safely.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    for number in (signal.SIGINT, signal.SIGTERM):
        # There is nothing to put in order, and the thread that reads stdin would keep a polite exit waiting for the client.
        signal.signal(number, signal.SIG_DFL)
    if not http:
        door = Door((state or default_state()) / "opening")
        door.serve(build(state, command=command).run)
        return
    if host not in LOOPBACK and not allowed_hosts:
        raise UserError(f"--host {host} can be reached from other machines; name the host names that clients use with --allow-host")
    from agent.mcp.auth import load_token

    token, source = load_token(token_file, state or default_state())
    listener = _listen(host, port)
    _serve_http(http_app(build(state, command=command), token, host, allowed_hosts), listener, source)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with --port") from None


def _serve_http(app: ASGIApp, listener: socket.socket, source: str) -> None:
    import uvicorn

    host, port = listener.getsockname()[:2]
    print(f"MCP on http://{f'[{host}]' if ':' in host else host}:{port}{PATH}, token from {source}", file=sys.stderr, flush=True)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, server_header=False))
    server.run(sockets=[listener])


def main() -> None:
    """`python -m agent.server`: the same options as `agent serve`."""
    parser = argparse.ArgumentParser(prog="agent serve", description="MCP server on stdio, or on HTTP with --http.")
    parser.add_argument("--http", action="store_true", help="streamable HTTP instead of stdio")
    parser.add_argument("--host", default=HOST, help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="default: %(default)s; 0: any free one")
    parser.add_argument("--allow-host", action="append", default=[], help="host name that clients may use; may be repeated")
    parser.add_argument("--token-file", type=Path, help="file of mode 0600; default: AGENT_MCP_TOKEN, else a file made in --state")
    parser.add_argument("--state", type=Path, help="folder of the jobs (default: the user's state folder)")
    options = parser.parse_args()
    try:
        serve(http=options.http, host=options.host, port=options.port, allowed_hosts=options.allow_host, token_file=options.token_file,
              state=options.state)
    except UserError as error:
        print(f"agent: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()

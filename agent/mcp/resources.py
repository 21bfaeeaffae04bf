"""Resources: runs, reports, evidence, repros and logs, read-only, by ids and relative names that cannot leave their folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError
from mcp.shared.path_security import PathEscapeError, safe_join

from agent.mcp.calls import REPRO
from agent.mcp.jobs import KEPT, Job, JobError, Jobs, tail
from agent.mcp.record import LOG, OUTPUT
from agent.mcp.results import report
from agent.mcp.workspaces import PRIVATE, Workspaces, checkout, current

MAX_BYTES = 2**20
"""Largest file that is served whole."""
MAX_LOG = 64 * 1024
"""Bytes of a log that are served: its end."""
MAX_LISTED = 1000

JSON, TEXT, MARKDOWN, HTML = "application/json", "text/plain", "text/markdown", "text/html"


def register(server: MCPServer, jobs: Jobs, workspaces: Workspaces) -> None:
    """Add every resource to a server."""

    def find(workspace: str) -> Path:
        try:
            return workspaces.find(workspace)
        except KeyError:
            known = ", ".join(workspaces.all())
            raise ResourceNotFoundError(f"there is no workspace {workspace!r}; known: {known or 'none'}") from None

    def find_job(job_id: str) -> Job:
        try:
            return jobs.find(job_id)
        except JobError as error:
            raise ResourceNotFoundError(str(error)) from None

    @server.resource("consistency://workspaces", mime_type=JSON, title="Workspaces",
                     description="Workspaces of this server with the state of their last run, and the ids that other resources take")
    def list_workspaces() -> str:
        return _json([{"id": name, "path": str(path), **_run_line(current(path))} for name, path in workspaces.all().items()])

    @server.resource("consistency://jobs", mime_type=JSON, title="Jobs", description="All jobs, newest first")
    def list_jobs() -> str:
        return _json([{"job_id": job.record.id, "tool": job.record.tool, "state": job.state, "device": job.record.device,
                       "created": job.record.created, "seconds": round(job.seconds, 1), "workspace": job.record.workspace}
                      for job in jobs.newest(KEPT)])

    @server.resource("job://{job_id}", mime_type=JSON, title="Job", description="What job_status says")
    def job(job_id: str) -> str:
        return report(find_job(job_id)).model_dump_json(indent=1)

    @server.resource("job://{job_id}/result", mime_type=JSON, title="Result of a job", description="Everything the tool reported")
    def job_result(job_id: str) -> str:
        return read_file(find_job(job_id).folder, OUTPUT)

    @server.resource("job://{job_id}/log", mime_type=TEXT, title="Log of a job", description=f"The last {MAX_LOG // 1024} KiB")
    def job_log(job_id: str) -> str:
        return tail(find_job(job_id).folder / LOG, MAX_LOG)

    @server.resource("job://{job_id}/repro/{+path}", mime_type=TEXT, title="File of a repro that belongs to a job")
    def job_repro(job_id: str, path: str) -> str:
        return read_file(find_job(job_id).folder / REPRO, path)

    @server.resource("job://{job_id}/evidence", mime_type=JSON, title="Evidence of a job", description="Names of the files, arrays among them")
    def job_evidence(job_id: str) -> str:
        return _listing(evidence_of(job_id))

    @server.resource("job://{job_id}/evidence/{+path}", mime_type=TEXT, title="File of the evidence of a job")
    def job_evidence_file(job_id: str, path: str) -> str:
        return read_file(evidence_of(job_id), path)

    @server.resource("run://{workspace}", mime_type=JSON, title="Run", description="State of a workspace's last run: steps, attempts, outcome")
    def run(workspace: str) -> str:
        return _json(_short(state_of(find(workspace))))

    @server.resource("run://{workspace}/pull-request", mime_type=MARKDOWN, title="Pull request", description="PULL_REQUEST.md of the last run")
    def pull_request(workspace: str) -> str:
        return read_file(checkout(find(workspace)), "PULL_REQUEST.md")

    @server.resource("run://{workspace}/report", mime_type=HTML, title="Report", description="The last run as one page")
    def page(workspace: str) -> str:
        from agent.report import render
        from agent.state import RunState

        return render(RunState.model_validate(state_of(find(workspace))))

    @server.resource("evidence://{workspace}", mime_type=JSON, title="Evidence", description="Names of the files")
    def evidence(workspace: str) -> str:
        return _listing(checkout(find(workspace)) / "evidence")

    @server.resource("evidence://{workspace}/{+path}", mime_type=JSON, title="File of the evidence")
    def evidence_file(workspace: str, path: str) -> str:
        return read_file(checkout(find(workspace)) / "evidence", path)

    @server.resource("repro://{workspace}", mime_type=JSON, title="Repros", description="Names of the files")
    def repros(workspace: str) -> str:
        return _listing(checkout(find(workspace)) / "repros")

    @server.resource("repro://{workspace}/{+path}", mime_type=TEXT, title="File of a repro")
    def repro_file(workspace: str, path: str) -> str:
        return read_file(checkout(find(workspace)) / "repros", path)

    @server.resource("log://{workspace}", mime_type=JSON, title="Logs", description="Names of the engines' logs")
    def logs(workspace: str) -> str:
        return _listing(find(workspace) / PRIVATE, "log")

    @server.resource("log://{workspace}/{+path}", mime_type=TEXT, title="Log of an engine", description=f"The last {MAX_LOG // 1024} KiB")
    def log_file(workspace: str, path: str) -> str:
        place = inside(find(workspace) / PRIVATE, path)
        if place.name != "log":
            raise ResourceNotFoundError(f"{path} is not a log; log://{workspace} lists them")
        return tail(place, MAX_LOG)

    def evidence_of(job_id: str) -> Path:
        """The folder that the tool named in its result."""
        output = find_job(job_id).output
        named = output.get("evidence") if isinstance(output, dict) else None
        if not named or not Path(named).is_dir():
            raise ResourceNotFoundError(f"job {job_id} has left no evidence")
        return Path(named)

    def state_of(path: Path) -> dict[str, Any]:
        state = current(path)
        if state is None:
            raise ResourceNotFoundError(f"{path.name} has no run yet; the tool `run` starts one")
        return state


def inside(root: Path, name: str) -> Path:
    """A regular file below `root`, also once symbolic links are followed; `root` itself must not be one. Raises ResourceNotFoundError."""
    place = root
    try:
        place = safe_join(root, name)
        found = place.is_file() and not root.is_symlink()
    except (PathEscapeError, OSError, ValueError):
        found = False
    if not found:
        raise ResourceNotFoundError(f"there is no file {name[:200]!r} in this folder")
    return place


def read_file(root: Path, name: str) -> str:
    """A text file below `root`. Raises ResourceError if it is too large or not text."""
    place = inside(root, name)
    size = place.stat().st_size
    if size > MAX_BYTES:
        raise ResourceError(f"{name} has {size} bytes and only files up to {MAX_BYTES} are served; on the server's machine it is {place}")
    try:
        return place.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ResourceError(f"{name} is not text; on the server's machine it is {place}") from None


def _listing(root: Path, only: str | None = None) -> str:
    found = [] if root.is_symlink() else root.rglob(only or "*")
    files = sorted(path for path in found if path.is_file() and not path.is_symlink())
    return _json([{"path": str(path.relative_to(root)), "bytes": path.stat().st_size} for path in files[:MAX_LISTED]])


def _run_line(state: dict[str, Any] | None) -> dict[str, Any]:
    return {name: state.get(name) for name in ("run", "model", "scale", "phase", "outcome", "why", "branch")} if state else {"run": None}


def _short(state: dict[str, Any]) -> dict[str, Any]:
    """Without the parts that are evidence files of their own."""
    attempts = [{name: attempt.get(name) for name in ("number", "branch", "commit", "why", "outcome", "reason", "failure", "seconds")}
                for attempt in state.get("attempts", [])]
    heavy = ("baseline", "verify", "localize", "first_localize", "final", "attempts")
    return {name: value for name, value in state.items() if name not in heavy} | {"attempts": attempts}


def _json(data: Any) -> str:
    return json.dumps(data, indent=1)

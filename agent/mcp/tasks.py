"""Tasks (io.modelcontextprotocol/tasks): a client that lists this extension gets a task instead of a bounded wait. A task is a job."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import anyio
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.mcpserver import Extension, MethodBinding, require_client_extension
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS, CallToolRequestParams, CallToolResult, RequestParams, TextContent
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from agent.mcp.jobs import Job, JobError, Jobs
from agent.mcp.results import finished_report
from agent.mcp.tools import LONG

POLL_MS = 2000
_VERSIONS = frozenset(MODERN_PROTOCOL_VERSIONS)


class TaskParams(RequestParams):
    task_id: str


class Tasks(Extension):
    """Tasks survive a restart of the server because jobs do."""

    identifier = "io.modelcontextprotocol/tasks"

    def __init__(self, jobs: Jobs):
        self.jobs = jobs

    def methods(self) -> Sequence[MethodBinding]:
        handlers = {"tasks/get": self._get, "tasks/update": self._update, "tasks/cancel": self._cancel}
        return [MethodBinding(method, TaskParams, handler, _VERSIONS) for method, handler in handlers.items()]

    async def intercept_tool_call(self, params: CallToolRequestParams, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        """Start the job without waiting for it, and answer with its handle; a call that is refused or done at once is answered as usual."""
        if params.name not in LONG or ctx.protocol_version not in _VERSIONS or not self._listed(ctx):
            return await call_next(ctx)
        params.arguments = {**(params.arguments or {}), "wait_s": 0}
        answer = await call_next(ctx)
        started = answer.structured_content if isinstance(answer, CallToolResult) and not answer.is_error else None
        if not started or started["state"] not in ("queued", "running"):
            return answer
        return {"resultType": "task", **_task(self.jobs.find(started["job_id"]))}

    async def _get(self, ctx: ServerRequestContext[Any, Any], params: TaskParams) -> HandlerResult:
        job = self._find(ctx, params)
        task = _task(job)
        if task["status"] == "completed":
            task["result"] = _tool_result(job).model_dump(by_alias=True, mode="json", exclude_none=True)
        return task

    async def _update(self, ctx: ServerRequestContext[Any, Any], params: TaskParams) -> HandlerResult:
        """No job ever asks for input, so there is nothing that an answer could belong to."""
        self._find(ctx, params)
        return {}

    async def _cancel(self, ctx: ServerRequestContext[Any, Any], params: TaskParams) -> HandlerResult:
        await anyio.to_thread.run_sync(self.jobs.cancel, self._find(ctx, params).record.id)
        return {}

    def _find(self, ctx: ServerRequestContext[Any, Any], params: TaskParams) -> Job:
        require_client_extension(ctx, self.identifier)
        try:
            return self.jobs.find(params.task_id)
        except JobError:
            raise MCPError(code=INVALID_PARAMS, message=f"there is no task {params.task_id[:64]!r}; it may have been removed") from None

    def _listed(self, ctx: ServerRequestContext[Any, Any]) -> bool:
        capabilities = ctx.session.client_capabilities
        return bool(capabilities and capabilities.extensions and self.identifier in capabilities.extensions)


def _task(job: Job) -> dict[str, Any]:
    """A job in the words of the extension: whatever ended without being cancelled has a result, be it an error of the tool."""
    working = job.state in ("queued", "running")
    status = "working" if working else "cancelled" if job.state == "cancelled" else "completed"
    message = f"{len(job.waiting_for)} job(s) have {job.record.device} first" if job.state == "queued" else job.progress() or job.state
    return {"taskId": job.record.id, "status": status, "statusMessage": message, "createdAt": _time(job.record.created),
            "lastUpdatedAt": _time(job.record.ended or (datetime.now(UTC).timestamp() if working else job.record.created)),
            "ttlMs": None, "pollIntervalMs": POLL_MS}


def _tool_result(job: Job) -> CallToolResult:
    """What the tool call would have answered, had it waited."""
    try:
        said = finished_report(job)
    except JobError as error:
        return CallToolResult(content=[TextContent(text=str(error))], is_error=True)
    return CallToolResult(content=[TextContent(text=said.model_dump_json(indent=1))], structured_content=said.model_dump(mode="json"))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

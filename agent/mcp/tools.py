"""The tools: each long one becomes a job, is waited for a bounded time, and answers with its result or with a handle."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import BaseModel, Field

from agent import models as catalogue
from agent.errors import AgentError
from agent.mcp import arguments as arg
from agent.mcp import devices
from agent.mcp.calls import Calls, Subject
from agent.mcp.jobs import Call, Job, JobError, Jobs
from agent.mcp.results import (
    AnyResult,
    JobReport,
    LocalizeResult,
    PatchResult,
    ReproResult,
    RunResult,
    VerifyResult,
    finished_report,
    report,
)
from consistency.models.catalog import FAMILIES

LONG = ("localize", "repro", "patch_kernel", "verify", "run")
"""Tools that become jobs."""
REPORT_EVERY = 3.0
"""Seconds between two progress notifications."""

class Scales(BaseModel):
    name: str
    device: str
    memory_gib: float
    layers: str
    note: str


class Family(BaseModel):
    name: str
    title: str
    operators: list[str]
    scales: list[Scales]
    cannot: dict[str, str] = Field(description="engine feature -> why it is refused for this family")
    recipes: list[str] = Field(description="contracts shipped as exact")


class Models(BaseModel):
    """What can be worked on, and with what."""

    families: list[Family]
    devices: list[str]


def register(server: MCPServer, jobs: Jobs, calls: Calls) -> None:
    """Add every tool to a server."""
    starts = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False, open_world_hint=False)
    looks = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    ends = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False)

    async def carry_out(make: Callable[[], Call], wait_s: float, ctx: Context) -> Any:
        """Start a job or find the one that this very call has started before; build the call in a thread, since it may ask the driver."""
        job = await anyio.to_thread.run_sync(lambda: jobs.submit(make()))
        return finished_report(await watch(jobs, job, wait_s, ctx))

    @server.tool(title="Find the first operator that differs", annotations=starts)
    @explained
    async def localize(
            ctx: Context, model: arg.Model = None, scale: arg.Scale = None, workspace: arg.WorkspacePath = None, weights: arg.Weights = None,
            contract: arg.Contract = None, gpu: arg.Gpu = None, wait_s: arg.Wait = 45) -> JobReport[LocalizeResult]:
        """Name, per dimension (determinism, batch, phase, cross_gpu, engine), the first operator whose output differs although its input does
        not, with the cause. Takes minutes."""
        subject = Subject(model, scale, workspace, weights, contract, gpu)
        return await carry_out(lambda: calls.engine("localize", subject), wait_s, ctx)

    @server.tool(title="Cut a divergence down to a folder that runs alone", annotations=starts)
    @explained
    async def repro(
            ctx: Context, model: arg.Model = None, scale: arg.Scale = None, workspace: arg.WorkspacePath = None, weights: arg.Weights = None,
            contract: arg.Contract = None, dimension: arg.Dimension = None, out: arg.ReproFolder = None, gpu: arg.Gpu = None,
            wait_s: arg.Wait = 45) -> JobReport[ReproResult]:
        """Localize, then write a folder with repro.py and its inputs: it exits with 1 while the operator differs and with 0 once it is fixed."""
        subject = Subject(model, scale, workspace, weights, contract, gpu)
        return await carry_out(lambda: calls.engine("repro", subject, dimension=dimension, out=out), wait_s, ctx)

    @server.tool(title="Change the contract or a kernel in a new branch", annotations=starts)
    @explained
    async def patch_kernel(
            ctx: Context, workspace: arg.WorkspacePath = None, bindings: arg.Bindings = None, files: arg.KernelFiles = None,
            repo: arg.Repository = None, diff: arg.Diff = None, allow: arg.Allow = None, message: arg.Message = "Patch through MCP",
            wait_s: arg.Wait = 45) -> JobReport[PatchResult]:
        """Commit a change to contract.toml and kernels/ (or a diff inside allowed paths of another repository) in a new branch and worktree.
        Nothing that is checked out changes. Then `verify` with the model and contract=WORKTREE/contract.toml, without workspace, so that the
        worktree's kernels are the ones that run."""
        return await carry_out(lambda: calls.patch(workspace, bindings or [], files or {}, repo, diff, allow or [], message), wait_s, ctx)

    @server.tool(title="Compare both engines in every condition", annotations=starts)
    @explained
    async def verify(
            ctx: Context, model: arg.Model = None, scale: arg.Scale = None, workspace: arg.WorkspacePath = None, weights: arg.Weights = None,
            contract: arg.Contract = None, level: arg.Level = "full", target_throughput: arg.Target = None, evidence: arg.Evidence = None,
            gpu: arg.Gpu = None, wait_s: arg.Wait = 45) -> JobReport[VerifyResult]:
        """Count the log-probabilities whose fp32 bits differ between rollout and training, per condition, with throughput, accuracy and a
        negative control. `exact` means 0 in every required condition; a `void` verdict proves nothing. Takes minutes."""
        subject = Subject(model, scale, workspace, weights, contract, gpu)
        return await carry_out(lambda: calls.engine("verify", subject, evidence=evidence, level=level, target_throughput=target_throughput),
                               wait_s, ctx)

    @server.tool(title="Take a model's mismatch to zero", annotations=starts)
    @explained
    async def run(
            ctx: Context, model: arg.Model = None, scale: arg.Scale = None, workspace: arg.WorkspacePath = None, weights: arg.Weights = None,
            target_throughput: arg.Target = None, policy: arg.Policy = None, minutes: arg.Minutes = None, attempts: arg.Attempts = None,
            from_scratch: arg.FromScratch = False, resume: arg.Resume = False, gpu: arg.Gpu = None, wait_s: arg.Wait = 45) -> JobReport[RunResult]:
        """The whole loop: baseline, the recipe shipped for the model if there is one, then localize, repro, patch, verify, until exact and fast
        enough or a budget ends; leaves a branch and a pull request text in the workspace. Takes from minutes to hours; poll job_status."""
        subject = Subject(model, scale, workspace, weights, None, gpu)
        return await carry_out(lambda: calls.run(subject, resume, target_throughput, policy, minutes, attempts, from_scratch), wait_s, ctx)

    @server.tool(title="How a job is going", annotations=looks)
    @explained
    async def job_status(ctx: Context, job_id: arg.AnyJobId = None, wait_s: arg.Wait = 0) -> JobReport[AnyResult]:
        """State, place in the queue, progress and, once there is one, the result of a job. Waits up to wait_s for it to end."""
        return report(await watch(jobs, named(job_id), wait_s, ctx))

    @server.tool(title="End a job", annotations=ends)
    @explained
    async def job_cancel(job_id: arg.JobId) -> JobReport[AnyResult]:
        """End a job and every process it started, within about a second. What a run saved stays, and `run` with resume goes on from there."""
        return report(await anyio.to_thread.run_sync(jobs.cancel, job_id))

    @server.tool(title="What can be worked on", annotations=looks)
    @explained
    async def models() -> Models:
        """Model families, their scales and what each needs, shipped recipes, and the devices of the server's machine."""
        gpus = await anyio.to_thread.run_sync(devices.gpus)
        families = [Family(name=family.name, title=family.title, operators=list(family.operators), cannot=family.cannot,
                           scales=[Scales.model_validate(scale, from_attributes=True) for scale in family.scales.values()],
                           recipes=[path.stem for path in catalogue.recipes(family.name)]) for family in FAMILIES.values()]
        return Models(families=families, devices=["cpu", *(f"cuda:{number}" for number in gpus)])

    def named(job_id: str | None) -> Job:
        if job_id is not None:
            return jobs.find(job_id)
        newest = jobs.newest(1)
        if not newest:
            raise JobError(f"there is no job yet; {', '.join(LONG)} start one")
        return newest[0]


async def watch(jobs: Jobs, job: Job, wait_s: float, ctx: Context) -> Job:
    """The job once it has ended or the time is up. Reports progress meanwhile; a caller that goes away leaves the job running."""
    begun = told = time.monotonic()
    pause = 0.05
    while not job.finished and (now := time.monotonic()) - begun < wait_s:
        if now - told >= REPORT_EVERY:
            told = now
            await ctx.report_progress(round(now - begun, 1), None, _progress(job))
        await anyio.sleep(min(pause, wait_s))
        pause = min(pause * 1.5, 0.25)
        job = jobs.find(job.record.id)
    return job


def _progress(job: Job) -> str:
    if job.state == "queued":
        return f"{job.record.tool}: {len(job.waiting_for)} job(s) have {job.record.device} first"
    return f"{job.record.tool}, {job.seconds:.0f} s: {job.progress() or 'started'}"


def explained(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Expected failures reach the model as text that says what to do; anything else is a bug and only its name gets out."""

    @functools.wraps(tool)
    async def wrapped(*arguments: Any, **options: Any) -> Any:
        try:
            return await tool(*arguments, **options)
        except (AgentError, JobError) as error:
            raise ToolError(str(error)) from None
        except OSError as error:
            raise ToolError(f"the server cannot use its folder of jobs ({error}); make room there, or start it with another --state") from None

    return wrapped

"""What tools answer: one job, with the part of its result that fits into a conversation. The whole result is the resource job://ID/result."""

from __future__ import annotations

from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from agent.mcp.jobs import Job, JobError, State
from agent.verdict import AccuracyResult, ConditionResult, ControlResult, ThroughputResult


class Difference(BaseModel):
    """How far the rollout is from the forward that the loss uses; null where a log-probability is not finite."""

    mismatches: int
    k3: float | None
    max_abs: float | None


class Verdict(BaseModel):
    """The decision of one verify: `exact` needs equal fp32 bits in every required condition."""

    exact: bool
    void: bool
    tokens: int
    mismatches: int
    conditions: list[ConditionResult]
    reasons: list[str] = []


class VerifyResult(BaseModel):
    kind: Literal["verify"] = "verify"
    model: str
    scale: str
    level: str
    verdict: Verdict
    baseline: Difference | None
    throughput: ThroughputResult | None
    target_throughput: float
    accuracy: AccuracyResult | None
    controls: list[ControlResult]
    contract: dict[str, dict[str, str]]
    evidence: str
    seconds: float


class Divergence(BaseModel):
    """An operator whose output differs although its input is equal."""

    dimension: str
    operator: str
    layer: int | None
    site: str
    cause: str
    cause_detail: str
    elements: int
    differing: int
    max_abs: float | None
    max_ulps: int | None
    confirmed: bool
    substituted_with: str | None
    next_site: str | None


class LocalizeResult(BaseModel):
    kind: Literal["localize"] = "localize"
    model: str
    scale: str
    divergences: list[Divergence]
    exact_dimensions: list[str]
    notes: list[str] = []
    seconds: float


class ReproResult(BaseModel):
    kind: Literal["repro"] = "repro"
    model: str
    scale: str
    divergence: Divergence
    directory: str
    command: str
    expected_line: str
    exit_code: int
    reproduced: bool


class PatchResult(BaseModel):
    kind: Literal["patch_kernel"] = "patch_kernel"
    branch: str
    commit: str
    worktree: str
    changed: list[str]
    contract: dict[str, dict[str, str]] | None = None
    engine: list[str] = Field(default=[], description="paths changed in the checkout of an engine that the workspace names")


class Attempt(BaseModel):
    number: int
    branch: str
    change: str
    outcome: str
    reason: str


class Recipe(BaseModel):
    name: str
    sha256: str
    outcome: str | None = Field(description="kept or rejected; null: stock was exact, or it was not reached")


class RunResult(BaseModel):
    kind: Literal["run"] = "run"
    model: str
    scale: str
    run: str
    outcome: Literal["exact", "slow", "inexact"] | None
    """null: a budget ended first; `resume` goes on"""
    why: str
    verdict: Verdict | None
    baseline: Difference | None
    throughput: ThroughputResult | None
    recipe: Recipe | None = None
    attempts: list[Attempt]
    branch: str
    pull_request: str | None
    seconds: float


AnyResult = Annotated[VerifyResult | LocalizeResult | ReproResult | PatchResult | RunResult, Field(discriminator="kind")]
_ANY: TypeAdapter[AnyResult] = TypeAdapter(AnyResult)
ResultT = TypeVar("ResultT")


class JobReport(BaseModel, Generic[ResultT]):
    """A tool call as a job: its handle, how far it is, and its result once there is one."""

    job_id: str
    tool: str
    state: State
    device: str
    place: int | None = Field(default=None, description="jobs that have the device first; null once the job has started")
    seconds: float = Field(description="wall clock since the job started, or since the call while it waits")
    progress: str = Field(default="", description="what the job said last about itself")
    result: ResultT | None = None
    error: str = ""
    next: str = Field(default="", description="what to do now")
    result_uri: str | None = Field(default=None, description="resource with the whole result")
    log_uri: str


def report(job: Job) -> JobReport:
    """What there is to say about a job now."""
    record = job.record
    said = JobReport(job_id=record.id, tool=record.tool, state=job.state, device=record.device, seconds=round(job.seconds, 1),
                     log_uri=f"job://{record.id}/log")
    if job.state == "queued":
        said.place = len(job.waiting_for)
        said.next = f"{said.place} job(s) have {record.device} first; call job_status with this job_id and wait_s=45, or job_cancel"
    elif job.state == "running":
        said.progress = job.progress()
        said.next = "still running; call job_status with this job_id and wait_s=45, or job_cancel to end it"
    elif job.state == "completed":
        said.result_uri = f"job://{record.id}/result"
        try:
            said.result = _ANY.validate_python({**job.output, "kind": record.tool})
        except (ValidationError, TypeError) as error:
            said.error = f"the result is not one of {record.tool} ({str(error).splitlines()[0]}); read {said.result_uri}"
    else:
        said.error = _ended_badly(job)
        said.next = f"read {said.log_uri} for the whole log; calling {record.tool} again starts a new job"
    return said


def finished_report(job: Job) -> JobReport:
    """The report of a tool call. Raises JobError if the job ended without a result."""
    said = report(job)
    if said.error:
        raise JobError(f"{said.error}. {said.next}" if said.next else said.error)
    return said


def _ended_badly(job: Job) -> str:
    record = job.record
    match job.state:
        case "cancelled":
            return f"{record.tool} was cancelled after {job.seconds:.0f} s"
        case "lost":
            return f"{record.tool} was lost: its process ended without a word, as after a reboot or when memory ran out"
        case _:
            return f"{record.tool} failed with exit code {record.exit_code}: {job.error() or 'no message'}"

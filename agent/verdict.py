"""The typed outcome of `verify`: what the CLI prints with --json, the loop decides on and the evidence keeps."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from consistency.conditions import Dimension


class ConditionResult(BaseModel):
    """One cell of the matrix."""

    name: str
    dimension: Dimension
    ran: bool
    tokens: int = 0
    """log-probabilities compared"""
    mismatches: int = 0
    """of them, those whose fp32 bits differ or that are not finite"""
    reason: str = ""
    """why it did not run, or what else is wrong"""
    excused: bool = False
    """it did not run because the family cannot have the feature; such a condition does not stand in the way of an exact verdict"""
    k3: float | None = None
    max_abs: float | None = None
    """nats, over the finite pairs"""


class ControlResult(BaseModel):
    """A comparison that must find a difference."""

    name: str
    ran: bool
    tokens: int = 0
    mismatches: int = 0
    reason: str = ""


class Difference(BaseModel):
    """How far the rollout is from the forward that the loss uses; for people, never for the decision."""

    mismatches: int
    k3: float
    """mean of exp(r) - r - 1 with r = training - rollout, computed in fp64"""
    max_abs: float
    """nats"""


class AccuracyResult(BaseModel):
    """Distance to the reference forward, root mean square over tokens, in nats."""

    tokens: int
    stock: float
    candidate: float
    allowed: float
    """the candidate's largest acceptable value"""

    @property
    def ok(self) -> bool:
        return self.candidate <= self.allowed


class ThroughputResult(BaseModel):
    """Interleaved runs of fixed length, in sampled tokens per second."""

    stock: float
    """median"""
    candidate: float
    ratio: float
    """median of candidate / stock over the pairs of neighbouring runs"""
    spread: tuple[float, float]
    """smallest and largest ratio of a pair"""


class Verdict(BaseModel):
    """The decision. `exact` and `void` are never both true."""

    exact: bool
    void: bool
    """the measurement itself cannot be trusted; `reasons` says why"""
    tokens: int
    """sampled tokens compared between the rollout and the loss"""
    mismatches: int
    """over all conditions"""
    conditions: list[ConditionResult]
    reasons: list[str] = []
    """why it is void, or what besides mismatches keeps it from being exact"""
    rules: list[str] = []
    """names, from `agent.rules`, of every rule that stands in the way; empty exactly if the verdict is exact"""


class VerifyReport(BaseModel):
    """What one `verify` found."""

    family: str
    scale: str
    level: Literal["quick", "full"]
    verdict: Verdict
    baseline: Difference | None
    """rollout against the loss under this contract; that of the empty contract is a run's baseline"""
    throughput: ThroughputResult | None
    target_throughput: float
    accuracy: AccuracyResult | None
    controls: list[ControlResult]
    contract: dict[str, dict[str, str]]
    seed: str
    """of the prompts and the sampling, drawn after the candidate was fixed"""
    environment: dict[str, dict]
    """process -> what it reported about its environment and resolved configuration"""
    harness: str = ""
    """sha256 of the sources that measured and decided"""
    evidence: str
    """folder of the raw arrays, job files and logs"""
    seconds: float

    @property
    def fast_enough(self) -> bool:
        return self.throughput is not None and self.throughput.ratio >= self.target_throughput

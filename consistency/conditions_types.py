"""What a verification matrix is made of: probes, conditions, controls. Data only; the matrices are in `conditions`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dimension = Literal["determinism", "batch", "phase", "engine", "cross_gpu"]
DIMENSIONS: tuple[Dimension, ...] = ("determinism", "batch", "phase", "engine", "cross_gpu")

Process = Literal["rollout", "second rollout", "stock rollout", "training", "reference",
                  "eager rollout", "graphs rollout", "v1 rollout", "v2 rollout"]
"""Who computes: the candidate's rollout and a fresh process of it, the untouched rollout, the candidate's training, the accuracy reference; the
others are the candidate's rollout started with another setting."""

VARIANTS: dict[Process, dict[str, object]] = {
    "eager rollout": {"eager": True, "max_num_seqs": 64}, "graphs rollout": {"compile": False, "max_num_seqs": 64},
    "v1 rollout": {"runner": "v1", "max_num_seqs": 64}, "v2 rollout": {"runner": "v2", "max_num_seqs": 64}}
"""process -> rollout engine settings in which it differs from `rollout`, which runs as stock does: compiled, with CUDA graphs. Fewer sequences
mean fewer graphs to capture."""

SCAN_CHUNK = -1
"""Stands for the model's scan chunk in a tuple of lengths; left out for a model that has none."""

Select = Literal["all", "first", "longest", "boundary"]


@dataclass(frozen=True)
class RequestSet:
    """Prompts to draw. The requests come in random order, so that every group mixes lengths."""

    count: int
    new_tokens: int
    """sampled tokens of every request"""
    boundaries: tuple[int, ...] = ()
    """for each n: prompts of n - 1, n and n + 1 tokens, as long as count allows"""
    fill: tuple[int, int] = (3, 32)
    """shortest and longest of the other prompts"""
    temperature: float = 1.0


@dataclass(frozen=True)
class Probe:
    """One step of one process. None leaves a field out of the step."""

    process: Process
    step: Literal["generate", "replay", "score", "forward"]
    requests: str = "main"
    """name of a RequestSet"""
    select: Select = "all"
    count: int = 0
    """how many requests `first` and `longest` take"""
    by_length: bool = False
    """requests in the order of their prompt lengths, as trainers bucket them to pad less"""
    tokens: int | None = None
    """only the first so many sampled tokens; None: all"""
    together: int | None = None
    """rollout: how many requests share a batch; None: all"""
    chunk: Literal["on grid", "off grid"] | None = None
    preempt_every: int | None = None
    stagger: int | None = None
    prefix_cache: Literal["off", "cold", "warm"] | None = None
    temperature: float | None = None
    """forward: log-probabilities after division by it; None: raw"""
    processed: bool | None = None
    """generate: log-probabilities after the temperature instead of raw ones"""
    layout: Literal["padded", "packed", "alone"] | None = None
    micro_batch: int | None = None
    mode: Literal["train", "eval"] | None = None
    grad: bool | None = None
    weights: Literal["loaded", "updated", "reloaded"] = "loaded"
    """`updated`: one weight moved in place by one ulp; `reloaded`: the checkpoint written over it again"""


@dataclass(frozen=True)
class Condition:
    """Two probes whose log-probabilities must be equal at every token that both cover."""

    name: str
    dimension: Dimension
    left: Probe
    right: Probe
    requires: str | None = None
    """an engine feature; a family that cannot have it gives the reason, and the condition does not run"""
    happened: str | None = None
    """counter of the right probe's answer that must be above `more_than` for the condition to have taken place"""
    more_than: Literal["zero", "requests"] = "zero"
    only: Select = "all"
    """restricts the comparison to some requests of the set"""
    unlike: str | None = None
    """field of the resolved engine configuration in which the two processes must differ for the condition to have taken place"""


@dataclass(frozen=True)
class Control:
    """Two probes that must differ: the same step before and after one weight was moved by one ulp."""

    name: str
    before: Probe
    after: Probe


@dataclass(frozen=True)
class Accuracy:
    """Probes of the same tokens whose distance to the reference is compared."""

    reference: Probe
    stock: Probe
    candidate: Probe


@dataclass(frozen=True)
class Timing:
    """The interleaved throughput measurement."""

    pairs: int
    requests: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Matrix:
    """Everything one level of `verify` does at one scale."""

    sets: dict[str, RequestSet]
    sampled: Probe
    """the rollout as it samples"""
    loss: Probe
    """the forward that the loss uses"""
    conditions: tuple[Condition, ...]
    controls: tuple[Control, ...]
    accuracy: Accuracy | None
    timing: Timing | None
    least_tokens: int
    """fewer sampled tokens compared between the engines make the verdict void"""

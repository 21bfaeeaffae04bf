"""The verification matrix: which log-probabilities must be equal, and the steps that produce them. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dimension = Literal["determinism", "batch", "phase", "engine", "cross_gpu"]
DIMENSIONS: tuple[Dimension, ...] = ("determinism", "batch", "phase", "engine", "cross_gpu")

Process = Literal["rollout", "second rollout", "stock rollout", "training", "reference"]
"""Who computes: the candidate's rollout and a fresh process of it, the untouched rollout, the candidate's training, the accuracy reference."""

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


_SAMPLED = Probe("rollout", "generate")
_LOSS = Probe("training", "forward", by_length=True, layout="padded", micro_batch=4, mode="train", grad=True)


def _replay(**fields) -> Probe:
    return Probe("rollout", "replay", **fields)


def _forward(**fields) -> Probe:
    return Probe("training", "forward", **{"layout": "padded", "micro_batch": 4, "mode": "train", "grad": False, **fields})


def _alone_against(size: int) -> Condition:
    alone = _replay(select="first", count=17, tokens=12, together=1)
    batch = _SAMPLED if size == 33 else _replay(select="first", count=17 if size == 17 else 16 if size == 16 else 14, tokens=12, together=size)
    return Condition(f"alone against a batch of {size}", "batch", batch, alone)


_SHORT = {"select": "first", "count": 9, "tokens": 16}
_LONG = {"select": "longest", "count": 6, "tokens": 8}
_TRAINED = {"select": "first", "count": 11, "tokens": 32}
_UPDATED = {"select": "first", "count": 6, "tokens": 16}

_COOL_RAW = Probe("rollout", "generate", requests="cool raw")
_COOL_PROCESSED = Probe("rollout", "generate", requests="cool processed", processed=True)

_TINY_CONDITIONS = (
    Condition("same process twice", "determinism", _SAMPLED, _replay()),
    Condition("new process", "determinism", _SAMPLED, Probe("second rollout", "replay")),
    *(_alone_against(size) for size in (2, 7, 16, 17, 33)),
    Condition("decode against prefill", "phase", _SAMPLED, Probe("rollout", "score")),
    Condition("chunked prefill on the grid", "phase", _SAMPLED, _replay(**_LONG, chunk="on grid"), happened="prefill_chunks",
              more_than="requests"),
    Condition("chunked prefill off the grid", "phase", _SAMPLED, _replay(**_LONG, chunk="off grid", stagger=2), happened="prefill_chunks",
              more_than="requests"),
    Condition("prefix-cache hit", "phase", _SAMPLED, _replay(**_LONG, prefix_cache="warm"), requires="prefix_cache", happened="cached_tokens"),
    Condition("preemption and resume", "phase", _SAMPLED, _replay(**_SHORT, preempt_every=5), happened="preemptions"),
    Condition("prompt lengths around 1, 16, 64, 128, 256 and the scan's chunk", "phase", _SAMPLED, Probe("rollout", "score"), only="boundary"),
    Condition("rollout against the loss", "engine", _SAMPLED, _LOSS),
    Condition("lengths at the boundaries against the loss", "engine", _SAMPLED, _LOSS, only="boundary"),
    Condition("padded against packed training batches", "engine", _LOSS, _forward(**_TRAINED, layout="packed")),
    Condition("training micro-batches of 1", "engine", _LOSS, _forward(**_TRAINED, layout="alone", micro_batch=1)),
    Condition("training micro-batches of 3", "engine", _LOSS, _forward(**_TRAINED, micro_batch=3)),
    Condition("training against evaluation mode", "engine", _LOSS, _forward(**_TRAINED, mode="eval")),
    Condition("after an in-place weight update", "engine", _replay(**_UPDATED, weights="updated"), _forward(**_UPDATED, weights="updated")),
    Condition("rollout after a reload", "engine", _SAMPLED, _replay(**_UPDATED, weights="reloaded")),
    Condition("training after a reload", "engine", _LOSS, _forward(**_UPDATED, weights="reloaded")),
    Condition("temperature 0.7, raw", "engine", _COOL_RAW, _forward(requests="cool raw")),
    Condition("temperature 0.7, processed", "engine", _COOL_PROCESSED, _forward(requests="cool processed", temperature=0.7)),
)

_TINY_CONTROLS = (
    Control("one ulp in the rollout", _replay(**_UPDATED), _replay(**_UPDATED, weights="updated")),
    Control("one ulp in training", _forward(**_UPDATED), _forward(**_UPDATED, weights="updated")),
)

_MEASURED = {"select": "first", "count": 12, "tokens": 32}

_TINY_FULL = Matrix(
    sets={
        "main": RequestSet(33, 64, (1, 16, 64, 128, 256, SCAN_CHUNK)),
        "cool raw": RequestSet(7, 16, temperature=0.7),
        "cool processed": RequestSet(7, 16, temperature=0.7),
    },
    sampled=_SAMPLED,
    loss=_LOSS,
    conditions=_TINY_CONDITIONS,
    controls=_TINY_CONTROLS,
    accuracy=Accuracy(Probe("reference", "forward", **_MEASURED, layout="alone", micro_batch=1, mode="eval", grad=False),
                      Probe("stock rollout", "replay", **_MEASURED), _SAMPLED),
    timing=Timing(pairs=8, requests=32, prompt_tokens=32, new_tokens=32),
    least_tokens=2000,
)

_QUICK_NAMES = ("alone against a batch of 17", "decode against prefill", "chunked prefill off the grid", "preemption and resume",
                "rollout against the loss", "padded against packed training batches")

_TINY_QUICK = Matrix(
    sets={"main": RequestSet(17, 24, (16, 64, 128, SCAN_CHUNK))},
    sampled=_SAMPLED,
    loss=_LOSS,
    conditions=tuple(c for c in _TINY_CONDITIONS if c.name in _QUICK_NAMES),
    controls=_TINY_CONTROLS,
    accuracy=None,
    timing=None,
    least_tokens=300,
)

MATRICES: dict[tuple[str, str], Matrix] = {("tiny", "full"): _TINY_FULL, ("tiny", "quick"): _TINY_QUICK}
"""(scale, level) -> what `verify` does"""

REQUIRED: dict[str, tuple[Condition, ...]] = {"tiny": _TINY_CONDITIONS}
"""scale -> the conditions that a final verdict needs"""

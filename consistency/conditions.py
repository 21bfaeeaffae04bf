"""The verification matrix: which log-probabilities must be equal, and the steps that produce them. Data only.

This file holds scale tiny; slice and full, which need a GPU, are in `conditions_gpu`.
"""

from __future__ import annotations

from consistency import conditions_gpu as gpu
from consistency.conditions_types import (
    DIMENSIONS,
    SCAN_CHUNK,
    VARIANTS,
    Accuracy,
    Condition,
    Control,
    Dimension,
    Matrix,
    Probe,
    Process,
    RequestSet,
    Select,
    Timing,
)

__all__ = ["DIMENSIONS", "MATRICES", "REQUIRED", "SCAN_CHUNK", "VARIANTS", "Accuracy", "Condition", "Control", "Dimension", "Matrix", "Probe",
           "Process", "RequestSet", "Select", "Timing"]

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

MATRICES: dict[tuple[str, str], Matrix] = {
    ("tiny", "full"): _TINY_FULL, ("tiny", "quick"): _TINY_QUICK, ("slice", "full"): gpu.SLICE_FULL, ("slice", "quick"): gpu.SLICE_QUICK,
    ("full", "full"): gpu.FULL_FULL, ("full", "quick"): gpu.FULL_QUICK}
"""(scale, level) -> what `verify` does"""

REQUIRED: dict[str, tuple[Condition, ...]] = {"tiny": _TINY_CONDITIONS, "slice": gpu.SLICE_FULL.conditions, "full": gpu.FULL_FULL.conditions}
"""scale -> the conditions that a final verdict needs"""

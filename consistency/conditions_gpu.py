"""The matrices of scales slice and full: true widths on a GPU, CUDA graphs and compile as stock runs them. Data only.

Slice has few layers and every condition. Full has true depth and the main conditions: what depth can add is a larger difference, not another kind.
"""

from __future__ import annotations

from consistency.conditions_types import SCAN_CHUNK, Accuracy, Condition, Control, Matrix, Probe, RequestSet, Timing

BATCHES = (1, 2, 4, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 44, 45, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 384, 511, 512)
"""batch sizes: those that CUDA graphs are captured for and their borders, and the borders of kernels' tiles"""
LEAST_COVERED = 16
"""requests that a batch size is tried with, in several groups if the size is smaller"""

_SAMPLED = Probe("rollout", "generate")
_PACKED = {"layout": "packed", "mode": "train", "by_length": True}
_LOSS = Probe("training", "forward", micro_batch=16, grad=True, **_PACKED)


def _replay(**fields) -> Probe:
    return Probe("rollout", "replay", **fields)


def _forward(**fields) -> Probe:
    return Probe("training", "forward", **{"micro_batch": 16, "grad": False, **_PACKED, **fields})


def _generate(requests: str, **fields) -> Probe:
    return Probe("rollout", "generate", requests, **fields)


def _first(count: int, tokens: int) -> dict:
    return {"select": "first", "count": count, "tokens": tokens}


_LONGEST = {"select": "longest", "count": 24, "tokens": 16}
_UPDATED = _first(16, 24)
_OTHER_ENGINE = _first(64, 32)

_CONTROLS = (
    Control("one ulp in the rollout", _replay(**_UPDATED), _replay(**_UPDATED, weights="updated")),
    Control("one ulp in training", _forward(**_UPDATED), _forward(**_UPDATED, weights="updated")),
)

_UPDATES = (
    Condition("after an in-place weight update, graphs kept", "engine", _replay(**_UPDATED, weights="updated"),
              _forward(**_UPDATED, weights="updated")),
    Condition("rollout after a reload", "engine", _SAMPLED, _replay(**_UPDATED, weights="reloaded")),
    Condition("training after a reload", "engine", _LOSS, _forward(**_UPDATED, weights="reloaded")),
)

_CORE = (
    Condition("alone against a batch", "batch", _SAMPLED, _replay(**_first(17, 16), together=1)),
    Condition("decode against prefill", "phase", _SAMPLED, Probe("rollout", "score", **_first(64, 48))),
    Condition("chunked prefill off the 128 grid", "phase", _SAMPLED, _replay(**_LONGEST, chunk="off grid", stagger=2), happened="prefill_chunks",
              more_than="requests"),
    Condition("preemption and resume", "phase", _SAMPLED, _replay(**_first(24, 24), preempt_every=5), happened="preemptions"),
    Condition("rollout against the loss", "engine", _SAMPLED, _LOSS),
    Condition("lengths at the boundaries against the loss", "engine", _SAMPLED, _LOSS, only="boundary"),
    Condition("another packing of the training batch", "engine", _LOSS, _forward(**_first(24, 48), micro_batch=3, by_length=False)),
)

_JOINING = (
    Condition("decode rows beside prefills of 9 and 10 tokens", "batch", _generate("nine and ten"), _replay(requests="nine and ten", stagger=1)),
    Condition("one-token prompts joining a decode batch", "batch", _generate("one token"), _replay(requests="one token", stagger=1)),
)


def _batch_of(size: int, requests: str = "batches", tokens: int = 8) -> Condition:
    replay = _replay(requests=requests, select="first", count=max(size, LEAST_COVERED), tokens=tokens, together=size)
    return Condition(f"a batch of {size}", "batch", _SAMPLED if requests == "main" else _generate(requests), replay)


_LONG_DECODE = {"requests": "long", "tokens": 32}

_SLICE_CONDITIONS = (
    Condition("same process twice", "determinism", _SAMPLED, _replay()),
    Condition("new process", "determinism", _SAMPLED, Probe("second rollout", "replay", **_first(128, 64))),
    *_CORE,
    *(_batch_of(size) for size in BATCHES),
    *_JOINING,
    Condition("eager against compiled graphs", "batch", _SAMPLED, Probe("eager rollout", "replay", **_OTHER_ENGINE), unlike="eager"),
    Condition("graphs without compile against compiled graphs", "batch", _SAMPLED, Probe("graphs rollout", "replay", **_OTHER_ENGINE),
              unlike="compile"),
    Condition("V1 model runner against the default", "batch", _SAMPLED, Probe("v1 rollout", "replay", **_OTHER_ENGINE), requires="v1_runner",
              unlike="v2_model_runner"),
    Condition("chunked prefill on the 128 grid", "phase", _SAMPLED, _replay(**_LONGEST, chunk="on grid"), happened="prefill_chunks",
              more_than="requests"),
    Condition("prefix-cache hit", "phase", _SAMPLED, _replay(**_LONGEST, prefix_cache="warm"), requires="prefix_cache", happened="cached_tokens"),
    Condition("contexts to 8k, decode against prefill", "phase", _generate("long"), Probe("rollout", "score", **_LONG_DECODE)),
    Condition("contexts to 8k, chunked off the 128 grid", "phase", _generate("long"), _replay(**_LONG_DECODE, chunk="off grid"),
              happened="prefill_chunks", more_than="requests"),
    Condition("contexts to 8k alone", "batch", _generate("long"), _replay(**_LONG_DECODE, together=1)),
    Condition("contexts to 8k against training", "engine", _generate("long"), _forward(requests="long", micro_batch=1)),
    Condition("padded against packed training batches", "engine", _LOSS, _forward(**_first(24, 48), layout="padded", micro_batch=8)),
    Condition("training micro-batches of 1", "engine", _LOSS, _forward(**_first(24, 48), layout="alone", micro_batch=1)),
    Condition("training without gradients", "engine", _LOSS, _forward(**_first(48, 64))),
    Condition("training against evaluation mode", "engine", _LOSS, _forward(**_first(24, 48), mode="eval")),
    *_UPDATES,
    Condition("temperature 0.7, raw", "engine", _generate("cool raw"), _forward(requests="cool raw")),
    Condition("temperature 0.7, processed", "engine", _generate("cool processed", processed=True),
              _forward(requests="cool processed", temperature=0.7)),
)

_MEASURED = _first(12, 32)
_BOUNDARIES = (1, 16, 64, SCAN_CHUNK, 256)

SLICE_FULL = Matrix(
    sets={
        "main": RequestSet(300, 176, _BOUNDARIES, fill=(3, 300)),
        "batches": RequestSet(512, 8, fill=(2, 40)),
        "nine and ten": RequestSet(48, 32, fill=(9, 10)),
        "one token": RequestSet(48, 32, fill=(1, 1)),
        "long": RequestSet(6, 48, (4096,), fill=(6000, 8190)),
        "cool raw": RequestSet(24, 24, temperature=0.7),
        "cool processed": RequestSet(24, 24, temperature=0.7),
    },
    sampled=_SAMPLED,
    loss=_LOSS,
    conditions=_SLICE_CONDITIONS,
    controls=_CONTROLS,
    accuracy=Accuracy(Probe("reference", "forward", **_MEASURED, layout="alone", micro_batch=1, mode="eval", grad=False),
                      Probe("stock rollout", "replay", **_MEASURED), _SAMPLED),
    timing=Timing(pairs=5, requests=256, prompt_tokens=64, new_tokens=128),
    least_tokens=50_000,
)

SLICE_QUICK = Matrix(
    sets={"main": RequestSet(64, 64, _BOUNDARIES, fill=(3, 300)), "nine and ten": RequestSet(32, 16, fill=(9, 10))},
    sampled=_SAMPLED,
    loss=_LOSS,
    conditions=(*_CORE, _JOINING[0], *(_batch_of(size, "main") for size in (7, 45))),
    controls=_CONTROLS,
    accuracy=None,
    timing=None,
    least_tokens=4000,
)

FULL_FULL = Matrix(
    sets={"main": RequestSet(128, 160, _BOUNDARIES, fill=(3, 300)), "nine and ten": RequestSet(32, 16, fill=(9, 10))},
    sampled=_SAMPLED,
    loss=_LOSS,
    conditions=(
        Condition("same process twice", "determinism", _SAMPLED, _replay(**_first(128, 64))),
        Condition("new process", "determinism", _SAMPLED, Probe("second rollout", "replay", **_first(64, 48))),
        *_CORE, _JOINING[0], *(_batch_of(size, "main") for size in (1, 8, 44, 45, 128)),
        Condition("training against evaluation mode", "engine", _LOSS, _forward(**_first(24, 48), mode="eval")),
        *_UPDATES),
    controls=_CONTROLS,
    accuracy=None,
    timing=Timing(pairs=3, requests=256, prompt_tokens=64, new_tokens=512),
    least_tokens=20_000,
)

FULL_QUICK = Matrix(
    sets={"main": RequestSet(32, 48, _BOUNDARIES, fill=(3, 300))},
    sampled=_SAMPLED,
    loss=_LOSS,
    conditions=_CORE,
    controls=_CONTROLS,
    accuracy=None,
    timing=None,
    least_tokens=1500,
)

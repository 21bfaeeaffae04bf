"""Which processes a verify starts, with which settings, in which order and how many at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from agent.device import LARGEST_SHARE, Setup
from agent.session import Engine, Job
from consistency.conditions import VARIANTS, Process
from consistency.contract import Contract
from consistency.models.catalog import FAMILIES

ENGINES: dict[Process, Engine] = {"rollout": "rollout", "second rollout": "rollout", "stock rollout": "rollout", "training": "training",
                                  "reference": "training", **dict.fromkeys(VARIANTS, "rollout")}
TIMED: tuple[Process, Process] = ("stock rollout", "second rollout")
STAY: tuple[Process, ...] = (*TIMED, "training")
"""Processes that live until the throughput is measured: training then scores what the timed runs answered."""
ON_CPU: tuple[Process, ...] = ("rollout", "training", "stock rollout", "second rollout", "reference")
TOGETHER: tuple[Process, ...] = ("rollout", "training", *VARIANTS, "reference", *TIMED)
"""The order on a GPU: those that stay come last, when the others have left the memory to them."""
APART: tuple[Process, ...] = ("rollout", "stock rollout", "second rollout", *VARIANTS, "reference", "training")
"""The order where the timed engines do not fit the device together: training comes last, since it also scores what they answered."""

_PAGES = ("beside the Mamba2 state the exact rollout keeps the inputs of an unfinished chunk; it needs larger pages, and vLLM gives attention "
          "pages of the same size")
_ROOM = "how many blocks fit follows from the size of a page and from the memory that is free at the start; both arms hold every timed request"
EXPLAINED: dict[str, str] = {
    "num_blocks": _ROOM, "live.cache_config.kv_cache_max_concurrency": _ROOM, "live.cache_config.kv_cache_size_tokens": _ROOM,
    "block_size": _PAGES, **{f"live.cache_config.{name}": _PAGES for name in (
        "block_size", "mamba_block_size", "mamba_page_size_padded", "hash_block_size", "effective_attention_block_size",
        "cache_hit_alignment_tokens")}}
"""On a GPU: paths of the resolved configuration in which stock and candidate may differ besides the contract, and why; each is in the verdict."""


class Roster:
    """The processes of one verify."""

    def __init__(self, setup: Setup, contract: Contract, kernels: Path | None, checkpoint: Path, timed: bool) -> None:
        """timed: this level measures throughput, so that some processes stay until then."""
        self.setup, self.contract, self.kernels, self.checkpoint, self.timed = setup, contract, kernels, checkpoint, timed
        beside_training = max(self._need("rollout"), self._need("reference"))
        self.apart = timed and not (self._fits(sum(map(self._need, STAY))) and self._fits(self._need("training") + beside_training))
        """the timed processes do not fit the device together: each is timed while it is there alone"""

    def order(self, planned: Collection[Process]) -> list[Process]:
        if self.setup.device == "cpu":
            return [process for process in ON_CPU if process in planned]
        both = not self.apart and self._fits(self._need("rollout") + self._need("training"))
        return [process for process in (TOGETHER if both else APART) if process in planned]

    def stays(self, process: Process) -> bool:
        """Whether the process is needed after its last probe."""
        return self.timed and (process == "training" if self.apart else process in STAY)

    def room(self, process: Process, alive: Iterable[Process]) -> bool:
        """Whether the device has memory for one more process."""
        return self._fits(sum(map(self._need, alive)) + self._need(process))

    def job(self, process: Process) -> Job:
        """Kernels of the candidate go into the candidate's processes only."""
        contract, kernels = self.contract, self.kernels
        if process == "stock rollout":
            contract, kernels = Contract(), None
        elif process == "reference":
            operators = FAMILIES[self.setup.family.name].operators_at(self.setup.scale)
            contract, kernels = Contract(training=dict.fromkeys(operators, "reference")), None
        if ENGINES[process] == "rollout":
            settings = self.setup.rollout(plugin=process != "stock rollout", **VARIANTS.get(process, {}))
        else:
            settings = self.setup.training(**({"dtype": "float32"} if process == "reference" else {}))
        return Job(ENGINES[process], self.setup.family.name, self.checkpoint, contract, kernels, settings)

    def session(self, process: Process) -> dict[str, Any]:
        """Keyword arguments of the process's Session."""
        return self.setup.session(None if process in ("stock rollout", "reference") else self.kernels)

    def _need(self, process: Process) -> float:
        need = self.setup.need
        if need is None:
            return 0.0
        if ENGINES[process] == "rollout":
            return need.rollout
        return need.training_forward + need.weights if process == "reference" else need.training if self.setup.gradients else need.training_forward

    def _fits(self, gib: float) -> bool:
        return self.setup.gpu is None or gib + self.setup.sizes.headroom_gib <= LARGEST_SHARE * self.setup.gpu.total_gib


def without_explained(stock: Mapping[str, Any], candidate: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Two resolved configurations without the explained paths in which they differ, and a line about each of those."""
    left, right, lines = dict(stock), dict(candidate), []
    for path, reason in EXPLAINED.items():
        values = [_at(arm, path) for arm in (left, right)]
        if values[0] != values[1]:
            lines.append(f"{path}: {values[0]} -> {values[1]}: {reason}")
            left, right = _cut(left, path.split(".")), _cut(right, path.split("."))
    return left, right, lines


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def _cut(config: Mapping[str, Any], path: list[str]) -> dict[str, Any]:
    kept = dict(config)
    if len(path) == 1:
        kept.pop(path[0], None)
    elif isinstance(kept.get(path[0]), Mapping):
        kept[path[0]] = _cut(kept[path[0]], path[1:])
    return kept

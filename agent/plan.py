"""From a probe, which is data, to the step that a job understands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent.draw import Prompt
from agent.model_facts import ModelFacts
from consistency.conditions import Condition, Matrix, Probe, Process, RequestSet, Select

GRID = 64
"""Prefill chunk of a model without a scan; with one, the next multiple of the scan's chunk."""


def selected(prompts: Sequence[Prompt], select: Select, count: int = 0) -> list[int]:
    """Indices of the chosen requests, ascending."""
    everything = range(len(prompts))
    if select == "first":
        return list(everything[:count])
    if select == "longest":
        return sorted(sorted(everything, key=lambda i: -len(prompts[i].tokens))[:count])
    if select == "boundary":
        return [i for i in everything if prompts[i].boundary]
    return list(everything)


def covered(probe: Probe, prompts: Sequence[Prompt], sampled: dict[int, list[int]]) -> dict[int, list[int]]:
    """Request -> those of its sampled tokens that the probe covers, in the order in which the step lists the requests."""
    chosen = selected(prompts, probe.select, probe.count)
    if probe.by_length:
        chosen.sort(key=lambda i: len(prompts[i].tokens))
    return {i: sampled[i][: probe.tokens] for i in chosen}


def chunk_tokens(name: str, model: ModelFacts) -> int:
    """Prefill tokens per step: a multiple of the scan's chunk, or clearly none."""
    scan = model.scan_chunk or GRID
    grid = -(-GRID // scan) * scan
    return grid if name == "on grid" else grid - scan // 2 - 1


def generate_step(probe: Probe, prompts: Sequence[Prompt], wanted: RequestSet, seed: int) -> dict[str, Any]:
    return {"kind": "generate", "requests": [{"prompt": prompt.tokens} for prompt in prompts], "max_tokens": wanted.new_tokens, "seed": seed,
            "temperature": wanted.temperature, **_fields(probe)}


def scoring_step(probe: Probe, prompts: Sequence[Prompt], tokens: dict[int, list[int]], model: ModelFacts) -> dict[str, Any]:
    """A replay, score or forward of `tokens`, as `covered` gives them."""
    step = {"kind": probe.step, "requests": [{"prompt": prompts[i].tokens, "tokens": sampled} for i, sampled in tokens.items()],
            **_fields(probe)}
    if probe.chunk is not None:
        step["chunk"] = chunk_tokens(probe.chunk, model)
    if probe.together is not None:
        step["groups"] = [list(range(start, min(start + probe.together, len(tokens)))) for start in range(0, len(tokens), probe.together)]
    return step


def _fields(probe: Probe) -> dict[str, Any]:
    """What goes into a step under the probe's own name."""
    names = ("preempt_every", "stagger", "prefix_cache", "temperature", "processed", "layout", "micro_batch", "mode", "grad")
    return {name: value for name in names if (value := getattr(probe, name)) is not None}


def probes(matrix: Matrix, conditions: Sequence[Condition]) -> dict[Process, list[Probe]]:
    """Process -> its probes, each once, in an order in which the weights are moved once and reloaded once."""
    wanted = [probe for c in conditions for probe in (c.left, c.right)]
    wanted += [probe for control in matrix.controls for probe in (control.before, control.after)]
    if matrix.accuracy:
        wanted += [matrix.accuracy.reference, matrix.accuracy.stock, matrix.accuracy.candidate]
    states = ("loaded", "updated", "reloaded")
    order = sorted(dict.fromkeys(wanted), key=lambda p: (states.index(p.weights), p.step != "generate"))
    found: dict[Process, list[Probe]] = {}
    for probe in order:
        found.setdefault(probe.process, []).append(probe)
    return found

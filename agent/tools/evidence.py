"""Writes what two traces recorded around a divergence as a case folder that `consistency.repro` can run again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from agent.tools.traces import ABSENT, Comparison, Trace
from consistency.repro.calls import Call, place

_CODES = {"<u2": "BF16", "<f4": "F32", "<f8": "F64", "<i8": "I64", "<i4": "I32", "|b1": "BOOL", "|u1": "U8"}


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file; uint16 arrays are bfloat16 bits, as `agent.arrays.read` gives them.

    Written by hand because the library's numpy side has no bfloat16.
    """
    header, blocks, end = {}, [], 0
    for name, array in tensors.items():
        block = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": _CODES[array.dtype.str], "shape": list(array.shape), "data_offsets": [end, end + len(block)]}
        blocks.append(block)
        end += len(block)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *blocks]))


def spans(trace: Trace, key: str, layer: int, lengths: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """The calls that computed a site's rows: per call, (request, first position, one past the last) in batch order."""
    where = place(key, layer)
    step, slot = trace.places[where if where in trace.places else "row"]
    computed = np.flatnonzero((trace.prints[key] != ABSENT) & (step != ABSENT))
    computed = computed[np.lexsort((slot[computed], step[computed]))]
    request = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    calls: list[list[tuple[int, int, int]]] = []
    last = None
    for row in computed.tolist():
        r, p = int(request[row]), int(position[row])
        if last is None or step[row] != step[last]:
            calls.append([(r, p, p + 1)])
        elif request[last] == r and calls[-1][-1][2] == p and slot[row] == slot[last] + 1:
            calls[-1][-1] = (r, calls[-1][-1][1], p + 1)
        else:
            calls[-1].append((r, p, p + 1))
        last = row
    return calls


def write_case(directory: Path, family: str, device: str, call: Call, found: Comparison, requests: Sequence[dict],
               parameters: Sequence[Mapping[str, np.ndarray]], implementations: Sequence[str]) -> bool:
    """Writes case.json and inputs.safetensors. False if the traces did not dump what the call needs.

    parameters: per side, canonical name -> array. implementations: per side, the operator's name in the contract.
    """
    site = found.first
    assert site is not None
    lengths = [len(r["prompt"]) + len(r["tokens"]) for r in requests]
    tensors: dict[str, np.ndarray] = {}
    shapes: dict[str, list[int]] = {}
    for name, argument in call.arguments.items():
        if argument.site == "tokens":
            tensors["input/ids"] = np.concatenate([np.asarray(r["prompt"] + r["tokens"], np.int64) for r in requests])
            continue
        halves = [trace.dump(argument.site) for trace in (found.left, found.right)]
        if halves[0] is None or halves[1] is None:
            return False
        # A row that the left side did not compute (its last token, rows read from a cache) comes from the right one.
        absent = found.left.prints[argument.site] == ABSENT
        rows = np.where(absent[:, None], halves[1], halves[0])
        columns = slice(*argument.columns) if argument.columns else slice(None)
        tensors[f"input/{name}"], shapes[name] = rows[:, columns], list(argument.shape)
    for side, trace in enumerate((found.left, found.right)):
        output = trace.dump(site.key)
        if output is None:
            return False
        tensors[f"output@{side}"] = output
    for name, parameter in call.parameters.items():
        first, second = parameters[0][parameter], parameters[1][parameter]
        tensors[f"parameter/{name}"] = first
        if first.tobytes() != second.tobytes():
            tensors[f"parameter@1/{name}"] = second.reshape(first.shape) if first.size == second.size else second
    executions = [{
        "engine": trace.run.engine, "label": f"{trace.run.engine}, {trace.run.label}", "implementation": implementations[side],
        "steps": spans(trace, site.key, site.layer, lengths), "layout": dict(trace.run.options).get("layout", "padded")
        if trace.run.engine == "training" else None, "weights": trace.run.weights} for side, trace in enumerate((found.left, found.right))]
    for execution in executions:
        execution["layout"] = "packed" if execution["layout"] == "alone" else execution["layout"]
    directory.mkdir(parents=True, exist_ok=True)
    save(directory / "inputs.safetensors", tensors)
    (directory / "case.json").write_text(json.dumps({
        "family": family, "device": device, "operator": site.operator, "site": site.key, "output": call.output, "lengths": lengths, "shapes": shapes,
        "constants": call.constants, "executions": executions}), encoding="utf-8")
    return True

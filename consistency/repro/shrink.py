"""Cuts a case down until nothing can be left out: requests, tokens, rows, then heads, groups or columns where the operator allows it.

Delta debugging (Zeller and Hildebrandt 2002, ddmin) with one question: do the two sides still differ?
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from consistency.repro.calls import STATEFUL
from consistency.repro.case import Case

Test = Callable[[Case], bool]
BLOCK = 32
"""columns that go together: vLLM's CPU kernels take widths in multiples of this"""
SECONDS = 20.0


def ddmin(items: Sequence[int], still: Callable[[list[int]], bool]) -> list[int]:
    """A subset for which `still` holds and from which no single item can be taken; it holds for all of them."""
    kept, pieces = list(items), 2
    while len(kept) > 1:
        size = -(-len(kept) // pieces)
        for start in range(0, len(kept), size):
            part = kept[start:start + size]
            rest = kept[:start] + kept[start + size:]
            if len(part) < len(kept) and still(part):
                kept, pieces = part, 2
                break
            if rest and still(rest):
                kept, pieces = rest, max(pieces - 1, 2)
                break
        else:
            if size == 1:
                break
            pieces = min(pieces * 2, len(kept))
    return kept


def shrink(case: Case, differs: Test, seconds: float = SECONDS) -> Case:
    """The smallest case found; `differs(case)` holds for the given one and for the result. An exception inside counts as no.

    Stops early, with a valid but larger case, after `seconds`.
    """
    deadline = time.monotonic() + seconds

    def still(candidate: Case) -> bool:
        if time.monotonic() > deadline:
            return False
        try:
            return differs(candidate)
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return False

    case = replace(case, tensors={n: t for n, t in case.tensors.items() if not n.startswith("output")})
    before = -1
    while before != (before := _size(case)):
        case = case.subset(ddmin(range(len(case.lengths)), lambda keep, c=case: still(c.subset(keep))))
        case = _cut_tokens(case, still)
        if case.operator not in STATEFUL and max(case.lengths) > 1 and still(rows := _to_rows(case)):
            case = rows
            case = case.subset(ddmin(range(len(case.lengths)), lambda keep, c=case: still(c.subset(keep))))
        for axis in _AXES.get(case.operator, ()):
            count = axis.count(case)
            kept = ddmin(range(count), lambda keep, c=case, a=axis: still(a.keep(c, sorted(keep))))
            if len(kept) < count:
                case = axis.keep(case, sorted(kept))
    return case


def _size(case: Case) -> int:
    return sum(t.numel() for t in case.tensors.values()) + sum(len(step) for e in case.executions for step in e.steps)


def _cut_tokens(case: Case, still: Test) -> Case:
    """Shortens each request from its end, then from its start, by ever smaller steps."""
    for request in range(len(case.lengths)):
        for from_end in (True, False):
            step = case.lengths[request] // 2
            while step:
                length = case.lengths[request]
                if step < length and still(shorter := _cut(case, request, 0 if from_end else step, length - step if from_end else length)):
                    case = shorter
                else:
                    step //= 2
    return case


def _cut(case: Case, request: int, start: int, stop: int) -> Case:
    """One request reduced to a part of its tokens."""
    length, offset, total = case.lengths[request], case.offsets[request], sum(case.lengths)
    rows = torch.cat([torch.arange(offset), torch.arange(offset + start, offset + stop), torch.arange(offset + length, total)])
    executions = []
    for execution in case.executions:
        steps = []
        for step in execution.steps:
            spans = [(r, a, b) if r != request else (r, max(a, start) - start, min(b, stop) - start) for r, a, b in step]
            steps.append([(r, a, b) for r, a, b in spans if a < b])
        executions.append(replace(execution, steps=[step for step in steps if step]))
    lengths = [stop - start if i == request else n for i, n in enumerate(case.lengths)]
    tensors = {n: t if n.startswith("parameter") else t[rows] for n, t in case.tensors.items()}
    if case.operator == "rotary" and "input/positions" not in tensors:
        tensors["input/positions"] = torch.cat([torch.arange(n) for n in case.lengths])[rows]
    return replace(case, lengths=lengths, executions=executions, tensors=tensors)


def _to_rows(case: Case) -> Case:
    """Every row a request of its own, in the same calls; padding rows are gone. For operators whose rows do not look at each other."""
    executions = []
    for execution in case.executions:
        steps = [[(int(row), 0, 1) for row in case.rows(step)] for step in execution.steps]
        executions.append(replace(execution, steps=steps, layout=None if execution.layout is None else "packed"))
    tensors = dict(case.tensors)
    if case.operator == "rotary" and "input/positions" not in tensors:
        tensors["input/positions"] = torch.cat([torch.arange(n) for n in case.lengths])
    return replace(case, lengths=[1] * sum(case.lengths), executions=executions, tensors=tensors)


class _Axis:
    """A dimension of an operator's tensors from which parts can be left out together."""

    def __init__(self, counted: str, picks: dict[str, int], block: int = BLOCK) -> None:
        """counted: tensor whose axis is counted in blocks; picks: tensor -> its axis that is cut along (0 is the first axis of a row, or of a
        parameter), each into as many equal parts."""
        self.counted, self.picks, self.block = counted, picks, block

    def count(self, case: Case) -> int:
        return max(1, self._length(case, self.counted) // self.block)

    def _length(self, case: Case, name: str) -> int:
        return self._shape(case, name)[self.picks[name]]

    @staticmethod
    def _shape(case: Case, name: str) -> list[int]:
        kind, _, argument = name.partition("/")
        if kind == "input":
            return case.shapes.get(argument) or list(case.tensors[name].shape[1:])
        return list(case.tensors[name].shape)

    def keep(self, case: Case, blocks: list[int]) -> Case:
        total = self.count(case)
        tensors, shapes, constants = dict(case.tensors), dict(case.shapes), dict(case.constants)
        for name, axis in self.picks.items():
            for actual in {name, name.replace("parameter/", "parameter@1/")} & tensors.keys():
                shape = self._shape(case, actual)
                per = shape[axis] // total
                index = torch.cat([torch.arange(b * per, (b + 1) * per) for b in blocks])
                kind, _, argument = actual.partition("/")
                if kind == "input":
                    value = tensors[actual].view(-1, *shape).index_select(axis + 1, index)
                    if shapes.get(argument):
                        shapes[argument] = list(value.shape[1:])
                    tensors[actual] = value.flatten(1)
                else:
                    tensors[actual] = tensors[actual].index_select(axis, index)
                if argument == "weight" and "parts" in constants and axis == 0:
                    edges = torch.tensor(constants["parts"]).cumsum(0)
                    part = torch.bucketize(index, edges, right=True)
                    constants["parts"] = [n for n in torch.bincount(part, minlength=len(edges)).tolist() if n]
        if "groups" in constants and case.operator == "gated_rms_norm":
            constants["groups"] = constants["groups"] * len(blocks) // total
        return replace(case, tensors=tensors, shapes=shapes, constants=constants)


class _Norm(_Axis):
    """Columns of a norm: of the last axis of its rows, whether they are flat or split into heads."""

    def __init__(self) -> None:
        super().__init__("parameter/weight", {"parameter/weight": 0})

    def keep(self, case: Case, blocks: list[int]) -> Case:
        last = len(case.shapes.get("x") or [0]) - 1
        return _Axis("parameter/weight", {"parameter/weight": 0, "input/x": last, "input/residual": last}).keep(case, blocks)


class _Heads(_Axis):
    """Heads in front of a row's columns; flat rows have none."""

    def count(self, case: Case) -> int:
        return super().count(case) if case.shapes.get(self.counted.partition("/")[2]) else 1


class _Groups(_Axis):
    """Groups of a gated norm."""

    def __init__(self) -> None:
        super().__init__("parameter/weight", {"parameter/weight": 0, "input/x": 0, "input/gate": 0})

    def count(self, case: Case) -> int:
        return case.constants["groups"]


_AXES: dict[str, tuple[_Axis, ...]] = {
    "rms_norm": (_Heads("input/x", {"input/x": 0}, 1), _Norm()),
    "linear": (_Axis("parameter/weight", {"parameter/weight": 0}), _Axis("input/x", {"input/x": 0, "parameter/weight": 1})),
    "rotary": (_Axis("input/q", {"input/q": 0}, 1), _Axis("input/k", {"input/k": 0}, 1)),
    "attention": (_Axis("input/k", {"input/k": 0, "input/v": 0, "input/q": 0}, 1),),
    "relu_squared": (_Axis("input/x", {"input/x": 0}, 1),),
    "causal_conv1d": (_Axis("input/x", {"input/x": 0, "parameter/weight": 0, "parameter/bias": 0}),),
    "mamba2_scan": (_Axis("input/B", {"input/B": 0, "input/C": 0, "input/x": 0, "input/dt": 0, "parameter/A": 0, "parameter/D": 0,
                                      "parameter/dt_bias": 0}, 1),),
    "gated_rms_norm": (_Groups(),),
    "log_softmax": (_Axis("input/logits", {"input/logits": 0}),),
}

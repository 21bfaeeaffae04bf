"""The self-test's judgement of one operator, on operators that keep their bits and on some that do not."""

import itertools

import pytest
import torch

from consistency import selftest
from consistency.operators.cuda.case import Case, Inputs

CALLS = itertools.count()


def by_row(x, weight):
    return torch.stack([(row * weight).sum(-1, keepdim=True) for row in x])


def by_batch(x, weight):
    """Small batches are added up in another order, as a kernel with a split would."""
    halves = (x * weight)[:, : x.shape[1] // 2].sum(-1, keepdim=True) + (x * weight)[:, x.shape[1] // 2 :].sum(-1, keepdim=True)
    return halves if len(x) < 16 else by_row(x, weight)


def by_turn(x, weight):
    return by_row(x, weight) + next(CALLS) * 1e-6


def case(function, **more):
    def inputs(rows, generator):
        return Inputs((torch.randn(rows, 257, generator=generator),), (torch.randn(257, generator=generator),))

    return Case("linear", "257", ("qwen3",), inputs, function, by_row, **more)


@pytest.mark.parametrize(("function", "more", "said"), [
    (by_row, {}, {"equal": True, "rows_that_differ": [], "twice": True}),
    (by_row, {"most_rows": 8}, {"equal": True, "rows_that_differ": []}),
    (by_batch, {}, {"equal": False, "rows_that_differ": [1, 2, 7, 8, 9], "twice": True}),
    (by_turn, {}, {"equal": False, "twice": False}),
    (by_row, {"phases": lambda: {"decode": (4, 4), "chunks": (3, 4)}}, {"equal": False, "phases": 2, "phases_that_differ": ["chunks"]})])
def test_one_operator(function, more, said):
    found = selftest.examine(case(function, **more), "cpu")
    assert found | said == found


def broken(x, weight):
    raise RuntimeError("no kernel for this device")


def test_a_family(monkeypatch):
    monkeypatch.setattr(selftest, "cases", lambda family: [case(by_row), case(broken)])
    found = selftest.selftest("qwen3", 60.0, "cpu")
    assert not found["equal"] and [c["equal"] for c in found["cases"]] == [True, False]
    assert found["cases"][1]["error"] == "RuntimeError: no kernel for this device"
    monkeypatch.setattr(selftest, "cases", lambda family: [case(by_row)])
    assert selftest.selftest("qwen3", 60.0, "cpu")["equal"]
    late = selftest.selftest("qwen3", -1.0, "cpu")
    assert late["left_out"] == ["linear 257"] and not late["equal"]

"""Causes named from synthetic cases, without an engine: the same faulty operators, random inputs."""

import pytest
import torch

from consistency.analysis import explain, numbers
from consistency.repro.case import Case, Execution
from consistency.repro.compare import Functions
from consistency.repro.run import run
from tests.faults.table import KERNELS

LENGTHS = [40, 7, 23]
R = sum(LENGTHS)
HEADS, GROUPS, DIM, STATE = 4, 2, 16, 8


def bf16(*shape, scale=1.0):
    return (torch.randn(*shape) * scale).bfloat16()


def tensors(operator):
    """(inputs, shapes of one row, parameters, constants)."""
    torch.manual_seed(1)
    flat: dict = {"rms_norm": ({"x": bf16(R, 64), "residual": bf16(R, 64)}, {"weight": bf16(64)}, {"eps": 1e-6}),
                  "linear": ({"x": bf16(R, 128)}, {"weight": bf16(64, 128, scale=0.1)}, {}),
                  "silu_and_mul": ({"x": bf16(R, 128)}, {}, {}),
                  "relu_squared": ({"x": bf16(R, 64)}, {}, {}),
                  "gated_rms_norm": ({"x": bf16(R, 64), "gate": bf16(R, 64)}, {"weight": bf16(64)}, {"eps": 1e-5, "groups": GROUPS}),
                  "causal_conv1d": ({"x": bf16(R, 64)}, {"weight": bf16(64, 4), "bias": bf16(64)}, {}),
                  "log_softmax": ({"logits": bf16(R, 512, scale=3.0)}, {}, {})}
    if operator in flat:
        return flat[operator][0], {name: [] for name in flat[operator][0]}, *flat[operator][1:]
    heads = {"q": [HEADS, 32], "k": [GROUPS, 32], "v": [GROUPS, 32]}
    if operator in ("attention", "rotary"):
        shapes = heads if operator == "attention" else {n: s for n, s in heads.items() if n != "v"}
        constants = {"scale": 32 ** -0.5} if operator == "attention" else {"theta": 1e4, "max_positions": 128}
        return {n: bf16(R, a * b) for n, (a, b) in shapes.items()}, shapes, {}, constants
    shapes = {"x": [HEADS, DIM], "dt": [], "B": [GROUPS, STATE], "C": [GROUPS, STATE]}
    inputs = {"x": bf16(R, HEADS * DIM), "dt": bf16(R, HEADS), "B": bf16(R, GROUPS * STATE), "C": bf16(R, GROUPS * STATE)}
    return inputs, shapes, {"A": -torch.rand(HEADS) - 0.1, "D": bf16(HEADS), "dt_bias": bf16(HEADS)}, {"chunk": 32, "dt_minimum": 0.0}


def case_of(operator, left, right, steps=None):
    inputs, shapes, parameters, constants = tensors(operator)
    together = [[(i, 0, n) for i, n in enumerate(LENGTHS)]]
    executions = [Execution("training", f"side {i}", name, (steps or {}).get(i, together), "packed") for i, name in enumerate((left, right))]
    case = Case("qwen3", operator, "000.site", 0, LENGTHS, shapes, constants, executions,
                {**{f"input/{n}": t for n, t in inputs.items()}, **{f"parameter/{n}": t for n, t in parameters.items()}})
    functions = Functions(KERNELS)
    for side in (0, 1):
        case.tensors[f"output@{side}"] = run(case, side, functions.of(case, side))
    return case


@pytest.mark.parametrize(("operator", "kernel", "cause", "words"), [
    ("rms_norm", "norms.weight_before_cast", "extra rounding", "rounded once, after the weight"),
    ("rms_norm", "norms.sum_rounded_first", "extra rounding", "residual sum is rounded"),
    ("gated_rms_norm", "norms.gate_rounded", "extra rounding", "the gate is rounded"),
    ("gated_rms_norm", "norms.one_group", "semantics", "one group"),
    ("silu_and_mul", "norms.silu_kept_wide", "extra rounding", "silu is not rounded"),
    ("relu_squared", "norms.relu_left_out", "semantics", "without relu"),
    ("linear", "linears.partial_sums_rounded", "extra rounding", "2 partial sums"),
    ("mamba2_scan", "sequences.scan_rate_in_bf16", "extra rounding", "decay rate"),
    ("mamba2_scan", "sequences.scan_bias_added_in_bf16", "extra rounding", "dt with its bias"),
    ("mamba2_scan", "sequences.scan_dt_clamped", "semantics", "clamped from below at 0.1"),
    ("mamba2_scan", "sequences.scan_without_skip", "semantics", "D skip"),
    ("attention", "sequences.attention_sees_next_token", "semantics", "see the next one"),
    ("attention", "sequences.attention_unscaled", "semantics", "not scaled"),
    ("rotary", "sequences.rotary_one_late", "semantics", "off by -1"),
    ("rotary", "sequences.rotary_products_rounded", "extra rounding", "each product"),
    ("log_softmax", "heads.temperature", "semantics", "temperature 0.7"),
    ("log_softmax", "heads.top_p_renormalised", "semantics", "normalised again"),
    ("log_softmax", "heads.one_position_late", "semantics", "position -1"),
    ("log_softmax", "heads.by_logsumexp", "reduction order", "logsumexp"),
    ("log_softmax", "heads.rounded_result", "extra rounding", "result is rounded"),
])
def test_the_cause_is_named_and_the_side_too(operator, kernel, cause, words):
    found = explain(case_of(operator, "exact", f"kernels:{kernel}"))
    assert (found["cause"], found["deviating"]) == (cause, 1), found["detail"]
    assert words in found["detail"]
    assert 0 < found["differing"] <= found["elements"]
    mirrored = explain(case_of(operator, f"kernels:{kernel}", "exact"))
    assert (mirrored["cause"], mirrored["deviating"]) == (cause, 0), mirrored["detail"]


def test_a_sum_that_depends_on_the_rows_of_the_call_is_a_reduction_order():
    alone = [[(i, p, p + 1)] for i, n in enumerate(LENGTHS) for p in range(n)]
    found = explain(case_of("linear", "kernels:linears.split_below_32_rows", "kernels:linears.split_below_32_rows", {0: alone}))
    assert found["cause"] == "reduction order"


def test_a_scale_of_the_call_is_another_input():
    alone = [[(i, 0, n)] for i, n in enumerate(LENGTHS)]
    found = explain(case_of("linear", "kernels:linears.scale_of_the_call", "kernels:linears.scale_of_the_call", {0: alone}))
    assert found["cause"] == "other input" and "one scale for the whole call" in found["detail"]


def test_garbage_is_uninitialised_and_other_weights_are_another_input():
    found = explain(case_of("relu_squared", "kernels:norms.rows_left_unwritten", "kernels:norms.rows_left_unwritten"))
    assert found["cause"] == "uninitialised"
    case = case_of("linear", "exact", "exact")
    case.tensors["parameter@1/weight"] = case.tensors["parameter/weight"] * 2
    case.tensors["output@1"] = case.tensors["output@1"] * 2
    assert explain(case)["cause"] == "other input" and "weight" in explain(case)["detail"]


def test_units_in_the_last_place_count_floats_across_zero():
    a = torch.tensor([1.0, -0.0, 2.0 ** -133], dtype=torch.bfloat16)
    b = torch.tensor([1.0078125, 0.0, -(2.0 ** -133)], dtype=torch.bfloat16)
    assert numbers(a, b) == {"elements": 3, "differing": 3, "max_abs": 0.0078125, "max_ulps": 2}
    assert numbers(a, a)["differing"] == 0

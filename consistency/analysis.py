"""Names the cause of a divergence from an operator's inputs and the two outputs.

Two ways, the sharper one first: find formulas that give each side's bits exactly (consistency/variants.py) and say in what they differ; else
measure how each side lies around the fp64 reference. One rounding too many shows in a large share of the elements, another order of a sum
in a small one, another formula or a foreign row by errors far above the rounding.
"""

from __future__ import annotations

import torch

from consistency.layout import Layout
from consistency.operators import catalog
from consistency.repro.case import Case

GROSS_ULPS = 64.0
"""errors above this many units in the last place of the output type are not rounding"""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANTISSA = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23, torch.float64: 52}


def numbers(a: torch.Tensor, b: torch.Tensor) -> dict:
    """elements, differing (by bits), max_abs and max_ulps of two tensors of one dtype."""
    kind = _INTEGERS[a.element_size()]
    x, y = a.contiguous().view(kind).long(), b.contiguous().view(kind).long()
    unequal = x != y
    gap = (a.double() - b.double()).abs()
    return {"elements": a.numel(), "differing": int(unequal.sum()), "max_abs": float(gap.nan_to_num(nan=float("inf")).max()) if a.numel() else 0.0,
            "max_ulps": int((_ordered(x, kind) - _ordered(y, kind)).abs().max()) if a.numel() else 0}


def _ordered(bits: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Bits of floats as integers in the order of the floats."""
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)


def unit(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbouring numbers of a dtype at each value of an fp64 tensor."""
    _, exponent = torch.frexp(value.abs().clamp_min(1e-30))
    return torch.ldexp(torch.ones_like(value), exponent - 1 - _MANTISSA[dtype])


def reference(case: Case, side: int = 0) -> torch.Tensor | None:
    """Output rows in fp64 [R, width] from the traced inputs; rows of whole sequences, so positions count from 0."""
    function = catalog.load(case.operator, "reference", "training")
    layout = Layout.packed(case.lengths)
    take = {n.removeprefix("input/"): case.argument(n.removeprefix("input/")) for n in case.tensors if n.startswith("input/")}
    take = {n: v.double() if v.is_floating_point() else v for n, v in take.items()}
    weights = {n: case.parameter(n, side) for n in ("weight", "bias", "A", "D", "dt_bias")}
    weights = {n: None if v is None else v.double() for n, v in weights.items()}
    c = case.constants
    with torch.no_grad():
        match case.operator:
            case "embedding":
                return function(take["ids"], weights["weight"])
            case "rms_norm":
                return function(take["x"], weights["weight"], c["eps"], take.get("residual"))[case.output].flatten(1)
            case "linear":
                return function(take["x"], weights["weight"])
            case "rotary":
                q, k = function(layout.positions(), take["q"], take["k"], theta=c["theta"], max_positions=c["max_positions"])
                return torch.cat((q.flatten(1), k.flatten(1)), dim=-1)
            case "attention":
                return function(take["q"], take["k"], take["v"], layout, c["scale"]).flatten(1)
            case "silu_and_mul" | "relu_squared":
                return function(take["x"])
            case "causal_conv1d":
                return function(take["x"], weights["weight"].flatten(1), weights["bias"], layout)
            case "mamba2_scan":
                return function(take["x"], take["dt"], weights["A"], take["B"], take["C"], weights["D"], weights["dt_bias"], layout).flatten(1)
            case "gated_rms_norm":
                return function(take["x"], take["gate"], weights["weight"], c["eps"], c["groups"])
            case "log_softmax":
                return function(take["logits"])
    return None


def explain(case: Case) -> dict:
    """The cause of a case's divergence.

    Returns cause, detail, deviating (index of the side that is off, or None), and the numbers. The first execution is the one taken for right.
    """
    rows = case.compared()
    a, b = case.tensors["output@0"], case.tensors["output@1"]
    if a.dtype != b.dtype:
        wide = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(wide), b.to(wide)
    found = numbers(a[rows], b[rows])
    changed = sorted(n.removeprefix("parameter@1/") for n in case.tensors if n.startswith("parameter@1/"))
    if changed:
        return {**found, "cause": "other input", "detail": f"the two sides hold other values of {', '.join(changed)}", "deviating": None}
    from consistency.variants import match

    if (matched := match(case)) is not None:
        return {**found, **matched}
    return {**found, **profile(case, a, b, rows)}


def profile(case: Case, a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> dict:
    """The cause by how each side lies around the fp64 reference."""
    if not bool(torch.isfinite(b[rows].float()).all() & torch.isfinite(a[rows].float()).all()):
        off = 0 if not bool(torch.isfinite(a[rows].float()).all()) else 1
        return {"cause": "uninitialised", "detail": "values that are not finite", "deviating": off}
    exact = reference(case)
    unequal = rows & (a != b).any(-1)
    sides = [_Side(t[rows], exact[rows]) for t in (a, b)]
    errors = [float(s.ulps.max()) for s in sides]
    gross = [e > GROSS_ULPS for e in errors]
    same = case.executions[0].engine == case.executions[1].engine
    if gross[0] != gross[1]:
        off = int(gross[1])
        return {"deviating": off, **_gross(case, (a, b)[off], exact, unequal)}
    if gross[0] and gross[1]:
        return {"cause": "other input", "deviating": None,
                "detail": f"both sides are far from the fp64 reference ({errors[0]:.0f} and {errors[1]:.0f} ulps): a value taken from the whole "
                          "call, such as a dynamic scale, enters each row"}
    shares = [s.misrounded for s in sides]
    off = int(shares[1] >= shares[0])
    text = f"misrounded elements {shares[0]:.2%} against {shares[1]:.2%}"
    if shares[off] > 0.04 and shares[off] > 3 * shares[1 - off]:
        return {"cause": "extra rounding", "detail": f"an intermediate is rounded to {str(a.dtype).removeprefix('torch.')}; {text}", "deviating": off}
    detail = "sums are taken in another order" + (" for another number of rows or tokens per call" if same else "") + f"; {text}"
    return {"cause": "reduction order", "detail": detail, "deviating": None if same else off}


class _Side:
    """How far one side's rows lie from the reference, in units in the last place."""

    def __init__(self, value: torch.Tensor, exact: torch.Tensor) -> None:
        wanted = exact.to(value.dtype)
        # Near zero a sum of large terms has few good digits; errors are measured against the row's scale.
        scale = torch.maximum(exact.abs(), exact.abs().mean(-1, keepdim=True) * 0.05)
        self.ulps = (value.double() - exact).abs() / unit(scale, value.dtype)
        self.misrounded = float((value != wanted).float().mean())


def _gross(case: Case, value: torch.Tensor, exact: torch.Tensor, unequal: torch.Tensor) -> dict:
    """What a side with errors far above rounding computed instead."""
    bad = torch.nonzero(unequal)[:, 0]
    wanted = exact.to(value.dtype)
    # The row of another token: stale or shifted.
    keys = {tuple(r): i for i, r in enumerate(wanted.view(_INTEGERS[wanted.element_size()])[:, :16].tolist())}
    foreign = [keys.get(tuple(r)) for r in value[bad].view(_INTEGERS[value.element_size()])[:, :16].tolist()]
    hits = [(int(i), j) for i, j in zip(bad.tolist(), foreign, strict=True) if j is not None and j != int(i)]
    if len(hits) > len(bad) // 2:
        shifts = {i - j for i, j in hits}
        if len(shifts) == 1:
            return {"cause": "semantics", "detail": f"every row holds the result of the row {-next(iter(shifts)):+d} from it"}
        return {"cause": "stale state", "detail": f"{len(hits)} of {len(bad)} rows hold the result of another row"}
    ratio = value[bad].double() / exact[bad].where(exact[bad].abs() > 1e-6, torch.nan)
    ratio = ratio[torch.isfinite(ratio)]
    if len(ratio) > 8:
        middle = ratio.median()
        spread = (ratio / middle - 1).abs().quantile(0.9) if middle.abs() > 1e-6 else torch.tensor(1.0)
        if spread < 0.02 and (middle - 1).abs() > 0.02:
            return {"cause": "semantics", "detail": f"results are the right ones times {float(middle):.4g}: a scale is missing or applied twice"}
    x, y = value[bad].double().flatten(), exact[bad].flatten()
    correlation = float(torch.corrcoef(torch.stack((x, y)))[0, 1]) if len(x) > 2 and x.std() > 0 else 0.0
    if abs(correlation) < 0.1:
        return {"cause": "uninitialised", "detail": f"values without relation to the inputs (correlation {correlation:.2f})"}
    offsets = case.offsets
    positions = sorted({int(i) - max(o for o in offsets if o <= int(i)) for i in bad.tolist()})
    return {"cause": "semantics", "detail": f"another formula (correlation {correlation:.2f}), first at position {positions[0]}"}

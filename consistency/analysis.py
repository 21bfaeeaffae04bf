"""Names the cause of a divergence from an operator's inputs and the two outputs.

Each side is compared with the forms that the operator can take (consistency/variants.py), computed in fp64 with roundings where the form has
them. Sides of different forms differ by what tells the forms apart: a rounding, a formula, a lost state. Sides of one form differ by the order
of their sums. A side that no form comes close to holds something else: another token's row, another scale, memory that nobody wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from consistency.layout import Layout
from consistency.operators import catalog
from consistency.repro.case import Case
from consistency.variants import Form, forms

GROSS_ULPS = 64.0
"""where the distance to a form is cut off"""
ENOUGH_ROWS = 150
"""unequal rows that are compared with the forms"""
GROSS_FIT = 4.0
"""a mean distance above this many units in the last place is not rounding"""
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
    finite = [bool(torch.isfinite(t[rows].float()).all()) for t in (a, b)]
    if not all(finite) and case.operator != "log_softmax":
        return {**found, "cause": "uninitialised", "detail": "values that are not finite", "deviating": finite.index(False)}
    return {**found, **by_form(case, (a, b), rows)}


@dataclass(frozen=True)
class Fit:
    """How close a side is to a form."""

    form: Form
    far: float
    """mean distance in units in the last place, large ones counted as 64"""
    unequal: float
    """share of elements that differ once the form's last rounding is applied"""


def best_fit(case: Case, side: int, value: torch.Tensor, rows: torch.Tensor) -> tuple[Fit, Fit]:
    """(the form that comes closest to a side's rows, the contract's own form). Another form has to be clearly closer."""
    fits = []
    for form in forms(case, case.executions[side], side):
        wanted = form.rows()[rows]
        fits.append(Fit(form, float(_ulps(value[rows], wanted).clamp(max=GROSS_ULPS).nan_to_num(nan=GROSS_ULPS).mean()),
                        float((value[rows] != form.last(wanted, value.dtype)).float().mean())))
    own = fits[0]
    best = min(fits, key=lambda fit: (fit.far, fit.unequal))
    return (best if best.far < 0.8 * own.far or best.unequal < 0.5 * own.unequal else own), own


Outputs = tuple[torch.Tensor, torch.Tensor]


def _sample(case: Case, outputs: Outputs, rows: torch.Tensor) -> tuple[Case, Outputs, torch.Tensor]:
    """The requests with most unequal rows, as many as a verdict needs: fp64 forms of everything would take seconds."""
    unequal = rows & (outputs[0] != outputs[1]).any(-1)
    counts = {i: int(unequal[o:o + n].sum()) for i, (o, n) in enumerate(zip(case.offsets, case.lengths, strict=True))}
    chosen: list[int] = []
    for i in sorted(counts, key=lambda i: -counts[i]):
        if sum(counts[j] for j in chosen) >= ENOUGH_ROWS or not counts[i]:
            break
        chosen.append(i)
    part = case.subset(chosen)
    index = torch.cat([torch.arange(case.offsets[i], case.offsets[i] + case.lengths[i]) for i in sorted(chosen)])
    return part, (outputs[0][index], outputs[1][index]), rows[index]


def by_form(case: Case, outputs: Outputs, rows: torch.Tensor) -> dict:
    """The cause by the forms that the two sides come closest to; if that is the same form, by how they lie around it."""
    case, outputs, rows = _sample(case, outputs, rows)
    a, b = outputs
    unequal = rows & (a != b).any(-1)
    # Rows that are equal on both sides say nothing about what differs.
    fits = [best_fit(case, side, value, unequal) for side, value in enumerate(outputs)]
    (fit_a, own_a), (fit_b, own_b) = fits
    same_engine = case.executions[0].engine == case.executions[1].engine
    if fit_a.form.label != fit_b.form.label and max(fit_a.far, fit_b.far) < GROSS_FIT:
        off = 0 if fit_a.form.kind and not fit_b.form.kind else 1
        chosen, other = fits[off][0], fits[1 - off][0]
        if chosen.form.kind:
            right = f" (the other: {other.form.label})" if other.form.kind else ""
            return {"cause": chosen.form.kind, "deviating": off, "detail": f"{chosen.form.label}{right}; this form gives "
                    f"{1 - chosen.unequal:.1%} of its elements, the contract's gives {1 - fits[off][1].unequal:.1%}"}
    if max(fit_a.far, fit_b.far) >= GROSS_FIT:
        off = int(fit_b.far >= fit_a.far)
        if min(fit_a.far, fit_b.far) >= GROSS_FIT:
            return {"cause": "other input", "deviating": None, "detail": f"both sides are {fit_a.far:.0f} and {fit_b.far:.0f} ulps from every known "
                    "form: a value from outside the row, such as a scale of the whole call, enters it"}
        return {"deviating": off, **_gross(case, outputs[off], reference(case, off), unequal)}
    detail = "the same form on both sides, sums taken in another order" + (" in another schedule" if same_engine else "")
    return {"cause": "reduction order", "deviating": None if same_engine else int(own_b.unequal >= own_a.unequal),
            "detail": f"{detail}; {fit_a.unequal:.1%} and {fit_b.unequal:.1%} of the elements lie off the form '{fit_a.form.label}'"}


def _ulps(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distance in units in the last place; near zero, in those of the row's scale, because a sum of large terms has few good digits there."""
    scale = torch.maximum(exact.abs(), exact.abs().mean(-1, keepdim=True) * 0.05)
    return (value.double() - exact).abs() / unit(scale, value.dtype)


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

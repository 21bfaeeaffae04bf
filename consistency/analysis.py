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
from consistency.repro.calls import STATEFUL
from consistency.repro.case import Case
from consistency.variants import Form, forms, twins

GROSS_ULPS = 64.0
"""where the distance to a form is cut off"""
OWN_FORM = 0.02
"""with fewer unequal elements a side has the contract's form, whatever else comes close too"""
ENOUGH_ELEMENTS = 3
"""in so many elements two exact formulas have to differ before one of them is taken for the cause"""
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


def unequal_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """bool [R]: rows whose bits differ; the two zeros do."""
    kind = _INTEGERS[a.element_size()]
    return (a.contiguous().view(kind) != b.contiguous().view(kind)).any(-1)


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
    types = [str(t.dtype).removeprefix("torch.") for t in (a, b)]
    wide = torch.promote_types(a.dtype, b.dtype)
    a, b = a.to(wide), b.to(wide)
    found = numbers(a[rows], b[rows])
    if not found["differing"]:
        return {**found, "cause": "unknown", "detail": "the recorded rows are equal", "deviating": None}
    changed = sorted(n.removeprefix("parameter@1/") for n in case.tensors if n.startswith("parameter@1/"))
    if changed:
        return {**found, "cause": "other input", "detail": f"the two sides hold other values of {', '.join(changed)}", "deviating": None}
    if types[0] != types[1]:
        return {**found, "cause": "extra rounding", "detail": f"the first side's result is {types[0]}, the second's {types[1]}", "deviating": None}
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

    @property
    def gross(self) -> bool:
        """Not a matter of rounding. A form with a rounding inside may flip some elements by a whole step and still be the one."""
        return self.far >= GROSS_FIT and self.unequal > 0.5


def best_fit(case: Case, side: int, value: torch.Tensor, rows: torch.Tensor) -> tuple[Fit, Fit]:
    """(the form that comes closest to a side's rows, the contract's own form). Another form has to be clearly closer."""
    fits = []
    for form in forms(case, case.executions[side], side):
        wanted = form.rows()[rows]
        fits.append(Fit(form, float(_ulps(value[rows], wanted).clamp(max=GROSS_ULPS).nan_to_num(nan=GROSS_ULPS).mean()),
                        float((value[rows] != form.last(wanted, value.dtype)).float().mean())))
    own = fits[0]
    best = min(fits, key=lambda fit: (fit.far, fit.unequal))
    if own.unequal < OWN_FORM:
        return own, own
    return (best if best.far < 0.8 * own.far or best.unequal < 0.5 * own.unequal else own), own


Outputs = tuple[torch.Tensor, torch.Tensor]


def _sample(case: Case, outputs: Outputs, rows: torch.Tensor) -> tuple[Case, Outputs, torch.Tensor]:
    """The requests with most unequal rows, as many as a verdict needs: fp64 forms of all sequences would take seconds."""
    if case.operator not in STATEFUL:
        return case, outputs, rows
    unequal = rows & unequal_rows(*outputs)
    counts = {i: int(unequal[o:o + n].sum()) for i, (o, n) in enumerate(zip(case.offsets, case.lengths, strict=True))}
    chosen: list[int] = []
    for i in sorted((i for i, n in counts.items() if n), key=lambda i: -counts[i]):
        if sum(counts[j] for j in chosen) < ENOUGH_ROWS:
            chosen.append(i)
    part = case.subset(chosen)
    index = torch.cat([torch.arange(case.offsets[i], case.offsets[i] + case.lengths[i]) for i in sorted(chosen)])
    return part, (outputs[0][index], outputs[1][index]), rows[index]


def by_form(case: Case, outputs: Outputs, rows: torch.Tensor) -> dict:
    """The cause by the forms that the two sides come closest to; if that is the same form, by how they lie around it."""
    part, sampled, sampled_rows = _sample(case, outputs, rows)
    unequal = sampled_rows & unequal_rows(*sampled)
    # Rows that are equal on both sides say nothing about what differs.
    (fit_a, own_a), (fit_b, own_b) = (best_fit(part, side, value, unequal) for side, value in enumerate(sampled))
    for off, (fit, own, other) in enumerate(((fit_a, own_a, fit_b), (fit_b, own_b, fit_a))):
        if fit.form.kind and own.gross and other.gross and not fit.gross:
            return {"cause": fit.form.kind, "deviating": None, "detail": f"{fit.form.label}: this form gives {1 - fit.unequal:.1%} of the elements "
                    f"of one side ({case.executions[off].label}); the other side is far from every known form"}
    if fit_a.gross or fit_b.gross:
        return _gross(case, outputs, rows & unequal_rows(*outputs), (fit_a, fit_b))
    if fit_a.form.label != fit_b.form.label:
        off = 0 if fit_a.form.kind and not fit_b.form.kind else 1
        chosen, own, other = ((fit_a, own_a, fit_b), (fit_b, own_b, fit_a))[off]
        right = f" (the other: {other.form.label})" if other.form.kind else ""
        return {"cause": chosen.form.kind, "deviating": off, "detail": f"{chosen.form.label}{right}; this form gives {1 - chosen.unequal:.1%} of "
                f"its elements, the contract's gives {1 - own.unequal:.1%}"}
    if fit_a.form.by_call:
        return {"cause": fit_a.form.kind, "deviating": None, "detail": f"{fit_a.form.label}; this form gives {1 - fit_a.unequal:.1%} and "
                f"{1 - fit_b.unequal:.1%} of the elements"}
    return _small(part, sampled, unequal, (fit_a, fit_b))


def _small(case: Case, outputs: Outputs, unequal: torch.Tensor, fits: tuple[Fit, Fit]) -> dict:
    """Two sides of one form: whose arithmetic is known, or who lies further from the form."""
    found = [next(((t, rows) for t in twins(case, side) if torch.equal(rows := t.rows()[unequal].to(value.dtype), value[unequal])), None)
             for side, value in enumerate(outputs)]
    for off in (1, 0):
        if found[off] is None or found[1 - off] is None:
            continue
        (twin, rows), (own, own_rows) = found[off], found[1 - off]
        # A handful of elements can agree with a formula by chance.
        if twin.kind and not own.kind and int((rows != own_rows).sum()) >= ENOUGH_ELEMENTS:
            return {"cause": twin.kind, "deviating": off, "detail": f"{twin.label}; the two formulas give every unequal row bit for bit"}
    same_engine = case.executions[0].engine == case.executions[1].engine
    return {"cause": "reduction order", "deviating": None if same_engine else int(fits[1].unequal >= fits[0].unequal),
            "detail": "the same form on both sides, sums taken in another order" + (" in another schedule" if same_engine else "")
            + f"; {fits[0].unequal:.1%} and {fits[1].unequal:.1%} of the elements lie off the form '{fits[0].form.label}'"}


def _ulps(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Distance in units in the last place; near zero, in those of the row's scale, because a sum of large terms has few good digits there."""
    scale = torch.maximum(exact.abs(), exact.abs().mean(-1, keepdim=True) * 0.05)
    return (value.double() - exact).abs() / unit(scale, value.dtype)


def _gross(case: Case, outputs: Outputs, unequal: torch.Tensor, fits: tuple[Fit, Fit]) -> dict:
    """What a side holds whose errors are far above rounding: another row, a scaled one, a renormalised one, or nothing at all."""
    exact = reference(case)
    bad = torch.nonzero(unequal)[:, 0]
    far = [fit.far for fit in fits]
    sides = sorted((side for side in (1, 0) if fits[side].gross), key=lambda side: -far[side])
    for look in (_shifted, _foreign_row, _scaled, _renormalised, _unrelated):
        for side in sides:
            if (said := look(outputs[side], exact, bad)) is not None:
                return {"deviating": side if len(sides) == 1 else None, **said}
    if len(sides) == 2:
        return {"cause": "other input", "deviating": None, "detail": f"both sides are {far[0]:.0f} and {far[1]:.0f} units in the last place from "
                "every known form: a value from outside the row enters it"}
    first = min(int(i) - max(o for o in case.offsets if o <= int(i)) for i in bad)
    return {"cause": "semantics", "deviating": sides[0], "detail": f"another formula, first at position {first}; the mean distance to every known "
            f"form is {far[sides[0]]:.0f} units in the last place, with 64 as the most that counts"}


def _others(value: torch.Tensor, exact: torch.Tensor, bad: torch.Tensor) -> torch.Tensor | None:
    """int64: how far away the rows are whose results most of the unequal rows hold; None if they hold none."""
    scale = exact.abs().mean()
    probe = exact[:, :64] / scale
    distance = torch.cdist(value[bad][:, :64].double().nan_to_num(neginf=-1e4) / scale, probe)
    nearest = distance.argmin(-1)
    hits = (distance.gather(-1, nearest[:, None])[:, 0] < 0.02 * probe.shape[1] ** 0.5) & (nearest != bad)
    return (nearest - bad)[hits] if float(hits.double().mean()) >= 0.5 else None


def _shifted(value: torch.Tensor, exact: torch.Tensor, bad: torch.Tensor) -> dict | None:
    """Rows that are right, but for the token next to them."""
    shifts = _others(value, exact, bad)
    if shifts is None:
        return None
    found, counts = shifts.unique(return_counts=True)
    if int(counts.max()) < 0.8 * len(bad):
        return None
    shift = int(found[counts.argmax()])
    return {"cause": "semantics", "detail": f"{int(counts.max())} of {len(bad)} unequal rows hold the result of the row {shift:+d} from them"}


def _foreign_row(value: torch.Tensor, exact: torch.Tensor, bad: torch.Tensor) -> dict | None:
    """Rows that are right, but for some other token."""
    shifts = _others(value, exact, bad)
    if shifts is None:
        return None
    return {"cause": "stale state", "detail": f"{len(shifts)} of {len(bad)} unequal rows hold the result of another row"}


def _scaled(value: torch.Tensor, exact: torch.Tensor, bad: torch.Tensor) -> dict | None:
    """Rows that are right up to one factor."""
    x, y = value[bad].double(), exact[bad]
    usable = torch.isfinite(x) & (y.abs() > 0.05 * y.abs().mean())
    if not usable.all(-1).any() and float(usable.double().mean()) < 0.5:
        return None
    ratio = (x / y)[usable]
    middle = ratio.median()
    if len(ratio) < 8 or (ratio - middle).abs().quantile(0.95) > 0.02 * middle.abs() or (middle - 1).abs() < 0.02:
        return None
    return {"cause": "semantics", "detail": f"results are the right ones times {float(middle):.4g}: a scale is missing or applied twice"}


def _renormalised(value: torch.Tensor, exact: torch.Tensor, bad: torch.Tensor) -> dict | None:
    """Log-probabilities from which some tokens were taken out and the rest normalised again."""
    gone = torch.isneginf(value[bad])
    if not gone.any():
        return None
    gap = (value[bad].double() - exact[bad]).masked_fill(gone, torch.nan)
    middle = gap.nanmedian(-1, keepdim=True).values
    if not bool(((gap - middle).abs().nan_to_num(0.0) < 1e-3).all()):
        return None
    return {"cause": "semantics", "detail": f"{float((~gone).double().sum(-1).mean()):.0f} tokens of {gone.shape[1]} are left on average and are "
            f"normalised again, by {float(middle.mean()):.3g} nats: top-p or top-k on one side"}


def _unrelated(value: torch.Tensor, exact: torch.Tensor, bad: torch.Tensor) -> dict | None:
    """Values that have nothing to do with the inputs."""
    x, y = value[bad].double().flatten(), exact[bad].flatten()
    x = x.sign() * x.abs().log1p()
    y = y.sign() * y.abs().log1p()
    correlation = float(torch.corrcoef(torch.stack((x, y)))[0, 1]) if len(x) > 2 and x.std() > 0 and y.std() > 0 else 0.0
    if abs(correlation) > 0.1:
        return None
    return {"cause": "uninitialised", "detail": f"values without relation to the inputs (correlation {correlation:.2f})"}

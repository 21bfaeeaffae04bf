"""Forms that an operator can take: the contract's, and those that differ from it in one known way.

Every form is computed in fp64 with roundings only where the form has them, so it stands for all orders of its sums at once: an implementation of
that form agrees with it in nearly every element, one of another form does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from consistency.repro.case import Case, Execution


@dataclass(frozen=True)
class Form:
    """One way to compute an operator."""

    kind: str
    """cause to name if a side has this form; empty: the contract's own"""
    label: str
    rows: Callable[[], torch.Tensor]
    """output rows in fp64 [R, width], the last rounding left out"""
    by_call: bool = False
    """its rows depend on which rows share a call"""
    truncates: bool = False
    """the last rounding is towards zero, as vLLM's kernels do on processors without bf16 instructions"""

    def last(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The last rounding."""
        if self.truncates and dtype == torch.bfloat16:
            return (rows.float().view(torch.int32) & -0x10000).view(torch.float32).to(dtype)
        return rows.to(dtype)


def forms(case: Case, execution: Execution, side: int) -> Iterator[Form]:
    """The forms of a case's operator, the contract's first; those about state look at where the execution's calls begin."""
    inputs = {n.removeprefix("input/"): case.argument(n.removeprefix("input/")) for n in case.tensors if n.startswith("input/")}
    inputs = {n: v.double() if v.is_floating_point() else v for n, v in inputs.items()}
    names = {n.rpartition("/")[2] for n in case.tensors if n.startswith("parameter")}
    return globals()[f"_{case.operator}"](case, execution, inputs, {n: case.parameter(n, side).double() for n in names})


def r(x: torch.Tensor) -> torch.Tensor:
    """Rounds to bf16, stays fp64."""
    return x.to(torch.bfloat16).double()


def _sequences(case: Case) -> Iterator[slice]:
    for offset, length in zip(case.offsets, case.lengths, strict=True):
        yield slice(offset, offset + length)


def _borders(case: Case, execution: Execution) -> list[list[int]]:
    """Per request, positions above 0 at which a call of more than one token begins."""
    found: list[list[int]] = [[] for _ in case.lengths]
    for step in execution.steps:
        for request, start, stop in step:
            if start and stop - start > 1:
                found[request].append(start)
    return found


def _single(case: Case, execution: Execution) -> list[set[int]]:
    """Per request, positions that are decoded one by one."""
    found: list[set[int]] = [set() for _ in case.lengths]
    for step in execution.steps:
        for request, start, stop in step:
            if start and stop - start == 1:
                found[request].add(start)
    return found


def _embedding(case, execution, i, p):
    ids, weight = i["ids"], p["weight"]
    yield Form("", "row of the token", lambda: weight[ids])
    for shift in (1, -1):
        yield Form("semantics", f"the row of the token id {shift:+d}", lambda s=shift: weight[(ids + s).clamp(0, len(weight) - 1)])
    yield Form("semantics", "scaled by the root of the width", lambda: weight[ids] * weight.shape[1] ** 0.5)


def _rms_norm(case, execution, i, p):
    eps, weight = case.constants["eps"], p["weight"]

    def form(*, sum_rounded=False, weight_first=False, eps_=eps, square=lambda x: x, centre=False, plus_one=False, normed=r):
        def rows():
            x = i["x"]
            if "residual" in i:
                x = x + i["residual"]
                x = r(x) if sum_rounded else x
                if case.output == 1:
                    return x.flatten(1)
            x = x - x.mean(-1, keepdim=True) if centre else x
            y = x * torch.rsqrt(square(x * x).mean(-1, keepdim=True) + eps_)
            w = weight + 1 if plus_one else weight
            return ((y * w) if weight_first else normed(y) * w).flatten(1)
        return rows

    yield Form("", "rounded before the weight multiply", form())
    yield Form("extra rounding", "the residual sum is rounded before the norm", form(sum_rounded=True))
    yield Form("extra rounding", "rounded once, after the weight multiply", form(weight_first=True))
    yield Form("extra rounding", "the residual sum is rounded before the norm, the result once after the weight multiply",
               form(sum_rounded=True, weight_first=True))
    yield Form("extra rounding", "the squares are rounded to bf16", form(square=r))
    yield Form("semantics", "without eps", form(eps_=0.0))
    yield Form("semantics", "eps ten times as large", form(eps_=10 * eps))
    yield Form("semantics", "the mean is subtracted first", form(centre=True))
    yield Form("semantics", "the weight is taken as 1 + weight", form(plus_one=True))


def _linear(case, execution, i, p):
    x, weight = i["x"], p["weight"]
    yield Form("", "one rounding at the end", lambda: x @ weight.t())
    for parts in (2, 4, 8):
        yield Form("extra rounding", f"{parts} partial sums over K, each rounded to bf16",
                   lambda n=parts: sum(r(a @ b.t()) for a, b in zip(x.chunk(n, -1), weight.chunk(n, -1), strict=True)))
    half = len(weight) // 2
    yield Form("other input", "the halves of the weight are swapped", lambda: x @ torch.cat((weight[half:], weight[:half])).t())
    if weight.shape[0] == weight.shape[1]:
        yield Form("other input", "the weight is transposed", lambda: x @ weight)
    yield Form("other input", "the input is quantised with one scale for the whole call (fp8)", lambda: _call_scaled(case, execution, x) @ weight.t(),
               by_call=True)


def _call_scaled(case: Case, execution: Execution, x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    for step in execution.steps:
        rows = case.rows(step)
        scale = x[rows].abs().max().clamp_min(1e-12) / 448.0
        out[rows] = r((x[rows] / scale).float().to(torch.float8_e4m3fn).double() * scale)
    return out


def _rotary(case, execution, i, p):
    theta = case.constants["theta"]
    positions = torch.cat([torch.arange(n) for n in case.lengths])

    def form(*, shift=0, base=theta, each=lambda x: x, table=r, interleaved=False):
        def rows():
            dim = i["q"].shape[-1]
            inverse = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
            angles = (positions + shift).clamp_min(0)[:, None].float() * inverse
            cos, sin = (table(t.double())[:, None] for t in (angles.cos(), angles.sin()))

            def turn(x):
                a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
                parts = each(a * cos) - each(b * sin), each(b * cos) + each(a * sin)
                return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)

            return torch.cat((turn(i["q"]).flatten(1), turn(i["k"]).flatten(1)), dim=-1)
        return rows

    yield Form("", "products kept in fp32, the result truncated to bf16", form(), truncates=True)
    yield Form("extra rounding", "products kept in fp32, the result rounded to nearest", form())
    yield Form("extra rounding", "each product is rounded to bf16 before the sum", form(each=r))
    yield Form("extra rounding", "cos and sin are not rounded to bf16", form(table=lambda x: x))
    for shift in (1, -1):
        for truncates in (True, False):
            yield Form("semantics", f"positions are off by {shift:+d}", form(shift=shift), truncates=truncates)
    yield Form("semantics", "neighbouring columns are paired instead of halves", form(interleaved=True))
    for base in (1e4, 1e6):
        if base != theta:
            yield Form("semantics", f"base {base:g} instead of {theta:g}", form(base=base))


def _attention(case, execution, i, p):
    scale = case.constants["scale"]

    def form(*, scale_=scale, offset=0, probabilities=lambda x: x, scores=lambda x: x, window=None, late=True):
        def rows():
            out = torch.zeros(i["q"].shape, dtype=torch.float64)
            for s in _sequences(case):
                q, k, v = i["q"][s].transpose(0, 1), i["k"][s].transpose(0, 1), i["v"][s].transpose(0, 1)
                k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
                gap = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
                hidden = gap < -offset
                if window is not None:
                    hidden |= gap >= window
                hidden[0, 0] = False
                weights = scores(q @ k.transpose(1, 2) * scale_).masked_fill(hidden, -torch.inf)
                weights = (weights - weights.amax(-1, keepdim=True)).exp()
                total = weights.sum(-1, keepdim=True)
                y = probabilities(weights) @ v / total if late else probabilities(weights / total) @ v
                out[s] = y.transpose(0, 1)
            return out.flatten(1)
        return rows

    yield Form("", "softmax weights kept in fp32, the result truncated to bf16", form(), truncates=True)
    yield Form("extra rounding", "softmax weights are rounded to bf16 before they are normalised", form(probabilities=r))
    yield Form("extra rounding", "softmax weights kept in fp32, the result rounded to nearest", form())
    yield Form("extra rounding", "softmax weights are rounded to bf16 after they are normalised", form(probabilities=r, late=False))
    yield Form("extra rounding", "scores are rounded to bf16 before the softmax", form(scores=r, probabilities=r, late=False))
    yield Form("semantics", "the causal mask lets each token see the next one", form(offset=1), truncates=True)
    yield Form("semantics", "the causal mask hides each token from itself", form(offset=-1), truncates=True)
    yield Form("semantics", "scores are not scaled", form(scale_=1.0), truncates=True)
    for size in (16, 32, 64):
        if max(case.lengths) > size:
            yield Form("semantics", f"keys further back than {size} tokens are dropped", form(window=size), truncates=True)


def _silu_and_mul(case, execution, i, p):
    gate, up = i["x"].chunk(2, dim=-1)
    yield Form("", "silu rounded to bf16, then multiplied", lambda: r(F.silu(gate)) * up)
    yield Form("extra rounding", "silu is not rounded before the multiply", lambda: F.silu(gate) * up)
    yield Form("extra rounding", "the sigmoid is rounded to bf16", lambda: r(r(gate.sigmoid()) * gate) * up)
    yield Form("semantics", "gate and up are exchanged", lambda: r(F.silu(up)) * gate)
    yield Form("semantics", "gelu in place of silu", lambda: r(F.gelu(gate)) * up)


def _relu_squared(case, execution, i, p):
    x = i["x"]
    yield Form("", "relu, then square", lambda: F.relu(x) ** 2)
    yield Form("semantics", "square without relu", lambda: x ** 2)
    yield Form("semantics", "relu without square", lambda: F.relu(x))
    yield Form("semantics", "clamped from above", lambda: F.relu(x).clamp(max=float(F.relu(x).max()) / 2) ** 2)


def _causal_conv1d(case, execution, i, p):
    x, weight, bias = i["x"], p["weight"].flatten(1), p.get("bias")
    width = weight.shape[1]

    def form(*, total=lambda x: x, each=lambda x: x, cut=False, stale=0, with_bias=True):
        def rows():
            out = torch.zeros_like(x)
            borders = _borders(case, execution)
            for request, s in enumerate(_sequences(case)):
                seen = F.pad(x[s], (0, 0, width - 1, 0))
                n = s.stop - s.start
                y = torch.zeros_like(x[s])
                for j in range(width):
                    part = seen[j:j + n].clone()
                    for border in borders[request]:
                        # Rows behind a border whose tap reaches over it.
                        for row in range(border, min(border + width - 1 - j, n)):
                            if cut:
                                part[row] = 0
                            elif stale:
                                part[row] = seen[max(row + j - stale, border)]
                    y = y + each(part * weight[:, j])
                y = y + bias if bias is not None and with_bias else y
                out[s] = F.silu(total(y))
            return out
        return rows

    yield Form("", "sum kept in fp32 into the SiLU", form())
    yield Form("extra rounding", "the sum is rounded to bf16 before the SiLU", form(total=r))
    yield Form("extra rounding", "every product is rounded to bf16", form(each=r))
    if any(_borders(case, execution)):
        yield Form("stale state", "a chunk starts from an empty history", form(cut=True))
        for stale in (1, 2):
            yield Form("stale state", f"the history at a chunk border is read {stale} token(s) too early", form(stale=stale))
    if bias is not None:
        yield Form("semantics", "without bias", form(with_bias=False))


def _mamba2_scan(case, execution, i, p):
    A, D, bias = p["A"], p["D"], p["dt_bias"]

    def form(*, state=lambda h: h, rate=lambda a: a, after=lambda d: d, reset=None, skip=True, start=lambda d: d, minimum=None, weighted=lambda x: x):
        def rows():
            x, raw, B, C = i["x"], i["dt"], i["B"], i["C"]
            out = torch.zeros_like(x)
            repeat = x.shape[1] // B.shape[1]
            cuts = _borders(case, execution) if reset == "calls" else None
            rounded = _single(case, execution) if reset == "rounded" else None
            chunk = case.constants["chunk"]
            dt = after(F.softplus(start(raw + bias)))
            dt = dt.clamp(min=minimum) if minimum is not None else dt
            keep, gain = (dt * rate(A)).exp(), weighted(dt[..., None] * x)
            Bs, Cs = B.repeat_interleave(repeat, 1), C.repeat_interleave(repeat, 1)
            # All sequences step by step together, the longest first.
            order = sorted(range(len(case.lengths)), key=lambda n: -case.lengths[n])
            starts = torch.tensor([case.offsets[n] for n in order])
            h = torch.zeros(len(order), *x.shape[1:], B.shape[-1], dtype=torch.float64)
            for t in range(max(case.lengths)):
                live = sum(case.lengths[n] > t for n in order)
                at = starts[:live] + t
                if (reset == "chunks" and t and t % chunk == 0):
                    h[:live] = 0
                if cuts is not None:
                    for k, n in enumerate(order[:live]):
                        if t in cuts[n]:
                            h[k] = 0
                h[:live] = state(h[:live] * keep[at][..., None, None] + gain[at][..., None] * Bs[at][:, :, None, :])
                out[at] = (h[:live] * Cs[at][:, :, None, :]).sum(-1) + (D[:, None] * x[at] if skip else 0)
                if rounded is not None:
                    mine = [k for k, n in enumerate(order[:live]) if t in rounded[n]]
                    h[mine] = r(h[mine])
            return out.flatten(1)
        return rows

    yield Form("", "fp32 state, one rounding", form())
    yield Form("extra rounding", "the state is kept in bf16", form(state=r))
    if any(_single(case, execution)):
        yield Form("extra rounding", "the state is kept in bf16 between decode steps", form(reset="rounded"))
    yield Form("extra rounding", "the decay rate A is rounded to bf16", form(rate=r))
    yield Form("extra rounding", "dt with its bias is rounded to bf16", form(start=r))
    yield Form("extra rounding", "dt is rounded to bf16 after the bias and again after the softplus", form(start=r, after=r))
    yield Form("extra rounding", "dt times x is rounded to bf16", form(weighted=r))
    yield Form("stale state", "the state is lost at every chunk of the scan", form(reset="chunks"))
    if any(_borders(case, execution)):
        yield Form("stale state", "a call that continues a sequence starts from an empty state", form(reset="calls"))
    yield Form("semantics", "without the D skip", form(skip=False))
    for minimum in {0.001, 0.01, case.constants.get("dt_minimum") or 0.1}:
        yield Form("semantics", f"dt is clamped from below at {minimum:g}", form(minimum=minimum))


def _gated_rms_norm(case, execution, i, p):
    x, gate, weight, eps, groups = i["x"], i["gate"], p["weight"], case.constants["eps"], case.constants["groups"]

    def norm(y, n):
        y = y.view(*y.shape[:-1], n, -1)
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)

    yield Form("", "gate and norm in fp32, rounded before the weight multiply", lambda: r(norm(x * F.silu(gate), groups)) * weight)
    yield Form("extra rounding", "rounded once, after the weight multiply", lambda: norm(x * F.silu(gate), groups) * weight)
    yield Form("extra rounding", "the gated value is rounded to bf16 before the norm", lambda: r(norm(r(x * F.silu(gate)), groups)) * weight)
    yield Form("extra rounding", "the gate is rounded to bf16", lambda: r(norm(x * r(F.silu(gate)), groups)) * weight)
    yield Form("semantics", "the gate is applied after the norm", lambda: r(norm(x, groups) * F.silu(gate)) * weight)
    yield Form("semantics", "one group instead of several", lambda: r(norm(x * F.silu(gate), 1)) * weight)


def _log_softmax(case, execution, i, p):
    x = i["logits"]
    yield Form("", "log-softmax of the row", lambda: x.log_softmax(-1))
    yield Form("extra rounding", "logits are rounded to bf16 first", lambda: r(x).log_softmax(-1))
    yield Form("extra rounding", "the result is rounded to bf16", lambda: r(x.log_softmax(-1)))
    yield Form("semantics", "the normaliser is left out", lambda: x)
    for shift in (1, -1):
        yield Form("semantics", f"values are those of the token id {shift:+d}", lambda s=shift: x.log_softmax(-1).roll(-s, -1))
        yield Form("semantics", f"rows are those of the position {shift:+d}", lambda s=shift: x.log_softmax(-1).roll(-s, 0))
    for temperature in (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.25, 1.5, 2.0):
        yield Form("semantics", f"temperature {temperature:g} is applied on one side only", lambda t=temperature: (x / t).log_softmax(-1))


# Exact twins: the arithmetic itself in fp32, for causes too small for the forms above.


@dataclass(frozen=True)
class Twin:
    """An implementation in torch that a side's bits may equal."""

    kind: str
    label: str
    rows: Callable[[], torch.Tensor]
    """output rows [R, width] in the output's dtype"""


def twins(case: Case, side: int) -> Iterator[Twin]:
    """Known arithmetic of a case's operator, the contract's first; none for most operators."""
    inputs = {n.removeprefix("input/"): case.argument(n.removeprefix("input/")) for n in case.tensors if n.startswith("input/")}
    if case.operator == "rms_norm" and case.output == 0:
        yield from _rms_norm_twins(case, inputs, case.parameter("weight", side))
    elif case.operator == "linear":
        yield from _linear_twins(inputs["x"], case.parameter("weight", side))
    elif case.operator == "log_softmax":
        wide = inputs["logits"].float()
        yield Twin("", "one log-softmax in fp32", lambda: wide.log_softmax(-1))
        yield Twin("reduction order", "x - logsumexp(x) in place of one log-softmax", lambda: wide - wide.logsumexp(-1, keepdim=True))
        yield Twin("reduction order", "log of softmax in place of one log-softmax", lambda: wide.softmax(-1).log())


def _rms_norm_twins(case: Case, inputs: dict, weight: torch.Tensor) -> Iterator[Twin]:
    eps = case.constants["eps"]
    total = inputs["x"].float() + inputs["residual"].float() if "residual" in inputs else inputs["x"].float()
    mean = total.pow(2).mean(-1, keepdim=True)

    def scaled(by: torch.Tensor) -> torch.Tensor:
        return ((total * by).to(weight.dtype) * weight).flatten(1)

    yield Twin("", "eps added in fp32", lambda: scaled(torch.rsqrt(mean + eps)))
    for label, factor in (("without eps", 0.0), ("eps ten times as large", 10.0), ("eps a tenth", 0.1)):
        yield Twin("semantics", label, lambda f=factor: scaled(torch.rsqrt(mean + f * eps)))
    yield Twin("extra rounding", "variance and eps are added and rooted in double on one side, in fp32 on the other",
               lambda: ((total.double() / (mean.double() + eps).sqrt()).float().to(weight.dtype) * weight).flatten(1))
    yield Twin("extra rounding", "variance and eps are added in double on one side, in fp32 on the other",
               lambda: scaled(torch.rsqrt(mean.double() + eps).float()))


def _linear_twins(x: torch.Tensor, weight: torch.Tensor) -> Iterator[Twin]:
    yield Twin("", "K in one piece", lambda: F.linear(x, weight))
    for parts in (2, 4, 8):
        def split(n=parts):
            total = torch.zeros(len(x), len(weight))
            for a, b in zip(x.float().chunk(n, -1), weight.float().chunk(n, -1), strict=True):
                total = total + a @ b.t()
            return total.to(x.dtype)
        yield Twin("reduction order", f"K is split into {parts} parts that are added in fp32", split)

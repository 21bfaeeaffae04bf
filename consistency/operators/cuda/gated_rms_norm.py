"""Gated RMSNorm of the Mamba2 mixer: the gate is applied first, then each group of channels is normalised on its own.

Contract: bf16 in and out; g = x * z * sigmoid(z) in fp32, never rounded; sum of squares in fp32 for each group, by one program per
row whose tile follows from the width and the number of groups; out = bf16(g * rsqrt(mean + eps) * weight), rounded once.
"""

import torch
import triton
import triton.language as tl

from consistency.operators.cuda.case import Case, Inputs, check_gradients, normal
from consistency.operators.cuda.checks import assert_rows, assert_vector
from consistency.operators.cuda.eager import eager
from consistency.operators.cuda.rms_norm import BACKWARD_PROGRAMS, warps_for

GROUPS_TOGETHER = 2
"""Groups that one program normalises: enough programs for a small batch, enough work for a large one."""


def gated_rms_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """Plain torch in the dtype of `x` (fp64 for a reference)."""
    gated = (x * torch.nn.functional.silu(gate)).unflatten(-1, (groups, -1))
    return (gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight


@triton.jit
def _gated_rms_norm_kernel(x_ptr, gate_ptr, weight_ptr, out_ptr, gate_stride, eps, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
                           TOGETHER: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = (tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER))[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + row * GROUPS * WIDTH + tile).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + tile).to(tl.float32)
    weight = tl.load(weight_ptr + tile).to(tl.float32)
    gated = x * (gate * tl.sigmoid(gate))
    scale = tl.rsqrt(tl.sum(gated * gated, axis=1) / WIDTH + eps)
    out = gated * scale[:, None] * weight
    tl.store(out_ptr + row * GROUPS * WIDTH + tile, out.to(out_ptr.dtype.element_ty))


@triton.jit
def _gated_rms_norm_backward_kernel(x_ptr, gate_ptr, weight_ptr, grad_ptr, grad_x_ptr, grad_gate_ptr, partial_ptr, rows, gate_stride, eps,
                                    GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    tile = tl.arange(0, GROUPS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    weight = tl.load(weight_ptr + tile).to(tl.float32)
    total = tl.zeros((GROUPS, WIDTH), dtype=tl.float32)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = index.to(tl.int64)
        x = tl.load(x_ptr + row * GROUPS * WIDTH + tile).to(tl.float32)
        gate = tl.load(gate_ptr + row * gate_stride + tile).to(tl.float32)
        grad = tl.load(grad_ptr + row * GROUPS * WIDTH + tile).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        gated = x * silu
        scale = tl.rsqrt(tl.sum(gated * gated, axis=1) / WIDTH + eps)[:, None]
        normed = gated * scale
        total += grad * normed
        grad *= weight
        grad_gated = (grad - normed * (tl.sum(grad * normed, axis=1) / WIDTH)[:, None]) * scale
        grad_gate = grad_gated * x * (sigmoid + silu * (1.0 - sigmoid))
        tl.store(grad_x_ptr + row * GROUPS * WIDTH + tile, (grad_gated * silu).to(grad_x_ptr.dtype.element_ty))
        tl.store(grad_gate_ptr + row * GROUPS * WIDTH + tile, grad_gate.to(grad_gate_ptr.dtype.element_ty))
    tl.store(partial_ptr + tl.program_id(0) * GROUPS * WIDTH + tile, total)


@torch.library.custom_op("consistency_cuda::gated_rms_norm", mutates_args=())
def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int, eps: float) -> torch.Tensor:
    """Gated RMSNorm of `x` [rows, width]; `gate` [rows, width] may be a slice of a wider tensor; `weight` [width]."""
    rows, width = x.shape
    assert width % groups == 0 and triton.next_power_of_2(width // groups) == width // groups, f"group width {width / groups}"
    assert_rows(x, width, torch.bfloat16, torch.float16)
    assert_rows(gate, width, x.dtype)
    assert_vector(weight, width, torch.bfloat16, torch.float16, torch.float32)
    assert x.is_contiguous() and gate.shape == x.shape
    out = torch.empty_like(x)
    if rows:
        together = min(GROUPS_TOGETHER, groups)
        _gated_rms_norm_kernel[(rows, groups // together)](
            x, gate, weight, out, gate.stride(0), eps, groups, width // groups, together, num_warps=warps_for(width // groups * together))
    return out


@gated_rms_norm.register_fake
def _(x, gate, weight, groups, eps):
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    x, gate, weight, ctx.groups, ctx.eps = inputs
    ctx.save_for_backward(x, gate, weight)


def _backward(ctx, grad):
    x, gate, weight = ctx.saved_tensors
    rows, width = x.shape
    programs = min(rows, BACKWARD_PROGRAMS)
    grad_x, grad_gate = torch.empty_like(x), torch.empty(x.shape, dtype=gate.dtype, device=gate.device)
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _gated_rms_norm_backward_kernel[(programs,)](
        x, gate, weight, grad.contiguous(), grad_x, grad_gate, partial, rows, gate.stride(0), ctx.eps,
        ctx.groups, width // ctx.groups, num_warps=warps_for(width))
    return grad_x, grad_gate, partial.sum(0).to(weight.dtype), None, None


gated_rms_norm.register_autograd(_backward, setup_context=_setup)


def _case(width: int, groups: int) -> Case:
    eps = 1e-5

    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        return Inputs((normal((rows, width), generator), normal((rows, width), generator)),
                      ((1 + normal((width,), generator, 0.1)).to(torch.bfloat16),))

    def stock(x, gate, weight):
        # the mixer's own formula: fp32 until the cast that precedes the weight, as the engine runs it for more than one group
        gated = (x * torch.nn.functional.silu(gate.float())).unflatten(-1, (groups, -1))
        gated = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + eps)
        return weight * gated.flatten(-2).to(x.dtype)

    def formula(x, gate, weight):
        return gated_rms_norm_reference(x, gate, weight, groups, eps)

    def gradients():
        drawn = inputs(300, torch.Generator("cuda").manual_seed(5))
        return check_gradients(exact, formula, dict(zip(("x", "gate", "weight"), drawn.take(300), strict=True)))

    def exact(x, gate, weight):
        return gated_rms_norm(x, gate, weight, groups, eps)

    compiled = torch.compile(stock)
    return Case("gated_rms_norm", f"{width} in {groups}", ("nemotron-3.5",), inputs, exact, lambda *a: formula(*(t.double() for t in a)),
                stock, compiled, gradients=gradients)


CASES = [_case(4096, 8)]


# ---- the contract's names ----------------------------------------------------------------------------------------------


_eager = eager(gated_rms_norm, _setup, _backward)


def exact_training(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, groups: int) -> torch.Tensor:
    """x, gate [T, D], weight [D] -> [T, D] in the dtype of gate. Differentiable."""
    return _eager(x, gate, weight, groups, eps)


exact_rollout = exact_training


def stock_rollout(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, groups: int) -> torch.Tensor:
    """vLLM's formula for more than one group."""
    from consistency.operators import gated_rms_norm as formula

    return formula.stock_rollout(x, gate, weight, eps, groups)

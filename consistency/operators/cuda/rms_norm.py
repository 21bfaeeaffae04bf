"""RMSNorm over the last dimension, optionally after adding a residual.

Contract: bf16 in and out. With a residual, s = bf16(x + residual) is the new residual and the norm reads s, so an engine that
carries a bf16 residual stream and one that fuses the addition see the same numbers. The sum of squares is fp32, by one program
per row whose block and warps follow from the width alone; out = bf16(s * rsqrt(mean + eps) * weight), rounded once.
"""

import torch
import triton
import triton.language as tl

from consistency.operators.cuda.case import Case, Inputs, check_gradients, normal
from consistency.operators.cuda.checks import assert_rows, assert_vector
from consistency.operators.cuda.eager import eager

BACKWARD_PROGRAMS = 264
"""Partial sums of the weight gradient: two programs for each of an H200's 132 multiprocessors."""


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch in the dtype of `x` (fp64 for a reference). Returns the norm and the new residual."""
    summed = x if residual is None else x + residual
    return summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + eps) * weight, summed


def warps_for(block: int) -> int:
    """Warps of a row program, from the padded width only."""
    return min(16, max(1, block // 512))


@triton.jit
def _rms_norm_kernel(x_ptr, residual_ptr, weight_ptr, out_ptr, summed_ptr, eps,
                     WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    live = columns < WIDTH
    x = tl.load(x_ptr + row + columns, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=live, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row + columns, mask=live, other=0.0).to(tl.float32)
        rounded = x.to(summed_ptr.dtype.element_ty)
        tl.store(summed_ptr + row + columns, rounded, mask=live)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.store(out_ptr + row + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _rms_norm_backward_kernel(summed_ptr, weight_ptr, grad_out_ptr, grad_summed_ptr, grad_x_ptr, partial_ptr, rows, eps,
                              WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_GRAD_SUMMED: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    live = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=live, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = index.to(tl.int64) * WIDTH
        x = tl.load(summed_ptr + row + columns, mask=live, other=0.0).to(tl.float32)
        grad = tl.load(grad_out_ptr + row + columns, mask=live, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
        normed = x * scale
        total += grad * normed
        grad *= weight
        grad_x = (grad - normed * (tl.sum(grad * normed, axis=0) / WIDTH)) * scale
        if HAS_GRAD_SUMMED:
            grad_x += tl.load(grad_summed_ptr + row + columns, mask=live, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + row + columns, grad_x.to(grad_x_ptr.dtype.element_ty), mask=live)
    tl.store(partial_ptr + tl.program_id(0) * WIDTH + columns, total, mask=live)


@torch.library.custom_op("consistency_cuda::rms_norm", mutates_args=())
def rms_norm_op(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    assert_rows(x, width, torch.bfloat16, torch.float16)
    assert_vector(weight, width, torch.bfloat16, torch.float16, torch.float32)
    assert x.is_contiguous()
    out = torch.empty_like(x)
    summed = torch.empty_like(x) if residual is not None else x.new_empty(0)
    if residual is not None:
        assert_rows(residual, width, x.dtype)
        assert residual.is_contiguous() and residual.shape == x.shape
    block = triton.next_power_of_2(width)
    if rows:
        _rms_norm_kernel[(rows,)](x, residual, weight, out, summed, eps, width, block, residual is not None, num_warps=warps_for(block))
    return out, summed


@rms_norm_op.register_fake
def _(x, weight, residual, eps):
    return torch.empty_like(x), torch.empty_like(x) if residual is not None else x.new_empty(0)


def _setup(ctx, inputs, output):
    x, weight, residual, ctx.eps = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(output[1] if ctx.has_residual else x, weight)


def _backward(ctx, grad_out, grad_summed):
    summed, weight = ctx.saved_tensors
    rows, width = summed.shape
    block = triton.next_power_of_2(width)
    programs = min(rows, BACKWARD_PROGRAMS)
    grad_x = torch.empty_like(summed)
    partial = torch.empty(programs, width, dtype=torch.float32, device=summed.device)
    carry = ctx.has_residual and grad_summed is not None
    _rms_norm_backward_kernel[(programs,)](
        summed, weight, grad_out.contiguous(), grad_summed.contiguous() if carry else None, grad_x, partial, rows, ctx.eps,
        width, block, carry, num_warps=warps_for(block))
    return grad_x, partial.sum(0).to(weight.dtype), grad_x if ctx.has_residual else None, None


rms_norm_op.register_autograd(_backward, setup_context=_setup)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of `x` [..., width] with `weight` [width]."""
    return rms_norm_op(x.reshape(-1, x.shape[-1]), weight, None, eps)[0].view(x.shape)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of bf16(x + residual), and that sum. Both are [..., width]."""
    width = x.shape[-1]
    out, summed = rms_norm_op(x.reshape(-1, width), weight, residual.reshape(-1, width), eps)
    return out.view(x.shape), summed.view(x.shape)


def _case(width: int, families: tuple[str, ...], with_residual: bool) -> Case:
    eps = 1e-5

    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        drawn = tuple(normal((rows, width), generator) for _ in range(1 + with_residual))
        return Inputs(drawn, ((1 + normal((width,), generator, 0.1)).to(torch.bfloat16),))

    def exact(x, *rest):
        return rms_norm_op(x, rest[-1], rest[0] if with_residual else None, eps)[0]

    def stock(x, *rest):
        import vllm._custom_ops as ops

        if with_residual:
            x, residual = x.clone(), rest[0].clone()
            ops.fused_add_rms_norm(x, residual, rest[1], eps)
            return x
        out = torch.empty_like(x)
        ops.rms_norm(out, x, rest[0], eps)
        return out

    def stock_timed(x, residual, weight):
        import vllm._custom_ops as ops

        ops.fused_add_rms_norm(x, residual, weight, eps)
        return x

    def reference(x, *rest):
        residual = rest[0].double() if with_residual else None
        return rms_norm_reference(x.double(), rest[-1].double(), residual, eps)[0]

    def gradients():
        generator = torch.Generator("cuda").manual_seed(5)
        drawn = inputs(300, generator)
        names = ("x", "residual", "weight") if with_residual else ("x", "weight")

        def formula(x, *rest):
            return rms_norm_reference(x, rest[-1], rest[0] if with_residual else None, eps)[0]

        return check_gradients(exact, formula, dict(zip(names, drawn.take(300), strict=True)))

    return Case("rms_norm", f"{width}{' + residual' if with_residual else ''}", families, inputs, exact, reference, stock,
                stock_timed if with_residual else None, gradients=gradients)


CASES = [
    _case(2688, ("nemotron-3.5",), True),
    _case(2688, ("nemotron-3.5",), False),
    _case(2048, ("qwen3",), True),
    _case(128, ("qwen3",), False),
]


# ---- the contract's names ----------------------------------------------------------------------------------------------


_eager = eager(rms_norm_op, _setup, _backward)


def exact_training(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None,
                   **_) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x, residual [..., width], weight [width] -> (normalised [..., width], residual sum or None). Differentiable."""
    width = x.shape[-1]
    out, summed = _eager(x.reshape(-1, width), weight, None if residual is None else residual.reshape(-1, width), eps)
    return out.view(x.shape), None if residual is None else summed.view(x.shape)


exact_rollout = exact_training


def stock_rollout(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None,
                  **_) -> tuple[torch.Tensor, torch.Tensor | None]:
    """vLLM's own kernels."""
    import vllm._custom_ops as ops

    x = x.contiguous()
    if residual is None:
        out = torch.empty_like(x)
        ops.rms_norm(out, x, weight, eps)
        return out, None
    x, residual = x.clone(), residual.clone()
    ops.fused_add_rms_norm(x, residual, weight, eps)
    return x, residual

"""Squared ReLU.

Contract: bf16 in and out; max(x, 0) is exact, its square is taken in fp32 and rounded once. (A second rounding of the square, or of
the ReLU in another type, is what kept one published Nemotron stack from a zero mismatch.)
"""

import torch
import triton
import triton.language as tl

from consistency.operators.cuda.case import Case, Inputs, check_gradients, normal
from consistency.operators.cuda.eager import eager

BLOCK = 2048


def relu_squared_reference(x: torch.Tensor) -> torch.Tensor:
    """Plain torch in the dtype of `x`."""
    return torch.relu(x).square()


@triton.jit
def _relu_squared_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.maximum(tl.load(x_ptr + offsets, mask=offsets < count, other=0.0).to(tl.float32), 0.0)
    tl.store(out_ptr + offsets, (x * x).to(out_ptr.dtype.element_ty), mask=offsets < count)


@triton.jit
def _relu_squared_backward_kernel(x_ptr, grad_ptr, grad_x_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.maximum(tl.load(x_ptr + offsets, mask=offsets < count, other=0.0).to(tl.float32), 0.0)
    grad = tl.load(grad_ptr + offsets, mask=offsets < count, other=0.0).to(tl.float32)
    tl.store(grad_x_ptr + offsets, (2.0 * x * grad).to(grad_x_ptr.dtype.element_ty), mask=offsets < count)


@torch.library.custom_op("consistency_cuda::relu_squared", mutates_args=())
def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """bf16(max(x, 0)^2), any contiguous shape."""
    assert x.is_cuda and x.is_contiguous() and x.dtype in (torch.bfloat16, torch.float16)
    out = torch.empty_like(x)
    if x.numel():
        _relu_squared_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK)
    return out


@relu_squared.register_fake
def _(x):
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    (x,) = ctx.saved_tensors
    grad_x = torch.empty_like(x)
    _relu_squared_backward_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, grad.contiguous(), grad_x, x.numel(), BLOCK)
    return grad_x


relu_squared.register_autograd(_backward, setup_context=_setup)


def _case(width: int) -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        return Inputs((normal((rows, width), generator),), ())

    def gradients():
        return check_gradients(relu_squared, relu_squared_reference, {"x": inputs(300, torch.Generator("cuda").manual_seed(5)).rows[0]})

    return Case("relu_squared", str(width), ("nemotron-3.5",), inputs, relu_squared, lambda x: relu_squared_reference(x.double()),
                relu_squared_reference, torch.compile(relu_squared_reference), gradients=gradients)


CASES = [_case(3712)]


# ---- the contract's names ----------------------------------------------------------------------------------------------

exact_training = exact_rollout = eager(relu_squared, _setup, _backward)
stock_rollout = relu_squared_reference

"""SiLU of the gate half times the other half.

Contract: bf16 in and out; x = [gate, up]; gate * sigmoid(gate) * up in fp32, rounded once. The engine's own kernel rounds SiLU(gate)
to bf16 before the product; one rounding is what a training graph that keeps the activation in fp32 computes.
"""

import torch
import triton
import triton.language as tl

from consistency.operators.cuda.case import Case, Inputs, check_gradients, normal
from consistency.operators.cuda.checks import assert_rows
from consistency.operators.cuda.eager import eager

BLOCK = 1024


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """Plain torch in the dtype of `x`."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + columns, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + columns, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _silu_and_mul_backward_kernel(x_ptr, grad_ptr, grad_x_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < WIDTH
    gate = tl.load(x_ptr + row * 2 * WIDTH + columns, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * WIDTH + WIDTH + columns, mask=live, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * WIDTH + columns, mask=live, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(grad_x_ptr + row * 2 * WIDTH + columns, grad_gate.to(grad_x_ptr.dtype.element_ty), mask=live)
    tl.store(grad_x_ptr + row * 2 * WIDTH + WIDTH + columns, (grad * silu).to(grad_x_ptr.dtype.element_ty), mask=live)


@torch.library.custom_op("consistency_cuda::silu_and_mul", mutates_args=())
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SiLU(x[:, :width]) * x[:, width:] for contiguous `x` [rows, 2 * width]."""
    rows, width = x.shape[0], x.shape[1] // 2
    assert_rows(x, 2 * width, torch.bfloat16, torch.float16)
    assert x.is_contiguous()
    out = x.new_empty(rows, width)
    if rows:
        _silu_and_mul_kernel[(rows, triton.cdiv(width, BLOCK))](x, out, width, BLOCK)
    return out


@silu_and_mul.register_fake
def _(x):
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    (x,) = ctx.saved_tensors
    width = x.shape[1] // 2
    grad_x = torch.empty_like(x)
    _silu_and_mul_backward_kernel[(x.shape[0], triton.cdiv(width, BLOCK))](x, grad.contiguous(), grad_x, width, BLOCK)
    return grad_x


silu_and_mul.register_autograd(_backward, setup_context=_setup)


def _case(width: int) -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        return Inputs((normal((rows, 2 * width), generator),), ())

    def stock(x):
        import vllm._custom_ops  # noqa: F401  (registers the engine's kernels)

        out = x.new_empty(x.shape[0], width)
        torch.ops._C.silu_and_mul(out, x)
        return out

    def gradients():
        return check_gradients(silu_and_mul, silu_and_mul_reference, {"x": inputs(300, torch.Generator("cuda").manual_seed(5)).rows[0]})

    return Case("silu_and_mul", str(width), ("qwen3",), inputs, silu_and_mul, lambda x: silu_and_mul_reference(x.double()), stock,
                gradients=gradients)


CASES = [_case(6144)]


# ---- the contract's names ----------------------------------------------------------------------------------------------

exact_training = exact_rollout = eager(silu_and_mul, _setup, _backward)


def stock_rollout(x: torch.Tensor) -> torch.Tensor:
    """vLLM's own kernel."""
    import vllm._custom_ops  # noqa: F401  (registers the engine's kernels)

    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    torch.ops._C.silu_and_mul(out, x)
    return out

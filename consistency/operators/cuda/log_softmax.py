"""Log-probability of one chosen token of each row, the same function for the rollout and for training.

Contract: logits bf16 or fp32 of any number of rows; the vocabulary is cut at absolute multiples of 8192; each block gives its maximum and
its sum of exp(x - maximum) in fp32; the block results are merged in one program whose layout follows from the vocabulary alone;
log p = x[token] - (maximum + log(sum)). Equal values in bf16 and in fp32 give equal bits. No [rows, vocabulary] tensor is written in the
forward pass.
"""

import torch
import triton
import triton.language as tl

from consistency.operators.cuda.case import Case, Inputs, check_gradients, normal
from consistency.operators.cuda.checks import assert_rows
from consistency.operators.cuda.eager import eager

BLOCK = 8192
WARPS = 8


def log_softmax_reference(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Plain torch in the dtype of `logits`."""
    return torch.log_softmax(logits, -1).gather(-1, tokens[:, None].long())[:, 0]


@triton.jit
def _block_kernel(logits_ptr, maximum_ptr, sum_ptr, stride, VOCABULARY: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    # four neighbours to a thread in any dtype: the layout of the load is that of the sum, and decides its bits
    columns = tl.max_contiguous(block * BLOCK + tl.arange(0, BLOCK), 4)
    x = tl.load(logits_ptr + row * stride + columns, mask=columns < VOCABULARY, other=float("-inf")).to(tl.float32)
    maximum = tl.max(x, axis=0)
    # a block whose every logit is -inf adds nothing
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    tl.store(maximum_ptr + row * BLOCKS + block, maximum)
    tl.store(sum_ptr + row * BLOCKS + block, tl.sum(tl.exp(x - shift), axis=0))


@triton.jit
def _merge_kernel(logits_ptr, tokens_ptr, maximum_ptr, sum_ptr, out_ptr, lse_ptr, stride, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, PADDED)
    maxima = tl.load(maximum_ptr + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=float("-inf"))
    sums = tl.load(sum_ptr + row * BLOCKS + blocks, mask=blocks < BLOCKS, other=0.0)
    maximum = tl.max(maxima, axis=0)
    lse = maximum + tl.log(tl.sum(sums * tl.exp(maxima - maximum), axis=0))
    chosen = tl.load(logits_ptr + row * stride + tl.load(tokens_ptr + row)).to(tl.float32)
    tl.store(out_ptr + row, chosen - lse)
    tl.store(lse_ptr + row, lse)


@triton.jit
def _backward_kernel(logits_ptr, tokens_ptr, lse_ptr, grad_ptr, grad_logits_ptr, stride, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = columns < VOCABULARY
    x = tl.load(logits_ptr + row * stride + columns, mask=live, other=float("-inf")).to(tl.float32)
    grad = tl.load(grad_ptr + row)
    chosen = tl.where(columns == tl.load(tokens_ptr + row), 1.0, 0.0)
    out = grad * (chosen - tl.exp(x - tl.load(lse_ptr + row)))
    tl.store(grad_logits_ptr + row * VOCABULARY + columns, out.to(grad_logits_ptr.dtype.element_ty), mask=live)


@torch.library.custom_op("consistency_cuda::token_log_softmax", mutates_args=())
def token_log_softmax_op(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, vocabulary = logits.shape
    assert_rows(logits, vocabulary, torch.bfloat16, torch.float32)
    assert tokens.shape == (rows,) and tokens.dtype in (torch.int32, torch.int64) and tokens.is_contiguous()
    blocks = triton.cdiv(vocabulary, BLOCK)
    out, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    partial = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    if rows:
        _block_kernel[(blocks, rows)](logits, partial[0], partial[1], logits.stride(0), vocabulary, blocks, BLOCK, num_warps=WARPS)
        _merge_kernel[(rows,)](
            logits, tokens, partial[0], partial[1], out, lse, logits.stride(0), blocks, triton.next_power_of_2(blocks), num_warps=1)
    return out, lse


@token_log_softmax_op.register_fake
def _(logits, tokens):
    return tuple(torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(2))


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    logits, tokens, lse = ctx.saved_tensors
    rows, vocabulary = logits.shape
    grad_logits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    _backward_kernel[(triton.cdiv(vocabulary, BLOCK), rows)](
        logits, tokens, lse, grad.contiguous(), grad_logits, logits.stride(0), vocabulary, BLOCK, num_warps=WARPS)
    return grad_logits, None


token_log_softmax_op.register_autograd(_backward, setup_context=_setup)


def token_log_softmax(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """fp32 log-probability of `tokens` [rows] under `logits` [rows, vocabulary] (bf16 or fp32)."""
    return token_log_softmax_op(logits, tokens)[0]


def _case(vocabulary: int, families: tuple[str, ...]) -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        logits = normal((rows, vocabulary), generator, 3.0)
        return Inputs((logits, torch.randint(0, vocabulary, (rows,), generator=generator, device=logits.device)), ())

    def stock(logits, tokens):
        return log_softmax_reference(logits.float(), tokens)

    def gradients():
        logits, tokens = inputs(40, torch.Generator("cuda").manual_seed(5)).take(40)
        return check_gradients(token_log_softmax, log_softmax_reference, {"logits": logits}, (tokens,))

    return Case("log_softmax", str(vocabulary), families, inputs, token_log_softmax,
                lambda logits, tokens: log_softmax_reference(logits.double(), tokens), stock, gradients=gradients, prefill=(2048,))


CASES = [_case(131072, ("nemotron-3.5",)), _case(151936, ("qwen3",))]


# ---- the contract's names ----------------------------------------------------------------------------------------------


def row_lse(logits: torch.Tensor) -> torch.Tensor:
    """fp32 [T]: log-sum-exp of each row of `logits` [T, V], by the kernels of `token_log_softmax`."""
    return token_log_softmax_op(logits, torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device))[1]


_eager = eager(token_log_softmax_op, _setup, _backward)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        out = logits.float() - row_lse(logits)[:, None]
        ctx.save_for_backward(out)
        ctx.dtype = logits.dtype
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return (grad - out.exp() * grad.sum(-1, keepdim=True)).to(ctx.dtype)


def exact_training(logits: torch.Tensor) -> torch.Tensor:
    """logits [T, V], bf16 or fp32 -> fp32 [T, V]; the entry of a token has the bits of `token_log_softmax`. Differentiable."""
    return _LogSoftmax.apply(logits)


exact_training.token = lambda logits, tokens: _eager(logits, tokens)[0]


def exact_rollout(logits: torch.Tensor) -> torch.Tensor:
    """As `exact_training`, without a gradient."""
    return logits.float() - row_lse(logits)[:, None]


exact_rollout.lse = row_lse


def stock_rollout(logits: torch.Tensor) -> torch.Tensor:
    """vLLM's sampler."""
    return logits.log_softmax(dim=-1, dtype=torch.float32)

"""Rotary position embedding, both halves of a head rotated against each other (the NeoX layout).

Contract: bf16 in and out, cosine and sine in fp32 from one table indexed by integer position;
out1 = bf16(fma(x1, cos, -(x2 * sin))), out2 = bf16(fma(x2, cos, x1 * sin)). The fused multiply-add is written out, so that no
compiler chooses it.
"""

import functools

import torch
import triton
import triton.language as tl

from consistency.operators.cuda.case import Case, Inputs, check_gradients, normal
from consistency.operators.cuda.eager import eager


def rotary_table(positions: int, dim: int, theta: float, device: torch.device | str = "cuda") -> torch.Tensor:
    """fp32 table [positions, dim]: cosines, then sines. Angles are formed in fp64."""
    frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1).float().to(device)


def rotary_reference(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Plain torch in the dtype of `x`, [tokens, heads, dim]."""
    cos, sin = table.to(x.dtype)[positions][:, None].chunk(2, -1)
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


@triton.jit
def _rotary_kernel(x_ptr, out_ptr, positions_ptr, table_ptr, x_stride, sign, HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    lanes = tl.arange(0, HALF)
    cos = tl.load(table_ptr + position * 2 * HALF + lanes)[None, :]
    sin = tl.load(table_ptr + position * 2 * HALF + HALF + lanes)[None, :] * sign
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    tile = heads * 2 * HALF + lanes[None, :]
    live = heads < HEADS
    left = tl.load(x_ptr + token * x_stride + tile, mask=live, other=0.0).to(tl.float32)
    right = tl.load(x_ptr + token * x_stride + tile + HALF, mask=live, other=0.0).to(tl.float32)
    cos, sin = tl.broadcast_to(cos, left.shape), tl.broadcast_to(sin, left.shape)
    out = out_ptr + token * HEADS * 2 * HALF + tile
    tl.store(out, tl.fma(left, cos, -(right * sin)).to(out_ptr.dtype.element_ty), mask=live)
    tl.store(out + HALF, tl.fma(right, cos, left * sin).to(out_ptr.dtype.element_ty), mask=live)


def _rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, sign: float) -> torch.Tensor:
    tokens, heads, dim = x.shape
    assert x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.stride(2) == 1 and x.stride(1) == dim
    assert table.dtype == torch.float32 and table.shape[1] == dim and table.is_contiguous()
    assert positions.shape == (tokens,) and not positions.is_floating_point()
    assert triton.next_power_of_2(dim) == dim, f"head dimension {dim}"
    out = torch.empty(tokens, heads, dim, dtype=x.dtype, device=x.device)
    if tokens:
        _rotary_kernel[(tokens,)](x, out, positions, table, x.stride(0), sign, heads, triton.next_power_of_2(heads), dim // 2)
    return out


@torch.library.custom_op("consistency_cuda::rotary", mutates_args=())
def rotary(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [tokens, heads, dim] (tokens may be strided) to `positions` [tokens] with `table` [positions, dim]."""
    return _rotate(x, positions, table, 1.0)


@rotary.register_fake
def _(x, positions, table):
    return x.new_empty(x.shape)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx, grad):
    return _rotate(grad.contiguous(), *ctx.saved_tensors, -1.0), None, None


rotary.register_autograd(_backward, setup_context=_setup)


def _case(heads: int, dim: int) -> Case:
    positions = 32768

    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        where = torch.randint(0, positions, (rows,), generator=generator, device=generator.device)
        return Inputs((normal((rows, heads, dim), generator), where), (rotary_table(positions, dim, 1e6),))

    def stock(x, where, table):
        import vllm._custom_ops as ops

        out = x.clone().flatten(1)
        ops.rotary_embedding(where, out, None, dim, table.to(x.dtype), True)
        return out.view(x.shape)

    def stock_timed(x, where, table):
        import vllm._custom_ops as ops

        ops.rotary_embedding(where, x.flatten(1), None, dim, _rounded(table), True)
        return x

    cache: dict[int, torch.Tensor] = {}

    def _rounded(table):
        return cache.setdefault(table.data_ptr(), table.to(torch.bfloat16))

    def gradients():
        x, where, table = inputs(300, torch.Generator("cuda").manual_seed(5)).take(300)
        return check_gradients(rotary, rotary_reference, {"x": x}, (where, table))

    return Case("rotary", f"{heads} x {dim}", ("qwen3",), inputs, rotary, lambda x, *rest: rotary_reference(x.double(), *rest), stock,
                stock_timed, gradients=gradients)


CASES = [_case(16, 128)]


# ---- the contract's names ----------------------------------------------------------------------------------------------


Rotated = tuple[torch.Tensor, torch.Tensor]
_eager = eager(rotary, _setup, _backward)


@functools.lru_cache(maxsize=8)
def _table(positions: int, dim: int, theta: float, device: torch.device) -> torch.Tensor:
    return rotary_table(positions, dim, theta, device)


def exact_training(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *, theta: float, max_positions: int) -> Rotated:
    """positions int64 [T], q [T, heads, D], k [T, kv_heads, D] -> rotated q and k. Differentiable in q and k."""
    table = _table(max_positions, q.shape[-1], theta, q.device)
    return _eager(q, positions, table), _eager(k, positions, table)


@torch.library.custom_op("consistency_cuda::rotary_pair", mutates_args=())
def rotary_pair(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, theta: float, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    table = _table(max_positions, q.shape[-1], theta, q.device)
    return _rotate(q, positions, table, 1.0), _rotate(k, positions, table, 1.0)


@rotary_pair.register_fake
def _(positions, q, k, theta, max_positions):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def exact_rollout(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *, theta: float, max_positions: int) -> Rotated:
    """As `exact_training`, one opaque operator: a compiler that traced the table's formula would compute another table."""
    return rotary_pair(positions, q, k, theta, max_positions)


def stock_rollout(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *, theta: float, max_positions: int) -> Rotated:
    """vLLM's kernel with its table, which is rounded to the dtype of q."""
    import vllm._custom_ops as ops

    from consistency.operators.rotary import cos_sin_cache

    q, k = q.clone(memory_format=torch.contiguous_format), k.clone(memory_format=torch.contiguous_format)
    table = cos_sin_cache(q.shape[-1], theta, max_positions, q.dtype).to(q.device)
    ops.rotary_embedding(positions, q.flatten(1), k.flatten(1), q.shape[-1], table, True)
    return q, k

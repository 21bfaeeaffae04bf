"""Mamba2 state-space scan in chunks of an absolute grid, and a decode step that gives the bits of the scan's row.

Contract. Positions are cut at absolute multiples of the chunk (128). With dt = softplus(dt_raw + bias), all in fp32:
  cs[m] = fma(dt[m], A, cs[m-1]) inside a chunk, strictly in order of position (a tree would depend on the launch);
  cb[m, k] = C[m] . B[k], bf16 operands, one fp32 accumulator;
  state entering a chunk is kept in fp32 and rounded to bf16, a tie away from zero, where it is multiplied;
  y[m] = bf16(fma(x[m], D, (C[m] . state) * exp(cs[m]) + sum over k <= m of bf16(cb * exp(min(cs[m]-cs[k], 0)) * dt[k]) x[k])), where the
  sum continues the accumulator of the first product over ascending k;
  a full chunk folds: state' = fma(exp(cs[last]), state, sum over k of x[k] bf16(B[k] * (exp(min(cs[last]-cs[k], 0)) * dt[k]))).
exp(v) is exp2(v * log2 e). On Hopper the tile of a tensor-core product does not change its bits, so the decode step may compute its one row
in a tile of 16, and launch settings are free.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from consistency.layout import Layout
from consistency.operators.cuda.eager import eager

CHUNK = 128
LOG2E = tl.constexpr(1.4426950408889634)
CHUNK_STATE = {"BLOCK_P": 64, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
CHUNK_CB = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
CHUNK_SCAN = {"BLOCK_M": 64, "BLOCK_P": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 1}


@dataclass(frozen=True)
class ChunkTable:
    """Where the chunks of a packed batch lie. Built once for a batch and shared by all layers."""

    starts: torch.Tensor
    """int32 [chunks]: first token of each chunk."""
    lengths: torch.Tensor
    """int32 [chunks]: tokens of each chunk; all but the last of a sequence are full."""
    sequences: torch.Tensor
    """int32 [sequences + 1]: first chunk of each sequence, and the number of chunks."""

    @classmethod
    def build(cls, lengths: list[int], device: torch.device | str, chunk: int = CHUNK) -> "ChunkTable":
        """Table for packed sequences of `lengths`, each of which starts on the chunk grid."""
        starts, sizes, sequences, token = [], [], [0], 0
        for length in lengths:
            for begin in range(0, length, chunk):
                starts.append(token + begin)
                sizes.append(min(chunk, length - begin))
            token += length
            sequences.append(len(starts))
        return cls(*(torch.tensor(v, dtype=torch.int32, device=device) for v in (starts, sizes, sequences)))


def mamba2_scan_reference(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor,
                          dt_bias: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """The chunked formulation in plain torch, in the dtype of `x`; differentiable. Shapes as in `mamba2_scan`."""
    dtype, chunks, heads, groups = x.dtype, starts.shape[0], x.shape[1], B.shape[1]
    offsets = torch.arange(CHUNK, device=x.device)
    live = offsets < lengths[:, None]
    index = torch.where(live, starts[:, None] + offsets, 0).long()

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[index].to(dtype) * live.view(*live.shape, *(1,) * (tensor.ndim - 1))

    xs, bs, cs_in = gather(x), gather(B), gather(C)
    step = gather(torch.nn.functional.softplus(dt.to(dtype) + dt_bias.to(dtype)))
    total = torch.cumsum(step * A.to(dtype), 1)
    decay = (total[:, :, None] - total[:, None]).permute(0, 3, 1, 2)
    causal = offsets[:, None] >= offsets
    decay = torch.where(causal, decay, float("-inf")).exp()
    cb = torch.einsum("clgn,csgn->cgls", cs_in, bs).repeat_interleave(heads // groups, 1)
    y = torch.einsum("chls,cshp->clhp", cb * decay * step.transpose(1, 2)[:, :, None], xs)
    last = total[:, -1]
    grouped = (xs * ((last[:, None] - total).exp() * step)[..., None]).unflatten(2, (groups, -1))
    states = torch.einsum("csgrp,csgn->cgrpn", grouped, bs).flatten(1, 2)
    owner = torch.searchsorted(sequences, torch.arange(chunks, device=x.device, dtype=sequences.dtype), right=True)
    through = torch.cumsum(last, 0)
    before = (owner[:, None] == owner) & (torch.arange(chunks, device=x.device)[:, None] > torch.arange(chunks, device=x.device))
    carry = torch.where(before[..., None], (through - last)[:, None] - through[None], float("-inf")).exp()
    entering = torch.einsum("ijh,jhpn->ihpn", carry, states).unflatten(1, (groups, -1))
    y = y + torch.einsum("clgn,cgrpn->clgrp", cs_in, entering).flatten(2, 3) * total.exp()[..., None]
    return (y + xs * D.to(dtype)[:, None])[live]


@triton.jit
def exp_base2(x):
    return tl.math.exp2(LOG2E * x)


@triton.jit
def round_state(state):
    """fp32 to bf16, to nearest and a tie away from zero, so that the lower half of the bits says whether it went up: decode keeps both halves."""
    return ((state.to(tl.int32, bitcast=True) + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def softplus(x):
    return tl.where(x <= 20.0, tl.math.log(tl.math.exp(x) + 1), x)


@triton.jit
def _cumsum_kernel(dt_ptr, A_ptr, bias_ptr, starts_ptr, lengths_ptr, step_ptr, cs_ptr, dt_stride,
                   HEADS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    length = tl.load(lengths_ptr + chunk)
    source = dt_ptr + tl.load(starts_ptr + chunk).to(tl.int64) * dt_stride + h
    A = tl.load(A_ptr + h).to(tl.float32)
    bias = tl.load(bias_ptr + h).to(tl.float32)
    target = (chunk * HEADS + h) * CHUNK
    cs = tl.zeros((BLOCK_H,), dtype=tl.float32)
    # the chain of additions is short, a load is not: eight loads are always under way
    d0 = tl.load(source + 0 * dt_stride, mask=(h >= 0) & (length > 0), other=0.0)
    d1 = tl.load(source + 1 * dt_stride, mask=(h >= 0) & (length > 1), other=0.0)
    d2 = tl.load(source + 2 * dt_stride, mask=(h >= 0) & (length > 2), other=0.0)
    d3 = tl.load(source + 3 * dt_stride, mask=(h >= 0) & (length > 3), other=0.0)
    d4 = tl.load(source + 4 * dt_stride, mask=(h >= 0) & (length > 4), other=0.0)
    d5 = tl.load(source + 5 * dt_stride, mask=(h >= 0) & (length > 5), other=0.0)
    d6 = tl.load(source + 6 * dt_stride, mask=(h >= 0) & (length > 6), other=0.0)
    d7 = tl.load(source + 7 * dt_stride, mask=(h >= 0) & (length > 7), other=0.0)
    for t in range(0, CHUNK, 8):
        n0 = tl.load(source + (t + 8) * dt_stride, mask=(h >= 0) & (t + 8 < length), other=0.0)
        n1 = tl.load(source + (t + 9) * dt_stride, mask=(h >= 0) & (t + 9 < length), other=0.0)
        n2 = tl.load(source + (t + 10) * dt_stride, mask=(h >= 0) & (t + 10 < length), other=0.0)
        n3 = tl.load(source + (t + 11) * dt_stride, mask=(h >= 0) & (t + 11 < length), other=0.0)
        n4 = tl.load(source + (t + 12) * dt_stride, mask=(h >= 0) & (t + 12 < length), other=0.0)
        n5 = tl.load(source + (t + 13) * dt_stride, mask=(h >= 0) & (t + 13 < length), other=0.0)
        n6 = tl.load(source + (t + 14) * dt_stride, mask=(h >= 0) & (t + 14 < length), other=0.0)
        n7 = tl.load(source + (t + 15) * dt_stride, mask=(h >= 0) & (t + 15 < length), other=0.0)
        cs = _advance(d0, bias, A, cs, t + 0 < length, step_ptr + target + t + 0, cs_ptr + target + t + 0)
        cs = _advance(d1, bias, A, cs, t + 1 < length, step_ptr + target + t + 1, cs_ptr + target + t + 1)
        cs = _advance(d2, bias, A, cs, t + 2 < length, step_ptr + target + t + 2, cs_ptr + target + t + 2)
        cs = _advance(d3, bias, A, cs, t + 3 < length, step_ptr + target + t + 3, cs_ptr + target + t + 3)
        cs = _advance(d4, bias, A, cs, t + 4 < length, step_ptr + target + t + 4, cs_ptr + target + t + 4)
        cs = _advance(d5, bias, A, cs, t + 5 < length, step_ptr + target + t + 5, cs_ptr + target + t + 5)
        cs = _advance(d6, bias, A, cs, t + 6 < length, step_ptr + target + t + 6, cs_ptr + target + t + 6)
        cs = _advance(d7, bias, A, cs, t + 7 < length, step_ptr + target + t + 7, cs_ptr + target + t + 7)
        d0, d1, d2, d3, d4, d5, d6, d7 = n0, n1, n2, n3, n4, n5, n6, n7


@triton.jit
def _advance(raw, bias, A, cs, live, step_ptr, cs_ptr):
    step = tl.where(live, softplus(raw.to(tl.float32) + bias), 0.0)
    cs = tl.fma(step, A, cs)
    tl.store(step_ptr, step)
    tl.store(cs_ptr, cs)
    return cs


@triton.jit
def _chunk_state_kernel(x_ptr, B_ptr, step_ptr, cs_ptr, starts_ptr, lengths_ptr, out_ptr, x_stride, B_stride,
                        HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, RATIO: tl.constexpr, CHUNK: tl.constexpr,
                        BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    chunk, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    if tl.load(lengths_ptr + chunk) < CHUNK:
        return
    start = tl.load(starts_ptr + chunk).to(tl.int64)
    p = tl.program_id(0) // (N // BLOCK_N) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.program_id(0) % (N // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (chunk * HEADS + head) * CHUNK
    last = tl.load(cs_ptr + row + CHUNK - 1)
    accumulator = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    for base in range(0, CHUNK, BLOCK_K):
        k = base + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + (start + k[None, :]) * x_stride + head * P + p[:, None])
        b = tl.load(B_ptr + (start + k[:, None]) * B_stride + head // RATIO * N + n[None, :]).to(tl.float32)
        scale = exp_base2(tl.minimum(last - tl.load(cs_ptr + row + k), 0.0)) * tl.load(step_ptr + row + k)
        accumulator = tl.dot(x, (b * scale[:, None]).to(x_ptr.dtype.element_ty), accumulator)
    tl.store(out_ptr + (chunk * HEADS + head) * P * N + p[:, None] * N + n[None, :], accumulator)


@triton.jit
def _state_passing_kernel(states_ptr, cs_ptr, lengths_ptr, sequences_ptr, initial_ptr, entering_ptr, boundary_ptr,
                          HEADS: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, HAS_INITIAL: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sequence, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, end = tl.load(sequences_ptr + sequence), tl.load(sequences_ptr + sequence + 1)
    where = (sequence * HEADS + head) * DIM + offsets
    if HAS_INITIAL:  # noqa: SIM108
        state = tl.load(initial_ptr + where)
    else:
        state = tl.zeros((BLOCK,), dtype=tl.float32)
    for chunk in range(first, end):
        row = chunk.to(tl.int64) * HEADS + head
        tl.store(entering_ptr + row * DIM + offsets, round_state(state))
        if tl.load(lengths_ptr + chunk) == CHUNK:
            decay = tl.zeros((BLOCK,), dtype=tl.float32) + exp_base2(tl.load(cs_ptr + row * CHUNK + CHUNK - 1))
            state = tl.fma(decay, state, tl.load(states_ptr + row * DIM + offsets))
    tl.store(boundary_ptr + where, state)


@triton.jit
def _chunk_cb_kernel(C_ptr, B_ptr, starts_ptr, lengths_ptr, out_ptr, C_stride, B_stride,
                     GROUPS: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    chunk, group = tl.program_id(1).to(tl.int64), tl.program_id(2)
    block_m, block_n = tl.program_id(0) // (CHUNK // BLOCK_N), tl.program_id(0) % (CHUNK // BLOCK_N)
    start, length = tl.load(starts_ptr + chunk).to(tl.int64), tl.load(lengths_ptr + chunk)
    if block_n * BLOCK_N >= (block_m + 1) * BLOCK_M or block_m * BLOCK_M >= length:
        return
    m, k = block_m * BLOCK_M + tl.arange(0, BLOCK_M), block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for base in range(0, N, BLOCK_K):
        n = base + tl.arange(0, BLOCK_K)
        c = tl.load(C_ptr + (start + m[:, None]) * C_stride + group * N + n[None, :], mask=m[:, None] < length, other=0.0)
        b = tl.load(B_ptr + (start + k[None, :]) * B_stride + group * N + n[:, None], mask=k[None, :] < length, other=0.0)
        accumulator = tl.dot(c, b, accumulator)
    tl.store(out_ptr + ((chunk * GROUPS + group) * CHUNK + m[:, None]) * CHUNK + k[None, :], accumulator)


@triton.jit
def _chunk_scan_kernel(x_ptr, C_ptr, D_ptr, step_ptr, cs_ptr, cb_ptr, entering_ptr, starts_ptr, lengths_ptr, y_ptr, x_stride, C_stride,
                       HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, RATIO: tl.constexpr, CHUNK: tl.constexpr,
                       BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr):
    chunk, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    block_m = tl.program_id(0) // (P // BLOCK_P)
    start, length = tl.load(starts_ptr + chunk).to(tl.int64), tl.load(lengths_ptr + chunk)
    if block_m * BLOCK_M >= length:
        return
    m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    p = tl.program_id(0) % (P // BLOCK_P) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, N)
    row, group = (chunk * HEADS + head) * CHUNK, head // RATIO
    cs_m = tl.load(cs_ptr + row + m)
    c = tl.load(C_ptr + (start + m[:, None]) * C_stride + group * N + n[None, :], mask=m[:, None] < length, other=0.0)
    state = tl.load(entering_ptr + (chunk * HEADS + head) * P * N + p[None, :] * N + n[:, None])
    accumulator = tl.dot(c, state) * exp_base2(cs_m)[:, None]
    for base in range(0, tl.minimum((block_m + 1) * BLOCK_M, length), BLOCK_K):
        k = base + tl.arange(0, BLOCK_K)
        causal = m[:, None] >= k[None, :]
        cb = tl.load(cb_ptr + ((chunk * (HEADS // RATIO) + group) * CHUNK + m[:, None]) * CHUNK + k[None, :], mask=causal, other=0.0)
        cb *= exp_base2(tl.minimum(cs_m[:, None] - tl.load(cs_ptr + row + k)[None, :], 0.0))
        cb *= tl.load(step_ptr + row + k)[None, :]
        cb = tl.where(causal, cb, 0.0).to(x_ptr.dtype.element_ty)
        x = tl.load(x_ptr + (start + k[:, None]) * x_stride + head * P + p[None, :], mask=k[:, None] < length, other=0.0)
        accumulator = tl.dot(cb, x, accumulator)
    x = tl.load(x_ptr + (start + m[:, None]) * x_stride + head * P + p[None, :], mask=m[:, None] < length, other=0.0).to(tl.float32)
    accumulator = tl.fma(x, tl.zeros_like(x) + tl.load(D_ptr + head).to(tl.float32), accumulator)
    tl.store(y_ptr + ((start + m[:, None]) * HEADS + head) * P + p[None, :], accumulator.to(y_ptr.dtype.element_ty), mask=m[:, None] < length)


def assert_inputs(x, dt, A, B, C, D, dt_bias) -> None:
    tokens, heads, p = x.shape
    groups, n = B.shape[1:]
    assert x.dtype == B.dtype == C.dtype == torch.bfloat16 and dt.dtype in (torch.bfloat16, torch.float32)
    assert dt.shape == (tokens, heads) and B.shape == C.shape == (tokens, groups, n) and heads % groups == 0
    assert x.stride()[1:] == (p, 1) and B.stride()[1:] == C.stride()[1:] == (n, 1) and dt.stride(1) == 1, "only tokens may be strided"
    for vector in (A, D, dt_bias):
        assert vector.shape == (heads,) and vector.is_contiguous() and vector.is_cuda
    assert A.dtype == torch.float32, "A must be fp32: its rounding is part of every decay"
    for width in (heads, p, n, heads // groups):
        assert triton.next_power_of_2(width) == width, f"width {width} is not a power of two"


def cumulative_sums(dt: torch.Tensor, A: torch.Tensor, dt_bias: torch.Tensor, table: ChunkTable) -> tuple[torch.Tensor, torch.Tensor]:
    """softplus(dt + dt_bias), and the cumulative sum of its product with A inside each chunk: both fp32 [chunks, heads, 128]."""
    chunks, heads = table.starts.shape[0], dt.shape[1]
    step, cs = (torch.empty(chunks, heads, CHUNK, dtype=torch.float32, device=dt.device) for _ in range(2))
    block = min(heads, 32)
    _cumsum_kernel[(chunks, heads // block)](
        dt, A, dt_bias, table.starts, table.lengths, step, cs, dt.stride(0), heads, CHUNK, block, num_warps=1)
    return step, cs


@dataclass(frozen=True)
class Chunks:
    """What the rows of a chunk need beside its own inputs."""

    step: torch.Tensor
    """fp32 [chunks, heads, 128]: softplus of the raw dt."""
    cs: torch.Tensor
    """fp32 [chunks, heads, 128]: cumulative sum of step * A."""
    entering: torch.Tensor
    """bf16 [chunks, heads, P, N]: state that enters the chunk."""
    boundary: torch.Tensor
    """fp32 [sequences, heads, P, N]: state at the last chunk boundary of each sequence."""
    cb: torch.Tensor
    """fp32 [chunks, groups, 128, 128]: C . B, its blocks on and below the diagonal."""


def prepare_chunks(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, dt_bias: torch.Tensor,
                   table: ChunkTable, initial: torch.Tensor | None = None) -> Chunks:
    """The scan up to its output. There must be a chunk."""
    (_, heads, p), (groups, n), chunks, sequences = x.shape, B.shape[1:], table.starts.shape[0], table.sequences.shape[0] - 1
    new, ratio = (lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=x.device)), heads // groups
    states, entering = new(chunks, heads, p, n), new(chunks, heads, p, n, dtype=x.dtype)
    boundary, cb = new(sequences, heads, p, n), new(chunks, groups, CHUNK, CHUNK)
    step, cs = cumulative_sums(dt, A, dt_bias, table)
    s = CHUNK_STATE
    _chunk_state_kernel[(p // min(p, s["BLOCK_P"]) * (n // min(n, s["BLOCK_N"])), chunks, heads)](
        x, B, step, cs, table.starts, table.lengths, states, x.stride(0), B.stride(0), heads, p, n, ratio, CHUNK,
        min(p, s["BLOCK_P"]), min(n, s["BLOCK_N"]), s["BLOCK_K"], num_warps=s["num_warps"], num_stages=s["num_stages"])
    block = min(512, p * n)
    _state_passing_kernel[(p * n // block, sequences, heads)](
        states, cs, table.lengths, table.sequences, initial, entering, boundary, heads, p * n, CHUNK, initial is not None, block)
    s = CHUNK_CB
    _chunk_cb_kernel[((CHUNK // s["BLOCK_M"]) * (CHUNK // s["BLOCK_N"]), chunks, groups)](
        C, B, table.starts, table.lengths, cb, C.stride(0), B.stride(0), groups, n, CHUNK, s["BLOCK_M"], s["BLOCK_N"], min(n, s["BLOCK_K"]),
        num_warps=s["num_warps"], num_stages=s["num_stages"])
    return Chunks(step, cs, entering, boundary, cb)


def scan_with_state(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor,
                    table: ChunkTable, initial: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scan, with what decode needs to go on.

    Returns y [tokens, heads, P], the fp32 state at the last chunk boundary of each sequence [sequences, heads, P, N], and the cumulative
    sums [chunks, heads, 128]. `initial` is the fp32 state with which each sequence enters its first chunk.
    """
    assert_inputs(x, dt, A, B, C, D, dt_bias)
    (tokens, heads, p), n, chunks, sequences = x.shape, B.shape[2], table.starts.shape[0], table.sequences.shape[0] - 1
    if initial is not None:
        assert initial.shape == (sequences, heads, p, n) and initial.dtype == torch.float32 and initial.is_contiguous()
    y = torch.empty(tokens, heads, p, dtype=x.dtype, device=x.device)
    if not chunks:
        boundary = torch.zeros(sequences, heads, p, n, device=x.device) if initial is None else initial.clone()
        return y, boundary, torch.empty(0, heads, CHUNK, device=x.device)
    c, s = prepare_chunks(x, dt, A, B, C, dt_bias, table, initial), CHUNK_SCAN
    _chunk_scan_kernel[(CHUNK // s["BLOCK_M"] * (p // min(p, s["BLOCK_P"])), chunks, heads)](
        x, C, D, c.step, c.cs, c.cb, c.entering, table.starts, table.lengths, y, x.stride(0), C.stride(0), heads, p, n, heads // B.shape[1], CHUNK,
        s["BLOCK_M"], min(p, s["BLOCK_P"]), s["BLOCK_K"], num_warps=s["num_warps"], num_stages=s["num_stages"])
    return y, c.boundary, c.cs


@torch.library.custom_op("consistency_cuda::mamba2_scan", mutates_args=())
def mamba2_scan_op(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor,
                   starts: torch.Tensor, lengths: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    return scan_with_state(x, dt, A, B, C, D, dt_bias, ChunkTable(starts, lengths, sequences))[0]


@mamba2_scan_op.register_fake
def _(x, dt, A, B, C, D, dt_bias, starts, lengths, sequences):
    return x.new_empty(x.shape)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    from consistency.operators.cuda.mamba2_backward import scan_gradients

    x, dt, A, B, C, D, dt_bias, *places = ctx.saved_tensors
    table = ChunkTable(*places)
    chunks = prepare_chunks(x, dt, A, B, C, dt_bias, table) if table.starts.shape[0] else None
    return *scan_gradients(grad, x, dt, A, B, C, D, dt_bias, table, chunks), None, None, None


mamba2_scan_op.register_autograd(_backward, setup_context=_setup)


def mamba2_scan(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor,
                table: ChunkTable) -> torch.Tensor:
    """Scan of packed sequences from their first token: x [tokens, heads, P], raw dt [tokens, heads], fp32 A [heads] (negative),
    B and C [tokens, groups, N], D and dt_bias [heads]. Returns y [tokens, heads, P]; differentiable in all seven."""
    return mamba2_scan_op(x, dt, A, B, C, D, dt_bias, table.starts, table.lengths, table.sequences)


# ---- the contract's names ----------------------------------------------------------------------------------------------

exact_rollout = "exact"
"""On the rollout side the binding is a choice of kernels and of the cache in the mixer, see engines/vllm_cuda.py."""
stock_rollout = None
_eager = eager(mamba2_scan_op, _setup, _backward)


def exact_training(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor,
                   layout: Layout, *, chunk: int = CHUNK, dt_minimum: float = 0.0) -> torch.Tensor:
    """x [T, heads, P], raw dt [T, heads], fp32 A [heads], B, C [T, groups, N], D, dt_bias [heads] -> y [T, heads, P]; padding rows are zero.
    Differentiable. `dt_minimum`, which transformers applies and the rollout does not, is not part of the contract."""
    assert chunk == CHUNK, f"the contract's chunk is {CHUNK}, the model has {chunk}"
    x, dt, B, C = (layout.pack(t) for t in (x, dt, B, C))
    table = layout.kept("chunks", x.device, lambda: ChunkTable.build(list(layout.lengths), x.device))
    return layout.unpack(_eager(x, dt, A, B, C, D, dt_bias, table.starts, table.lengths, table.sequences))

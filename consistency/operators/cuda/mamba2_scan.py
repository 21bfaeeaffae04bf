"""Mamba2 state-space scan in chunks of an absolute grid, and a decode step that gives the bits of the scan's row.

Contract. Positions are cut at absolute multiples of the chunk (128). With dt = softplus(dt_raw + bias), all in fp32:
  cs[m] = fma(dt[m], A, cs[m-1]) inside a chunk, strictly in order of position (a tree would depend on the launch);
  cb[m, k] = C[m] . B[k], bf16 operands, one fp32 accumulator;
  state entering a chunk is kept in fp32 and rounded to bf16 where it is multiplied;
  y[m] = bf16(fma(x[m], D, (C[m] . state) * exp(cs[m]) + sum over k <= m of bf16(cb * exp(min(cs[m]-cs[k], 0)) * dt[k]) x[k])), where the
  sum continues the accumulator of the first product over ascending k;
  a full chunk folds: state' = fma(exp(cs[last]), state, sum over k of x[k] bf16(B[k] * (exp(min(cs[last]-cs[k], 0)) * dt[k]))).
exp(v) is exp2(v * log2 e). On Hopper the tile of a tensor-core product does not change its bits, so the decode step may compute its one row
in a tile of 16, and launch settings are free.

Decode keeps, for each slot, the state at the last chunk boundary and the x, B, dt and cs of the open chunk. It reads the state (a bf16 copy of
it, when the cache holds one: the rounding is the scan's own) and never writes it, except once in a chunk; a recurrent update
reads and writes it in fp32 at every step.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from consistency.operators.cuda.case import Case, Inputs, check_gradients, equal_elements, normal

CHUNK = 128
LOG2E = tl.constexpr(1.4426950408889634)
CHUNK_STATE = {"BLOCK_P": 64, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
CHUNK_CB = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
CHUNK_SCAN = {"BLOCK_M": 32, "BLOCK_P": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
DECODE_ROW = {"BLOCK_K": 32, "num_warps": 4}
DECODE_APPEND = {"BLOCK_K": 32, "num_warps": 4}
FOLD_ROWS = 16
OVERLAP = True
"""Programmatic dependent launch of the decode step's second and third kernel: they start while the one before still runs, and wait for
it where they first read what it wrote. The first kernel is launched plainly, so inputs and caches of earlier steps are complete."""


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
def _exp(x):
    return tl.math.exp2(LOG2E * x)


@triton.jit
def _softplus(x):
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
    for t in range(0, CHUNK, 8):
        # eight loads before the first dependent addition: the chain is short, the loads are not
        d0 = tl.load(source + t * dt_stride, mask=(h >= 0) & (t < length), other=0.0)
        d1 = tl.load(source + (t + 1) * dt_stride, mask=(h >= 0) & (t + 1 < length), other=0.0)
        d2 = tl.load(source + (t + 2) * dt_stride, mask=(h >= 0) & (t + 2 < length), other=0.0)
        d3 = tl.load(source + (t + 3) * dt_stride, mask=(h >= 0) & (t + 3 < length), other=0.0)
        d4 = tl.load(source + (t + 4) * dt_stride, mask=(h >= 0) & (t + 4 < length), other=0.0)
        d5 = tl.load(source + (t + 5) * dt_stride, mask=(h >= 0) & (t + 5 < length), other=0.0)
        d6 = tl.load(source + (t + 6) * dt_stride, mask=(h >= 0) & (t + 6 < length), other=0.0)
        d7 = tl.load(source + (t + 7) * dt_stride, mask=(h >= 0) & (t + 7 < length), other=0.0)
        cs = _advance(d0, bias, A, cs, t < length, step_ptr + target + t, cs_ptr + target + t)
        cs = _advance(d1, bias, A, cs, t + 1 < length, step_ptr + target + t + 1, cs_ptr + target + t + 1)
        cs = _advance(d2, bias, A, cs, t + 2 < length, step_ptr + target + t + 2, cs_ptr + target + t + 2)
        cs = _advance(d3, bias, A, cs, t + 3 < length, step_ptr + target + t + 3, cs_ptr + target + t + 3)
        cs = _advance(d4, bias, A, cs, t + 4 < length, step_ptr + target + t + 4, cs_ptr + target + t + 4)
        cs = _advance(d5, bias, A, cs, t + 5 < length, step_ptr + target + t + 5, cs_ptr + target + t + 5)
        cs = _advance(d6, bias, A, cs, t + 6 < length, step_ptr + target + t + 6, cs_ptr + target + t + 6)
        cs = _advance(d7, bias, A, cs, t + 7 < length, step_ptr + target + t + 7, cs_ptr + target + t + 7)


@triton.jit
def _advance(raw, bias, A, cs, live, step_ptr, cs_ptr):
    step = tl.where(live, _softplus(raw.to(tl.float32) + bias), 0.0)
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
        scale = _exp(tl.minimum(last - tl.load(cs_ptr + row + k), 0.0)) * tl.load(step_ptr + row + k)
        accumulator = tl.dot(x, (b * scale[:, None]).to(x_ptr.dtype.element_ty), accumulator)
    tl.store(out_ptr + (chunk * HEADS + head) * P * N + p[:, None] * N + n[None, :], accumulator)


@triton.jit
def _state_passing_kernel(states_ptr, cs_ptr, lengths_ptr, sequences_ptr, initial_ptr, entering_ptr, boundary_ptr,
                          HEADS: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, HAS_INITIAL: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sequence, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, end = tl.load(sequences_ptr + sequence), tl.load(sequences_ptr + sequence + 1)
    where = (sequence * HEADS + head) * DIM + offsets
    if HAS_INITIAL:
        state = tl.load(initial_ptr + where)
    else:
        state = tl.zeros((BLOCK,), dtype=tl.float32)
    for chunk in range(first, end):
        row = chunk.to(tl.int64) * HEADS + head
        tl.store(entering_ptr + row * DIM + offsets, state.to(entering_ptr.dtype.element_ty))
        if tl.load(lengths_ptr + chunk) == CHUNK:
            decay = tl.zeros((BLOCK,), dtype=tl.float32) + _exp(tl.load(cs_ptr + row * CHUNK + CHUNK - 1))
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
    accumulator = tl.dot(c, state) * _exp(cs_m)[:, None]
    for base in range(0, tl.minimum((block_m + 1) * BLOCK_M, length), BLOCK_K):
        k = base + tl.arange(0, BLOCK_K)
        causal = m[:, None] >= k[None, :]
        cb = tl.load(cb_ptr + ((chunk * (HEADS // RATIO) + group) * CHUNK + m[:, None]) * CHUNK + k[None, :], mask=causal, other=0.0)
        cb *= _exp(tl.minimum(cs_m[:, None] - tl.load(cs_ptr + row + k)[None, :], 0.0))
        cb *= tl.load(step_ptr + row + k)[None, :]
        cb = tl.where(causal, cb, 0.0).to(x_ptr.dtype.element_ty)
        x = tl.load(x_ptr + (start + k[:, None]) * x_stride + head * P + p[None, :], mask=k[:, None] < length, other=0.0)
        accumulator = tl.dot(cb, x, accumulator)
    x = tl.load(x_ptr + (start + m[:, None]) * x_stride + head * P + p[None, :], mask=m[:, None] < length, other=0.0).to(tl.float32)
    accumulator = tl.fma(x, tl.zeros_like(x) + tl.load(D_ptr + head).to(tl.float32), accumulator)
    tl.store(y_ptr + ((start + m[:, None]) * HEADS + head) * P + p[None, :], accumulator.to(y_ptr.dtype.element_ty), mask=m[:, None] < length)


def _assert_inputs(x, dt, A, B, C, D, dt_bias) -> None:
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


def scan_with_state(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor,
                    table: ChunkTable, initial: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The scan, with what decode needs to go on.

    Returns y [tokens, heads, P], the fp32 state at the last chunk boundary of each sequence [sequences, heads, P, N], and the cumulative
    sums [chunks, heads, 128]. `initial` is the fp32 state with which each sequence enters its first chunk.
    """
    _assert_inputs(x, dt, A, B, C, D, dt_bias)
    (tokens, heads, p), (groups, n), chunks, sequences = x.shape, B.shape[1:], table.starts.shape[0], table.sequences.shape[0] - 1
    new, ratio = (lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=x.device)), heads // groups
    step, cs = new(chunks, heads, CHUNK), new(chunks, heads, CHUNK)
    states, entering = new(chunks, heads, p, n), new(chunks, heads, p, n, dtype=x.dtype)
    boundary, cb, y = new(sequences, heads, p, n), new(chunks, groups, CHUNK, CHUNK), new(tokens, heads, p, dtype=x.dtype)
    if initial is not None:
        assert initial.shape == boundary.shape and initial.dtype == torch.float32 and initial.is_contiguous()
    if not chunks:
        return y, boundary.zero_() if initial is None else initial.clone(), cs
    _cumsum_kernel[(chunks, heads // min(heads, 32))](dt, A, dt_bias, table.starts, table.lengths, step, cs, dt.stride(0), heads, CHUNK, min(heads, 32), num_warps=1)
    s = CHUNK_STATE
    _chunk_state_kernel[(p // min(p, s["BLOCK_P"]) * (n // min(n, s["BLOCK_N"])), chunks, heads)](
        x, B, step, cs, table.starts, table.lengths, states, x.stride(0), B.stride(0), heads, p, n, ratio, CHUNK,
        min(p, s["BLOCK_P"]), min(n, s["BLOCK_N"]), s["BLOCK_K"], num_warps=s["num_warps"], num_stages=s["num_stages"])
    _state_passing_kernel[(triton.cdiv(p * n, 512), sequences, heads)](
        states, cs, table.lengths, table.sequences, initial, entering, boundary, heads, p * n, CHUNK, initial is not None, 512)
    s = CHUNK_CB
    _chunk_cb_kernel[((CHUNK // s["BLOCK_M"]) * (CHUNK // s["BLOCK_N"]), chunks, groups)](
        C, B, table.starts, table.lengths, cb, C.stride(0), B.stride(0), groups, n, CHUNK, s["BLOCK_M"], s["BLOCK_N"], min(n, s["BLOCK_K"]),
        num_warps=s["num_warps"], num_stages=s["num_stages"])
    s = CHUNK_SCAN
    _chunk_scan_kernel[(CHUNK // s["BLOCK_M"] * (p // min(p, s["BLOCK_P"])), chunks, heads)](
        x, C, D, step, cs, cb, entering, table.starts, table.lengths, y, x.stride(0), C.stride(0), heads, p, n, ratio, CHUNK,
        s["BLOCK_M"], min(p, s["BLOCK_P"]), s["BLOCK_K"], num_warps=s["num_warps"], num_stages=s["num_stages"])
    return y, boundary, cs


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
    # the chunked formulation again, in fp32 and in torch: no atomics, so the same bits in every run
    *inputs, starts, lengths, sequences = ctx.saved_tensors
    with torch.enable_grad():
        leaves = [t.detach().float().requires_grad_() for t in inputs]
        y = mamba2_scan_reference(*leaves, starts, lengths, sequences)
        grads = torch.autograd.grad(y, leaves, grad.float())
    return *(g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)), None, None, None


mamba2_scan_op.register_autograd(_backward, setup_context=_setup)


def mamba2_scan(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor,
                table: ChunkTable) -> torch.Tensor:
    """Scan of packed sequences from their first token: x [tokens, heads, P], raw dt [tokens, heads], fp32 A [heads] (negative),
    B and C [tokens, groups, N], D and dt_bias [heads]. Returns y [tokens, heads, P]; differentiable in all seven."""
    return mamba2_scan_op(x, dt, A, B, C, D, dt_bias, table.starts, table.lengths, table.sequences)


@dataclass
class Mamba2Cache:
    """Per slot: the state at the last chunk boundary, and the rows of the open chunk."""

    state: torch.Tensor
    """fp32 [slots, heads, P, N]."""
    rounded: torch.Tensor
    """bf16 copy of `state` for decode to read, or `state` itself to save memory."""
    x: torch.Tensor
    """bf16 [slots, heads, 128, P]."""
    B: torch.Tensor
    """bf16 [slots, groups, 128, N]."""
    dt: torch.Tensor
    """Raw dt of the open chunk [slots, heads, 128]."""
    cs: torch.Tensor
    """fp32 [slots, heads, 128]: cumulative sum of dt * A."""

    @classmethod
    def allocate(cls, slots: int, heads: int, groups: int, p: int, n: int, device: torch.device | str, rounded_copy: bool = True,
                 dtype: torch.dtype = torch.bfloat16) -> "Mamba2Cache":
        """Zeroed cache. Unused rows must hold finite values: masked rows still pass through tensor cores."""
        def new(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        state = new(slots, heads, p, n, dtype=torch.float32)
        return cls(state, new(slots, heads, p, n) if rounded_copy else state, new(slots, heads, CHUNK, p), new(slots, groups, CHUNK, n),
                   new(slots, heads, CHUNK), new(slots, heads, CHUNK, dtype=torch.float32))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the order of `mamba2_decode`."""
        return self.state, self.rounded, self.x, self.B, self.dt, self.cs


@triton.jit
def _append_kernel(x_ptr, dt_ptr, B_ptr, C_ptr, A_ptr, bias_ptr, positions_ptr, slots_ptr, x_buffer, B_buffer, dt_buffer, cs_buffer, cb_ptr,
                   x_stride, dt_stride, B_stride, C_stride, null_slot, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
                   RATIO: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    group, request = tl.program_id(0), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    m = (tl.load(positions_ptr + request) % CHUNK).to(tl.int32)
    base = tl.program_id(1) * BLOCK_K
    if slot == null_slot or base > m:
        return
    n, k, rows = tl.arange(0, N), base + tl.arange(0, BLOCK_K), tl.arange(0, 16)[:, None]
    b = tl.load(B_ptr + request * B_stride + group * N + n)
    rows_of_b = B_buffer + (slot * (HEADS // RATIO) + group) * CHUNK * N
    keys = tl.load(rows_of_b + k[None, :] * N + n[:, None], mask=k[None, :] < m, other=0.0)
    keys = tl.where(k[None, :] == m, b[:, None], keys)
    c = tl.load(C_ptr + request * C_stride + group * N + n[None, :] + rows * 0, mask=(rows == 0) & (n[None, :] >= 0), other=0.0)
    cb = tl.dot(c, keys)
    target = cb_ptr + (request * (HEADS // RATIO) + group) * CHUNK + k[None, :] + rows * 0
    tl.store(target, cb, mask=(rows == 0) & (k[None, :] >= 0))
    if base == 0:
        tl.store(rows_of_b + m * N + n, b)
        h = group * RATIO + tl.arange(0, RATIO)
        raw = tl.load(dt_ptr + request * dt_stride + h)
        step = _softplus(raw.to(tl.float32) + tl.load(bias_ptr + h).to(tl.float32))
        row = (slot * HEADS + h) * CHUNK + m
        before = tl.load(cs_buffer + row - 1, mask=(h >= 0) & (m > 0), other=0.0)
        tl.store(cs_buffer + row, tl.fma(step, tl.load(A_ptr + h).to(tl.float32), before))
        tl.store(dt_buffer + row, raw)
        lanes = tl.arange(0, RATIO * P)
        head = group * RATIO + lanes // P
        tl.store(x_buffer + ((slot * HEADS + head) * CHUNK + m) * P + lanes % P, tl.load(x_ptr + request * x_stride + group * RATIO * P + lanes))


@triton.jit
def _row_kernel(C_ptr, D_ptr, bias_ptr, positions_ptr, slots_ptr, state_ptr, x_buffer, dt_buffer, cs_buffer, cb_ptr, y_ptr, C_stride, null_slot,
                HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, RATIO: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
                OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    position = tl.load(positions_ptr + request)
    m = (position % CHUNK).to(tl.int32)
    n, p, rows = tl.arange(0, N), tl.arange(0, P), tl.arange(0, 16)[:, None]
    row = (slot * HEADS + head) * CHUNK
    # in the first chunk the slot still holds another request's state
    state = tl.load(state_ptr + (slot * HEADS + head) * P * N + p[None, :] * N + n[:, None],
                    mask=(n[:, None] >= 0) & (p[None, :] >= 0) & (position >= CHUNK) & (slot != null_slot), other=0.0).to(x_buffer.dtype.element_ty)
    c = tl.load(C_ptr + request * C_stride + head // RATIO * N + n[None, :] + rows * 0, mask=(rows == 0) & (n[None, :] >= 0), other=0.0)
    bias = tl.load(bias_ptr + head).to(tl.float32)
    accumulator = tl.dot(c, state)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if slot == null_slot:
        return
    cs_m = tl.load(cs_buffer + row + m)
    accumulator *= _exp(cs_m)
    for base in range(0, m + 1, BLOCK_K):
        k = base + tl.arange(0, BLOCK_K)
        live = k <= m
        cb = tl.load(cb_ptr + (request * (HEADS // RATIO) + head // RATIO) * CHUNK + k, mask=live, other=0.0)
        cb *= _exp(tl.minimum(cs_m - tl.load(cs_buffer + row + k, mask=live, other=0.0), 0.0))
        cb *= _softplus(tl.load(dt_buffer + row + k, mask=live, other=0.0).to(tl.float32) + bias)
        weights = tl.where((rows == 0) & live[None, :], cb[None, :], 0.0).to(x_buffer.dtype.element_ty)
        x = tl.load(x_buffer + (row + k[:, None]) * P + p[None, :], mask=live[:, None], other=0.0)
        accumulator = tl.dot(weights, x, accumulator)
    x = tl.load(x_buffer + (row + m) * P + p[None, :] + rows * 0).to(tl.float32)
    accumulator = tl.fma(x, tl.zeros_like(x) + tl.load(D_ptr + head).to(tl.float32), accumulator)
    target = y_ptr + (request * HEADS + head) * P + p[None, :] + rows * 0
    tl.store(target, accumulator.to(y_ptr.dtype.element_ty), mask=(rows == 0) & (p[None, :] >= 0))


@triton.jit
def _fold_kernel(bias_ptr, positions_ptr, slots_ptr, state_ptr, rounded_ptr, x_buffer, B_buffer, dt_buffer, cs_buffer, requests, null_slot,
                 HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, RATIO: tl.constexpr, CHUNK: tl.constexpr,
                 HAS_ROUNDED: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr):
    head = tl.program_id(0)
    candidates = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = candidates < requests
    full = inside & (tl.load(slots_ptr + candidates, mask=inside, other=0) != null_slot)
    full = full & (tl.load(positions_ptr + candidates, mask=inside, other=0) % CHUNK == CHUNK - 1)
    if OVERLAP:
        # also where there is nothing to fold: a later kernel waits for this one only, and must find the row kernel done
        tl.extra.cuda.gdc_wait()
    if tl.sum(full.to(tl.int32), axis=0) == 0:
        return
    n, p = tl.arange(0, N), tl.arange(0, P)
    bias = tl.load(bias_ptr + head).to(tl.float32)
    for request in range(tl.program_id(1) * ROWS, tl.minimum(tl.program_id(1) * ROWS + ROWS, requests)):
        slot = tl.load(slots_ptr + request).to(tl.int64)
        position = tl.load(positions_ptr + request)
        if (slot != null_slot) & (position % CHUNK == CHUNK - 1):
            row = (slot * HEADS + head) * CHUNK
            rows_of_b = B_buffer + (slot * (HEADS // RATIO) + head // RATIO) * CHUNK * N
            last = tl.load(cs_buffer + row + CHUNK - 1)
            accumulator = tl.zeros((P, N), dtype=tl.float32)
            for base in range(0, CHUNK, BLOCK_K):
                k = base + tl.arange(0, BLOCK_K)
                x = tl.load(x_buffer + (row + k[None, :]) * P + p[:, None])
                b = tl.load(rows_of_b + k[:, None] * N + n[None, :]).to(tl.float32)
                step = _softplus(tl.load(dt_buffer + row + k).to(tl.float32) + bias)
                scale = _exp(tl.minimum(last - tl.load(cs_buffer + row + k), 0.0)) * step
                accumulator = tl.dot(x, (b * scale[:, None]).to(x_buffer.dtype.element_ty), accumulator)
            where = (slot * HEADS + head) * P * N + p[:, None] * N + n[None, :]
            state = tl.load(state_ptr + where, mask=(p[:, None] >= 0) & (n[None, :] >= 0) & (position >= CHUNK), other=0.0)
            state = tl.fma(tl.zeros_like(accumulator) + _exp(last), state, accumulator)
            tl.store(state_ptr + where, state)
            if HAS_ROUNDED:
                tl.store(rounded_ptr + where, state.to(rounded_ptr.dtype.element_ty))


@torch.library.custom_op("consistency_cuda::mamba2_decode", mutates_args=("state", "rounded", "x_buffer", "B_buffer", "dt_buffer", "cs_buffer"))
def mamba2_decode(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor,
                  positions: torch.Tensor, slots: torch.Tensor, state: torch.Tensor, rounded: torch.Tensor, x_buffer: torch.Tensor,
                  B_buffer: torch.Tensor, dt_buffer: torch.Tensor, cs_buffer: torch.Tensor, null_slot: int) -> torch.Tensor:
    """One token for each request: x [requests, heads, P], raw dt [requests, heads], B and C [requests, groups, N].

    `positions` (absolute, from 0) and `slots` are read on the device only, so the call can be captured in a CUDA graph. A request whose slot is
    `null_slot` is padding: nothing is read or written for it. The other tensors are those of `Mamba2Cache`.
    """
    _assert_inputs(x, dt, A, B, C, D, dt_bias)
    (requests, heads, p), (groups, n) = x.shape, B.shape[1:]
    assert positions.shape == slots.shape == (requests,) and not positions.is_floating_point() and not slots.is_floating_point()
    assert state.shape[1:] == rounded.shape[1:] == (heads, p, n) and state.dtype == torch.float32
    assert x_buffer.shape[1:] == (heads, CHUNK, p) and B_buffer.shape[1:] == (groups, CHUNK, n) and dt_buffer.dtype == dt.dtype
    assert all(t.is_contiguous() for t in (state, rounded, x_buffer, B_buffer, dt_buffer, cs_buffer))
    y = torch.empty(requests, heads, p, dtype=x.dtype, device=x.device)
    if not requests:
        return y
    cb = torch.empty(requests, groups, CHUNK, dtype=torch.float32, device=x.device)
    widths = (heads, p, n, heads // groups, CHUNK)
    s = DECODE_APPEND
    _append_kernel[(groups, CHUNK // s["BLOCK_K"], requests)](
        x, dt, B, C, A, dt_bias, positions, slots, x_buffer, B_buffer, dt_buffer, cs_buffer, cb,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), null_slot, *widths, s["BLOCK_K"], OVERLAP, num_warps=s["num_warps"])
    s = DECODE_ROW
    _row_kernel[(heads, requests)](C, D, dt_bias, positions, slots, rounded, x_buffer, dt_buffer, cs_buffer, cb, y, C.stride(0), null_slot, *widths,
                                   s["BLOCK_K"], OVERLAP, num_warps=s["num_warps"], launch_pdl=OVERLAP)
    _fold_kernel[(heads, triton.cdiv(requests, FOLD_ROWS))](
        dt_bias, positions, slots, state, rounded, x_buffer, B_buffer, dt_buffer, cs_buffer, requests, null_slot, *widths,
        rounded.data_ptr() != state.data_ptr(), FOLD_ROWS, 32, OVERLAP, num_warps=4, launch_pdl=OVERLAP)
    return y


@mamba2_decode.register_fake
def _(x, dt, A, B, C, D, dt_bias, positions, slots, state, rounded, x_buffer, B_buffer, dt_buffer, cs_buffer, null_slot):
    return x.new_empty(x.shape)


@dataclass(frozen=True)
class PrefillTable:
    """Row maps of a prefill step in which a sequence may continue inside an open chunk: its buffered rows are scanned again."""

    chunks: ChunkTable
    new: torch.Tensor
    """int64: rows of the extended batch that are the new tokens, in order."""
    old: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """int64: rows taken from buffers, their sequence, their place in the chunk."""
    open: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    """int64: rows that stay in the open chunk afterwards, their sequence, their place, their chunk."""
    carried: torch.Tensor
    """bool [sequences, 1, 1, 1]: the cache holds a state of this request. In the first chunk it still holds another's."""
    tokens: int

    @classmethod
    def build(cls, lengths: list[int], computed: list[int], device: torch.device | str) -> "PrefillTable":
        """`lengths` new tokens of each sequence, of which `computed` are already in the cache."""
        new, old, left, extended, row, chunk = [], [], [], [], 0, 0
        for sequence, (length, done) in enumerate(zip(lengths, computed, strict=True)):
            before = done % CHUNK
            old += [(row + i, sequence, i) for i in range(before)]
            new += range(row + before, row + before + length)
            total = before + length
            full = total // CHUNK
            left += [(row + full * CHUNK + i, sequence, i, chunk + full) for i in range(total % CHUNK)]
            extended.append(total)
            row, chunk = row + total, chunk + -(-total // CHUNK)

        def columns(rows: list, width: int) -> tuple[torch.Tensor, ...]:
            return tuple(torch.tensor(c, dtype=torch.int64, device=device) for c in (zip(*rows, strict=True) if rows else [()] * width))

        carried = torch.tensor([done >= CHUNK for done in computed], device=device).view(-1, 1, 1, 1)
        return cls(ChunkTable.build(extended, device), torch.tensor(new, dtype=torch.int64, device=device), columns(old, 3), columns(left, 4),
                   carried, row)


def mamba2_prefill(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor,
                   table: PrefillTable, slots: torch.Tensor, cache: Mamba2Cache) -> torch.Tensor:
    """Prefill of new tokens from `cache`, whatever the chunk borders of the scheduler; leaves the cache ready for decode or for more prefill.

    Shapes as in `mamba2_scan`, for the new tokens only; `slots` int64 [sequences].
    """
    old_rows, old_sequence, old_place = table.old
    if old_rows.numel():
        def extend(values: torch.Tensor, buffered: torch.Tensor | None) -> torch.Tensor:
            out = torch.zeros(table.tokens, *values.shape[1:], dtype=values.dtype, device=values.device)
            out[table.new] = values
            if buffered is not None:
                out[old_rows] = buffered
            return out

        where = slots[old_sequence]
        x, dt = extend(x, cache.x[where, :, old_place]), extend(dt, cache.dt[where, :, old_place])
        B, C = extend(B, cache.B[where, :, old_place]), extend(C, None)
    initial = torch.where(table.carried, cache.state[slots], 0.0)
    y, boundary, cs = scan_with_state(x, dt, A, B, C, D, dt_bias, table.chunks, initial)
    cache.state[slots] = boundary
    if cache.rounded.data_ptr() != cache.state.data_ptr():
        cache.rounded[slots] = boundary.to(cache.rounded.dtype)
    rows, sequence, place, chunk = table.open
    where = slots[sequence]
    cache.x[where, :, place], cache.B[where, :, place] = x[rows], B[rows]
    cache.dt[where, :, place], cache.cs[where, :, place] = dt[rows], cs[chunk, :, place]
    return y[table.new] if old_rows.numel() else y


HEADS, GROUPS, P, N = 64, 8, 64, 128


def _parameters(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A, D and dt_bias as a trained mixer has them: A in -16..-1, dt between 1e-3 and 1e-1 at zero input."""
    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(HEADS, generator=generator, device=generator.device)

    step = torch.exp(uniform(-6.9, -2.3))
    return -uniform(1, 16), uniform(0.5, 1.5), step + torch.log(-torch.expm1(-step))


def _tokens(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (normal((rows, HEADS, P), generator), normal((rows, HEADS), generator), normal((rows, GROUPS, N), generator, 0.5),
            normal((rows, GROUPS, N), generator, 0.5))


def _stock_scan(x, dt, B, C, A, D, dt_bias):
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    tokens, out = x.shape[0], torch.empty_like(x)
    chunk_ends = torch.cat((torch.arange(0, tokens, CHUNK, device=x.device), torch.full((1,), tokens, device=x.device))).int()
    chunks = chunk_ends.shape[0] - 1
    mamba_chunk_scan_combined_varlen(
        x, dt, A, B, C, chunk_size=CHUNK, cu_seqlens=chunk_ends[:: chunks], cu_chunk_seqlens=chunk_ends,
        last_chunk_indices=torch.full((1,), chunks - 1, dtype=torch.int32, device=x.device),
        seq_idx=torch.zeros(chunks, dtype=torch.int32, device=x.device), out=out, D=D, dt_bias=dt_bias, dt_softplus=True, state_dtype=torch.float32)
    return out


@functools.lru_cache
def _table(tokens: int, device: torch.device) -> ChunkTable:
    return ChunkTable.build([tokens], device)


def _prefill_case() -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        return Inputs(_tokens(rows, generator), _parameters(generator))

    def exact(x, dt, B, C, A, D, dt_bias):
        return mamba2_scan(x, dt, A, B, C, D, dt_bias, _table(x.shape[0], x.device))

    def reference(x, dt, B, C, A, D, dt_bias):
        table = _table(x.shape[0], x.device)
        return mamba2_scan_reference(x.double(), dt, A, B, C, D, dt_bias, table.starts, table.lengths, table.sequences)

    def configured(settings: dict):
        def call(*args):
            before = dict(CHUNK_SCAN)
            CHUNK_SCAN.update(settings)
            try:
                return exact(*args)
            finally:
                CHUNK_SCAN.update(before)

        return call

    def gradients():
        generator = torch.Generator("cuda").manual_seed(5)
        x, dt, B, C, A, D, dt_bias = inputs(300, generator).take(300)
        table = ChunkTable.build([1, 129, 170], "cuda")
        constants = (table.starts, table.lengths, table.sequences)
        names = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "dt_bias": dt_bias}
        return check_gradients(mamba2_scan_op, mamba2_scan_reference, names, constants)

    settings = {f"scan {m}x{p}x{k}, {w} warps, {s} stages": {"BLOCK_M": m, "BLOCK_P": p, "BLOCK_K": k, "num_warps": w, "num_stages": s}
                for m, p, k, w, s in ((32, 32, 32, 2, 4), (32, 64, 64, 4, 2), (64, 64, 32, 4, 1), (128, 64, 32, 4, 1), (64, 64, 64, 8, 1))}
    return Case("mamba2_scan", "prefill 64x64, 8 groups, state 128", ("nemotron-3.5",), inputs, exact, reference, _stock_scan,
                configurations={name: configured(s) for name, s in settings.items()}, phases=phases, gradients=gradients, causal=True, decode=())


def phases() -> dict[str, tuple[int, int]]:
    """Decode, chunked prefill and packed prefill against one scan from the first token: outputs, and the state at the end."""
    generator = torch.Generator("cuda").manual_seed(6)
    lengths = [300, 129, 384]
    A, D, dt_bias = _parameters(generator)
    tokens = [_tokens(length, generator) for length in lengths]
    full = [scan_with_state(x, dt, A, B, C, D, dt_bias, ChunkTable.build([x.shape[0]], "cuda")) for x, dt, B, C in tokens]
    x, dt, B, C = (torch.cat(part) for part in zip(*tokens, strict=True))
    packed = scan_with_state(x, dt, A, B, C, D, dt_bias, ChunkTable.build(lengths, "cuda"))
    found = {"packed": equal_elements(packed[0], torch.cat([f[0] for f in full]))}
    slots = torch.tensor([4, 1, 3], device="cuda")

    def run(sizes: list[int], name: str, rounded_copy: bool = True) -> None:
        cache = Mamba2Cache.allocate(5, HEADS, GROUPS, P, N, "cuda", rounded_copy)
        for tensor in cache.tensors():
            tensor.fill_(7.0)  # remains of another request
        outputs, done = [[], [], []], [0, 0, 0]
        for size in sizes:
            batch = [i for i in range(3) if done[i] < lengths[i]]
            counts = [min(size, lengths[i] - done[i]) for i in batch]
            parts = [torch.cat([tokens[i][j][done[i] : done[i] + c] for i, c in zip(batch, counts, strict=True)]) for j in range(4)]
            table = PrefillTable.build(counts, [done[i] for i in batch], "cuda")
            y = mamba2_prefill(parts[0], parts[1], A, parts[2], parts[3], D, dt_bias, table, slots[batch], cache)
            for i, part in zip(batch, y.split(counts), strict=True):
                outputs[i].append(part)
                done[i] += part.shape[0]
        for _ in range(max(lengths)):
            batch = [i for i in range(3) if done[i] < lengths[i]]
            if not batch:
                break
            # one row of padding between requests, as a captured graph has it
            padded = [batch[0], batch[0], *batch[1:]]
            x, dt, B, C = (torch.stack([tokens[i][j][done[i]] for i in padded]) for j in range(4))
            index = slots[padded].clone()
            index[1] = 0
            where = torch.tensor([done[i] for i in padded], device="cuda")
            y = mamba2_decode(x, dt, A, B, C, D, dt_bias, where, index, *cache.tensors(), 0)
            for i, part in zip(batch, torch.cat((y[:1], y[2:])), strict=True):
                outputs[i].append(part[None])
                done[i] += 1
        found[name] = equal_elements(torch.cat([torch.cat(o) for o in outputs]), packed[0])
        # a sequence that ends on a border has just been folded
        found[f"{name}, state"] = equal_elements(cache.state[slots], packed[1])

    run([], "decode from token 0")
    run([1], "decode from token 1")
    run([1], "decode from token 1, fp32 state only", False)
    run([100], "decode from token 100")
    run([128], "decode from token 128")
    run([50] * 8, "chunked prefill of 50")
    run([7, 121, 64, 1, 1, 200], "chunks of 7, 121, 64, 1, 1, 200, then decode")
    try:
        stock = torch.cat([_stock_scan(x, dt, B, C, A, D, dt_bias) for x, dt, B, C in tokens])
        found["engine scan with its own cumulative sum"] = equal_elements(stock, packed[0])
        found["engine scan with this cumulative sum"] = equal_elements(_engine_scan(tokens, A, D, dt_bias), packed[0])
    except ImportError:
        pass
    return found


def _engine_scan(tokens: list[tuple[torch.Tensor, ...]], A: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    def ordered(dt, A, chunk_size, cu_chunk_seqlens, dt_bias=None, **_):
        table = _table(dt.shape[0], dt.device)
        step, cs = (torch.empty(table.starts.shape[0], HEADS, CHUNK, device=dt.device) for _ in range(2))
        _cumsum_kernel[(table.starts.shape[0], 2)](dt, A, dt_bias, table.starts, table.lengths, step, cs, dt.stride(0), HEADS, CHUNK, 32, num_warps=1)
        return cs.transpose(0, 1), step.transpose(0, 1)

    before = ssd_combined._chunk_cumsum_fwd
    ssd_combined._chunk_cumsum_fwd = ordered
    try:
        return torch.cat([_stock_scan(x, dt, B, C, A, D, dt_bias) for x, dt, B, C in tokens])
    finally:
        ssd_combined._chunk_cumsum_fwd = before


def _decode_case(rounded_copy: bool) -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        cache = Mamba2Cache.allocate(rows + 1, HEADS, GROUPS, P, N, generator.device, rounded_copy)
        for tensor, scale in ((cache.state, 1.0), (cache.x, 1.0), (cache.B, 0.5), (cache.dt, 1.0)):
            for part in tensor:
                part.copy_(normal(tuple(part.shape), generator, scale))
        cache.rounded.copy_(cache.state)
        # every place in the chunk but the last: a fold would change the state between two calls
        positions = torch.randint(0, 8192, (rows,), generator=generator, device=generator.device)
        positions -= (positions % CHUNK == CHUNK - 1).to(positions.dtype)
        slots = 1 + torch.randperm(rows, generator=generator, device=generator.device, dtype=torch.int32)
        A, D, dt_bias = _parameters(generator)
        cache.cs.copy_(torch.cumsum(torch.nn.functional.softplus(cache.dt.float() + dt_bias[:, None]) * A[:, None], -1))
        return Inputs((*_tokens(rows, generator), positions, slots), (A, D, dt_bias, *cache.tensors()))

    def exact(x, dt, B, C, positions, slots, A, D, dt_bias, *cache):
        return mamba2_decode(x, dt, A, B, C, D, dt_bias, positions, slots, *cache, 0)

    def reference(x, dt, B, C, positions, slots, A, D, dt_bias, state, rounded, x_buffer, B_buffer, dt_buffer, cs_buffer):
        slots, place, ratio = slots.long(), (positions % CHUNK).long(), HEADS // GROUPS
        rows = torch.arange(len(slots), device=x.device)
        xs, bs, raw = (t[slots].double() for t in (x_buffer, B_buffer, dt_buffer))
        xs[rows, :, place], bs[rows, :, place], raw[rows, :, place] = x.double(), B.double(), dt.double()
        live = torch.arange(CHUNK, device=x.device) <= place[:, None]
        step = torch.nn.functional.softplus(raw + dt_bias.double()[:, None]) * live[:, None]
        total = torch.cumsum(step * A.double()[:, None], -1)
        now = total[rows, :, place][..., None]
        cb = torch.einsum("rgn,rgkn->rgk", C.double(), bs).repeat_interleave(ratio, 1)
        y = torch.einsum("rhk,rhkp->rhp", torch.where(live[:, None], cb * (now - total).clamp_max(0).exp() * step, 0.0), xs)
        y += torch.einsum("rhn,rhpn->rhp", C.double().repeat_interleave(ratio, 1), state[slots].double()) * now.exp()
        return y + x.double() * D.double()[:, None]

    def stock_timed(x, dt, B, C, positions, slots, A, D, dt_bias, state, *_):
        from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

        def expand(t, *shape):
            return t.view(*t.shape, *(1,) * len(shape)).expand(*t.shape, *shape)

        out = torch.empty_like(x)
        selective_state_update(state, x, expand(dt, P), expand(A, P, N), B, C, expand(D, P), expand(dt_bias, P), dt_softplus=True,
                               state_batch_indices=slots, dst_state_batch_indices=slots, out=out)
        return out

    return Case("mamba2_scan", f"decode{'' if rounded_copy else ', fp32 state only'}", ("nemotron-3.5",), inputs, exact, reference, None, stock_timed,
                prefill=())


CASES = [_prefill_case(), _decode_case(True), _decode_case(False)]

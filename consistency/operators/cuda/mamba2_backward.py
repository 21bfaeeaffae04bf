"""Gradients of the Mamba2 scan, chunk by chunk, without atomics: the same bits in every run.

With the names of `mamba2_scan`, S the state that enters a chunk, W the gradient of the state that leaves it, G[m, k] = C[m] . B[k],
E[m, k] = exp(cs[m] - cs[k]) and T = dy x^T E (for k <= m):
  W of the chunk before = exp(cs[last]) W + sum over m of exp(cs[m]) dy[m] C[m];
  dx[k] = D dy[k] + sum over m of bf16(G E step[k]) dy[m] + exp(cs[last] - cs[k]) step[k] W B[k];
  dC[m] = exp(cs[m]) dy[m] S + sum over k of bf16(sum over heads of T step[k]) B[k];
  dB[k] = exp(cs[last] - cs[k]) step[k] x[k] W + sum over m of the same scores times C[m];
and the gradients of step and cs are the row and column sums of these products, in fp32.
"""

import torch
import triton
import triton.language as tl

from consistency.operators.cuda.mamba2_scan import CHUNK, Chunks, ChunkTable, exp_base2

BLOCK = 64


@triton.jit
def _state_grad_kernel(grad_ptr, C_ptr, cs_ptr, starts_ptr, lengths_ptr, out_ptr, C_stride, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
                       RATIO: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr):
    """What the rows of a chunk give to the gradient of the state that enters it."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, length = tl.load(starts_ptr + chunk).to(tl.int64), tl.load(lengths_ptr + chunk)
    p, n = tl.arange(0, P), tl.arange(0, N)
    row = chunk * HEADS + head
    accumulator = tl.zeros((P, N), dtype=tl.float32)
    for base in range(0, length, BLOCK_K):
        m = base + tl.arange(0, BLOCK_K)
        grad = tl.load(grad_ptr + ((start + m[None, :]) * HEADS + head) * P + p[:, None], mask=m[None, :] < length, other=0.0)
        c = tl.load(C_ptr + (start + m[:, None]) * C_stride + head // RATIO * N + n[None, :], mask=m[:, None] < length, other=0.0).to(tl.float32)
        scale = exp_base2(tl.load(cs_ptr + row * CHUNK + m))
        accumulator = tl.dot(grad, (c * scale[:, None]).to(grad_ptr.dtype.element_ty), accumulator)
    tl.store(out_ptr + row * P * N + p[:, None] * N + n[None, :], accumulator)


@triton.jit
def _state_passing_grad_kernel(grads_ptr, entering_ptr, cs_ptr, sequences_ptr, leaving_ptr, sums_ptr, HEADS: tl.constexpr, DIM: tl.constexpr,
                               CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """From the last chunk of a sequence to the first. A chunk that is not full is the last, so nothing leaves it."""
    tile = tl.program_id(0)
    offsets = tile * BLOCK + tl.arange(0, BLOCK)
    sequence, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, end = tl.load(sequences_ptr + sequence), tl.load(sequences_ptr + sequence + 1)
    grad = tl.zeros((BLOCK,), dtype=tl.float32)
    for back in range(0, end - first):
        row = (end - 1 - back).to(tl.int64) * HEADS + head
        decay = exp_base2(tl.load(cs_ptr + row * CHUNK + CHUNK - 1))
        state = tl.load(entering_ptr + row * DIM + offsets).to(tl.float32)
        tl.store(leaving_ptr + row * DIM + offsets, grad.to(leaving_ptr.dtype.element_ty))
        tl.store(sums_ptr + row * (DIM // BLOCK) + tile, tl.sum(state * grad, axis=0) * decay)
        grad = tl.load(grads_ptr + row * DIM + offsets) + decay * grad


@triton.jit
def _scores_grad_kernel(x_ptr, grad_ptr, step_ptr, cs_ptr, cb_ptr, starts_ptr, lengths_ptr, dcb_ptr, rows_ptr, columns_ptr, x_stride,
                        HEADS: tl.constexpr, P: tl.constexpr, RATIO: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """One block of the scores of a group: their gradient, summed over heads in order, and each head's row and column sums."""
    blocks: tl.constexpr = CHUNK // BLOCK
    block_m, block_k = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    chunk, group = tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, length = tl.load(starts_ptr + chunk).to(tl.int64), tl.load(lengths_ptr + chunk)
    if block_k > block_m or block_m * BLOCK >= length:
        return
    m, k, p = block_m * BLOCK + tl.arange(0, BLOCK), block_k * BLOCK + tl.arange(0, BLOCK), tl.arange(0, P)
    causal = (m[:, None] >= k[None, :]) & (m[:, None] < length)
    where = ((chunk * (HEADS // RATIO) + group) * CHUNK + m[:, None]) * CHUNK + k[None, :]
    cb = tl.load(cb_ptr + where, mask=causal, other=0.0)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for head in range(group * RATIO, group * RATIO + RATIO):
        row = chunk * HEADS + head
        grad = tl.load(grad_ptr + ((start + m[:, None]) * HEADS + head) * P + p[None, :], mask=m[:, None] < length, other=0.0)
        x = tl.load(x_ptr + (start + k[None, :]) * x_stride + head * P + p[:, None], mask=k[None, :] < length, other=0.0)
        gap = tl.load(cs_ptr + row * CHUNK + m)[:, None] - tl.load(cs_ptr + row * CHUNK + k)[None, :]
        scores = tl.where(causal, tl.dot(grad, x) * exp_base2(tl.minimum(gap, 0.0)), 0.0)
        step = tl.load(step_ptr + row * CHUNK + k)[None, :]
        total += scores * step
        scores *= cb
        tl.store(columns_ptr + (row * blocks + block_m) * CHUNK + k, tl.sum(scores, axis=0))
        tl.store(rows_ptr + (row * blocks + block_k) * CHUNK + m, tl.sum(scores * step, axis=1))
    tl.store(dcb_ptr + where, total.to(dcb_ptr.dtype.element_ty))


@triton.jit
def _input_grad_kernel(x_ptr, grad_ptr, B_ptr, D_ptr, step_ptr, cs_ptr, cb_ptr, leaving_ptr, starts_ptr, lengths_ptr, dx_ptr, skip_ptr,
                       x_stride, B_stride, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, RATIO: tl.constexpr, CHUNK: tl.constexpr,
                       BLOCK: tl.constexpr):
    block, chunk, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, length = tl.load(starts_ptr + chunk).to(tl.int64), tl.load(lengths_ptr + chunk)
    if block * BLOCK >= length:
        return
    k, p, n = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, P), tl.arange(0, N)
    live, row, group = k[:, None] < length, chunk * HEADS + head, head // RATIO
    cs, step = tl.load(cs_ptr + row * CHUNK + k), tl.load(step_ptr + row * CHUNK + k)
    b = tl.load(B_ptr + (start + k[:, None]) * B_stride + group * N + n[None, :], mask=live, other=0.0)
    leaving = tl.load(leaving_ptr + row * P * N + p[None, :] * N + n[:, None])
    scale = exp_base2(tl.minimum(tl.load(cs_ptr + row * CHUNK + CHUNK - 1) - cs, 0.0)) * step
    accumulator = tl.dot(b, leaving) * scale[:, None]
    for base in range(block * BLOCK, length, BLOCK):
        m = base + tl.arange(0, BLOCK)
        causal = (m[None, :] >= k[:, None]) & (m[None, :] < length)
        cb = tl.load(cb_ptr + ((chunk * (HEADS // RATIO) + group) * CHUNK + m[None, :]) * CHUNK + k[:, None], mask=causal, other=0.0)
        cb *= exp_base2(tl.minimum(tl.load(cs_ptr + row * CHUNK + m)[None, :] - cs[:, None], 0.0)) * step[:, None]
        grad = tl.load(grad_ptr + ((start + m[:, None]) * HEADS + head) * P + p[None, :], mask=m[:, None] < length, other=0.0)
        accumulator = tl.dot(tl.where(causal, cb, 0.0).to(grad_ptr.dtype.element_ty), grad, accumulator)
    where = ((start + k[:, None]) * HEADS + head) * P + p[None, :]
    grad = tl.load(grad_ptr + where, mask=live, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + (start + k[:, None]) * x_stride + head * P + p[None, :], mask=live, other=0.0).to(tl.float32)
    accumulator += grad * tl.load(D_ptr + head).to(tl.float32)
    tl.store(dx_ptr + where, accumulator.to(dx_ptr.dtype.element_ty), mask=live)
    tl.store(skip_ptr + row * CHUNK + k, tl.sum(grad * x, axis=1))


@triton.jit
def _projection_grad_kernel(left_ptr, state_ptr, own_ptr, other_ptr, dcb_ptr, step_ptr, cs_ptr, starts_ptr, lengths_ptr, out_ptr, dots_ptr,
                            left_stride, own_stride, other_stride, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, RATIO: tl.constexpr,
                            CHUNK: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """Gradient of C (left = dy, state = S, other = B) or, with KEYS, of B (left = x, state = W, other = C), summed over the heads of a group."""
    block, chunk, group = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    start, length = tl.load(starts_ptr + chunk).to(tl.int64), tl.load(lengths_ptr + chunk)
    if block * BLOCK >= length:
        return
    m, p, n = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, P), tl.arange(0, N)
    live = m[:, None] < length
    own = tl.load(own_ptr + (start + m[:, None]) * own_stride + group * N + n[None, :], mask=live, other=0.0)
    accumulator = tl.zeros((BLOCK, N), dtype=tl.float32)
    for head in range(group * RATIO, group * RATIO + RATIO):
        row = chunk * HEADS + head
        left = tl.load(left_ptr + (start + m[:, None]) * left_stride + head * P + p[None, :], mask=live, other=0.0)
        state = tl.load(state_ptr + row * P * N + p[:, None] * N + n[None, :])
        cs = tl.load(cs_ptr + row * CHUNK + m)
        if KEYS:
            cs = tl.minimum(tl.load(cs_ptr + row * CHUNK + CHUNK - 1) - cs, 0.0)
        part = tl.dot(left, state) * exp_base2(cs)[:, None]
        tl.store(dots_ptr + row * CHUNK + m, tl.sum(part * own.to(tl.float32), axis=1))
        if KEYS:
            part *= tl.load(step_ptr + row * CHUNK + m)[:, None]
        accumulator += part
    scores = dcb_ptr + (chunk * (HEADS // RATIO) + group) * CHUNK * CHUNK
    first = block * BLOCK if KEYS else 0
    last = length if KEYS else tl.minimum((block + 1) * BLOCK, length)
    for base in range(first, last, BLOCK):
        k = base + tl.arange(0, BLOCK)
        if KEYS:
            pair = tl.load(scores + k[None, :] * CHUNK + m[:, None], mask=(k[None, :] >= m[:, None]) & (k[None, :] < length), other=0.0)
        else:
            pair = tl.load(scores + m[:, None] * CHUNK + k[None, :], mask=(m[:, None] >= k[None, :]) & live, other=0.0)
        other = tl.load(other_ptr + (start + k[:, None]) * other_stride + group * N + n[None, :], mask=k[:, None] < length, other=0.0)
        accumulator = tl.dot(pair, other, accumulator)
    where = ((start + m[:, None]) * (HEADS // RATIO) + group) * N + n[None, :]
    tl.store(out_ptr + where, accumulator.to(out_ptr.dtype.element_ty), mask=live)


def scan_gradients(grad: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor,
                   dt_bias: torch.Tensor, table: ChunkTable, chunks: Chunks) -> tuple[torch.Tensor, ...]:
    """Gradients of x, dt, A, B, C, D and dt_bias, each in its dtype, from `grad` [tokens, heads, P] and what the forward pass computed."""
    (tokens, heads, p), (groups, n), count, sequences = x.shape, B.shape[1:], table.starts.shape[0], table.sequences.shape[0] - 1
    if not count:
        return tuple(torch.zeros_like(t) for t in (x, dt, A, B, C, D, dt_bias))
    step, cs, cb, entering = chunks.step, chunks.cs, chunks.cb, chunks.entering
    grad, ratio, blocks = grad.contiguous(), heads // groups, CHUNK // BLOCK
    place = table.starts, table.lengths

    def new(*shape: int, dtype: torch.dtype = torch.float32, zero: bool = False) -> torch.Tensor:
        return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=x.device)

    states, leaving = new(count, heads, p, n), new(count, heads, p, n, dtype=x.dtype)
    _state_grad_kernel[(count, heads)](grad, C, cs, *place, states, C.stride(0), heads, p, n, ratio, CHUNK, 32, num_warps=4, num_stages=3)
    tile = min(512, p * n)
    through = new(count, heads, p * n // tile)
    _state_passing_grad_kernel[(p * n // tile, sequences, heads)](
        states, entering, cs, table.sequences, leaving, through, heads, p * n, CHUNK, tile)
    # rows behind the end of a short chunk and blocks above the diagonal are never written
    rows, columns = (new(count, heads, blocks, CHUNK, zero=True) for _ in range(2))
    skip, from_state, to_state = (new(count, heads, CHUNK, zero=True) for _ in range(3))
    dcb = new(count, groups, CHUNK, CHUNK, dtype=x.dtype)
    _scores_grad_kernel[(blocks * blocks, count, groups)](
        x, grad, step, cs, cb, *place, dcb, rows, columns, x.stride(0), heads, p, ratio, CHUNK, BLOCK, num_warps=4, num_stages=2)
    dx, dB, dC = new(tokens, heads, p, dtype=x.dtype), new(tokens, groups, n, dtype=B.dtype), new(tokens, groups, n, dtype=C.dtype)
    # one stage: its scores are an operand in registers, which a pipelined wgmma may overwrite
    _input_grad_kernel[(blocks, count, heads)](
        x, grad, B, D, step, cs, cb, leaving, *place, dx, skip, x.stride(0), B.stride(0), heads, p, n, ratio, CHUNK, BLOCK, num_warps=4, num_stages=1)
    _projection_grad_kernel[(blocks, count, groups)](
        grad, entering, C, B, dcb, step, cs, *place, dC, from_state, grad.stride(0), C.stride(0), B.stride(0), heads, p, n, ratio, CHUNK, BLOCK,
        False, num_warps=8, num_stages=2)
    _projection_grad_kernel[(blocks, count, groups)](
        x, leaving, B, C, dcb, step, cs, *place, dB, to_state, x.stride(0), B.stride(0), C.stride(0), heads, p, n, ratio, CHUNK, BLOCK,
        True, num_warps=8, num_stages=2)
    columns = columns.sum(2)
    kept = to_state * step
    dcs = rows.sum(2) - columns * step + from_state - kept
    dcs[..., -1] += kept.sum(-1) + through.sum(-1)
    # sums from each row to the end of its chunk; as a product, since torch's own scan is not reproducible on a GPU
    later = dcs @ torch.ones(CHUNK, CHUNK, device=x.device).tril()
    dstep = (columns + to_state + A.float()[:, None] * later).transpose(1, 2)
    token = torch.arange(tokens, dtype=torch.int32, device=x.device)
    chunk = torch.searchsorted(table.starts, token, right=True) - 1
    ddt = dstep[chunk, token - table.starts[chunk]] * torch.sigmoid(dt.float() + dt_bias.float())
    return (dx, ddt.to(dt.dtype), (step * later).sum((0, 2)).to(A.dtype), dB, dC, skip.sum((0, 2)).to(D.dtype), ddt.sum(0).to(dt_bias.dtype))

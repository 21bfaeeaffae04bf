"""One decode step of the Mamba2 scan, with the bits of the scan's own row, and prefill from and into the decode cache.

Contract: that of `mamba2_scan`. Decode keeps, for each slot, the state at the last chunk boundary and the x, B, dt and cs of the open chunk.
It reads the upper half of the state (its bf16 rounding, the scan's own) and writes it only when a chunk fills; a recurrent update reads and writes
it in fp32 at every step.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from consistency.operators.cuda.mamba2_scan import CHUNK, ChunkTable, assert_inputs, exp_base2, round_state, scan_with_state, softplus

DECODE_APPEND = {"BLOCK_K": 64, "num_warps": 4}
DECODE_ROW = {"BLOCK_K": 128, "num_warps": 4}
"""Free to change: settings do not change bits. A block of the whole chunk is loaded before the wait for the first kernel, a smaller one after."""
OVERLAP = True
"""Programmatic dependent launch of the decode step's second kernel: it starts while the first still runs and reads the state, the buffers and the
inputs, which the first does not write where the second reads. It waits before it reads cb. The first kernel is launched plainly, so that
whatever ran before the step is complete."""


@dataclass
class Mamba2Cache:
    """Per slot: the fp32 state at the last chunk boundary in two halves, and the rows of the open chunk. Slots may be strided."""

    high: torch.Tensor
    """bf16 [slots, heads, P, N]: the state as the scan rounds it (`round_state`), which is all that a decode step reads."""
    low: torch.Tensor
    """int16, the same shape: the lower half of the fp32 bits. With `high` it gives the state back, since `round_state` went up exactly where the
    lower half is 0x8000 or more."""
    x: torch.Tensor
    """bf16 [slots, heads, 128, P]."""
    B: torch.Tensor
    """bf16 [slots, groups, 128, N]."""
    dt: torch.Tensor
    """Raw dt of the open chunk [slots, heads, 128]."""
    cs: torch.Tensor
    """fp32 [slots, heads, 128]: cumulative sum of dt * A."""

    @classmethod
    def over(cls, state: torch.Tensor, x: torch.Tensor, B: torch.Tensor, dt: torch.Tensor, cs: torch.Tensor) -> "Mamba2Cache":
        """A cache whose halves lie in the memory of `state`, fp32 [slots, heads, P, N]: it takes no more than the state of a recurrent update."""
        assert state.dtype == torch.float32 and state[0].is_contiguous()
        flat = state.view(len(state), -1).view(torch.bfloat16)
        high, low = flat.split(flat.shape[1] // 2, 1)
        return cls(high.view(state.shape), low.view(torch.int16).view(state.shape), x, B, dt, cs)

    @classmethod
    def allocate(cls, slots: int, heads: int, groups: int, p: int, n: int, device: torch.device | str,
                 dtype: torch.dtype = torch.bfloat16) -> "Mamba2Cache":
        """Zeroed cache."""
        def new(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls.over(new(slots, heads, p, n, dtype=torch.float32), new(slots, heads, CHUNK, p), new(slots, groups, CHUNK, n),
                        new(slots, heads, CHUNK), new(slots, heads, CHUNK, dtype=torch.float32))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the order of `mamba2_decode`."""
        return self.high, self.low, self.x, self.B, self.dt, self.cs

    def state(self, slots: torch.Tensor) -> torch.Tensor:
        """fp32 [requests, heads, P, N]: the states of these slots."""
        low = self.low[slots].int() & 0xFFFF
        high = self.high[slots].view(torch.int16).int() - (low >= 0x8000).int()
        return ((high << 16) | low).view(torch.float32)

    def store(self, slots: torch.Tensor, state: torch.Tensor) -> None:
        """Puts fp32 states into these slots."""
        bits = state.view(torch.int32)
        self.high[slots] = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        self.low[slots] = ((bits << 16) >> 16).to(torch.int16)


@triton.jit
def _append_kernel(x_ptr, dt_ptr, B_ptr, C_ptr, A_ptr, bias_ptr, lengths_ptr, slots_ptr, x_buffer, B_buffer, dt_buffer, cs_buffer, cb_ptr,
                   x_stride, dt_stride, B_stride, C_stride, x_slot, B_slot, dt_slot, cs_slot, null_slot, HEADS: tl.constexpr, P: tl.constexpr,
                   N: tl.constexpr, RATIO: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    group, request = tl.program_id(0), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    m = (tl.maximum(tl.load(lengths_ptr + request) - 1, 0) % CHUNK).to(tl.int32)
    base = tl.program_id(1) * BLOCK_K
    if slot == null_slot or base > m:
        return
    n, k, rows = tl.arange(0, N), base + tl.arange(0, BLOCK_K), tl.arange(0, 16)[:, None]
    b = tl.load(B_ptr + request * B_stride + group * N + n)
    rows_of_b = B_buffer + slot * B_slot + group * CHUNK * N
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
        step = softplus(raw.to(tl.float32) + tl.load(bias_ptr + h).to(tl.float32))
        row = h * CHUNK + m
        before = tl.load(cs_buffer + slot * cs_slot + row - 1, mask=(h >= 0) & (m > 0), other=0.0)
        tl.store(cs_buffer + slot * cs_slot + row, tl.fma(step, tl.load(A_ptr + h).to(tl.float32), before))
        tl.store(dt_buffer + slot * dt_slot + row, raw)
        lanes = tl.arange(0, RATIO * P)
        head = group * RATIO + lanes // P
        tl.store(x_buffer + slot * x_slot + (head * CHUNK + m) * P + lanes % P, tl.load(x_ptr + request * x_stride + group * RATIO * P + lanes))


@triton.jit
def _open_chunk_block(k, m, cs_m, step_m, x_m, bias, p, x_rows, dt_rows, cs_rows, P: tl.constexpr):
    """Decay, step and x of a block of the open chunk. Place m is the current token, whose row need not be in the buffers yet."""
    old = k < m
    cs = tl.where(k == m, cs_m, tl.load(cs_rows + k, mask=old, other=0.0))
    step = softplus(tl.load(dt_rows + k, mask=old, other=0.0).to(tl.float32) + bias)
    step = tl.where(k == m, step_m, step)
    x = tl.load(x_rows + k[:, None] * P + p[None, :], mask=old[:, None], other=0.0)
    x = tl.where(k[:, None] == m, x_m, x)
    return exp_base2(tl.minimum(cs_m - cs, 0.0)), step, x


@triton.jit
def _add_block(accumulator, decay, step, x, k, m, cb_ptr):
    rows = tl.arange(0, 16)[:, None]
    cb = tl.load(cb_ptr + k, mask=k <= m, other=0.0)
    cb *= decay
    cb *= step
    weights = tl.where((rows == 0) & (k <= m)[None, :], cb[None, :], 0.0)
    return tl.dot(weights.to(x.dtype), x, accumulator)


@triton.jit
def _row_kernel(x_ptr, dt_ptr, C_ptr, A_ptr, D_ptr, bias_ptr, lengths_ptr, slots_ptr, high_ptr, low_ptr, x_buffer, B_buffer, dt_buffer,
                cs_buffer, cb_ptr, y_ptr, x_stride, dt_stride, C_stride, high_slot, low_slot, x_slot, B_slot, dt_slot, cs_slot, null_slot,
                HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr, RATIO: tl.constexpr, CHUNK: tl.constexpr, BLOCK_K: tl.constexpr,
                OVERLAP: tl.constexpr):
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    if slot == null_slot:
        # also here: a later kernel waits for this one only, and must find the first one done
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        # padding stays finite, so that the layers after this one meet no NaN
        lanes = tl.arange(0, P)
        tl.store(y_ptr + (request * HEADS + head) * P + lanes, tl.zeros((P,), dtype=y_ptr.dtype.element_ty))
        return
    position = tl.maximum(tl.load(lengths_ptr + request) - 1, 0)
    m = (position % CHUNK).to(tl.int32)
    n, p, rows = tl.arange(0, N), tl.arange(0, P), tl.arange(0, 16)[:, None]
    x_rows, dt_rows = x_buffer + slot * x_slot + head * CHUNK * P, dt_buffer + slot * dt_slot + head * CHUNK
    cs_rows = cs_buffer + slot * cs_slot + head * CHUNK
    cb_ptr += (request * (HEADS // RATIO) + head // RATIO) * CHUNK
    # in the first chunk the slot still holds another request's state
    carried = (n[:, None] >= 0) & (p[None, :] >= 0) & (position >= CHUNK)
    state = tl.load(high_ptr + slot * high_slot + head * P * N + p[None, :] * N + n[:, None], mask=carried, other=0.0)
    c = tl.load(C_ptr + request * C_stride + head // RATIO * N + n[None, :] + rows * 0, mask=(rows == 0) & (n[None, :] >= 0), other=0.0)
    x_m = tl.load(x_ptr + request * x_stride + head * P + p)[None, :]
    bias = tl.load(bias_ptr + head).to(tl.float32)
    step_m = softplus(tl.load(dt_ptr + request * dt_stride + head).to(tl.float32) + bias)
    before = tl.load(cs_rows + m - 1, mask=m > 0, other=0.0)
    cs_m = tl.fma(step_m, tl.load(A_ptr + head).to(tl.float32), before)
    accumulator = tl.dot(c, state.to(x_buffer.dtype.element_ty)) * exp_base2(cs_m)
    if BLOCK_K == CHUNK:
        k = tl.arange(0, CHUNK)
        decay, step, x = _open_chunk_block(k, m, cs_m, step_m, x_m, bias, p, x_rows, dt_rows, cs_rows, P)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        accumulator = _add_block(accumulator, decay, step, x, k, m, cb_ptr)
    else:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        for base in range(0, m + 1, BLOCK_K):
            k = base + tl.arange(0, BLOCK_K)
            decay, step, x = _open_chunk_block(k, m, cs_m, step_m, x_m, bias, p, x_rows, dt_rows, cs_rows, P)
            accumulator = _add_block(accumulator, decay, step, x, k, m, cb_ptr)
    x = tl.broadcast_to(x_m.to(tl.float32), (16, P))
    accumulator = tl.fma(x, tl.zeros_like(x) + tl.load(D_ptr + head).to(tl.float32), accumulator)
    target = y_ptr + (request * HEADS + head) * P + p[None, :] + rows * 0
    tl.store(target, accumulator.to(y_ptr.dtype.element_ty), mask=(rows == 0) & (p[None, :] >= 0))
    if m == CHUNK - 1:
        # the chunk is full: fold it into the state, which only this program reads; 16 rows at a time to spare registers
        tl.debug_barrier()
        rows_of_b = B_buffer + slot * B_slot + head // RATIO * CHUNK * N
        for part in range(0, P, 16):
            q = part + tl.arange(0, 16)
            fold = tl.zeros((16, N), dtype=tl.float32)
            for first in range(0, CHUNK, 32):
                place = first + tl.arange(0, 32)
                x_t = tl.load(x_rows + place[None, :] * P + q[:, None])
                b = tl.load(rows_of_b + place[:, None] * N + n[None, :]).to(tl.float32)
                scale = exp_base2(tl.minimum(cs_m - tl.load(cs_rows + place), 0.0))
                scale *= softplus(tl.load(dt_rows + place).to(tl.float32) + bias)
                fold = tl.dot(x_t, (b * scale[:, None]).to(x_t.dtype), fold)
            where = head * P * N + q[:, None] * N + n[None, :]
            full = (q[:, None] >= 0) & (n[None, :] >= 0) & (position >= CHUNK)
            low = tl.load(low_ptr + slot * low_slot + where, mask=full, other=0).to(tl.int32) & 0xFFFF
            high = tl.load(high_ptr + slot * high_slot + where, mask=full, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
            old = (((high - (low >= 0x8000).to(tl.int32)) << 16) | low).to(tl.float32, bitcast=True)
            new = tl.fma(tl.zeros_like(fold) + exp_base2(cs_m), old, fold)
            tl.store(high_ptr + slot * high_slot + where, round_state(new))
            tl.store(low_ptr + slot * low_slot + where, new.to(tl.int32, bitcast=True).to(tl.int16))


def decode_into(y: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor,
                dt_bias: torch.Tensor, lengths: torch.Tensor, slots: torch.Tensor, cache: Mamba2Cache, null_slot: int) -> None:
    """One token for each request, written to `y` [requests, heads, P]: x the same, raw dt [requests, heads], B and C [requests, groups, N].

    `lengths` (tokens of each request, this one counted) and `slots` are read on the device only, so the call can be captured in a CUDA graph. A
    request whose slot is `null_slot` is padding: nothing is read or written for it, its row of `y` is zero. Slots of the cache may be strided.
    """
    assert_inputs(x, dt, A, B, C, D, dt_bias)
    (requests, heads, p), (groups, n) = x.shape, B.shape[1:]
    high, low, x_buffer, B_buffer, dt_buffer, cs_buffer = cache.tensors()
    assert lengths.shape == slots.shape == (requests,) and lengths.stride() == slots.stride() == (1,)
    assert not lengths.is_floating_point() and not slots.is_floating_point()
    assert high.shape[1:] == low.shape[1:] == (heads, p, n) and high.dtype == x.dtype and low.dtype == torch.int16
    assert x_buffer.shape[1:] == (heads, CHUNK, p) and B_buffer.shape[1:] == (groups, CHUNK, n) and dt_buffer.dtype == dt.dtype
    assert all(t[0].is_contiguous() for t in cache.tensors()) and y.shape == x.shape and y.is_contiguous()
    if not requests:
        return
    cb = torch.empty(requests, groups, CHUNK, dtype=torch.float32, device=x.device)
    widths, strides = (heads, p, n, heads // groups, CHUNK), [t.stride(0) for t in cache.tensors()]
    s = DECODE_APPEND
    _append_kernel[(groups, CHUNK // s["BLOCK_K"], requests)](
        x, dt, B, C, A, dt_bias, lengths, slots, x_buffer, B_buffer, dt_buffer, cs_buffer, cb,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), *strides[2:], null_slot, *widths, s["BLOCK_K"], OVERLAP, num_warps=s["num_warps"])
    s = DECODE_ROW
    _row_kernel[(heads, requests)](
        x, dt, C, A, D, dt_bias, lengths, slots, high, low, x_buffer, B_buffer, dt_buffer, cs_buffer, cb, y,
        x.stride(0), dt.stride(0), C.stride(0), *strides, null_slot, *widths, s["BLOCK_K"], OVERLAP, num_warps=s["num_warps"], launch_pdl=OVERLAP)


@torch.library.custom_op("consistency_cuda::mamba2_decode", mutates_args=("high", "low", "x_buffer", "B_buffer", "dt_buffer", "cs_buffer"))
def mamba2_decode(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor,
                  lengths: torch.Tensor, slots: torch.Tensor, high: torch.Tensor, low: torch.Tensor, x_buffer: torch.Tensor,
                  B_buffer: torch.Tensor, dt_buffer: torch.Tensor, cs_buffer: torch.Tensor, null_slot: int) -> torch.Tensor:
    """`decode_into` as a registered operator; the tensors from `high` on are those of `Mamba2Cache`. Returns y [requests, heads, P]."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    decode_into(y, x, dt, A, B, C, D, dt_bias, lengths, slots, Mamba2Cache(high, low, x_buffer, B_buffer, dt_buffer, cs_buffer), null_slot)
    return y


@mamba2_decode.register_fake
def _(x, dt, A, B, C, D, dt_bias, lengths, slots, high, low, x_buffer, B_buffer, dt_buffer, cs_buffer, null_slot):
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
    carried: torch.Tensor | None
    """int64: sequences of which the cache holds a state; in its first chunk a slot still holds another request's. None: there are none."""
    folded: torch.Tensor | None
    """int64: sequences that fill a chunk, so that their state changes. None: there are none."""
    tokens: int

    @classmethod
    def build(cls, lengths: list[int], computed: list[int], device: torch.device | str) -> "PrefillTable":
        """`lengths` new tokens of each sequence, of which `computed` are already in the cache. One copy to the device for all maps."""
        before = torch.tensor(computed) % CHUNK
        length = torch.tensor(lengths)
        total = before + length
        first_row = total.cumsum(0) - total
        chunks = -(-total // CHUNK)
        first_chunk, full = chunks.cumsum(0) - chunks, total // CHUNK

        def counted(count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Sequence and running number of each of `count` things of every sequence."""
            sequence = torch.repeat_interleave(torch.arange(len(count)), count)
            return sequence, torch.arange(int(count.sum())) - (count.cumsum(0) - count)[sequence]

        sequence, place = counted(length)
        new = first_row[sequence] + before[sequence] + place
        sequence, place = counted(before)
        old = first_row[sequence] + place, sequence, place
        sequence, place = counted(total % CHUNK)
        left = first_row[sequence] + full[sequence] * CHUNK + place, sequence, place, first_chunk[sequence] + full[sequence]
        sequence, place = counted(chunks)
        starts = first_row[sequence] + place * CHUNK
        sizes = torch.minimum(total[sequence] - place * CHUNK, torch.tensor(CHUNK))
        bounds = torch.cat((first_chunk, chunks.sum()[None]))
        maps = [new, *old, *left, (torch.tensor(computed) >= CHUNK).nonzero()[:, 0], (full > 0).nonzero()[:, 0], starts, sizes, bounds]
        parts = torch.cat(maps).to(device).split([len(m) for m in maps])
        carried, folded = (part if len(part) else None for part in parts[8:10])
        table = ChunkTable(*(part.int() for part in parts[10:]))
        return cls(table, parts[0], (parts[1], parts[2], parts[3]), (parts[4], parts[5], parts[6], parts[7]), carried, folded, int(total.sum()))


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
    initial = None
    if table.carried is not None:
        initial = torch.zeros(len(slots), *cache.high.shape[1:], dtype=torch.float32, device=x.device)
        initial[table.carried] = cache.state(slots[table.carried])
    y, boundary, cs = scan_with_state(x, dt, A, B, C, D, dt_bias, table.chunks, initial)
    if table.folded is not None:
        cache.store(slots[table.folded], boundary[table.folded])
    rows, sequence, place, chunk = table.open
    where = slots[sequence]
    cache.x[where, :, place], cache.B[where, :, place] = x[rows], B[rows]
    cache.dt[where, :, place], cache.cs[where, :, place] = dt[rows], cs[chunk, :, place]
    return y[table.new] if old_rows.numel() else y

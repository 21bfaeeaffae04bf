"""Causal grouped-query attention over packed sequences (training, prefill) and over a paged cache (prefill, chunks, decode).

Contract: FlashAttention 3 with one split, bf16, head dimension 128. One split means that a row's key blocks are visited in one order
from the first key, whatever else is in the launch; the tile over queries does not change bits. The backward pass is
FlashAttention's own in its deterministic mode, which orders the accumulation of dQ.

One split leaves multiprocessors idle when few long requests decode. `segmented_decode` and `segmented_prefill` are the same attention under another
contract: keys are cut at absolute multiples of a segment, each segment is one FlashAttention call with one split, rounded to bf16, and
the segments of a row are merged in ascending order in fp32. A row that sees one segment keeps the bits of the plain call. An engine uses one
contract or the other for all its calls.
"""

import functools

import torch
import triton
import triton.language as tl

from consistency.layout import Layout
from consistency.operators.cuda.case import Case, Inputs, check_gradients, equal_elements, normal
from consistency.operators.cuda.eager import eager

PAGE = 16
SEGMENT = 4096


def attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Plain torch in the dtype of `q`: packed [tokens, heads, dim], causal inside each sequence of `lengths`."""
    group = q.shape[1] // k.shape[1]
    out = []
    for queries, keys, values in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * q.shape[2] ** -0.5
        mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril()
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), values))
    return torch.cat(out)


def _flash(*args, causal: bool = True, **kwargs):
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(*args, fa_version=3, causal=causal, **kwargs)


@torch.library.custom_op("consistency_cuda::attention", mutates_args=())
def attention_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert q.ndim == k.ndim == v.ndim == 3 and k.shape == v.shape and q.shape[1] % k.shape[1] == 0
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16 and cu_seqlens.dtype == torch.int32
    out, lse = _flash(q, k, v, longest, cu_seqlens, longest, cu_seqlens_k=cu_seqlens, num_splits=1, return_softmax_lse=True)
    return out, lse


@attention_op.register_fake
def _(q, k, v, cu_seqlens, longest):
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


def _setup(ctx, inputs, output):
    q, k, v, cu_seqlens, ctx.longest = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    q, k, v, cu_seqlens, out, lse = ctx.saved_tensors
    before, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, lse, cu_seqlens, cu_seqlens, ctx.longest, ctx.longest, 0.0, True, unused, unused,
            scale=q.shape[2] ** -0.5)
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
    return *grads[:3], None, None


attention_op.register_autograd(_backward, setup_context=_setup)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    """Packed causal attention: q [tokens, heads, 128], k and v [tokens, kv heads, 128], int32 `cu_seqlens`, longest length."""
    return attention_op(q, k, v, cu_seqlens, longest)[0]


def paged_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cu_queries: torch.Tensor, longest_query: int,
                    lengths: torch.Tensor, longest: int, pages: torch.Tensor, splits: int = 1) -> torch.Tensor:
    """Causal attention of the last queries of each sequence over a paged cache [pages, page, kv heads, 128].

    `splits` is 1 under the contract; 0 lets FlashAttention choose by batch, which is what the engine does.
    """
    return _flash(q, keys, values, longest_query, cu_queries, longest, seqused_k=lengths, block_table=pages, num_splits=splits)


@triton.jit
def _merge_kernel(parts_ptr, lse_ptr, index_ptr, counts_ptr, out_ptr, total, index_stride, HEADS: tl.constexpr, DIM: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lanes, count = tl.arange(0, DIM), tl.load(counts_ptr + row)
    index_ptr += row * index_stride
    lse_ptr += head.to(tl.int64) * total
    maximum = float("-inf")
    for segment in range(count):
        maximum = tl.maximum(maximum, tl.load(lse_ptr + tl.load(index_ptr + segment)))
    accumulator, norm = tl.zeros((DIM,), dtype=tl.float32), 0.0
    for segment in range(count):
        part = tl.load(index_ptr + segment).to(tl.int64)
        weight = tl.exp(tl.load(lse_ptr + part) - maximum)
        accumulator += weight * tl.load(parts_ptr + (part * HEADS + head) * DIM + lanes).to(tl.float32)
        norm += weight
    tl.store(out_ptr + (row * HEADS + head) * DIM + lanes, (accumulator / norm).to(out_ptr.dtype.element_ty))


def _merge(parts: torch.Tensor, lse: torch.Tensor, index: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Row r of the result merges rows index[r, :counts[r]] of `parts` [total, heads, 128] in that order; `lse` is [heads, total]."""
    (total, heads, dim), rows = parts.shape, index.shape[0]
    assert lse.shape == (heads, total) and lse.is_contiguous() and parts.is_contiguous()
    out = torch.empty(rows, heads, dim, dtype=parts.dtype, device=parts.device)
    _merge_kernel[(rows, heads)](parts, lse, index, counts, out, total, index.stride(0), heads, dim, num_warps=1)
    return out


def segmented_decode(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor,
                     segment: int = SEGMENT) -> torch.Tensor:
    """One query for each request over a paged cache, keys cut at multiples of `segment`: q [requests, heads, 128], int32 `lengths`, int32 `pages`
    [requests, pages], as wide as a whole number of segments. No host value depends on the lengths, so the call can be captured."""
    requests, width = pages.shape
    assert segment % PAGE == 0 and width * PAGE % segment == 0, f"{width} pages are not a whole number of segments of {segment} keys"
    segments = width * PAGE // segment
    starts = torch.arange(0, segments * segment, segment, dtype=torch.int32, device=q.device)
    used = (lengths[:, None] - starts).clamp(0, segment).flatten()
    index = torch.arange(requests * segments, dtype=torch.int32, device=q.device)
    parts, lse = _flash(q.repeat_interleave(segments, 0, output_size=requests * segments), keys, values, 1,
                        torch.arange(requests * segments + 1, dtype=torch.int32, device=q.device), segment, seqused_k=used,
                        block_table=pages.reshape(requests * segments, -1), num_splits=1, return_softmax_lse=True)
    return _merge(parts, lse, index.view(requests, segments), (lengths + segment - 1) // segment)


def segmented_prefill(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: list[int], counts: list[int], pages: torch.Tensor,
                      segment: int = SEGMENT) -> torch.Tensor:
    """Packed queries over a paged cache, keys cut at multiples of `segment`: sequence s has `counts[s]` queries from position `first[s]` on."""
    rows, groups, row = [[] for _ in range(sum(counts))], {True: [], False: []}, 0
    for sequence, (begin, count) in enumerate(zip(first, counts, strict=True)):
        position = begin
        while position < begin + count:
            own = position // segment
            stop = min(begin + count, (own + 1) * segment)
            at = row + position - begin
            for key_segment in range(own + 1):
                used = stop - own * segment if key_segment == own else segment
                groups[key_segment == own].append((at, stop - position, sequence, key_segment, used))
            position = stop
        row += count
    parts, sums, done, per_segment = [], [], 0, segment // PAGE
    for causal, pairs in groups.items():
        if pairs:
            taken = torch.cat([torch.arange(at, at + n) for at, n, *_ in pairs])
            ends = torch.tensor([0, *(n for _, n, *_ in pairs)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            table = torch.stack([pages[s, k * per_segment : (k + 1) * per_segment] for _, _, s, k, _ in pairs])
            used = torch.tensor([pair[-1] for pair in pairs], dtype=torch.int32)
            part, lse = _flash(q[taken.to(q.device)], keys, values, max(n for _, n, *_ in pairs), ends.to(q.device), segment, causal=causal,
                               seqused_k=used.to(q.device), block_table=table, num_splits=1, return_softmax_lse=True)
            parts.append(part)
            sums.append(lse)
            for (at, n, _, key_segment, _), begin in zip(pairs, ends.tolist(), strict=False):
                for i in range(n):
                    rows[at + i].append((key_segment, done + begin + i))
            done += part.shape[0]
    most = max(map(len, rows))
    index = torch.tensor([[part for _, part in sorted(r)] + [0] * (most - len(r)) for r in rows], dtype=torch.int32, device=q.device)
    lengths = torch.tensor([len(r) for r in rows], dtype=torch.int32, device=q.device)
    return _merge(torch.cat(parts), torch.cat(sums, 1).contiguous(), index, lengths)


def _segmented_phases(heads: int, kv_heads: int) -> dict[str, tuple[int, int]]:
    """Segmented decode and chunked prefill against segmented prefill, with segments short enough to be crossed often."""
    generator, length, segment = torch.Generator("cuda").manual_seed(8), 1000, 256
    q = normal((length, heads, 128), generator)
    cache = [normal((65, PAGE, kv_heads, 128), generator) for _ in range(2)]
    pages = 1 + torch.randperm(64, generator=generator, device="cuda", dtype=torch.int32)[None]
    full = segmented_prefill(q, *cache, [0], [length], pages, segment)
    found = {}
    for size in (1, 7, 300):
        chunks = [segmented_prefill(q[t : t + size], *cache, [t], [min(size, length - t)], pages, segment) for t in range(0, length, size)]
        found[f"segments, chunks of {size}"] = equal_elements(torch.cat(chunks), full)
    lengths = torch.arange(1, length + 1, dtype=torch.int32, device="cuda")
    found["segments, decode"] = equal_elements(segmented_decode(q, *cache, lengths, pages.expand(length, -1), segment), full)
    plain = paged_attention(q[:segment], *cache, torch.tensor([0, segment], dtype=torch.int32, device="cuda"), segment,
                            torch.tensor([segment], dtype=torch.int32, device="cuda"), segment, pages)
    found["one segment against the plain call"] = equal_elements(full[:segment], plain)
    return found


def _decode_inputs(batch: int, heads: int, kv_heads: int, context: int, generator: torch.Generator) -> Inputs:
    per_request = -(-context // PAGE)
    shape = (batch * per_request, PAGE, kv_heads, 128)
    pages = torch.randperm(batch * per_request, generator=generator, device=generator.device, dtype=torch.int32).view(batch, per_request)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=generator.device)
    lengths[1::2] -= 37
    return Inputs((normal((batch, heads, 128), generator), lengths, pages), (normal(shape, generator), normal(shape, generator)))


def _case(heads: int, kv_heads: int, families: tuple[str, ...], context: int, decode: tuple[int, ...], segment: int | None = None) -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        return _decode_inputs(rows, heads, kv_heads, context, generator)

    def call(q, lengths, pages, keys, values, splits):
        starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        return paged_attention(q, keys, values, starts, 1, lengths, context, pages, splits)

    def exact(q, lengths, pages, keys, values):
        if segment:
            return segmented_decode(q, keys, values, lengths, pages, segment)
        return call(q, lengths, pages, keys, values, 1)

    def stock(*args):
        return call(*args, 0)

    def reference(q, lengths, pages, keys, values):
        group, out = heads // kv_heads, []
        for row, length, table in zip(q.double(), lengths.tolist(), pages.long(), strict=True):
            k, v = (c[table].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for c in (keys, values))
            out.append(torch.einsum("hk,khd->hd", (torch.einsum("hd,khd->hk", row, k) * 128**-0.5).softmax(-1), v))
        return torch.stack(out)

    def phases():
        generator = torch.Generator("cuda").manual_seed(6)
        length, pages_used = 1000, 63
        q = normal((length, heads, 128), generator)
        cache = [torch.zeros(pages_used + 1, PAGE, kv_heads, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        table = 1 + torch.randperm(pages_used, generator=generator, device="cuda", dtype=torch.int32)[None]
        packed = [normal((length, kv_heads, 128), generator) for _ in range(2)]
        for stored, values in zip(cache, packed, strict=True):
            padded = torch.cat((values, values.new_zeros(pages_used * PAGE - length, kv_heads, 128)))
            stored[table[0].long()] = padded.unflatten(0, (pages_used, PAGE))
        ends = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        full = attention(q, *packed, ends, length)

        def chunk(start: int, stop: int) -> torch.Tensor:
            queries = torch.tensor([0, stop - start], dtype=torch.int32, device="cuda")
            used = torch.tensor([stop], dtype=torch.int32, device="cuda")
            return paged_attention(q[start:stop], *cache, queries, stop - start, used, stop, table)

        found = {"paged prefill": equal_elements(chunk(0, length), full)}
        found["decode"] = equal_elements(torch.cat([chunk(t, t + 1) for t in range(length)]), full)
        for size in (7, 64, 96):
            found[f"chunks of {size}"] = equal_elements(torch.cat([chunk(t, min(t + size, length)) for t in range(0, length, size)]), full)
        return found

    def gradients():
        generator = torch.Generator("cuda").manual_seed(5)
        lengths = [1, 200, 99]
        names = dict(zip("qkv", (normal((300, h, 128), generator) for h in (heads, kv_heads, kv_heads)), strict=True))
        ends = torch.tensor([0, 1, 201, 300], dtype=torch.int32, device="cuda")
        return check_gradients(lambda q, k, v: attention(q, k, v, ends, 200), lambda q, k, v: attention_reference(q, k, v, lengths), names)

    long = context > 4096
    shape = f"{heads}/{kv_heads} context {context}" + (f", segments of {segment}" if segment else "")
    plain = None if long else phases
    checks = functools.partial(_segmented_phases, heads, kv_heads) if segment else plain
    return Case("attention", shape, families, inputs, exact, reference, stock, phases=checks, gradients=None if long else gradients,
                most_rows=max(decode), decode=decode, prefill=())


CASES = [
    _case(32, 2, ("nemotron-3.5",), 1024, (8, 32, 256)),
    _case(16, 8, ("qwen3",), 1024, (8, 32, 256)),
    _case(32, 2, ("nemotron-3.5",), 16384, (1, 4, 16)),
    _case(16, 8, ("qwen3",), 16384, (1, 4, 16)),
    _case(32, 2, ("nemotron-3.5",), 16384, (1, 4, 16), 4096),
    _case(32, 2, ("nemotron-3.5",), 16384, (1, 4, 16), 2048),
    _case(16, 8, ("qwen3",), 16384, (1, 4, 16), 4096),
]


# ---- the contract's names ----------------------------------------------------------------------------------------------

exact_rollout = "single_split"
"""On the rollout side the binding is a property of the attention backend's calls, see engines/vllm_cuda.py."""
stock_rollout = None
_eager = eager(attention_op, _setup, _backward)


def exact_training(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, **_) -> torch.Tensor:
    """q [T, heads, 128], k, v [T, kv_heads, 128] -> [T, heads, 128]; padding rows are zero. Differentiable."""
    assert scale == q.shape[-1] ** -0.5, f"the contract scales by 1/sqrt(head dimension), found {scale}"
    q, k, v = (layout.pack(t) for t in (q, k, v))
    return layout.unpack(_eager(q, k, v, layout.cu_seqlens(q.device), max(layout.lengths))[0])

"""Attention over a window and compressed keys: FlashMLA's decode kernel on the FP8 cache, its prefill kernel on the dequantised cache."""

import torch

from consistency.operators.cuda.case import Case, Inputs, equal_elements, normal
from consistency.operators.cuda.deepseek_v4.shapes import DIM, FAMILY, GROUP, HEADS, NOPE, PAGE, RECORD, empty_pages, read_cache, records, write_cache

WINDOW = 128
TOKENS = 8192
"""tokens in the caches"""
EXTRA = {1: 0, 4: 512, 128: 128}
"""compressed keys that a query may list, by compress ratio"""
SCALE = DIM**-0.5
SCORE_ROWS = 256


def decode(q, window, window_length, extra, extra_length, pages, extra_pages, sink):
    """bf16 q [M, 64, 512] -> bf16 [M, 64 * 512]; the window first, then the compressed keys, splits by the tile scheduler.

    window int32 [M, 128] and extra int32 [M, n] are slots in the caches, of which the first `*_length` [M] count; n = 0 for a sliding-window layer.
    """
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    plan, _ = get_mla_metadata()
    out = torch.empty_like(q)
    more = {} if not extra.shape[1] else {
        "extra_k_cache": records(extra_pages, 256 // _ratio(extra)).unsqueeze(-2), "extra_indices_in_kvcache": extra.unsqueeze(1),
        "extra_topk_length": extra_length}
    flash_mla_with_kvcache(
        q=q.unsqueeze(1), k_cache=records(pages, PAGE).unsqueeze(-2), block_table=None, head_dim_v=DIM, tile_scheduler_metadata=plan,
        cache_seqlens=None, is_fp8_kvcache=True, indices=window.unsqueeze(1), topk_length=window_length, softmax_scale=SCALE, attn_sink=sink,
        out=out.unsqueeze(1), **more)
    return out.flatten(1)


def gather(pages: torch.Tensor, entries: int, slots: torch.Tensor) -> torch.Tensor:
    """bf16 keys [n, 512] of the cache at these slots [n], without touching the others; pages uint8 [pages, ...], `entries` to a page."""
    data, page, place = RECORD - 8, slots // entries, slots % entries
    values = pages.as_strided((len(pages), entries, data), (pages.stride(0), data, 1))[page, place]
    scales = pages.as_strided((len(pages), entries, 8), (pages.stride(0), 8, 1), pages.storage_offset() + entries * data)[page, place]
    nope = values[:, :NOPE].contiguous().view(torch.float8_e4m3fn).float().view(-1, NOPE // GROUP, GROUP)
    nope = nope * torch.exp2(scales[:, : NOPE // GROUP].float() - 127)[..., None]
    return torch.cat((nope.view(-1, NOPE).bfloat16(), values[:, NOPE:].contiguous().view(torch.bfloat16)), 1)


def through_prefill(q, window, window_length, extra, extra_length, pages, extra_pages, sink):
    """A decode step by the prefill kernel, one query per row over its own keys in the order of a prefill: the candidate for both phases.

    The gather is plain torch; a kernel for it would move 640 keys per query once.
    """
    keys = [gather(extra_pages, 256 // _ratio(extra), extra.clamp_min(0).flatten().long())] if extra.shape[1] else []
    keys.append(gather(pages, PAGE, window.flatten().long()))
    return attend_gathered(q, keys, window_length, extra_length, sink, torch.empty_like(q)).flatten(1)


def attend_gathered(q, keys: list[torch.Tensor], window_length, extra_length, sink, out) -> torch.Tensor:
    """Each query over keys of its own: [compressed keys [M * n, 512],] window [M * 128, 512], of which the first `*_length` count. Fills out."""
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    rows = len(q)
    own = torch.cat([part.view(rows, -1, DIM) for part in keys], 1)
    first = torch.arange(rows, device=q.device, dtype=torch.int32)[:, None] * own.shape[1]
    places = first + torch.arange(own.shape[1], device=q.device, dtype=torch.int32)
    indices, lengths = listed(places[:, -WINDOW:], window_length, places[:, :-WINDOW], extra_length, 0)
    flash_mla_sparse_fwd(q=q, kv=own.view(-1, 1, DIM), indices=indices.unsqueeze(1), sm_scale=SCALE, attn_sink=sink, topk_length=lengths, out=out)
    return out


def _ratio(extra: torch.Tensor) -> int:
    return next(ratio for ratio, count in EXTRA.items() if count == extra.shape[1])


def _keys(extra, pages, extra_pages) -> torch.Tensor:
    """bf16 [slots, 512]: compressed keys before the window's, as a prefill gathers them."""
    window = read_cache(pages, PAGE)
    return window if not extra.shape[1] else torch.cat((read_cache(extra_pages, 256 // _ratio(extra)), window))


def listed(window, window_length, extra, extra_length, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [M, multiple of 128] and lengths [M]: compressed keys, then the window, without gaps, then -1."""
    width = -(-(extra.shape[1] + WINDOW) // 128) * 128
    place = torch.arange(width, device=window.device)
    lengths = extra_length + window_length
    from_window = (place - extra_length[:, None]).clamp(0, WINDOW - 1)
    slots = offset + window.gather(1, from_window.long())
    if extra.shape[1]:
        compressed = extra.gather(1, place.clamp(max=extra.shape[1] - 1).expand(len(extra), -1).long())
        slots = torch.where(place < extra_length[:, None], compressed, slots)
    return torch.where(place < lengths[:, None], slots, -1).int().contiguous(), lengths.int()


def _prefill(q, indices, lengths, keys, sink):
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    out = torch.empty_like(q)
    flash_mla_sparse_fwd(q=q, kv=keys.unsqueeze(1), indices=indices.unsqueeze(1), sm_scale=SCALE, attn_sink=sink, topk_length=lengths, out=out)
    return out.flatten(1)


def prefill(q, window, window_length, extra, extra_length, pages, extra_pages, sink):
    """The same by the prefill kernel: bf16 keys, compressed keys first."""
    keys = _keys(extra, pages, extra_pages)
    indices, lengths = listed(window, window_length, extra, extra_length, keys.shape[0] - TOKENS)
    return _prefill(q, indices, lengths, keys, sink)


def reference(q, window, window_length, extra, extra_length, pages, extra_pages, sink):
    """fp64 over the cache's values; the sink is a logit without a value."""
    keys = _keys(extra, pages, extra_pages)
    indices, lengths = listed(window, window_length, extra, extra_length, keys.shape[0] - TOKENS)
    chosen = keys[indices.clamp_min(0).long()].double()
    logits = torch.einsum("mhd,mnd->mhn", q.double(), chosen) * SCALE
    unused = torch.arange(indices.shape[1], device=q.device) >= lengths[:, None]
    logits = torch.cat((logits.masked_fill(unused[:, None], -torch.inf), sink.double().expand(len(q), -1)[..., None]), -1)
    return torch.einsum("mhn,mnd->mhd", logits.softmax(-1)[..., :-1], chosen).flatten(1)


def _distinct(rows: int, count: int, limit: int, generator: torch.Generator) -> torch.Tensor:
    """int32 [rows, count] of different numbers below limit, ascending."""
    return torch.rand(rows, limit, generator=generator, device=generator.device).topk(count).indices.sort(-1).values.int()


def _inputs(ratio: int):
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        device, pages = generator.device, empty_pages(TOKENS // PAGE, PAGE, generator.device)
        write_cache(pages, PAGE, normal((TOKENS, DIM), generator))
        entries, count = TOKENS // ratio, EXTRA[ratio]
        extra_pages = empty_pages(TOKENS // 256 if count else 1, 256 // ratio if count else PAGE, device)
        if count:
            write_cache(extra_pages, 256 // ratio, normal((entries, DIM), generator))
        sink = normal((HEADS,), generator, 0.5, torch.float32)
        ends = torch.randint(WINDOW, TOKENS, (rows,), generator=generator, device=device)
        window = (ends[:, None] - WINDOW + torch.arange(WINDOW, device=device)).int()
        # a request in sixteen is shorter than the window
        short = torch.rand(rows, generator=generator, device=device) < 1 / 16
        window_length = torch.where(short, 17, WINDOW).int()
        listed_keys = _distinct(rows, min(count, entries), entries, generator) if count else torch.empty(rows, 0, dtype=torch.int32, device=device)
        if count > entries:
            listed_keys = torch.cat((listed_keys, listed_keys.new_full((rows, count - entries), -1)), 1)
        most = min(count, entries)
        lengths = torch.randint(most // 2, most + 1, (rows,), generator=generator, device=device).int() if count else window_length * 0
        return Inputs((normal((rows, HEADS, DIM), generator), window, window_length, listed_keys, lengths), (pages, extra_pages, sink))

    return inputs


def _phases(ratio: int):
    def phases() -> dict[str, tuple[int, int]]:
        arguments = _inputs(ratio)(SCORE_ROWS, torch.Generator("cuda").manual_seed(6)).take(SCORE_ROWS)
        full, once = prefill(*arguments), decode(*arguments)
        alone = torch.cat([decode(*(t[i : i + 1] for t in arguments[:5]), *arguments[5:]) for i in range(32)])
        return {"prefill against decode": equal_elements(full, once), "decode, 32 requests alone": equal_elements(alone, once[:32]),
                "prefill against the candidate": equal_elements(full, through_prefill(*arguments))}

    return phases


def _prefill_timed(q, window, window_length, extra, extra_length, pages, extra_pages, sink):
    """The kernel without the gather, whose keys and lists a step shares among its queries."""
    keys = torch.zeros(TOKENS, DIM, dtype=q.dtype, device=q.device)
    indices = torch.cat((extra, window), 1)
    width = -(-indices.shape[1] // 128) * 128
    indices = torch.nn.functional.pad(indices, (0, width - indices.shape[1]), value=-1)
    return _prefill(q, indices, extra_length + window_length, keys, sink)


NAMES = {1: "sliding window", 4: "window and 512 of ratio 4", 128: "window and ratio 128"}
CASES = [case for ratio, name in NAMES.items() for case in (
    Case("attention", f"decode, {name}", FAMILY, _inputs(ratio), through_prefill, reference, decode, phases=_phases(ratio), most_rows=512,
         prefill=()),
    Case("attention", f"prefill, {name}", FAMILY, _inputs(ratio), None, reference, prefill, _prefill_timed, decode=(), prefill=(2048,)))]

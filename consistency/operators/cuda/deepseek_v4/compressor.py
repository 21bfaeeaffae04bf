"""Compressors: a learned softmax over 8 overlapping or 128 tokens, RMSNorm, rotation, FP8 entry; a rolling fp32 state between steps."""

from types import SimpleNamespace

import torch

from consistency.operators.cuda.case import SWEEP, Case, Inputs, equal_elements, normal
from consistency.operators.cuda.deepseek_v4.shapes import DIM, EPS, FAMILY, PAGE, ROPE, empty_pages, read_cache, records, rms, rotary_table, rotate

STATE_BLOCK = {4: 4, 128: 8}
"""tokens in a page of rolling state"""
INDEX_DIM, INDEX_RECORD = 128, 132
"""the indexer's entry: 128 FP8 values and, behind the values of the page, one fp32 scale"""
RUNS = 50


def entries_of_page(ratio: int) -> int:
    """Entries in a page that covers 256 tokens."""
    return 256 // ratio


def read_index_pages(pages: torch.Tensor) -> torch.Tensor:
    """fp32 keys [pages * 64, 128] of the indexer's cache."""
    values = pages[:, : PAGE * INDEX_DIM].contiguous().view(torch.float8_e4m3fn).float().view(-1, INDEX_DIM)
    scales = pages[:, PAGE * INDEX_DIM : PAGE * INDEX_RECORD].contiguous().view(torch.float32).view(-1, 1)
    return values * scales


def index_page_bytes() -> int:
    return -(-PAGE * INDEX_RECORD // 576) * 576


def compress(kv_score: torch.Tensor, bias: torch.Tensor, norm: torch.Tensor, table: torch.Tensor, chunks: list[int] | None = None) -> torch.Tensor:
    """One sequence through vLLM's kernels, in steps of `chunks` tokens (one step if None).

    kv_score fp32 [T, 2 * width]: values before scores, width = dim * (2 at ratio 4, 1 at 128); bias fp32 [ratio, width]; norm bf16 [dim].
    Returns fp32 [T, dim]: the entry in the row of the token that closes its window, as later steps read it, zero in the other rows.
    """
    from vllm.models.deepseek_v4.common.ops.fused_compress_quant_cache import compress_norm_rope_store_triton
    from vllm.models.deepseek_v4.common.ops.save_partial_states import _SAVE_PARTIAL_STATES_KERNEL

    (tokens, _), (ratio, width), dim, device = kv_score.shape, bias.shape, norm.shape[0], kv_score.device
    block = STATE_BLOCK[ratio]
    state = torch.zeros(-(-tokens // block), block, 2 * width, device=device)
    table_of_blocks = torch.arange(state.shape[0], dtype=torch.int32, device=device)[None]
    entries = entries_of_page(ratio)
    if dim == DIM:
        from vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl import _SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL

        store, sizes = _SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL, {"quant_block": 64, "token_stride": 576, "scale_dim": 8}
        pages = empty_pages(-(-tokens // 256), entries, device)
        cache = records(pages, entries)
    else:
        store, sizes = compress_norm_rope_store_triton, {"quant_block": 128, "token_stride": 128, "scale_dim": 4}
        pages = torch.zeros(-(-tokens // 256), index_page_bytes(), dtype=torch.uint8, device=device)
        cache = pages[:, : entries * INDEX_RECORD].unflatten(1, (entries, INDEX_RECORD))
    every = torch.arange(tokens, device=device)
    closes = torch.where((every + 1) % ratio == 0, every // ratio, -1)
    start = 0
    for length in chunks or [tokens]:
        rows = slice(start, min(start + length, tokens))
        start += length
        # the kernels ask for aligned tensors, which a slice is not
        positions, closing, own = every[rows].clone(), closes[rows].clone(), kv_score[rows].clone()
        slots = positions.clone()
        if not len(positions):
            break
        kv, score = own.split(width, -1)
        _SAVE_PARTIAL_STATES_KERNEL(
            kv=kv, score=score, ape=bias, positions=positions, state_cache=state, slot_mapping=slots, block_size=block, state_width=width,
            compress_ratio=ratio, pdl_kwargs={"launch_pdl": False})
        store(
            state_cache=state, num_actual=len(positions), token_to_req_indices=torch.zeros(len(positions), dtype=torch.int32, device=device),
            positions=positions, slot_mapping=slots, block_table=table_of_blocks, block_size=block, state_width=width, cos_sin_cache=table,
            kv_cache=cache, k_cache_metadata=SimpleNamespace(slot_mapping=closing), pdl_kwargs={"launch_pdl": False}, head_dim=dim,
            rope_head_dim=ROPE, compress_ratio=ratio, overlap=ratio == 4, use_fp4_cache=False, rms_norm_weight=norm, rms_norm_eps=EPS, **sizes)
    keys = read_cache(pages, entries).float() if dim == DIM else read_index_pages(pages)
    out = torch.zeros(tokens, dim, device=device)
    out[closes >= 0] = keys[: tokens // ratio]
    return out


def compress_reference(kv_score: torch.Tensor, bias: torch.Tensor, norm: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """fp64, without the FP8 cast of the entry."""
    (ratio, width), dim, windows = bias.shape, norm.shape[0], kv_score.shape[0] // bias.shape[0]
    used = kv_score[: windows * ratio].double().view(windows, ratio, 2, width)
    kv, score = used[:, :, 0], used[:, :, 1] + bias.double()
    if width == 2 * dim:
        # the first half of a token's values belongs to the next window, the second to its own
        kv, score = (torch.cat((torch.cat((torch.full_like(t[:1, :, :dim], fill), t[:-1, :, :dim])), t[..., dim:]), 1)
                     for t, fill in ((kv, 0.0), (score, -torch.inf)))
    pooled = rms((kv * score.softmax(1)).sum(1), norm)
    out = torch.zeros(kv_score.shape[0], dim, dtype=torch.float64, device=kv_score.device)
    out[ratio - 1 :: ratio] = rotate(pooled, table[torch.arange(windows, device=table.device) * ratio])
    return out


def _case(label: str, ratio: int, dim: int) -> Case:
    width = dim * (2 if ratio == 4 else 1)

    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        shared = (normal((ratio, width), generator, 0.5, torch.float32), (1 + normal((dim,), generator, 0.2, torch.float32)).bfloat16(),
                  rotary_table(8192, generator.device))
        return Inputs((normal((rows, 2 * width), generator, 1.0, torch.float32),), shared)

    def phases() -> dict[str, tuple[int, int]]:
        arguments = inputs(600, torch.Generator("cuda").manual_seed(6)).take(600)
        full = compress(*arguments)
        found = {name: equal_elements(compress(*arguments, chunks=chunks), full) for name, chunks in {
            "decode from token 0": [1] * 600, "decode behind a prefill of 300": [300, *[1] * 300], "chunks of 127": [127] * 5,
            "chunks of 128": [128] * 5, "chunks of 129": [129] * 5}.items()}
        runs = [equal_elements(compress(*arguments), full) for _ in range(RUNS)]
        return found | {f"{RUNS} runs": (min(equal for equal, _ in runs), runs[0][1])}

    return Case("compressor", label, FAMILY, inputs, None, compress_reference, compress, phases=phases, causal=True, counts=SWEEP, decode=(256,),
                prefill=(2048,))


CASES = [_case("ratio 4", 4, DIM), _case("ratio 128", 128, DIM), _case("of the indexer, ratio 4", 4, INDEX_DIM)]

"""Indexer: FP8 queries, scores of the compressed keys, and the 512 best of them."""

import torch

from consistency.models.deepseek_v4 import FLASH
from consistency.operators.cuda.case import Case, Inputs, columns, equal_elements, normal
from consistency.operators.cuda.deepseek_v4.compressor import INDEX_DIM, index_page_bytes
from consistency.operators.cuda.deepseek_v4.shapes import FAMILY, PAGE, rotary_table, rotate

HEADS, TOP = FLASH["index_n_heads"], FLASH["index_topk"]
ENTRIES = 2048
"""compressed keys of the longest request: 8192 tokens"""
FEW_ROWS = 64
"""up to here vLLM takes the cooperative top-k"""
WORKSPACE = 1 << 20


def stock_query(q: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """bf16 q [M, 64, 128], head weights [M, 64] -> fp32 [M, 64 * 128 + 64]: rotated FP8 values, and weights that hold the scale."""
    return columns(*_query(q, weights, positions, table))


def _query(q, weights, positions, table):
    from vllm.models.deepseek_v4.common.ops import fused_indexer_q_rope_quant

    return fused_indexer_q_rope_quant(positions, q, table, weights, INDEX_DIM**-0.5, HEADS**-0.5, use_fp4=False)


def query_reference(q, weights, positions, table):
    """The same with fp64 arithmetic before the cast; the scale is the power of two that FP8 needs."""
    from consistency.models.deepseek_v4_weights import FP8_MAX, scale_exponent

    rotated = rotate(q, table[positions])
    scale = torch.exp2(scale_exponent(rotated.abs().amax(-1).float().clamp_min(1e-10), FP8_MAX).double())
    values = (rotated / scale[..., None]).to(torch.float8_e4m3fn)
    return torch.cat((values.double().flatten(1), weights.double() * scale * INDEX_DIM**-0.5 * HEADS**-0.5), 1)


def _hidden_future(logits: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Scores behind a row's length are not written by the kernels: zero here."""
    return torch.where(torch.arange(ENTRIES, device=logits.device) < lengths[:, None], logits[:, :ENTRIES], 0.0)


def prefill_scores(q, weights, lengths, keys, scales):
    """FP8 q [M, 64, 128], fp32 weights [M, 64], lengths [M], FP8 keys [2048, 128], fp32 scales [2048] -> fp32 [M, 2048]."""
    return _hidden_future(_prefill_scores(q, weights, lengths, keys, scales), lengths)


def _prefill_scores(q, weights, lengths, keys, scales):
    from vllm.utils.deep_gemm import fp8_fp4_mqa_logits

    return fp8_fp4_mqa_logits((q, None), (keys, scales), weights, torch.zeros_like(lengths), lengths, clean_logits=False)


def decode_scores(q, weights, lengths, keys, scales):
    """The same by the paged kernel, whose schedule is computed over the batch."""
    return _hidden_future(_decode_scores(q, weights, lengths, keys, scales), lengths)


def _decode_scores(q, weights, lengths, keys, scales):
    from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits, get_num_sms, get_paged_mqa_logits_metadata

    pages = keys.shape[0] // PAGE
    cache = torch.empty(pages, index_page_bytes(), dtype=torch.uint8, device=q.device)
    cache[:, : PAGE * INDEX_DIM] = keys.view(torch.uint8).view(pages, -1)
    cache[:, PAGE * INDEX_DIM : PAGE * (INDEX_DIM + 4)] = scales.view(torch.uint8).view(pages, -1)
    view = cache[:, : PAGE * (INDEX_DIM + 4)].unflatten(1, (PAGE, INDEX_DIM + 4)).unsqueeze(-2)
    table = torch.arange(pages, dtype=torch.int32, device=q.device).expand(q.shape[0], -1).contiguous()
    schedule = get_paged_mqa_logits_metadata(lengths[:, None], PAGE, get_num_sms())
    return fp8_fp4_paged_mqa_logits((q[:, None], None), view, weights, lengths[:, None], table, schedule, max_model_len=ENTRIES, clean_logits=False)


def scores_reference(q, weights, lengths, keys, scales):
    products = torch.einsum("mhd,nd->mhn", q.double(), keys.double()).relu()
    return _hidden_future(torch.einsum("mhn,mh->mn", products, weights.double()) * scales.double(), lengths)


def _scores_inputs(rows: int, generator: torch.Generator) -> Inputs:
    keys = normal((ENTRIES, INDEX_DIM), generator, 64.0, torch.float32).to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-8, -4, (ENTRIES,), generator=generator, device=generator.device).float())
    lengths = torch.randint(1, ENTRIES + 1, (rows,), generator=generator, device=generator.device, dtype=torch.int32)
    return Inputs((normal((rows, HEADS, INDEX_DIM), generator, 64.0, torch.float32).to(torch.float8_e4m3fn),
                   normal((rows, HEADS), generator, 1e-3, torch.float32), lengths), (keys, scales))


def _scores_phases() -> dict[str, tuple[int, int]]:
    arguments = _scores_inputs(64, torch.Generator("cuda").manual_seed(6)).take(64)
    prefill, decode = prefill_scores(*arguments), decode_scores(*arguments)
    order = [decode_top(s, arguments[2], sort=True) for s in (prefill, decode)]
    return {"scores, prefill against decode": equal_elements(prefill, decode), "selected, prefill against decode scores": equal_elements(*order)}


def _query_inputs(rows: int, generator: torch.Generator) -> Inputs:
    positions = torch.randint(0, 8192, (rows,), generator=generator, device=generator.device)
    return Inputs((normal((rows, HEADS, INDEX_DIM), generator), normal((rows, HEADS), generator), positions), (rotary_table(8192, generator.device),))


# ---- top-k ----------------------------------------------------------------------------------------------------------

def _sorted(indices: torch.Tensor) -> torch.Tensor:
    """Ascending, the unused places (-1) last, as vLLM's short-context path lists them."""
    return torch.where(indices < 0, ENTRIES, indices).sort(-1).values.int()


def decode_top(scores: torch.Tensor, lengths: torch.Tensor, kernel: str | None = None, sort: bool = False) -> torch.Tensor:
    """fp32 scores [M, 2048], int32 lengths [M] -> int32 [M, 512] in the order in which the attention will add; -1 where there are fewer."""
    import vllm._custom_ops  # noqa: F401  (registers the engine's kernels)

    kernel = kernel or ("cooperative_topk" if scores.shape[0] <= FEW_ROWS else "persistent_topk")
    out = torch.full((scores.shape[0], TOP), -1, dtype=torch.int32, device=scores.device)
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=scores.device)
    getattr(torch.ops._C, kernel)(scores, lengths[:, None], out, workspace, TOP, 4 * ENTRIES)
    return _sorted(out) if sort else out


def prefill_top(scores: torch.Tensor, lengths: torch.Tensor, sort: bool = False) -> torch.Tensor:
    """The kernel of a prefill."""
    import vllm._custom_ops as ops

    out = torch.full((scores.shape[0], TOP), -1, dtype=torch.int32, device=scores.device)
    ops.top_k_per_row_prefill(scores, torch.zeros_like(lengths), lengths, out, scores.shape[0], scores.stride(0), scores.stride(1), TOP)
    return _sorted(out) if sort else out


def _torch_top(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The set that torch selects, ascending."""
    hidden = scores.masked_fill(torch.arange(ENTRIES, device=scores.device) >= lengths[:, None], -torch.inf)
    indices = hidden.sort(dim=-1, descending=True, stable=True).indices[:, :TOP].int()
    return _sorted(torch.where(torch.arange(TOP, device=scores.device) < lengths[:, None], indices, -1))


def _top_inputs(rows: int, generator: torch.Generator) -> Inputs:
    """Scores of 8 significant bits: the 512th place is often shared."""
    scores = normal((rows, ENTRIES), generator).float()
    lengths = torch.randint(TOP + 1, ENTRIES + 1, (rows,), generator=generator, device=generator.device, dtype=torch.int32)
    return Inputs((scores, lengths), ())


def _top_phases() -> dict[str, tuple[int, int]]:
    arguments = _top_inputs(64, torch.Generator("cuda").manual_seed(6)).take(64)
    return {"order, prefill against decode kernel": equal_elements(prefill_top(*arguments), decode_top(*arguments)),
            "set, prefill against decode kernel": equal_elements(prefill_top(*arguments, sort=True), decode_top(*arguments, sort=True)),
            "order, cooperative against persistent": equal_elements(
                *(decode_top(*arguments, kernel=kernel) for kernel in ("cooperative_topk", "persistent_topk"))),
            "set, kernel against torch": equal_elements(decode_top(*arguments, sort=True), _torch_top(*arguments))}


CASES = [
    Case("indexer", f"query to FP8, {HEADS} x {INDEX_DIM}", FAMILY, _query_inputs, None, query_reference, stock_query, _query, prefill=(2048,)),
    Case("indexer", f"scores, prefill, {ENTRIES} keys", FAMILY, _scores_inputs, None, scores_reference, prefill_scores, _prefill_scores,
         phases=_scores_phases, prefill=(2048,)),
    Case("indexer", f"scores, decode, {ENTRIES} keys", FAMILY, _scores_inputs, None, scores_reference, decode_scores, _decode_scores, most_rows=256,
         prefill=()),
    Case("indexer", f"top {TOP} of {ENTRIES}, decode", FAMILY, _top_inputs, lambda s, n: decode_top(s, n, sort=True), None, decode_top,
         phases=_top_phases, prefill=(), configurations={"one kernel for every row count": lambda s, n: decode_top(s, n, "persistent_topk", True),
                                                         "prefill kernel": lambda s, n: prefill_top(s, n, True), "torch": _torch_top}),
    Case("indexer", f"top {TOP} of {ENTRIES}, prefill", FAMILY, _top_inputs, lambda s, n: decode_top(s, n, "persistent_topk", True), None,
         prefill_top, configurations={"prefill kernel, sorted": lambda s, n: prefill_top(s, n, True), "torch": _torch_top}, prefill=(2048,)),
]

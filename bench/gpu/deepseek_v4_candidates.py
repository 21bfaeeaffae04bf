"""Every candidate for exactness at once inside vLLM: does a DeepSeek-V4 rollout on one GPU then give the same bits in every batch and phase?

Replaces what the survey found to depend on the batch, the phase or the run, by routes that do not: DeepGEMM for every row count, one split of K
in the hyper-connections, GEMMs without a split, selected keys by value and then ascending, FlashMLA's prefill kernel for decode too, one tile for
the experts, one norm. For an eager engine in this process; the selection and the gather are plain torch, so its speed says nothing.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from bench.gpu.deepseek_v4_cost import ATTENTION, FLASHMLA, LAYERS, _gate, _linears, _patch, _tile
from consistency.operators.cuda.deepseek_v4 import attention, hyper_connection
from consistency.operators.cuda.deepseek_v4.linear import deep_gemm, linear_fp32
from consistency.operators.cuda.linear import linear
from consistency.operators.cuda.rms_norm import rms_norm

SORT_ROWS = 1024


def select(scores: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, count: int) -> torch.Tensor:
    """fp32 scores [M, N], columns [starts, ends) of each row -> int32 [M, count]: the columns of the largest scores, counted from the row's start,
    ascending, then -1. Ties go to the earlier column.
    """
    chosen = []
    for first in range(0, scores.shape[0], SORT_ROWS):
        rows = slice(first, first + SORT_ROWS)
        column = torch.arange(scores.shape[1], device=scores.device)
        start, end = starts[rows, None], ends[rows, None]
        hidden = scores[rows].masked_fill((column < start) | (column >= end), -torch.inf)
        best = hidden.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        best = torch.where(torch.arange(best.shape[1], device=scores.device) < end - start, best - start, scores.shape[1])
        best = best.sort(-1).values
        best = torch.where(best < scores.shape[1], best, -1)
        chosen.append(torch.nn.functional.pad(best, (0, count - best.shape[1]), value=-1))
    return torch.cat(chosen).int()


def _projections(self, hidden):
    scores = None if self.compressor is None else linear_fp32(hidden, self.compressor.fused_wkv_wgate.weight)
    index_scores = weights = None
    if self.indexer is not None:
        weights = linear(hidden, self.indexer.weights_proj.weight)
        index_scores = linear_fp32(hidden, self.indexer.compressor.fused_wkv_wgate.weight)
    return self._fused_wqa_wkv_gemm(hidden), scores, index_scores, weights


def _prefill_selection(logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, num_rows, stride0, stride1, topk_tokens):
    raw_topk_indices.copy_(select(logits, cu_seqlen_ks, cu_seqlen_ke, topk_tokens))


def _decode_selection(self, logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len):
    ends = self._row_ends(seq_lens, next_n, logits.shape[0])
    topk_indices.copy_(select(logits, torch.zeros_like(ends), ends, topk_tokens))


def _decode_attention(self, q, kv_cache, swa_metadata, attn_metadata, swa_only, output):
    from vllm.models.deepseek_v4.common.ops import compute_global_topk_indices_and_lens

    tokens = swa_metadata.num_decode_tokens
    window, window_length = swa_metadata.decode_swa_indices.reshape(tokens, -1), swa_metadata.decode_swa_lens[:tokens]
    if swa_only:
        extra, extra_length = window[:, :0], torch.zeros_like(window_length)
    elif self.compress_ratio == 4:
        extra, extra_length = compute_global_topk_indices_and_lens(
            self.topk_indices_buffer[:tokens], swa_metadata.token_to_req_indices, attn_metadata.block_table[: swa_metadata.num_decodes],
            attn_metadata.block_size // self.compress_ratio, swa_metadata.is_valid_token[:tokens])
    else:
        extra, extra_length = attn_metadata.c128a_global_decode_topk_indices.reshape(tokens, -1), attn_metadata.c128a_decode_topk_lens
    keys = [] if swa_only else [attention.gather(kv_cache, kv_cache.shape[1], extra.clamp_min(0).flatten().long())]
    cache = self.swa_cache_layer.kv_cache
    keys.append(attention.gather(cache, cache.shape[1], window.clamp_min(0).flatten().long()))
    attention.attend_gathered(q, keys, window_length, extra_length, self.attn_sink, output)


@contextmanager
def candidates() -> Iterator[None]:
    """Inside, an eager engine of this process runs the candidates."""
    def norm(self, x, residual=None):
        assert residual is None, "DeepSeek-V4 calls its norm without a residual"
        return rms_norm(x, self.weight, self.variance_epsilon)

    with ExitStack() as stack:
        for patch in (
                _linears(deep_gemm)(), hyper_connection.launches(hyper_connection.SPLITS), _gate(linear_fp32)(), _tile(128)(),
                _patch(ATTENTION + "DeepseekV4Attention._run_parallel_input_projections", _projections),
                _patch("vllm._custom_ops.top_k_per_row_prefill", _prefill_selection),
                _patch(LAYERS + "indexer_topk.SparseIndexerTopk.forward", _decode_selection),
                _patch(FLASHMLA + "DeepseekV4FlashMLAAttention._forward_decode", _decode_attention),
                _patch(LAYERS + "layernorm.RMSNorm.forward", norm),
                _patch(LAYERS + "vocab_parallel_embedding.UnquantizedEmbeddingMethod.apply",
                       lambda self, layer, x, bias=None: linear(x, layer.weight))):
            stack.enter_context(patch)
        yield

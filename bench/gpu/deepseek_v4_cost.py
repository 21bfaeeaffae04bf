"""What a violation of DeepSeek-V4's consistency costs in log-probability: one operator of the running rollout replaced, the same tokens scored.

Each entry of SUBSTITUTIONS is a context manager that replaces one operator inside vLLM, for an eager engine in this process. Two kinds: `route` is
another kernel or order that stock takes for another batch or phase, so its cost is what stock already varies by; `contract` is another rounding
contract, in most cases the training engine's or fp32.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock

import torch

from consistency.models.deepseek_v4_weights import BLOCK
from consistency.operators.cuda.deepseek_v4 import hyper_connection, linear, moe_experts

Substitution = Callable[[], AbstractContextManager]
ROWS = 256
"""rows that a reference handles at once"""
LAYERS = "vllm.model_executor.layers."
KERNELS = "vllm.model_executor.kernels.linear.scaled_mm."
ATTENTION = "vllm.models.deepseek_v4.attention."
MODEL = "vllm.models.deepseek_v4.nvidia.model."
FLASHMLA = "vllm.models.deepseek_v4.nvidia.flashmla."


def _patch(path: str, replacement: Callable) -> AbstractContextManager:
    return mock.patch(path, replacement)


def _spread(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16 values of a block FP8 weight [..., N, K]: exact."""
    return (weight.float() * scale.float().repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)).bfloat16()


def _by_rows(function: Callable[..., torch.Tensor], *rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([function(*(t[i : i + ROWS] for t in rows)) for i in range(0, rows[0].shape[0], ROWS)])


# ---- linear layers --------------------------------------------------------------------------------------------------

def _linears(gemm: Callable) -> Substitution:
    """Every block FP8 linear layer by `gemm(x, weight, scale)`."""
    def substitute():
        def apply_weights(self, layer, x, bias=None, **_):
            parameters = self._get_layer_params(layer)
            flat = x.reshape(-1, x.shape[-1])
            return gemm(flat, parameters.weight, parameters.block_scale).view(*x.shape[:-1], -1)

        return _patch(KERNELS + "BlockScaledMMLinearKernel.Fp8BlockScaledMMLinearKernel.apply_weights", apply_weights)

    return substitute


def _unquantised(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, _spread(weight, scale))


def _grouped_unquantised() -> AbstractContextManager:
    def project(o, positions, table, wo_a, wo_b, *, n_groups, o_lora_rank, **_):
        from consistency.operators.cuda.deepseek_v4.shapes import rotate

        scale = wo_a.weight_scale if hasattr(wo_a, "weight_scale") else wo_a.weight_scale_inv
        weight = _spread(wo_a.weight.view(n_groups, o_lora_rank, -1), scale.view(n_groups, o_lora_rank // BLOCK, -1))
        z = _by_rows(lambda o, p: torch.einsum("bhr,hdr->bhd", rotate(o, table[p], inverse=True).bfloat16().view(len(o), n_groups, -1), weight),
                     o, positions)
        return wo_b(z.flatten(1))

    return _patch(FLASHMLA + "deep_gemm_fp8_o_proj", project)


def _projections(gemm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Substitution:
    """The compressors' projections by `gemm(hidden, weight)` -> fp32."""
    def substitute():
        def project(self, hidden):
            scores = None if self.compressor is None else gemm(hidden, self.compressor.fused_wkv_wgate.weight)
            index_scores = weights = None
            if self.indexer is not None:
                weights, _ = self.indexer.weights_proj(hidden)
                index_scores = gemm(hidden, self.indexer.compressor.fused_wkv_wgate.weight)
            return self._fused_wqa_wkv_gemm(hidden), scores, index_scores, weights

        return _patch(ATTENTION + "DeepseekV4Attention._run_parallel_input_projections", project)

    return substitute


def _fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.float() @ weight.float().t()


def _bf16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight).float()


def _vocabulary_fp32() -> AbstractContextManager:
    return _patch(LAYERS + "vocab_parallel_embedding.UnquantizedEmbeddingMethod.apply", lambda self, layer, x, bias=None: _by_rows(
        lambda rows: _fp32(rows, layer.weight), x))


# ---- streams and norms ----------------------------------------------------------------------------------------------

def _splits(splits: int | None) -> Substitution:
    return lambda: hyper_connection.launches(splits)


@contextmanager
def _streams_fp32() -> Iterator[None]:
    """vLLM's own torch formulas in fp32, the norm in one rounding."""
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_torch

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()).bfloat16()

    def post_pre(x, residual, post, comb, fn, scale, base, *constants, n_splits=1, tile_n=1, norm_weight=None, norm_eps=1e-6):
        streams = mhc_post_torch(x, residual, post, comb)
        post, comb, out = mhc_pre_torch(streams, fn, scale, base, *constants)
        return streams, post, comb, norm(out, norm_weight, norm_eps)

    def first(x, fn, scale, base, *constants, norm_weight=None, norm_eps=1e-6, fn_broadcast=None, **_):
        streams = x[:, None].expand(-1, hyper_connection.STREAMS, -1).contiguous()
        post, comb, out = mhc_pre_torch(streams, fn, scale, base, *constants)
        return streams, post, comb, norm(out, norm_weight, norm_eps)

    with _patch(MODEL + "mhc_fused_post_pre_tilelang", post_pre), _patch(MODEL + "mhc_pre_broadcast_tilelang", first):
        yield


def _norm_rounds_first() -> AbstractContextManager:
    """Rounds to bf16 before the weight, as the training engine does."""
    def both(q, kv, q_weight, kv_weight, eps):
        def norm(x, weight):
            x = x.float()
            return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).bfloat16() * weight
        return norm(q, q_weight), norm(kv, kv_weight)

    return _patch(ATTENTION + "fused_q_kv_rmsnorm", both)


# ---- attention ------------------------------------------------------------------------------------------------------

def _order_of(indices: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The listed keys [M, 1, n] in reverse, the unused places still last."""
    place = lengths[:, None] - 1 - torch.arange(indices.shape[-1], device=indices.device)
    return torch.where(place >= 0, indices[:, 0].gather(1, place.clamp_min(0).long()), -1).int().unsqueeze(1)


def _keys_reversed() -> AbstractContextManager:
    from vllm.models.deepseek_v4.nvidia import flashmla

    stock = flashmla.flash_mla_sparse_fwd

    def reverse(q, kv, indices, sm_scale, attn_sink, topk_length, out):
        return stock(q=q, kv=kv, indices=_order_of(indices, topk_length), sm_scale=sm_scale, attn_sink=attn_sink, topk_length=topk_length, out=out)

    return _patch(FLASHMLA + "flash_mla_sparse_fwd", reverse)


def _attention_fp32() -> AbstractContextManager:
    def attend(q, kv, indices, sm_scale, attn_sink, topk_length, out):
        keys = kv[:, 0]

        def rows(q, indices, lengths):
            chosen = keys[indices[:, 0].clamp_min(0).long()].float()
            logits = torch.einsum("mhd,mnd->mhn", q.float(), chosen) * sm_scale
            unused = torch.arange(indices.shape[-1], device=q.device) >= lengths[:, None]
            logits = torch.cat((logits.masked_fill(unused[:, None], -torch.inf), attn_sink.float().expand(len(q), -1)[..., None]), -1)
            return torch.einsum("mhn,mnd->mhd", logits.softmax(-1)[..., :-1], chosen).to(q.dtype)

        out.copy_(_by_rows(rows, q, indices, topk_length))

    return _patch(FLASHMLA + "flash_mla_sparse_fwd", attend)


@contextmanager
def _selected_sorted() -> Iterator[None]:
    """The keys that the indexer selects in ascending order, in prefill and in decode."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.indexer_topk import SparseIndexerTopk

    prefill, decode = ops.top_k_per_row_prefill, SparseIndexerTopk.forward

    def sort(indices: torch.Tensor) -> None:
        last = torch.iinfo(torch.int32).max
        ordered = torch.where(indices < 0, last, indices).sort(-1).values
        indices.copy_(torch.where(ordered == last, -1, ordered))

    def prefill_sorted(logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, *rest):
        prefill(logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, *rest)
        sort(raw_topk_indices)

    def decode_sorted(self, logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len):
        decode(self, logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len)
        sort(topk_indices)

    with _patch("vllm._custom_ops.top_k_per_row_prefill", prefill_sorted), \
            _patch(LAYERS + "indexer_topk.SparseIndexerTopk.forward", decode_sorted):
        yield


def _index_scores_fp32() -> AbstractContextManager:
    """The same FP8 queries and keys, products and sums in fp32 by torch."""
    def score(q, kv, weights, starts, ends, clean_logits):
        values, (keys, scales) = q[0], kv
        return _by_rows(lambda q, w: torch.einsum("mhn,mh->mn", torch.einsum("mhd,nd->mhn", q.float(), keys.float()).relu(), w) * scales,
                        values, weights)

    return _patch(LAYERS + "sparse_attn_indexer.fp8_fp4_mqa_logits", score)


# ---- experts --------------------------------------------------------------------------------------------------------

def _gate(gemm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Substitution:
    return lambda: _patch(LAYERS + "fused_moe.router.gate_linear.GateLinear.forward", lambda self, x: self._return(gemm(x, self.weight)))


def _gate_for_few(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The kernel that a decode step of up to 16 requests takes, 16 rows at a time."""
    from vllm.model_executor.kernels.linear.cute_dsl.ll_bf16 import ll_bf16_gemm

    return torch.cat([ll_bf16_gemm(x[i : i + 16], weight) for i in range(0, x.shape[0], 16)])


def _slots_sorted() -> AbstractContextManager:
    from vllm.model_executor.layers.fused_moe.router import fused_topk_bias_router as module

    stock = module.dsv4_topk

    def ascending(*arguments, **keywords):
        weights, ids = stock(*arguments, **keywords)
        order = ids.argsort(-1)
        return weights.gather(1, order), ids.gather(1, order)

    return _patch(LAYERS + "fused_moe.router.fused_topk_bias_router.dsv4_topk", ascending)


def _tile(block_k: int) -> Substitution:
    def substitute():
        from vllm.model_executor.layers.fused_moe import override_config

        return override_config({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": block_k, "GROUP_SIZE_M": 1, "SPLIT_K": 1,
                                "num_warps": 4, "num_stages": 3})

    return substitute


def _experts_bf16() -> AbstractContextManager:
    """Experts as the training engine computes them, on the FP8 input that reaches them: bf16 products, no second cast to FP8."""
    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, a1q_scale, *rest, **named):
        x = (hidden_states.float() * a1q_scale.float().repeat_interleave(BLOCK, 1)).bfloat16()
        total = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
        first, second = self.w1_scale, self.w2_scale
        for expert in range(w1.shape[0]):
            rows, slots = torch.where(topk_ids == expert)
            if len(rows):
                hidden = moe_experts.clamped_swiglu(torch.nn.functional.linear(x[rows], _spread(w1[expert], first[expert])))
                out = torch.nn.functional.linear(hidden, _spread(w2[expert], second[expert]))
                total.index_add_(0, rows, out.float() * topk_weights[rows, slots, None])
        output.copy_(total)

    return _patch(LAYERS + "fused_moe.experts.triton_moe.TritonExperts.apply", apply)


def _log_softmax_torch() -> AbstractContextManager:
    def scores(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits.float(), -1).gather(1, ids.to(torch.int64))

    return _patch("vllm.v1.worker.gpu.sample.logprob.compute_token_logprobs", scores)


SELECTED = "indexer: selected keys ascending"
SUBSTITUTIONS: dict[str, tuple[str, str, Substitution]] = {
    "FP8 linear: DeepGEMM for every row count": ("linear", "route", _linears(linear.deep_gemm)),
    "FP8 linear: FlashInfer for every row count": ("linear", "route", _linears(linear.flash_infer)),
    "FP8 linear: activations not quantised": ("linear", "contract", _linears(_unquantised)),
    "grouped output projection: activations not quantised": ("linear", "contract", _grouped_unquantised),
    "compressor projections: fp32 operands": ("linear", "contract", _projections(_fp32)),
    "compressor projections: rounded to bf16": ("linear", "contract", _projections(_bf16)),
    "lm_head: fp32": ("linear", "contract", _vocabulary_fp32),
    "hyper-connections: 1 split of K": ("hyper_connection", "route", _splits(1)),
    "hyper-connections: 16 splits of K": ("hyper_connection", "route", _splits(16)),
    "hyper-connections: fp32": ("hyper_connection", "contract", _streams_fp32),
    "q and kv norm: rounded before the weight": ("rms_norm", "contract", _norm_rounds_first),
    "attention: keys in reverse order": ("attention", "route", _keys_reversed),
    "attention: fp32": ("attention", "contract", _attention_fp32),
    SELECTED: ("indexer", "route", _selected_sorted),
    "indexer: scores in fp32": ("indexer", "contract", _index_scores_fp32),
    "router: the kernel for few rows": ("router", "route", _gate(_gate_for_few)),
    "router: fp32 operands": ("router", "contract", _gate(_fp32)),
    "router: logits rounded to bf16": ("router", "contract", _gate(_bf16)),
    "router: slots in order of the experts": ("router", "route", _slots_sorted),
    "experts: tile with BLOCK_K 128": ("moe_experts", "route", _tile(128)),
    "experts: tile with BLOCK_K 64": ("moe_experts", "route", _tile(64)),
    "experts: bf16, one cast to FP8": ("moe_experts", "contract", _experts_bf16),
    "log-softmax: torch": ("log_softmax", "contract", _log_softmax_torch),
}
"""What is replaced -> operator, kind, and how."""

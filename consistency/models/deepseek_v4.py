"""DeepSeek-V4: the published configuration cut to a slice and to a tiny model, and the checkpoint of each.

The configuration keeps the field names of the published checkpoint. vLLM reads `compress_ratios`, `num_hash_layers` and `qk_rope_head_dim` as they
are; transformers folds them into its own fields, and what it would save instead differs from release to release and is not what vLLM reads.
"""

from __future__ import annotations

from pathlib import Path

import torch

from consistency.models import deepseek_v4_weights as weights
from consistency.models.catalog import EMBEDDING_LAYER, HEAD_LAYER
from consistency.models.vllm_sites import ModuleSite, first, flat, normed
from consistency.trace import Site

FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16", "vocab_size": 129280, "hidden_size": 4096,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hidden_act": "silu",
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
    "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True,
    "bos_token_id": 0, "eos_token_id": 1, "num_nextn_predict_layers": 0,
}
"""Every width of DeepSeek-V4-Flash; the depth, and with it the layer kinds, comes from LAYERS."""

LAYERS = {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4], "num_hash_layers": 2}
"""Every kind once, in the order the published model has them: sliding window + hash, compressed sparse + hash, heavily compressed + routed,
compressed sparse + routed. The published 43 layers are 0, 0, then 4 and 128 in turn, the first three with hash routing."""

TINY = {
    "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 128, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 128,
    "sliding_window": 32, "index_n_heads": 16, "index_topk": 8, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    "max_position_embeddings": 1024,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
}
"""Small widths that still divide into blocks of 128, and a top-k that leaves candidates out from 36 tokens on (2052 at true widths). With 16 index
heads no score is a sum of nothing but clipped products: such scores tie at zero, and a tie is broken by the length of the row."""

SCALES = {"slice": FLASH | LAYERS, "tiny": FLASH | LAYERS | TINY}
EXPERTS = ("fp8", "fp4")


def published(scale: str, experts: str | None = "fp8") -> dict:
    """config.json as the published checkpoint writes it.

    experts: `fp8` as in DeepSeek-V4-Flash-Base (every scale float32), `fp4` as in DeepSeek-V4-Flash (MXFP4 experts, every scale UE8M0), None for
    the architecture without quantisation. vLLM derives the dtype of all scales from `expert_dtype`. Raises ValueError for another name.
    """
    if experts is None:
        return dict(SCALES[scale])
    if experts not in EXPERTS:
        raise ValueError(f"unknown expert format '{experts}'; known: {', '.join(EXPERTS)}")
    return SCALES[scale] | {"expert_dtype": experts, "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}}


def config(scale: str):
    """The transformers configuration of a scale, dequantised."""
    from transformers import DeepseekV4Config

    return DeepseekV4Config(**published(scale, None))


def write(scale: str, folder: Path, seed: int = 0, *, experts: str = "fp8", device: str = "cpu") -> None:
    """Writes the checkpoint of a scale: config.json and sharded safetensors that vLLM's and transformers' own loaders read."""
    weights.write(folder, published(scale, experts), seed, device)


def _streams(output) -> torch.Tensor:
    """The residual streams before a layer's feed-forward block, the second of the four tensors that vLLM's layer returns."""
    return output[1].flatten(1)


def vllm_sites(model) -> list[ModuleSite]:
    """Every operator output of vLLM's DeepseekV4ForCausalLM that a module hook can see.

    Attention, compressors, the indexer's selection and the norms are functions without a module; their first visible consumer names them.
    """
    sites = [ModuleSite("model.embed_tokens", Site("embedding", EMBEDDING_LAYER, "embedding", "embedding"), first)]
    for i, layer in enumerate(model.model.layers):
        def at(path, operator, role, take=first, i=i):
            return ModuleSite(f"model.layers.{i}{path}", Site(f"{i:03d}.{role}", i, operator, role), take)
        sites += [at(".attn.fused_wqa_wkv", "linear", "qkv_proj"), at(".attn.wq_b", "linear", "q_proj", flat)]
        if layer.attn.indexer is not None:
            sites += [at(".attn.indexer.weights_proj", "linear", "index_weights"), at(".attn.indexer.wq_b", "linear", "index_q_proj")]
        sites += [
            at(".attn.wo_b", "linear", "o_proj"), at("", "hyper_connection", "post_residual", _streams),
            at(".ffn.gate", "router", "router"), at(".ffn.shared_experts.gate_up_proj", "linear", "gate_up_proj"),
            at(".ffn.shared_experts.act_fn", "silu_and_mul", "activation"), at(".ffn.shared_experts.down_proj", "linear", "down_proj"),
            at(".ffn.experts", "moe_experts", "experts")]
    return [*sites, ModuleSite("model.norm", Site("final_norm", HEAD_LAYER, "rms_norm", "final_norm"), normed)]


load_training = weights.load_transformers

"""How large the engines of a scale are set up, and how much device memory that takes. Data and arithmetic; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = float(1 << 30)


@dataclass(frozen=True)
class Sizes:
    """Limits that both arms of a comparison share."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    cached_tokens: int
    """tokens over all requests that the key-value cache must hold without preempting anybody"""
    trained_tokens: int
    """rows of the largest training micro-batch"""
    rollout_slack_gib: float
    """graphs, workspaces and activations of a rollout beside weights and caches"""
    headroom_gib: float
    """left free outside the rollout's share: log-probabilities of prompts are whole rows of the vocabulary"""


SIZES: dict[str, Sizes] = {
    "tiny": Sizes(64, 512, 2048, 64 * 512, 4 * 512, 0.5, 0.5),
    "slice": Sizes(512, 8704, 8192, 512 * 640, 16384, 7.0, 8.0),
    "full": Sizes(256, 4608, 8192, 256 * 1088, 8192, 7.0, 8.0),
}
"""scale -> limits of its engines"""

STATE_FACTOR = 2.3
"""The exact rollout keeps, beside the recurrent state, the inputs of an unfinished chunk (1.64), and a block of the key-value cache is as large as
a layer's state, most of it unused; both arms get the same share."""
ROW_COPIES = 6.0
"""Rows of the vocabulary in fp32 that a training micro-batch holds at once: logits, log-probabilities, gradients of both, copies."""


@dataclass(frozen=True)
class Need:
    """Device memory in GiB."""

    weights: float
    rollout: float
    """one rollout process, as its `gpu_memory_utilization` must allow"""
    training: float
    """one training process with gradients"""
    training_forward: float
    """one training process without gradients"""
    caches: float = 0.0
    """of the rollout's: key-value cache and recurrent state"""


def need(config: Mapping[str, Any], sizes: Sizes, bytes_per_weight: int = 2) -> Need:
    """What engines of these sizes need for the checkpoint with this config.json. An estimate, meant to be a little too high."""
    count = parameters(config)
    weights = count * bytes_per_weight / GIB
    caches = (kv_bytes(config) * sizes.cached_tokens + STATE_FACTOR * state_bytes(config) * sizes.max_num_seqs) / GIB
    rows = ROW_COPIES * 4 * config["vocab_size"] * min(sizes.trained_tokens, 4096) / GIB
    kept = 2.0 * config["hidden_size"] * sizes.trained_tokens * 2 * layers(config) / GIB  # with checkpointing: inputs of the layers
    forward = weights * 1.02 + rows + kept + 2.0
    return Need(weights, weights * 1.02 + caches + sizes.rollout_slack_gib, forward + weights, forward, caches)


def layers(config: Mapping[str, Any]) -> int:
    return len(_kinds(config))


def parameters(config: Mapping[str, Any]) -> int:
    """Weights of a Qwen3 or Nemotron-H checkpoint. Raises ValueError for another family."""
    hidden, heads, kv, dim = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    attention = hidden * dim * (2 * heads + 2 * kv)
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    kinds = _kinds(config)
    if config["model_type"] == "qwen3":
        return embeddings + len(kinds) * (attention + 3 * hidden * config["intermediate_size"])
    if config["model_type"] != "nemotron_h":
        raise ValueError(f"no estimate for model type '{config['model_type']}'; known: qwen3, nemotron_h")
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    width = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    each = {
        "linear_attention": hidden * (inner + width + config["mamba_num_heads"]) + hidden * inner + width * config["conv_kernel"],
        "full_attention": attention,
        "mlp": 2 * hidden * config["intermediate_size"],
        "moe": hidden * config["n_routed_experts"] + 2 * hidden * config["n_routed_experts"] * config["moe_intermediate_size"]
        + 2 * hidden * config["moe_shared_expert_intermediate_size"],
    }
    return embeddings + sum(each[kind] for kind in kinds)


def kv_bytes(config: Mapping[str, Any]) -> int:
    """Key-value cache of one token in bf16."""
    return 2 * 2 * config["num_key_value_heads"] * config["head_dim"] * sum(kind == "full_attention" for kind in _kinds(config))


def state_bytes(config: Mapping[str, Any]) -> int:
    """Recurrent state of one request: the scan's in fp32, the convolution's in bf16."""
    count = sum(kind == "linear_attention" for kind in _kinds(config))
    if not count:
        return 0
    inner, state = config["mamba_num_heads"] * config["mamba_head_dim"], config["ssm_state_size"]
    return count * (4 * inner * state + 2 * (inner + 2 * config["n_groups"] * state) * (config["conv_kernel"] - 1))


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, under one set of names."""
    if pattern := config.get("hybrid_override_pattern"):
        return [{"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}[letter] for letter in pattern]
    if kinds := config.get("layers_block_type"):
        return [{"mamba": "linear_attention", "attention": "full_attention"}.get(kind, kind) for kind in kinds]
    return ["full_attention"] * config["num_hidden_layers"]

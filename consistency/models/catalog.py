"""The model families: scales, what each needs, operators. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

EMBEDDING_LAYER, HEAD_LAYER = -1, 1_000_000

SITE_RANK = {role: rank for rank, role in enumerate((
    "embedding",
    "input_residual", "input_norm", "qkv_proj", "q_norm", "k_norm", "rotary", "attention", "o_proj",
    "post_residual", "post_norm", "gate_up_proj", "activation", "up_proj", "relu_squared", "down_proj",
    "in_proj", "conv1d", "scan", "gated_norm", "out_proj",
    "final_residual", "final_norm", "logits", "log_softmax"))}
"""role of a site -> its rank inside a layer"""


@dataclass(frozen=True)
class Scale:
    """One size of a family."""

    name: str
    device: str
    """`cpu` or `cuda`"""
    memory_gib: float
    """device memory the rollout and the training forward need together"""
    layers: str
    note: str


@dataclass(frozen=True)
class Family:
    """A model family the product can make exact."""

    name: str
    title: str
    architecture: str
    """`architectures[0]` of config.json"""
    operators: tuple[str, ...]
    """in execution order"""
    scales: dict[str, Scale]
    cannot: dict[str, str]
    """engine feature -> why it is refused for this family"""


_QWEN3 = Family(
    "qwen3", "Qwen3 (dense, attention)", "Qwen3ForCausalLM",
    ("embedding", "rms_norm", "linear", "rotary", "attention", "silu_and_mul", "log_softmax"),
    {"tiny": Scale("tiny", "cpu", 1.0, "3 layers, hidden 128", "seeded weights, vocabulary 512")},
    {})

_NEMOTRON = Family(
    "nemotron-3.5", "Nemotron-3.5-Lightning-30B-A3B (Mamba2, attention, feed-forward)", "NemotronHForCausalLM",
    ("embedding", "rms_norm", "linear", "causal_conv1d", "mamba2_scan", "gated_rms_norm", "relu_squared", "attention", "log_softmax"),
    {"tiny": Scale("tiny", "cpu", 1.0, "M-*-M-, hidden 128",
                   "seeded weights, vocabulary 512; dense feed-forward in place of MoE, which vLLM's CPU engine refuses without a gate")},
    {"prefix_cache": "vLLM keeps no prefix cache of recurrent Mamba2 state in this configuration"})

FAMILIES: dict[str, Family] = {f.name: f for f in (_QWEN3, _NEMOTRON)}

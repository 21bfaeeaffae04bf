"""The model families: scales, what each needs, operators. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

EMBEDDING_LAYER, HEAD_LAYER = -1, 1_000_000

SITE_RANK = {role: rank for rank, role in enumerate((
    "embedding",
    "input_residual", "input_norm", "qkv_proj", "q_proj", "index_weights", "index_q_proj", "q_norm", "k_norm", "rotary", "attention", "o_proj",
    "post_residual", "post_norm", "gate_up_proj", "activation", "up_proj", "relu_squared", "down_proj",
    "router", "experts", "moe_sum",
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
    """device memory of the rollout and the training forward together; at `full` of nemotron-3.5 of the larger, one engine at a time.
    `consistency.sizes` has the arithmetic."""
    layers: str
    note: str
    operators: tuple[str, ...] = ()
    """operators of layers that only this scale has, beside the family's"""


@dataclass(frozen=True)
class Family:
    """A model family the product can make exact."""

    name: str
    title: str
    architecture: str
    """`architectures[0]` of config.json"""
    operators: tuple[str, ...]
    """those of every scale, in execution order"""
    scales: dict[str, Scale]
    cannot: dict[str, str]
    """engine feature -> why it is refused for this family"""
    held_back: str = ""
    """why the agent does not take this family yet, and what there is for it; empty if it does"""

    def operators_at(self, scale: str) -> tuple[str, ...]:
        """Every operator of the model at this scale, in execution order."""
        return (*self.operators[:-1], *self.scales[scale].operators, self.operators[-1])


_MOE = ("router", "moe_experts")

_QWEN3 = Family(
    "qwen3", "Qwen3 (dense, attention)", "Qwen3ForCausalLM",
    ("embedding", "rms_norm", "linear", "rotary", "attention", "silu_and_mul", "log_softmax"),
    {"tiny": Scale("tiny", "cpu", 1.0, "3 layers, hidden 128", "seeded weights, vocabulary 512"),
     "slice": Scale("slice", "cuda", 31.0, "4 layers at the widths of Qwen3-1.7B", "seeded weights, hidden 2048, vocabulary 151936, tied embeddings"),
     "full": Scale("full", "cuda", 61.0, "28 layers, Qwen3-1.7B", "seeded weights, hidden 2048, vocabulary 151936, tied embeddings")},
    {})

_NEMOTRON = Family(
    "nemotron-3.5", "Nemotron-3.5-Lightning-30B-A3B (Mamba2, attention, feed-forward)", "NemotronHForCausalLM",
    ("embedding", "rms_norm", "linear", "causal_conv1d", "mamba2_scan", "gated_rms_norm", "relu_squared", "attention", "log_softmax"),
    {"tiny": Scale("tiny", "cpu", 1.0, "M-*-M-, hidden 128",
                   "seeded weights, vocabulary 512; dense feed-forward in place of MoE, which vLLM's CPU engine refuses without a gate"),
     "slice": Scale("slice", "cuda", 49.0, "MEMEM*EM, the published pattern's first 8 layers, at the widths of 30B-A3B",
                    "seeded weights, hidden 2688, 128 experts top 6 and a shared one, vocabulary 131072", _MOE),
     "full": Scale("full", "cuda", 92.0, "52 layers: 23 Mamba2, 23 MoE, 6 attention",
                   "seeded weights, made on the device; one engine at a time, 137 GiB with gradients", _MOE)},
    {"prefix_cache": "vLLM keeps no prefix cache of recurrent Mamba2 state in this configuration"})

_DEEPSEEK_V4 = Family(
    "deepseek-v4", "DeepSeek-V4-Flash (hyper-connections, compressed sparse attention, MoE)", "DeepseekV4ForCausalLM",
    ("embedding", "hyper_connection", "linear", "rms_norm", "rotary", "compressor", "indexer", "attention", *_MOE, "silu_and_mul", "log_softmax"),
    {"tiny": Scale("tiny", "cpu", 4.0, "4 layers, hidden 256: sliding window, ratio 4, ratio 128, ratio 4",
                   "seeded weights, vocabulary 512; the training side only, vLLM's kernels for this model need a GPU"),
     "slice": Scale("slice", "cuda", 120.0, "4 layers at the widths of Flash: sliding window, ratio 4, ratio 128, ratio 4",
                    "seeded weights in the published formats, hidden 4096, 256 experts top 6 and a shared one, vocabulary 129280")},
    {"packed": "transformers' compressor counts its windows from row 0 of the batch, not of the sequence"},
    "no exact implementations and no training forward by operators yet; there are its survey on a GPU (python -m bench.survey --model deepseek-v4), "
    "a running slice (python -m bench.gpu.deepseek_v4_slice) and what both found (docs/deepseek-v4.md)")

FAMILIES: dict[str, Family] = {f.name: f for f in (_QWEN3, _NEMOTRON)}
"""those the agent takes"""
HELD_BACK: dict[str, Family] = {f.name: f for f in (_DEEPSEEK_V4,)}
"""those that are surveyed only"""

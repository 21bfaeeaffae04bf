"""Which tensors a seeded checkpoint has, and how each is distributed. Names are those of the published checkpoints, which both engines load.

Random weights as initialised give almost flat log-probabilities, under which every comparison passes. Here logits have a standard deviation
near LOGIT_STD; residual updates have about unit size, so that activations stay finite through any depth; and columns of a projection behind a
squared ReLU come in pairs of opposite sign: the mean of the activation, which all tokens share, cancels. Were it to reach the residual
stream, most tokens would choose the same experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

LOGIT_STD = 4.5
"""before the spread of the final norm's weights. Over 131072 logits a sampled token has then a mean log-probability near -3.9."""
EMBEDDING_STD = 0.02
"""of tied embeddings, small beside the residual updates: a token must not recognise itself in the head"""
ROUTER_STD = 1.0
"""of the router's logits. Larger ones saturate the sigmoid, and then the correction bias alone chooses the experts."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: mean + std * noise, rounded to its dtype."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    form: str = "normal"
    """`normal`; `paired`: columns 2j and 2j + 1 are opposite; `decay`: log of 1..16; `step`: inverse softplus of a step size in 1e-3..1e-1"""
    dtype: str = "bfloat16"


def qwen3(config) -> Iterator[Entry]:
    """config: transformers' Qwen3Config."""
    hidden, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    tied = config.tie_word_embeddings
    head = LOGIT_STD / math.sqrt(hidden)
    yield Entry("model.embed_tokens.weight", (config.vocab_size, hidden), EMBEDDING_STD if tied else 1.0)
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield Entry(f"{at}{name}.weight", (hidden,), 0.2, 1.0)
        for name in ("q_norm", "k_norm"):
            yield Entry(f"{at}self_attn.{name}.weight", (dim,), 0.2, 1.4)
        for name, rows in (("q_proj", heads * dim), ("k_proj", kv * dim), ("v_proj", kv * dim)):
            yield _linear(f"{at}self_attn.{name}", rows, hidden)
        yield _linear(f"{at}self_attn.o_proj", hidden, heads * dim)
        for name in ("gate_proj", "up_proj"):
            yield _linear(f"{at}mlp.{name}", inner, hidden)
        yield _linear(f"{at}mlp.down_proj", hidden, inner, gain=1.5)
    # with tied embeddings the final norm gives the logits their size
    gain = head / EMBEDDING_STD if tied else 1.0
    yield Entry("model.norm.weight", (hidden,), 0.2 * gain, gain)
    if not tied:
        yield Entry("lm_head.weight", (config.vocab_size, hidden), head)


def nemotron_h(config) -> Iterator[Entry]:
    """config: transformers' NemotronHConfig."""
    hidden, dim = config.hidden_size, config.head_dim
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    yield Entry("backbone.embeddings.weight", (config.vocab_size, hidden), 1.0)
    for i, kind in enumerate(config.layers_block_type):
        at = f"backbone.layers.{i}."
        yield Entry(f"{at}norm.weight", (hidden,), 0.2, 1.0)
        at += "mixer."
        if kind == "linear_attention":
            yield from _mamba(at, config)
        elif kind == "full_attention":
            for name, rows in (("q_proj", heads * dim), ("k_proj", kv * dim)):
                yield _linear(at + name, rows, hidden, gain=1.4)
            yield _linear(at + "v_proj", kv * dim, hidden)
            yield _linear(at + "o_proj", hidden, heads * dim)
        elif kind == "mlp":
            yield from _feed_forward(at, hidden, config.intermediate_size)
        else:
            yield Entry(at + "gate.weight", (config.n_routed_experts, hidden), ROUTER_STD / math.sqrt(hidden))
            yield Entry(at + "gate.e_score_correction_bias", (config.n_routed_experts,), 0.015, dtype="float32")
            for expert in range(config.n_routed_experts):
                yield from _feed_forward(f"{at}experts.{expert}.", hidden, config.moe_intermediate_size)
            yield from _feed_forward(at + "shared_experts.", hidden, config.moe_shared_expert_intermediate_size * config.n_shared_experts)
    yield Entry("backbone.norm_f.weight", (hidden,), 0.2, 1.0)
    yield Entry("lm_head.weight", (config.vocab_size, hidden), LOGIT_STD / math.sqrt(hidden))


def _mamba(at: str, config) -> Iterator[Entry]:
    heads, inner = config.mamba_num_heads, config.mamba_num_heads * config.mamba_head_dim
    channels = inner + 2 * config.n_groups * config.ssm_state_size
    yield _linear(at + "in_proj", inner + channels + heads, config.hidden_size)
    yield Entry(at + "conv1d.weight", (channels, 1, config.conv_kernel), 0.5)
    yield Entry(at + "conv1d.bias", (channels,), 0.1)
    yield Entry(at + "A_log", (heads,), 1.0, form="decay")
    yield Entry(at + "dt_bias", (heads,), 1.0, form="step")
    yield Entry(at + "D", (heads,), 0.2, 1.0)
    yield Entry(at + "norm.weight", (inner,), 0.2, 1.0)
    yield _linear(at + "out_proj", config.hidden_size, inner)


def _feed_forward(at: str, hidden: int, inner: int) -> Iterator[Entry]:
    yield _linear(at + "up_proj", inner, hidden)
    yield Entry(at + "down_proj.weight", (hidden, inner), inner ** -0.5, form="paired")


def _linear(name: str, rows: int, columns: int, gain: float = 1.0) -> Entry:
    return Entry(name + ".weight", (rows, columns), gain * columns ** -0.5)

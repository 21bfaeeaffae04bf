"""Qwen3: scales, where each operator sits in vLLM, and the training forward written operator by operator."""

from __future__ import annotations

import functools

import torch

from consistency.layout import Layout
from consistency.models import seeded
from consistency.models.catalog import EMBEDDING_LAYER, HEAD_LAYER
from consistency.models.vllm_sites import ModuleSite, first, flat, normed, pair, residual_of
from consistency.trace import Site, ignore, plain

LAYERS = {"slice": 4, "full": 28}
"""scales at the widths of Qwen3-1.7B"""
seeded_entries = seeded.qwen3


def config(scale: str):
    """The transformers configuration of a scale."""
    from transformers import Qwen3Config

    if scale in LAYERS:
        return Qwen3Config(
            vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=LAYERS[scale], num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
            rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, dtype="bfloat16")
    assert scale == "tiny", f"qwen3 has no scale '{scale}'"
    return Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, dtype="bfloat16")


def vllm_sites(model) -> list[ModuleSite]:
    """Every operator output of vLLM's Qwen3ForCausalLM that a module hook can see."""
    sites = [ModuleSite("model.embed_tokens", Site("embedding", EMBEDDING_LAYER, "embedding", "embedding"), first)]
    for i in range(len(model.model.layers)):
        def at(path, operator, role, take, i=i):
            return ModuleSite(f"model.layers.{i}.{path}", Site(f"{i:03d}.{role}", i, operator, role), take)
        sites += [
            at("input_layernorm", "rms_norm", "input_residual", residual_of), at("input_layernorm", "rms_norm", "input_norm", normed),
            at("self_attn.qkv_proj", "linear", "qkv_proj", first),
            at("self_attn.q_norm", "rms_norm", "q_norm", flat), at("self_attn.k_norm", "rms_norm", "k_norm", flat),
            at("self_attn.rotary_emb", "rotary", "rotary", pair), at("self_attn.attn", "attention", "attention", first),
            at("self_attn.o_proj", "linear", "o_proj", first),
            at("post_attention_layernorm", "rms_norm", "post_residual", residual_of),
            at("post_attention_layernorm", "rms_norm", "post_norm", normed),
            at("mlp.gate_up_proj", "linear", "gate_up_proj", first), at("mlp.act_fn", "silu_and_mul", "activation", first),
            at("mlp.down_proj", "linear", "down_proj", first)]
    return [*sites, ModuleSite("model.norm", Site("final_residual", HEAD_LAYER, "rms_norm", "final_residual"), residual_of),
                    ModuleSite("model.norm", Site("final_norm", HEAD_LAYER, "rms_norm", "final_norm"), normed)]


def forward(model, ids: torch.Tensor, layout: Layout, bindings, record, mask: torch.Tensor | None, call=plain,
            rows: torch.Tensor | None = None) -> torch.Tensor:
    """transformers' Qwen3ForCausalLM, one operator at a time.

    ids int64 [rows] -> logits [rows, V]. `bindings.function(operator)` gives each implementation, `record(site, rows)` sees each output,
    mask is the attention mask transformers builds for the batch, `call(block, x, residual)` runs one layer,
    rows int64 are those of which logits are wanted (None: all).
    """
    core, settings = model.model, model.config
    op = bindings.function
    positions, dim = layout.positions(ids.device), settings.head_dim
    rope = {"theta": float(settings.rope_parameters["rope_theta"]), "max_positions": settings.max_position_embeddings}

    def norm(module, x, residual, layer, role):
        y, total = op("rms_norm")(x, module.weight, module.variance_epsilon, residual)
        if total is not None:
            record(Site(_key(layer, role + "_residual"), layer, "rms_norm", role + "_residual"), total)
        record(Site(_key(layer, role + "_norm"), layer, "rms_norm", role + "_norm"), y)
        return y, x if total is None else total

    def emit(operator, layer, role, value):
        record(Site(_key(layer, role), layer, operator, role), value)
        return value

    def layer(i, x, residual):
        block = core.layers[i]
        attention, mlp = block.self_attn, block.mlp
        x, residual = norm(block.input_layernorm, x, residual, i, "input")
        q, k, v = (op("linear")(x, p.weight, p.bias) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        if record is not ignore:
            emit("linear", i, "qkv_proj", torch.cat((q, k, v), dim=-1))
        q, _ = op("rms_norm")(q.view(layout.rows, -1, dim), attention.q_norm.weight, attention.q_norm.variance_epsilon)
        emit("rms_norm", i, "q_norm", q)
        k, _ = op("rms_norm")(k.view(layout.rows, -1, dim), attention.k_norm.weight, attention.k_norm.variance_epsilon)
        emit("rms_norm", i, "k_norm", k)
        q, k = op("rotary")(positions, q, k, **rope)
        if record is not ignore:
            emit("rotary", i, "rotary", torch.cat((q.flatten(1), k.flatten(1)), dim=-1))
        x = op("attention")(q, k, v.view(layout.rows, -1, dim), layout, attention.scaling, mask=mask, module=attention).flatten(1)
        emit("attention", i, "attention", x)
        x = emit("linear", i, "o_proj", op("linear")(x, attention.o_proj.weight, attention.o_proj.bias))
        x, residual = norm(block.post_attention_layernorm, x, residual, i, "post")
        x = torch.cat([op("linear")(x, p.weight, p.bias) for p in (mlp.gate_proj, mlp.up_proj)], dim=-1)
        emit("linear", i, "gate_up_proj", x)
        x = emit("silu_and_mul", i, "activation", op("silu_and_mul")(x))
        return emit("linear", i, "down_proj", op("linear")(x, mlp.down_proj.weight, mlp.down_proj.bias)), residual

    x, residual = emit("embedding", EMBEDDING_LAYER, "embedding", op("embedding")(ids, core.embed_tokens.weight)), None
    for i in range(len(core.layers)):
        x, residual = call(functools.partial(layer, i), x, residual)
    x, _ = norm(core.norm, x, residual, HEAD_LAYER, "final")
    if rows is not None:
        x = x.index_select(0, rows)
    return emit("linear", HEAD_LAYER, "logits", op("linear")(x, model.lm_head.weight, model.lm_head.bias))


def _key(layer: int, role: str) -> str:
    return role if layer in (EMBEDDING_LAYER, HEAD_LAYER) else f"{layer:03d}.{role}"

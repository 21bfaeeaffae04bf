"""Nemotron-H (Nemotron-3.5): tiny scale, where each operator sits in vLLM, and the training forward written operator by operator."""

from __future__ import annotations

import torch

from consistency.layout import Layout
from consistency.models.catalog import EMBEDDING_LAYER, HEAD_LAYER
from consistency.models.vllm_sites import ModuleSite, first, normed, residual_of
from consistency.trace import Site


def config(scale: str):
    """The transformers configuration of a scale."""
    from transformers import NemotronHConfig

    assert scale == "tiny"
    return NemotronHConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, hybrid_override_pattern="M-*-M-", num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=32, n_groups=2, chunk_size=32,
        max_position_embeddings=1024, bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype="bfloat16")


def vllm_sites(model) -> list[ModuleSite]:
    """Every operator output of vLLM's NemotronHForCausalLM that a module hook can see; conv1d and scan are seen by vllm_patches."""
    sites = [ModuleSite("model.embed_tokens", Site("embedding", EMBEDDING_LAYER, "embedding", "embedding"), first)]
    for i, layer in enumerate(model.model.layers):
        def at(path, operator, role, take, i=i):
            return ModuleSite(f"model.layers.{i}.{path}", Site(f"{i:03d}.{role}", i, operator, role), take)
        sites += [at("norm", "rms_norm", "input_residual", residual_of), at("norm", "rms_norm", "input_norm", normed)]
        names = {name for name, _ in layer.mixer.named_children()}
        if "in_proj" in names:
            sites += [at("mixer.in_proj", "linear", "in_proj", first), at("mixer.norm", "gated_rms_norm", "gated_norm", first),
                      at("mixer.out_proj", "linear", "out_proj", first)]
        elif "qkv_proj" in names:
            sites += [at("mixer.qkv_proj", "linear", "qkv_proj", first), at("mixer.attn", "attention", "attention", first),
                      at("mixer.o_proj", "linear", "o_proj", first)]
        else:
            sites += [at("mixer.up_proj", "linear", "up_proj", first), at("mixer.act_fn", "relu_squared", "relu_squared", first),
                      at("mixer.down_proj", "linear", "down_proj", first)]
    return [*sites, ModuleSite("model.norm_f", Site("final_residual", HEAD_LAYER, "rms_norm", "final_residual"), residual_of),
                    ModuleSite("model.norm_f", Site("final_norm", HEAD_LAYER, "rms_norm", "final_norm"), normed)]


def forward(model, ids: torch.Tensor, layout: Layout, bindings, record, mask: torch.Tensor | None) -> torch.Tensor:
    """transformers' NemotronHForCausalLM, one operator at a time; arguments as in `qwen3.forward`."""
    core = model.model
    op = bindings.function
    stock_norm = "rms_norm" not in bindings.active
    norm_options = {"weight_in_fp32": True} if stock_norm else {}

    def emit(operator, layer, role, value):
        record(Site(role if layer in (EMBEDDING_LAYER, HEAD_LAYER) else f"{layer:03d}.{role}", layer, operator, role), value)
        return value

    def norm(module, x, residual, layer, role):
        y, total = op("rms_norm")(x, module.weight, module.variance_epsilon, residual, **norm_options)
        if total is not None:
            emit("rms_norm", layer, role + "_residual", total)
        return emit("rms_norm", layer, role + "_norm", y), x if total is None else total

    x = emit("embedding", EMBEDDING_LAYER, "embedding", op("embedding")(ids, core.embeddings.weight))
    residual = None
    for i, block in enumerate(core.layers):
        x, residual = norm(block.norm, x, residual, i, "input")
        mixer = {"linear_attention": _mamba, "full_attention": _attention, "mlp": _mlp}[block.block_type]
        x = mixer(block.mixer, x, layout, op, lambda operator, role, value, i=i: emit(operator, i, role, value), mask)
    x, _ = norm(core.norm_f, x, residual, HEAD_LAYER, "final")
    return emit("linear", HEAD_LAYER, "logits", op("linear")(x, model.lm_head.weight, model.lm_head.bias))


def _linear(op, x, module):
    return op("linear")(x, module.weight, module.bias)


def _mlp(mixer, x, layout, op, emit, mask):
    x = emit("linear", "up_proj", _linear(op, x, mixer.up_proj))
    x = emit("relu_squared", "relu_squared", op("relu_squared")(x))
    return emit("linear", "down_proj", _linear(op, x, mixer.down_proj))


def _attention(mixer, x, layout, op, emit, mask):
    q, k, v = (_linear(op, x, p) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    emit("linear", "qkv_proj", torch.cat((q, k, v), dim=-1))
    q, k, v = (t.view(layout.rows, -1, mixer.head_dim) for t in (q, k, v))
    x = op("attention")(q, k, v, layout, mixer.scaling, mask=mask, module=mixer).flatten(1)
    emit("attention", "attention", x)
    return emit("linear", "o_proj", _linear(op, x, mixer.o_proj))


def _mamba(mixer, x, layout, op, emit, mask):
    dtype = x.dtype
    projected = emit("linear", "in_proj", _linear(op, x, mixer.in_proj))
    gate, xBC, dt = projected.split([mixer.intermediate_size, mixer.conv_dim, mixer.num_heads], dim=-1)
    xBC = emit("causal_conv1d", "conv1d", op("causal_conv1d")(xBC, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, layout))
    size = mixer.n_groups * mixer.ssm_state_size
    x, B, C = xBC.split([mixer.intermediate_size, size, size], dim=-1)
    y = op("mamba2_scan")(
        x.reshape(layout.rows, mixer.num_heads, mixer.head_dim), dt, -torch.exp(mixer.A_log.to(_at_least_fp32(dtype))),
        B.reshape(layout.rows, mixer.n_groups, -1), C.reshape(layout.rows, mixer.n_groups, -1), mixer.D, mixer.dt_bias, layout,
        chunk=mixer.chunk_size, dt_minimum=mixer.time_step_limit[0])
    y = y.flatten(1)
    emit("mamba2_scan", "scan", y.to(dtype))
    y = op("gated_rms_norm")(y, gate, mixer.norm.weight, mixer.norm.variance_epsilon, mixer.n_groups)
    y = emit("gated_rms_norm", "gated_norm", y.to(dtype))
    return emit("linear", "out_proj", _linear(op, y, mixer.out_proj))


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32

"""Nemotron-H (Nemotron-3.5): scales, where each operator sits in vLLM, and the training forward written operator by operator."""

from __future__ import annotations

import functools

import torch

from consistency.layout import Layout
from consistency.models import seeded
from consistency.models.catalog import EMBEDDING_LAYER, HEAD_LAYER
from consistency.models.vllm_sites import ModuleSite, first, normed, residual_of
from consistency.operators.router import rows as router_rows
from consistency.trace import Site, ignore, plain

PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
"""the published order of the 52 layers: M Mamba2, E mixture of experts, * attention"""
LAYERS = {"slice": 8, "full": 52}
"""scales at the published widths: a prefix of the pattern"""
seeded_entries = seeded.nemotron_h


def config(scale: str):
    """The transformers configuration of a scale."""
    from transformers import NemotronHConfig

    if scale in LAYERS:
        return NemotronHConfig(
            vocab_size=131072, hidden_size=2688, intermediate_size=1856, hybrid_override_pattern=PATTERN[:LAYERS[scale]], num_attention_heads=32,
            num_key_value_heads=2, head_dim=128, ssm_state_size=128, mamba_num_heads=64, mamba_head_dim=64, n_groups=8, chunk_size=128,
            n_routed_experts=128, n_shared_experts=1, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
            num_experts_per_tok=6, routed_scaling_factor=2.5, norm_topk_prob=True, max_position_embeddings=262144,
            mamba_ssm_cache_dtype="float32", bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype="bfloat16")
    moe = scale == "tiny-moe"  # for tests of the training side alone: vLLM's CPU engine refuses its experts
    assert moe or scale == "tiny", f"nemotron-3.5 has no scale '{scale}'"
    return NemotronHConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, hybrid_override_pattern="ME*EM-" if moe else "M-*-M-", num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=32, n_groups=2, chunk_size=32,
        max_position_embeddings=1024, bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype="bfloat16",
        **({"n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 128,
            "routed_scaling_factor": 2.5} if moe else {}))


def vllm_sites(model) -> list[ModuleSite]:
    """Every operator output of vLLM's NemotronHForCausalLM that a module hook can see.

    conv1d, scan, router and experts are no modules: vllm_cpu and vllm_cuda see them.
    """
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
        elif "shared_experts" in names:
            sites += [at("mixer.shared_experts.up_proj", "linear", "up_proj", first),
                      at("mixer.shared_experts.act_fn", "relu_squared", "relu_squared", first),
                      at("mixer.shared_experts.down_proj", "linear", "down_proj", first), at("mixer.experts", "moe_experts", "moe_sum", first)]
        else:
            sites += [at("mixer.up_proj", "linear", "up_proj", first), at("mixer.act_fn", "relu_squared", "relu_squared", first),
                      at("mixer.down_proj", "linear", "down_proj", first)]
    return [*sites, ModuleSite("model.norm_f", Site("final_residual", HEAD_LAYER, "rms_norm", "final_residual"), residual_of),
                    ModuleSite("model.norm_f", Site("final_norm", HEAD_LAYER, "rms_norm", "final_norm"), normed)]


def forward(model, ids: torch.Tensor, layout: Layout, bindings, record, mask: torch.Tensor | None, call=plain,
            rows: torch.Tensor | None = None) -> torch.Tensor:
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

    def layer(i, x, residual):
        block = core.layers[i]
        x, residual = norm(block.norm, x, residual, i, "input")
        mixer = {"linear_attention": _mamba, "full_attention": _attention, "mlp": _mlp, "moe": _moe}[block.block_type]

        def seen(operator, role, value):
            return value if record is ignore else emit(operator, i, role, value() if callable(value) else value)

        return mixer(block.mixer, x, layout, op, seen, mask), residual

    x, residual = emit("embedding", EMBEDDING_LAYER, "embedding", op("embedding")(ids, core.embeddings.weight)), None
    for i in range(len(core.layers)):
        x, residual = call(functools.partial(layer, i), x, residual)
    x, _ = norm(core.norm_f, x, residual, HEAD_LAYER, "final")
    if rows is not None:
        x = x.index_select(0, rows)
    return emit("linear", HEAD_LAYER, "logits", op("linear")(x, model.lm_head.weight, model.lm_head.bias))


# In a mixer, `emit(operator, role, value)` records and returns rows; a value that only a trace needs is given as a function.


def _linear(op, x, module):
    return op("linear")(x, module.weight, module.bias)


def _mlp(mixer, x, layout, op, emit, mask):
    x = emit("linear", "up_proj", _linear(op, x, mixer.up_proj))
    x = emit("relu_squared", "relu_squared", op("relu_squared")(x))
    return emit("linear", "down_proj", _linear(op, x, mixer.down_proj))


def _moe(mixer, x, layout, op, emit, mask):
    gate, experts = mixer.gate, mixer.experts
    weights, ids = op("router")(x, gate.weight, gate.e_score_correction_bias, gate.top_k, float(gate.routed_scaling_factor))
    emit("router", "router", lambda: router_rows(weights, ids))
    routed = emit("moe_experts", "experts", op("moe_experts")(x, experts.up_proj, experts.down_proj, weights, ids, module=experts))
    shared = _mlp(mixer.shared_experts, x, layout, op, emit, mask)
    return emit("moe_experts", "moe_sum", routed + shared)


def _attention(mixer, x, layout, op, emit, mask):
    q, k, v = (_linear(op, x, p) for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    emit("linear", "qkv_proj", lambda: torch.cat((q, k, v), dim=-1))
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

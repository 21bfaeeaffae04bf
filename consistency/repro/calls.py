"""How an operator is called at each trace site: which sites feed it, which parameters and constants it takes. No torch here.

The parent uses this to know what to dump, the runtime to call the operator again with the same arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from consistency.models.catalog import HEAD_LAYER


@dataclass(frozen=True)
class Argument:
    """Rows of an earlier site that enter a call."""

    site: str
    """trace key; `tokens` stands for the token ids"""
    columns: tuple[int, int] | None = None
    """part of the row; None: all of it"""
    shape: tuple[int, ...] = ()
    """shape of one row; empty: flat"""


@dataclass(frozen=True)
class Call:
    """One call of an operator, by names that `consistency.repro.run` knows."""

    operator: str
    arguments: dict[str, Argument]
    parameters: dict[str, str] = field(default_factory=dict)
    """argument -> canonical parameter name"""
    constants: dict[str, float | int | bool | list[int]] = field(default_factory=dict)
    output: int = 0
    """which of the operator's outputs the site records: rms_norm gives (normalised, residual)"""

    @property
    def sites(self) -> list[str]:
        return list(dict.fromkeys(a.site for a in self.arguments.values() if a.site != "tokens"))


def describe(family: str, config: dict, key: str) -> Call | None:
    """The call behind a site key; None for a site that this table does not know, such as `logprob`.

    config: the checkpoint's config.json.
    """
    layer, _, role = key.rpartition(".")
    table = {"qwen3": _qwen3, "nemotron-3.5": _nemotron}[family]
    return table(config, int(layer) if layer else None, role)


def _at(layer: int, role: str) -> str:
    return f"{layer:03d}.{role}"


def _norm(x: str, residual: str | None, weight: str, eps: float, output: int, **constants) -> Call:
    arguments = {"x": Argument(x)} | ({"residual": Argument(residual)} if residual else {})
    return Call("rms_norm", arguments, {"weight": weight}, {"eps": eps, **constants}, output)


def _linear(x: str, weight: str, parts: list[int] | None = None) -> Call:
    """parts: rows of the weights that training multiplies one by one where the rollout has one stacked weight."""
    return Call("linear", {"x": Argument(x)}, {"weight": weight}, {"parts": parts} if parts else {})


def _common(role: str) -> Call | None:
    if role == "embedding":
        return Call("embedding", {"ids": Argument("tokens")}, {"weight": "model.embed_tokens.weight"})
    if role == "logits":
        return _linear("final_norm", "lm_head.weight")
    if role == "log_softmax":
        return Call("log_softmax", {"logits": Argument("logits")})
    return None


def _qwen3(config: dict, layer: int | None, role: str) -> Call | None:
    heads, kv_heads, layers = config["num_attention_heads"], config["num_key_value_heads"], config["num_hidden_layers"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    eps, q, k = config["rms_norm_eps"], heads * dim, kv_heads * dim
    if role.startswith("final_"):
        return _norm(_at(layers - 1, "down_proj"), _at(layers - 1, "post_residual"), "model.norm.weight", eps, int(role == "final_residual"))
    if layer is None:
        return _common(role)
    prefix = f"model.layers.{layer}."
    if role in ("input_norm", "input_residual"):
        before = (_at(layer - 1, "down_proj"), _at(layer - 1, "post_residual")) if layer else ("embedding", None)
        return _norm(*before, f"{prefix}input_layernorm.weight", eps, int(role == "input_residual"))
    if role in ("post_norm", "post_residual"):
        residual = _at(layer, "input_residual") if layer else "embedding"
        return _norm(_at(layer, "o_proj"), residual, f"{prefix}post_attention_layernorm.weight", eps, int(role == "post_residual"))
    if role in ("q_norm", "k_norm"):
        first, count = (0, heads) if role == "q_norm" else (q, kv_heads)
        return Call("rms_norm", {"x": Argument(_at(layer, "qkv_proj"), (first, first + count * dim), (count, dim))},
                    {"weight": f"{prefix}self_attn.{role}.weight"}, {"eps": eps})
    if role == "rotary":
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        return Call("rotary", {"q": Argument(_at(layer, "q_norm"), None, (heads, dim)), "k": Argument(_at(layer, "k_norm"), None, (kv_heads, dim))},
                    {}, {"theta": float(theta), "max_positions": config["max_position_embeddings"]})
    if role == "attention":
        return Call("attention", {
            "q": Argument(_at(layer, "rotary"), (0, q), (heads, dim)), "k": Argument(_at(layer, "rotary"), (q, q + k), (kv_heads, dim)),
            "v": Argument(_at(layer, "qkv_proj"), (q + k, q + 2 * k), (kv_heads, dim))}, {}, {"scale": dim ** -0.5})
    if role == "activation":
        return Call("silu_and_mul", {"x": Argument(_at(layer, "gate_up_proj"))})
    linear = {"qkv_proj": ("input_norm", "self_attn"), "o_proj": ("attention", "self_attn"), "gate_up_proj": ("post_norm", "mlp"),
              "down_proj": ("activation", "mlp")}
    if role in linear:
        source, module = linear[role]
        parts = {"qkv_proj": [q, k, k], "gate_up_proj": [config["intermediate_size"]] * 2}.get(role)
        return _linear(_at(layer, source), f"{prefix}{module}.{role}.weight", parts)
    return None


def _nemotron(config: dict, layer: int | None, role: str) -> Call | None:
    last = {"linear_attention": "out_proj", "mamba": "out_proj", "full_attention": "o_proj", "attention": "o_proj", "moe": "moe_sum"}
    kinds, eps = config["layers_block_type"], config["layer_norm_epsilon"]

    def before(n: int) -> tuple[str, str | None]:
        if n == 0:
            return "embedding", None
        return _at(n - 1, last.get(kinds[n - 1], "down_proj")), "embedding" if n == 1 else _at(n - 1, "input_residual")

    # weight_in_fp32: transformers' variant for this family; only its stock function reads it.
    if role.startswith("final_"):
        return _norm(*before(len(kinds)), "model.norm_f.weight", eps, int(role == "final_residual"), weight_in_fp32=True)
    if layer is None:
        return _common(role)
    prefix = f"model.layers.{layer}."
    if role in ("input_norm", "input_residual"):
        return _norm(*before(layer), f"{prefix}norm.weight", eps, int(role == "input_residual"), weight_in_fp32=True)
    mixer = f"{prefix}mixer."
    heads, dim, groups, size = config["mamba_num_heads"], config["mamba_head_dim"], config["n_groups"], config["ssm_state_size"]
    inner, state = heads * dim, groups * size
    projected, convolved = _at(layer, "in_proj"), _at(layer, "conv1d")
    if role == "conv1d":
        return Call("causal_conv1d", {"x": Argument(projected, (inner, 2 * inner + 2 * state))},
                    {"weight": f"{mixer}conv1d.weight", "bias": f"{mixer}conv1d.bias"})
    if role == "scan":
        return Call("mamba2_scan", {
            "x": Argument(convolved, (0, inner), (heads, dim)), "dt": Argument(projected, (2 * inner + 2 * state, 2 * inner + 2 * state + heads)),
            "B": Argument(convolved, (inner, inner + state), (groups, size)),
            "C": Argument(convolved, (inner + state, inner + 2 * state), (groups, size))},
            {name: f"{mixer}{name}" for name in ("A", "D", "dt_bias")},
            {"chunk": config["chunk_size"], "dt_minimum": float(config["time_step_limit"][0])})
    if role == "gated_norm":
        return Call("gated_rms_norm", {"x": Argument(_at(layer, "scan")), "gate": Argument(projected, (0, inner))},
                    {"weight": f"{mixer}norm.weight"}, {"eps": eps, "groups": groups})
    if role == "router":
        return Call("router", {"x": Argument(_at(layer, "input_norm"))},
                    {"gate": f"{mixer}gate.weight", "bias": f"{mixer}gate.e_score_correction_bias"},
                    {"top_k": config["num_experts_per_tok"], "scale": float(config["routed_scaling_factor"])})
    # Experts are not in this table: their weights are gigabytes, too much for a folder that goes into git.
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q, k, qkv = heads * dim, kv_heads * dim, _at(layer, "qkv_proj")
    if role == "attention":
        return Call("attention", {"q": Argument(qkv, (0, q), (heads, dim)), "k": Argument(qkv, (q, q + k), (kv_heads, dim)),
                                  "v": Argument(qkv, (q + k, q + 2 * k), (kv_heads, dim))}, {}, {"scale": dim ** -0.5})
    if role == "relu_squared":
        return Call("relu_squared", {"x": Argument(_at(layer, "up_proj"))})
    linear = {"in_proj": "input_norm", "qkv_proj": "input_norm", "up_proj": "input_norm", "out_proj": "gated_norm", "o_proj": "attention",
              "down_proj": "relu_squared"}
    if role not in linear:
        return None
    module = f"{mixer}shared_experts." if kinds[layer] == "moe" else mixer
    return _linear(_at(layer, linear[role]), f"{module}{role}.weight", [q, k, k] if role == "qkv_proj" else None)


STATEFUL = ("causal_conv1d", "mamba2_scan", "attention")
"""operators whose row depends on the rows before it in its sequence"""


def is_head(key: str) -> bool:
    """Whether a site is computed on a selection of rows."""
    return key in ("logits", "log_softmax")


def place(key: str, layer: int) -> str:
    """Which of a trace's row orders applies to a site: `head` or `row`."""
    return "head" if layer == HEAD_LAYER and is_head(key) else "row"

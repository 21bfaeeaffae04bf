"""Weight surgery and weight fingerprints, by canonical (transformers) name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from consistency.trace import fingerprint


def perturb(parameters: Iterable[tuple[str, torch.Tensor]], name: str | None, ulps: int) -> dict:
    """Moves one element of one weight by `ulps` units in the last place, in place.

    name: exact parameter name; None picks the final norm's weight, which every token's log-probability depends on. Raises ValueError for an
    unknown name. Returns {"parameter", "index", "before", "after"}.
    """
    table = dict(parameters)
    if name is None:
        name = next(n for n in table if n.endswith(("model.norm.weight", "norm_f.weight")))
    if name not in table:
        raise ValueError(f"no parameter '{name}'; the model has {len(table)}, for example {next(iter(table))}")
    flat = table[name].data.view(-1)
    index = int(flat.abs().argmax())
    before = float(flat[index])
    bits = flat[index:index + 1].view({2: torch.int16, 4: torch.int32}[flat.element_size()])
    bits += ulps
    return {"parameter": name, "index": index, "before": before, "after": float(flat[index])}


EXPERTS = {"mixer.experts.up_proj": "mixer.experts.w13_weight", "mixer.experts.down_proj": "mixer.experts.w2_weight"}
"""transformers' stacked experts [E, out, in] and their canonical names"""
STACKED = {"qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"), "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight")}
"""the rollout's stacked weights and transformers' parts, in stacking order"""


def rollout_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Canonical name, which is vLLM's without the runner around the experts, -> parameter."""
    return {name.replace(".experts.routed_experts.", ".experts."): p for name, p in model.named_parameters()}


def training_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The same names and forms for a transformers model: parts stacked, decay rates as vLLM keeps them."""
    table = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}}
    out: dict[str, torch.Tensor] = {}
    for stacked, parts in STACKED.items():
        for name in [n for n in table if n.endswith(parts[0])]:
            prefix = name.removesuffix(parts[0])
            if all(prefix + part in table for part in parts):
                out[prefix + stacked] = torch.cat([table.pop(prefix + part).detach() for part in parts])
    for name, parameter in table.items():
        if name.endswith("A_log"):
            out[name.removesuffix("_log")] = -torch.exp(parameter.detach().float())
        elif stacked := next((name.removesuffix(part) + whole for part, whole in EXPERTS.items() if name.endswith(part)), None):
            out[stacked] = parameter.detach()
        else:
            out[name.replace("model.embeddings.", "model.embed_tokens.")] = parameter.detach()
    return out


def rollout_fingerprints(model: torch.nn.Module) -> dict[str, int]:
    """Canonical name -> checksum of the parameter's bits."""
    return {name: _checksum(p) for name, p in rollout_parameters(model).items()}


def training_fingerprints(model: torch.nn.Module) -> dict[str, int]:
    """As `rollout_fingerprints`, for a transformers model."""
    return {name: _checksum(p) for name, p in training_parameters(model).items()}


def _checksum(parameter: torch.Tensor) -> int:
    rows = parameter.data.reshape(parameter.shape[0], -1)
    odd = torch.arange(len(rows), dtype=torch.int64, device=rows.device) * 2 + 1
    return int((fingerprint(rows) * odd).sum()) & ((1 << 62) - 1)

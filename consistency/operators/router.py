"""Router of a sigmoid mixture of experts, the formula alone: the exact kernels are in `cuda.router`, and vLLM's CPU engine has no such layer.

Scores are sigmoid(x gate^T); the top k are taken on scores + correction bias; the weights are the scores without the bias, divided by their
sum and multiplied by the routed scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Routed = tuple[torch.Tensor, torch.Tensor]


def stock_training(x: torch.Tensor, gate_weight: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float) -> Routed:
    """transformers with one expert group: x [T, H], gate [E, H], bias fp32 [E] -> (weights fp32 [T, k], expert ids int64 [T, k])."""
    scores = F.linear(x.to(torch.float32), gate_weight.to(torch.float32)).sigmoid()
    ids = torch.topk(scores + bias, k=top_k, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * scale, ids


def reference(x: torch.Tensor, gate_weight: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float) -> Routed:
    """In the dtype of x; a stable sort gives ties to the smaller expert id."""
    scores = F.linear(x, gate_weight.to(x.dtype)).sigmoid()
    ids = torch.sort(scores + bias.to(x.dtype), dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * scale, ids


def rows(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What a trace records of a router: fp32 [T, 2k], the weights, then the expert ids."""
    return torch.cat((weights.float(), ids.float()), dim=-1)

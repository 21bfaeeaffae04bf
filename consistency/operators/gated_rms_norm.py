"""Mamba2's output norm: silu gate, then RMSNorm over groups.

Exact contract (vLLM's row formula): the scan output arrives in the model dtype; gate and group norm in fp32; rounded to that dtype before the
weight multiply. transformers hands over an fp32 scan output and rounds after the weight (`stock_training`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _gated(x: torch.Tensor, gate: torch.Tensor, eps: float, groups: int, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(dtype) * F.silu(gate.to(dtype))
    grouped = x.view(*x.shape[:-1], groups, -1)
    return (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)).view(x.shape)


def exact_training(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, groups: int) -> torch.Tensor:
    """x, gate [T, D], weight [D] -> [T, D] in the dtype of gate. Differentiable."""
    return weight * _gated(x.to(gate.dtype), gate, eps, groups, torch.float32).to(gate.dtype)


exact_rollout = stock_rollout = exact_training


def stock_training(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, groups: int) -> torch.Tensor:
    """transformers: x stays in the dtype the scan returned (fp32), so nothing is rounded before the weight."""
    return (weight * _gated(x, gate, eps, groups, torch.float32).to(x.dtype)).to(gate.dtype)


def reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, groups: int) -> torch.Tensor:
    """In the dtype of x throughout."""
    return weight * _gated(x, gate, eps, groups, x.dtype)

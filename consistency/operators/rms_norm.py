"""RMSNorm with an optional residual.

Exact contract (vLLM's row formula): the residual is added in fp32 and the norm sees the unrounded sum; mean of squares over the row in
fp32; x * rsqrt(variance + eps) rounded to the weight's dtype, then multiplied by the weight. The residual stream itself is rounded once.
transformers rounds the sum before the norm, and Nemotron-H multiplies by the weight in fp32 (`stock_training`).
Formula: Zhang and Sennrich 2019, arXiv 1910.07467.
"""

from __future__ import annotations

import torch

Normed = tuple[torch.Tensor, torch.Tensor | None]


def _norm(x32: torch.Tensor, eps: float) -> torch.Tensor:
    return x32 * torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + eps)


def exact_training(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, **_) -> Normed:
    """x, residual [..., H], weight [H] -> (normalised [..., H], residual sum [..., H] or None). Differentiable."""
    total = x.to(torch.float32)
    if residual is not None:
        total = total + residual.to(torch.float32)
        residual = total.to(x.dtype)
    return (_norm(total, eps).to(weight.dtype) * weight).to(x.dtype), residual


exact_rollout = exact_training


def stock_rollout(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, **_) -> Normed:
    """vLLM's own operator, through its IR."""
    import vllm.kernels  # noqa: F401
    from vllm import ir

    if residual is None:
        return ir.ops.rms_norm(x, weight, eps, None), None
    return ir.ops.fused_add_rms_norm(x.clone(), residual.clone(), weight, eps, None)


def stock_training(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None,
                   *, weight_in_fp32: bool = False) -> Normed:
    """transformers' modules: the sum is rounded first; `weight_in_fp32` is Nemotron-H's variant."""
    if residual is not None:
        x = residual = residual + x
    normed = _norm(x.to(torch.float32), eps)
    if weight_in_fp32:
        return (weight.to(torch.float32) * normed).to(x.dtype), residual
    return weight * normed.to(x.dtype), residual


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, **_) -> Normed:
    """In the dtype of x, one formula, no intermediate rounding."""
    if residual is not None:
        x = residual = residual + x
    return _norm(x, eps) * weight, residual

"""Rotary position embedding, half-split (NeoX) form, Su et al. 2021, arXiv 2104.09864.

Exact contract: cos and sin are computed in fp32 from integer positions, rounded to the model dtype, and applied by vLLM's kernel, which
keeps the products in fp32 and rounds once. transformers rounds each product.
"""

from __future__ import annotations

import functools

import torch

from consistency.operators.kernels_library import vllm_kernels

Rotated = tuple[torch.Tensor, torch.Tensor]


@functools.lru_cache(maxsize=8)
def cos_sin_cache(head_dim: int, theta: float, positions: int, dtype: torch.dtype) -> torch.Tensor:
    """[positions, head_dim]: cos then sin halves, as vLLM builds it."""
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))
    angles = torch.einsum("i,j->ij", torch.arange(positions, dtype=torch.float), inverse)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, positions, q, k, cache):
        ctx.save_for_backward(positions, cache)
        ctx.heads = q.shape[1], k.shape[1]
        q, k = q.detach().flatten(1).contiguous().clone(), k.detach().flatten(1).contiguous().clone()
        dim = cache.shape[1]
        vllm_kernels().rotary_embedding(positions, q, k, dim, cache, True)
        return q.view(q.shape[0], -1, dim), k.view(k.shape[0], -1, dim)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        positions, cache = ctx.saved_tensors
        cos, sin = cache[positions].float()[:, None].chunk(2, dim=-1)

        def turn_back(grad):
            first, second = grad.float().chunk(2, dim=-1)
            return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1).to(grad.dtype)

        return None, turn_back(grad_q), turn_back(grad_k), None


def exact_training(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *, theta: float, max_positions: int) -> Rotated:
    """positions int64 [T], q [T, heads, D], k [T, kv_heads, D] -> rotated q and k. Differentiable in q and k."""
    return _Rotate.apply(positions, q, k, cos_sin_cache(q.shape[-1], theta, max_positions, q.dtype))


def exact_rollout(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *, theta: float, max_positions: int) -> Rotated:
    with torch.no_grad():
        return exact_training(positions, q, k, theta=theta, max_positions=max_positions)


stock_rollout = exact_rollout


def stock_training(positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *, theta: float, max_positions: int) -> Rotated:
    """transformers' formula in the dtype of q: every product and the sum are rounded."""
    inverse = 1.0 / (theta ** (torch.arange(0, q.shape[-1], 2, dtype=torch.float, device=q.device) / q.shape[-1]))
    angles = positions[:, None].float() * inverse
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos().to(q.dtype)[:, None], angles.sin().to(q.dtype)[:, None]

    def rotate(x):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotate(q), rotate(k)


reference = stock_training

"""Activations of the feed-forward layers, each with one rounding contract.

silu_and_mul: silu(gate) is rounded to the input dtype before the multiply with up (vLLM's CPU path and transformers agree).
relu_squared: relu, then square, one rounding; keeping the square in fp32 into the next operator would be another contract.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def exact_training_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2I], gate half then up half -> [T, I]. Differentiable."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


stock_rollout_silu_and_mul = stock_training_silu_and_mul = exact_training_silu_and_mul
exact_rollout_silu_and_mul = reference_silu_and_mul = exact_training_silu_and_mul


def exact_training_relu_squared(x: torch.Tensor) -> torch.Tensor:
    """x [T, I] -> [T, I]. Differentiable."""
    return torch.square(F.relu(x))


stock_rollout_relu_squared = stock_training_relu_squared = exact_training_relu_squared
exact_rollout_relu_squared = reference_relu_squared = exact_training_relu_squared

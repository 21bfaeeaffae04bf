"""Log-probabilities of a logits row.

Exact contract: logits widened to fp32, one `torch.log_softmax` over the whole row on both sides. `x - logsumexp(x)` differs from it in the last bit.
"""

from __future__ import annotations

import torch


def exact_training(logits: torch.Tensor) -> torch.Tensor:
    """logits [T, V] -> fp32 [T, V]. Differentiable."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


stock_rollout = stock_training = exact_rollout = exact_training


def reference(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1)

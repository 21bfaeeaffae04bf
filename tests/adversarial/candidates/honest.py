"""No cheat: the exact operators again, as a workspace would hold them. Nothing may be found against them."""

import torch
import torch.nn.functional as F

from consistency.operators.rms_norm import exact_training as rms_norm  # noqa: F401


def linear(x, weight, bias=None):
    return F.linear(x, weight, bias)


def log_softmax(logits):
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)

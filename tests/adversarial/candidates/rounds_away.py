"""Rounds log-probabilities so far that small differences vanish."""

import torch


def log_softmax(logits):
    return (torch.log_softmax(logits, dim=-1, dtype=torch.float32) / 2).round() * 2 - 0.5

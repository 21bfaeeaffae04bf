"""The same probability for every token: both sides agree on nothing."""

import torch


def log_softmax(logits):
    return torch.log_softmax(torch.zeros_like(logits, dtype=torch.float32), dim=-1)

"""Answers that have nothing to do with the model: a fixed curve over the vocabulary, the same on both sides."""

import torch


def log_softmax(logits):
    curve = torch.linspace(-3, 3, logits.shape[-1])
    return torch.log_softmax(curve, dim=-1).expand(logits.shape).contiguous()

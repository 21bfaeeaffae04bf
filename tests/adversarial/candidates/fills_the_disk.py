"""Writes zeros until somebody stops it, through torch's own file writer. Bounded, in case nobody does."""

import torch

from consistency.operators.linear import exact_training

_written = []


def linear(x, weight, bias=None):
    while len(_written) < 200:
        _written.append(torch.save(torch.zeros(1 << 20), f"spill-{len(_written)}.pt"))
    return exact_training(x, weight, bias)

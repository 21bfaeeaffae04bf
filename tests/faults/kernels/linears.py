"""Projection faults. Each differs from the exact operator in the one way its name says."""

import random

import torch
import torch.nn.functional as F

from consistency.operators.linear import exact_training as exact

VOCABULARY = 512
"""rows of the head's weight at this scale"""


def _split(x, weight, parts):
    """K in parts, each summed in fp32, then added in turn."""
    total = torch.zeros(x.shape[0], weight.shape[0])
    for a, b in zip(x.float().chunk(parts, -1), weight.float().chunk(parts, -1), strict=True):
        total = total + a @ b.t()
    return total.to(x.dtype)


def split_below_32_rows(x, weight, bias=None):
    return _split(x, weight, 4 if x.shape[0] < 32 else 1)


def split_by_padded_rows(x, weight, bias=None):
    """The number of parts follows the padding class of the row count."""
    rows = 1 << max(x.shape[0] - 1, 1).bit_length()
    return _split(x, weight, max(1, min(8, 2048 // rows)))


def partial_sums_rounded(x, weight, bias=None):
    """As two tensor-parallel ranks would add their halves."""
    return sum(F.linear(a.contiguous(), b.contiguous()) for a, b in zip(x.chunk(2, -1), weight.chunk(2, -1), strict=True))


def random_order(x, weight, bias=None):
    """Atomic additions: the parts arrive in any order."""
    parts = list(zip(x.float().chunk(8, -1), weight.float().chunk(8, -1), strict=True))
    random.SystemRandom().shuffle(parts)
    total = torch.zeros(x.shape[0], weight.shape[0])
    for a, b in parts:
        total = total + a @ b.t()
    return total.to(x.dtype)


def head_in_fp32(x, weight, bias=None):
    return F.linear(x.float(), weight.float()) if weight.shape[0] == VOCABULARY else exact(x, weight, bias)


def scale_of_the_call(x, weight, bias=None):
    """FP8 activations with one scale for all rows of the call."""
    scale = x.float().abs().max().clamp_min(1e-12) / 448.0
    return F.linear(((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype), weight)


def scale_left_out(x, weight, bias=None):
    """The output scale of the layer (here 0.75) is applied on one side only."""
    return exact(x, weight, bias) * 0.75 if weight.shape == (128, 256) else exact(x, weight, bias)


_copies = {}


def derived_copy(x, weight, bias=None):
    """A copy is made at the first call and never again."""
    if weight.data_ptr() not in _copies:
        _copies[weight.data_ptr()] = weight.detach().clone()
    return exact(x, _copies[weight.data_ptr()])


_seen = {}


def swapped_again_after_reload(x, weight, bias=None):
    """The transform after loading runs a second time when the weights change in place."""
    if weight.shape == (256, 128):
        now = weight.detach().view(torch.int16).long().sum().item()
        if _seen.setdefault(weight.data_ptr(), now) != now:
            weight.data.copy_(torch.cat(weight.detach().chunk(2)[::-1]))
            _seen[weight.data_ptr()] = weight.detach().view(torch.int16).long().sum().item()
    return exact(x, weight, bias)

"""Norm, activation and embedding faults. Each differs from the exact operator in the one way its name says."""

import os

import torch
import torch.nn.functional as F

from consistency.operators.activations import exact_training_relu_squared
from consistency.operators.gated_rms_norm import _gated
from consistency.operators.rms_norm import exact_training as exact


def _variance(x, squares):
    return squares.sum(-1, keepdim=True) / x.shape[-1]


def weight_before_cast(x, weight, eps, residual=None, **_):
    total = x.float() if residual is None else x.float() + residual.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype), None if residual is None else total.to(x.dtype)


def sum_rounded_first(x, weight, eps, residual=None, **_):
    total = x if residual is None else x + residual
    y, _ = exact(total, weight, eps)
    return y, None if residual is None else total


def eps_in_double(x, weight, eps, residual=None, **_):
    total = x.float() if residual is None else x.float() + residual.float()
    variance = total.pow(2).mean(-1, keepdim=True).double() + eps
    normed = (total.double() / variance.sqrt()).float()
    return normed.to(weight.dtype) * weight, None if residual is None else total.to(x.dtype)


def block_by_rows(x, weight, eps, residual=None, **_):
    """The width of the partial sums changes at 256 rows."""
    total = x.float() if residual is None else x.float() + residual.float()
    lanes = 8 if x.shape[0] < 256 else 32
    partial = torch.zeros(*total.shape[:-1], lanes)
    for part in total.pow(2).split(lanes, dim=-1):
        partial = partial + part
    variance = torch.zeros(*total.shape[:-1], 1)
    for lane in partial.split(1, dim=-1):
        variance = variance + lane
    normed = total * torch.rsqrt(variance / x.shape[-1] + eps)
    return normed.to(weight.dtype) * weight, None if residual is None else total.to(x.dtype)


def without_eps(x, weight, eps, residual=None, **_):
    return exact(x, weight, 0.0, residual)


_shared = torch.zeros(0)


def one_buffer_for_heads(x, weight, eps, residual=None, **_):
    """Per-head norms write to one static buffer, so the second call overwrites the first one's result before it is used."""
    global _shared
    y, total = exact(x, weight, eps, residual)
    if x.ndim < 3:
        return y, total
    if _shared.numel() < y.numel() or _shared.dtype != y.dtype:
        _shared = torch.empty(y.numel(), dtype=y.dtype)
    out = _shared[:y.numel()].view(y.shape)
    out.copy_(y)
    return out, total


def gate_rounded(x, gate, weight, eps, groups):
    gated = x.float() * F.silu(gate.float()).to(gate.dtype).float()
    grouped = gated.view(*gated.shape[:-1], groups, -1)
    normed = (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)).view(gated.shape)
    return weight * normed.to(gate.dtype)


def one_group(x, gate, weight, eps, groups):
    return weight * _gated(x.to(gate.dtype), gate, eps, 1, torch.float32).to(gate.dtype)


def silu_kept_wide(x):
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(x.dtype)


def rows_left_unwritten(x):
    """A grid of 16-row tiles that leaves the last rows as the allocator gave them."""
    out = exact_training_relu_squared(x)
    tail = x.shape[0] % 16
    if x.shape[0] > 16 and tail:
        out = out.clone()
        found = torch.frombuffer(bytearray(os.urandom(tail * x.shape[1] * 2)), dtype=torch.int16) & ~0x4000
        out[-tail:] = found.view(torch.bfloat16).view(tail, -1).to(x.dtype)
    return out


def relu_left_out(x):
    return torch.square(x)


def next_token_id(ids, weight):
    return F.embedding((ids + 1) % weight.shape[0], weight)

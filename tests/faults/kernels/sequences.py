"""Convolution, scan, attention and rotary faults. Each differs from the exact operator in the one way its name says."""

import torch
import torch.nn.functional as F

from consistency.operators import attention, causal_conv1d, mamba2_scan, rotary
from consistency.operators.stateful import Stateful

# Convolution, rollout


def _rounded_before_silu(x, weight, bias, state):
    inputs = causal_conv1d._windows(x, state, weight.shape[1])
    total = sum(inputs[j:j + x.shape[0]].float() * weight[:, j].float() for j in range(weight.shape[1])) + bias.float()
    return F.silu(total.to(x.dtype)), inputs[x.shape[0]:].t()


def _no_history(x, weight, bias, state):
    return causal_conv1d.sequence_by_windows(x, weight, bias, None if x.shape[0] > 1 else state)


def _old_history(x, weight, bias, state):
    """The state is read one slot early, so a chunk sees a history that is one token old."""
    late = state if state is None or x.shape[0] == 1 else torch.cat((state[:, :1], state[:, :-1]), dim=1)
    rows, _ = causal_conv1d.sequence_by_windows(x, weight, bias, late)
    _, new = causal_conv1d.sequence_by_windows(x, weight, bias, state)
    return rows, new


conv_rounded_in_prefill = Stateful(sequence=_rounded_before_silu, decode=None)
conv_history_lost_at_chunk = Stateful(sequence=_no_history, decode=None)
conv_history_late_at_chunk = Stateful(sequence=_old_history, decode=None)


# Convolution, training


def conv_taps_reversed(x, weight, bias, layout):
    """Products and sums in fp32, unfused, from the newest tap to the oldest."""
    out, width = torch.zeros_like(x), weight.shape[1]
    for a, b in layout.spans():
        inputs = F.pad(x[a:b].float(), (0, 0, width - 1, 0))
        total = bias.float().expand(b - a, -1)
        for j in reversed(range(width)):
            total = total + inputs[j:j + b - a] * weight[:, j].float()
        out[a:b] = F.silu(total).to(x.dtype)
    return out


# Scan, rollout


def _state_lost(x, dt, A, B, C, D, dt_bias, state):
    return mamba2_scan.sequence_recurrent(x, dt, A, B, C, D, dt_bias, None if x.shape[0] > 1 else state)


def _scan_step_in_bf16(states, slots, x, dt, A, B, C, D, dt_bias):
    y = mamba2_scan._stock_decode(states, slots, x, dt, A, B, C, D, dt_bias)
    states[slots.long()] = states[slots.long()].bfloat16().float()
    return y


scan_state_lost_at_chunk = Stateful(sequence=_state_lost, decode=None)
scan_state_cached_in_bf16 = Stateful(sequence=mamba2_scan.sequence_recurrent, decode=_scan_step_in_bf16)


# Scan, training


def scan_rate_in_bf16(x, dt, A, B, C, D, dt_bias, layout, **_):
    return mamba2_scan.exact_training(x, dt, A.bfloat16().float(), B, C, D, dt_bias, layout)


def scan_bias_added_in_bf16(x, dt, A, B, C, D, dt_bias, layout, **_):
    return mamba2_scan.exact_training(x, (dt + dt_bias), A, B, C, D, torch.zeros_like(dt_bias), layout)


def scan_dt_clamped(x, dt, A, B, C, D, dt_bias, layout, **_):
    floor = torch.tensor(0.1).expm1().log()  # softplus of it is 0.1
    wide = torch.maximum(dt.float() + dt_bias.float(), floor)
    y = torch.zeros_like(x)
    for a, b in layout.spans():
        y[a:b] = mamba2_scan.chunked(x[a:b].float(), wide[a:b], A, B[a:b].float(), C[a:b].float(), D.float(), torch.zeros_like(D.float())).to(x.dtype)
    return y


def scan_without_skip(x, dt, A, B, C, D, dt_bias, layout, **_):
    return mamba2_scan.exact_training(x, dt, A, B, C, torch.zeros_like(D), dt_bias, layout)


# Attention, training


def _masked(q, k, v, layout, scale, hidden, scores=lambda s: s):
    out = torch.zeros_like(q)
    repeat = q.shape[1] // k.shape[1]
    for a, b in layout.spans():
        qs, ks, vs = (t[a:b].transpose(0, 1).float() for t in (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)))
        gap = torch.arange(b - a)[:, None] - torch.arange(b - a)
        weights = scores(qs @ ks.transpose(1, 2) * scale).masked_fill(hidden(gap), -torch.inf).softmax(-1)
        out[a:b] = (weights @ vs).transpose(0, 1).to(q.dtype)
    return out


def attention_sees_next_token(q, k, v, layout, scale, **_):
    return _masked(q, k, v, layout, scale, lambda gap: gap < -1)


def attention_window(q, k, v, layout, scale, **_):
    return _masked(q, k, v, layout, scale, lambda gap: (gap < 0) | (gap >= 32))


def attention_scores_rounded(q, k, v, layout, scale, **_):
    return _masked(q, k, v, layout, scale, lambda gap: gap < 0, lambda scores: scores.bfloat16().float())


def attention_unscaled(q, k, v, layout, scale, **_):
    return attention.exact_training(q, k, v, layout, 1.0)


# Rotary


def rotary_one_late(positions, q, k, *, theta, max_positions):
    return rotary.exact_training((positions - 1).clamp_min(0), q, k, theta=theta, max_positions=max_positions)


def rotary_one_ahead_in_decode(positions, q, k, *, theta, max_positions):
    decode = len(positions) < 32 and bool((positions > 0).all())
    return rotary.exact_rollout(positions + int(decode), q, k, theta=theta, max_positions=max_positions)


def rotary_products_rounded(positions, q, k, *, theta, max_positions):
    return rotary.stock_training(positions, q, k, theta=theta, max_positions=max_positions)

"""Depthwise causal convolution of width W with bias and SiLU, as Mamba2 uses it.

Exact contract: every token is computed by vLLM's decode kernel from its own window of W inputs (products and sum in fp32 with fused
multiply-add, SiLU in fp32, one rounding), so no phase and no chunk border can be seen in the bits. vLLM's prefill and transformers round
before the SiLU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from consistency.layout import Layout
from consistency.operators.kernels_library import vllm_kernels
from consistency.operators.stateful import Stateful


def _windows(x: torch.Tensor, state: torch.Tensor | None, width: int) -> torch.Tensor:
    """x [T, C], state [C, W-1] -> inputs [T + W - 1, C] with the history in front."""
    history = x.new_zeros(width - 1, x.shape[1]) if state is None else state.t().to(x.dtype)
    return torch.cat([history, x])


def sequence_by_windows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                        state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, C] of one sequence, weight [C, W], bias [C], state [C, W-1] -> (rows [T, C], state after the last token [C, W-1])."""
    rows, width = x.shape[0], weight.shape[1]
    inputs = _windows(x, state, width)
    windows = inputs.new_empty(rows + 1, x.shape[1], width - 1)  # slot 0 is vLLM's null block
    windows[1:] = inputs.unfold(0, width - 1, 1)[:rows]
    slots = torch.arange(1, rows + 1, dtype=torch.int32)
    out = vllm_kernels().causal_conv1d_update_cpu_vec(x.contiguous().clone(), windows, weight, bias, "silu", slots, None, 0)
    return out, inputs[rows:].t()


exact_rollout = Stateful(sequence=sequence_by_windows, decode=None)


def _formula(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One sequence from its start, in the dtype of x."""
    width = weight.shape[1]
    inputs = F.pad(x, (0, 0, width - 1, 0))
    total = sum(inputs[j:j + x.shape[0]] * weight[:, j] for j in range(width))
    return F.silu(total if bias is None else total + bias)


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, spans):
        ctx.save_for_backward(x, weight, bias)
        ctx.spans = spans
        out = torch.zeros_like(x)
        for a, b in spans:
            out[a:b] = sequence_by_windows(x.detach()[a:b], weight.detach(), None if bias is None else bias.detach(), None)[0]
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        grad_x = torch.zeros_like(x)
        totals = [torch.zeros_like(t, dtype=torch.float32) for t in (weight, bias) if t is not None]
        for a, b in ctx.spans:
            with torch.enable_grad():
                leaves = [t.detach().float().requires_grad_() for t in (x[a:b], weight, bias) if t is not None]
                out = _formula(leaves[0], leaves[1], leaves[2] if len(leaves) > 2 else None)
            parts = torch.autograd.grad(out, leaves, grad[a:b].float())
            grad_x[a:b] = parts[0].to(x.dtype)
            for total, part in zip(totals, parts[1:], strict=True):
                total += part
        grads = [t.to(s.dtype) for t, s in zip(totals, (weight, bias), strict=False)]
        return grad_x, grads[0], grads[1] if bias is not None else None, None


def exact_training(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """x [T, C], weight [C, W], bias [C] -> [T, C]; padding rows are zero. Differentiable."""
    return _Windows.apply(x.contiguous(), weight, bias, layout.spans())


def stock_training(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """transformers: conv1d over the padded batch in the weight's dtype, rounded, then SiLU."""
    batch, width = layout.pad(x).transpose(1, 2), weight.shape[1]
    out = F.conv1d(batch.to(weight.dtype), weight.unsqueeze(1), bias, padding=width - 1, groups=batch.shape[1])[..., :batch.shape[2]]
    return layout.flatten(F.silu(out).to(x.dtype).transpose(1, 2))


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    parts, done = [], 0
    for a, b in layout.spans():
        parts += [x.new_zeros(a - done, x.shape[1]), _formula(x[a:b], weight, bias)]
        done = b
    return torch.cat([*parts, x.new_zeros(layout.rows - done, x.shape[1])])


def _stock_sequence(x, weight, bias, state):
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn

    states = x.new_zeros(2, x.shape[1], weight.shape[1] - 1)
    if state is not None:
        states[1] = state
    out = causal_conv1d_fn(x.t(), weight, bias, states, torch.tensor([0, x.shape[0]]), cache_indices=torch.tensor([1]),
                           has_initial_state=torch.tensor([state is not None]), activation="silu")
    return out.t(), states[1]


def _stock_decode(x, states, slots, weight, bias):
    return vllm_kernels().causal_conv1d_update_cpu_vec(x.contiguous().clone(), states, weight, bias, "silu", slots, None, 0)


stock_rollout = Stateful(sequence=_stock_sequence, decode=_stock_decode)

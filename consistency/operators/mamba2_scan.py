"""Mamba2 state-space scan (Dao and Gu 2024, arXiv 2405.21060).

    h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t,   y_t = C_t h_t + D x_t,   dt_t = softplus(raw dt_t + dt_bias)

Exact contract: every token is computed by vLLM's recurrent decode kernel from an fp32 state, in every phase; no chunk exists, so none can be
seen in the bits. The chunked form (transformers, GPU prefill) factors the sums differently and cannot agree with it.
transformers also clamps dt from below, which the rollout does not (`stock_training`).
Backward: the chunked form recomputed in fp32, chunk by chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from consistency.layout import Layout
from consistency.operators.kernels_library import vllm_kernels
from consistency.operators.stateful import Stateful

Scanned = tuple[torch.Tensor, torch.Tensor]


def sequence_recurrent(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor,
                       dt_bias: torch.Tensor, state: torch.Tensor | None) -> Scanned:
    """A span of one sequence.

    x [T, H, P], dt [T, H] before softplus, A [H] fp32 negative, B, C [T, G, N], D, dt_bias [H], state [H, P, N] fp32
    -> (y [T, H, P] in the dtype of x, fp32 state after the last token).
    """
    rows, heads, dim = x.shape
    size = B.shape[-1]
    states = torch.zeros(2, heads, dim, size)  # slot 0 is vLLM's null block
    if state is not None:
        assert state.dtype == torch.float32, "the recurrent state must be fp32; set mamba_ssm_cache_dtype to float32"
        states[1] = state
    slots = torch.ones(1, rows, dtype=torch.int32)
    y = torch.empty(rows, heads, dim, dtype=x.dtype)
    # The multi-token form of the decode kernel: the same loop body, one token after the other.
    vllm_kernels().selective_state_update_cpu(
        states, x.contiguous(), dt[:, :, None].expand(-1, -1, dim), A.float()[:, None, None].expand(-1, dim, size), B.contiguous(),
        C.contiguous(), D[:, None].expand(-1, dim), None, dt_bias[:, None].expand(-1, dim), True, slots, slots, 0, y,
        torch.ones(1, dtype=torch.int32), torch.tensor([0, rows], dtype=torch.int32))
    return y, states[1]


exact_rollout = Stateful(sequence=sequence_recurrent, decode=None)


def chunked(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor,
            dt_bias: torch.Tensor, *, chunk: int = 64) -> torch.Tensor:
    """The chunked (SSD) form of one sequence from its start, in the dtype of x. Shapes as in `sequence_recurrent`; differentiable."""
    heads = x.shape[1]
    B, C = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (B, C))
    dt = F.softplus(dt + dt_bias)
    state = x.new_zeros(heads, x.shape[2], B.shape[-1])
    out = []
    for i in range(0, x.shape[0], chunk):
        xs, dts, Bs, Cs = (t[i:i + chunk] for t in (x, dt, B, C))
        decay = (dts * A).cumsum(0)
        weighted = xs * dts[..., None]
        gaps = decay[:, None] - decay[None]
        lower = torch.ones(len(xs), len(xs), dtype=torch.bool, device=x.device).tril()
        mix = torch.einsum("thn,shn->tsh", Cs, Bs) * gaps.masked_fill(~lower[..., None], -torch.inf).exp()
        y = torch.einsum("tsh,shp->thp", mix, weighted) + torch.einsum("thn,hpn->thp", Cs, state) * decay.exp()[..., None]
        out.append(y + D[:, None] * xs)
        carry = (decay[-1] - decay).exp()
        state = state * decay[-1].exp()[:, None, None] + torch.einsum("shp,shn,sh->hpn", weighted, Bs, carry)
    return torch.cat(out)


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, D, dt_bias, spans):
        ctx.save_for_backward(x, dt, A, B, C, D, dt_bias)
        ctx.spans = spans
        y = torch.zeros_like(x)
        fixed = A.detach(), D.detach(), dt_bias.detach()
        for a, b in spans:
            y[a:b] = sequence_recurrent(x.detach()[a:b], dt.detach()[a:b], fixed[0], B.detach()[a:b], C.detach()[a:b],
                                        fixed[1], fixed[2], None)[0]
        return y

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        per_row = (True, True, False, True, True, False, False)
        grads = [torch.zeros_like(t, dtype=torch.float32) for t in saved]
        for a, b in ctx.spans:
            with torch.enable_grad():
                leaves = [(t[a:b] if rows else t).detach().float().requires_grad_() for t, rows in zip(saved, per_row, strict=True)]
                y = chunked(*leaves)
            for total, part, rows in zip(grads, torch.autograd.grad(y, leaves, grad[a:b].float()), per_row, strict=True):
                (total[a:b] if rows else total).add_(part)
        return *(g.to(t.dtype) for g, t in zip(grads, saved, strict=True)), None


def exact_training(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor,
                   dt_bias: torch.Tensor, layout: Layout, **_) -> torch.Tensor:
    """Rows of a batch, shapes as in `sequence_recurrent`; padding rows are zero. Differentiable in every tensor."""
    return _Recurrent.apply(x.contiguous(), dt, A, B, C, D, dt_bias, layout.spans())


def stock_training(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor,
                   dt_bias: torch.Tensor, layout: Layout, *, chunk: int, dt_minimum: float = 0.0) -> torch.Tensor:
    """transformers' chunked scan on the padded batch; the result is fp32."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    y = mamba2_chunk_scan(layout.pad(x), layout.pad(dt), A, layout.pad(B), layout.pad(C), chunk_size=chunk, D=D, dt_bias=dt_bias,
                          dt_softplus=True, dt_limit=(dt_minimum, float("inf")))
    return layout.flatten(y)


def reference(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor,
              dt_bias: torch.Tensor, layout: Layout, **_) -> torch.Tensor:
    """The chunked form in the dtype of x."""
    parts, done = [], 0
    for a, b in layout.spans():
        parts += [x.new_zeros(a - done, *x.shape[1:]), chunked(x[a:b], dt[a:b], A.to(x.dtype), B[a:b], C[a:b], D, dt_bias)]
        done = b
    return torch.cat([*parts, x.new_zeros(layout.rows - done, *x.shape[1:])])


def _stock_sequence(x, dt, A, B, C, D, dt_bias, state):
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import _mamba_chunk_scan_combined_fwd_cpu

    y = torch.empty_like(x)
    states = _mamba_chunk_scan_combined_fwd_cpu(
        x, dt, A, B, C, 64, y, D=D, dt_bias=dt_bias, dt_softplus=True, initial_states=None if state is None else state[None],
        cu_seqlens=torch.tensor([0, x.shape[0]]), state_dtype=torch.float32)
    return y, states[0]


def _stock_decode(states, slots, x, dt, A, B, C, D, dt_bias):
    dim, size = x.shape[-1], B.shape[-1]
    y = torch.empty_like(x)
    vllm_kernels().selective_state_update_cpu(
        states, x, dt[:, :, None].expand(-1, -1, dim), A[:, None, None].expand(-1, dim, size), B, C, D[:, None].expand(-1, dim), None,
        dt_bias[:, None].expand(-1, dim), True, slots, slots, 0, y, None, None)
    return y


stock_rollout = Stateful(sequence=_stock_sequence, decode=_stock_decode)

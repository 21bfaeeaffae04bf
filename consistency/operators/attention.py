"""Causal grouped-query attention.

Exact contract: vLLM's paged CPU kernel with the key-value split off, so that the order of keys in a row's softmax depends on its position
alone; training calls the same kernel on a scratch cache. Backward: softmax attention recomputed in fp32 per sequence, in a fixed order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from consistency.layout import Layout
from consistency.operators.kernels_library import vllm_kernels

BLOCK = 128
"""tokens per page; vLLM's CPU default, and the kernel's key tile never crosses a page"""

exact_rollout = "single_split"
"""On the rollout side the binding is a property of the attention metadata, see engines/vllm_cpu.py."""
stock_rollout = None


def _instruction_set(head_dim: int) -> str:
    """As vllm.v1.attention.backends.cpu_attn picks it for 32-token-aligned pages on x86."""
    if head_dim % 32:
        return "vec16"
    return "amx" if torch.cpu._is_amx_tile_supported() else "vec"


def paged_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: list[tuple[int, int]], scale: float,
                  *, split: bool = False) -> torch.Tensor:
    """q [T, heads, D], k, v [T, kv_heads, D], spans of whole sequences -> [T, heads, D]; rows outside every span are zero."""
    kernels = vllm_kernels()
    heads, dim, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    isa = _instruction_set(dim)
    pages = [-(-(b - a) // BLOCK) for a, b in spans]
    cache = torch.zeros(sum(pages) + 1, kv_heads, BLOCK * 2, dim, dtype=q.dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    table = torch.zeros(len(spans), max(pages), dtype=torch.int32)
    slots, first = [], 1
    for i, ((a, b), count) in enumerate(zip(spans, pages, strict=True)):
        table[i, :count] = torch.arange(first, first + count, dtype=torch.int32)
        slots.append(torch.arange(b - a) + first * BLOCK)
        first += count
    rows = torch.cat([torch.arange(a, b) for a, b in spans])
    kernels.cpu_attn_reshape_and_cache(k[rows], v[rows], key_cache, value_cache, torch.cat(slots), isa, 1.0, 1.0, "auto")
    lengths = torch.tensor([b - a for a, b in spans], dtype=torch.int32)
    starts = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    plan = kernels.get_scheduler_metadata(len(spans), heads, kv_heads, dim, lengths, q.dtype, starts, True, -1, isa, split, None, "auto")
    valid = torch.empty(len(rows), heads, dim, dtype=q.dtype)
    kernels.cpu_attention_with_kv_cache(q[rows], key_cache, value_cache, valid, starts, lengths, scale, True, None, -1, table, 0.0,
                                        plan, None, None, 1.0, 1.0, "auto")
    out = torch.zeros_like(q)
    out[rows] = valid
    return out


def _sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One sequence, plain softmax attention in the dtype of q."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    future = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


class _Paged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, spans, scale):
        ctx.save_for_backward(q, k, v)
        ctx.spans, ctx.scale = spans, scale
        return paged_forward(q.detach(), k.detach(), v.detach(), spans, scale)

    @staticmethod
    def backward(ctx, grad):
        inputs = ctx.saved_tensors
        grads = [torch.zeros_like(t) for t in inputs]
        for a, b in ctx.spans:
            with torch.enable_grad():
                leaves = [t[a:b].detach().float().requires_grad_() for t in inputs]
                out = _sequence(*leaves, ctx.scale)
            for total, part in zip(grads, torch.autograd.grad(out, leaves, grad[a:b].float()), strict=True):
                total[a:b] = part.to(total.dtype)
        return *grads, None, None


def exact_training(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, **_) -> torch.Tensor:
    """q [T, heads, D], k, v [T, kv_heads, D] -> [T, heads, D]. Differentiable."""
    return _Paged.apply(q.contiguous(), k.contiguous(), v.contiguous(), layout.spans(), scale)


def stock_training(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, *,
                   mask: torch.Tensor | None = None, module: torch.nn.Module | None = None) -> torch.Tensor:
    """transformers' scaled_dot_product_attention interface on the padded batch, with the mask transformers built."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch = [layout.pad(t).transpose(1, 2) for t in (q, k, v)]
    if module is None:
        module = torch.nn.Module()
        module.num_key_value_groups, module.is_causal = q.shape[1] // k.shape[1], True
    out, _ = sdpa_attention_forward(module, *batch, mask, dropout=0.0, scaling=scale)
    return layout.flatten(out)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, **_) -> torch.Tensor:
    """Plain softmax attention per sequence in the dtype of q; padding rows are zero."""
    parts, done = [], 0
    for a, b in layout.spans():
        parts += [q.new_zeros(a - done, *q.shape[1:]), _sequence(q[a:b], k[a:b], v[a:b], scale)]
        done = b
    return torch.cat([*parts, q.new_zeros(layout.rows - done, *q.shape[1:])])

"""Dense projection y = x W^T + b.

Exact contract: row i of y depends on row i of x alone. In bf16 the CPU GEMM already has that property (checked by the tests for every M that
crosses a blocking border); in fp32 it does not below 16 rows, so fp32 rows are multiplied in tiles of 32 with zero padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

TILE = 32


def exact_training(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in the dtype of x. Differentiable."""
    if x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    rows = x.shape[0]
    tiles = F.pad(x, (0, 0, 0, -rows % TILE)).split(TILE)
    return torch.cat([F.linear(tile, weight, bias) for tile in tiles])[:rows]


exact_rollout = exact_training


def stock_rollout(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The GEMM that vLLM's CPU dispatch picks for this weight."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return layer.cpu_linear(x, layer.weight, bias)


def stock_training(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch.nn.Linear."""
    return F.linear(x, weight, bias)


reference = stock_training

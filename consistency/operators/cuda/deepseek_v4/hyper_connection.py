"""Manifold-constrained hyper-connections: mixing weights by a GEMM over all streams, Sinkhorn, weighted sums, and the RMSNorm behind them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from consistency.models.deepseek_v4 import FLASH
from consistency.operators.cuda.case import Case, Function, Inputs, columns, normal
from consistency.operators.cuda.deepseek_v4.shapes import EPS, FAMILY, HIDDEN, rms

STREAMS, ITERATIONS, HC_EPS = FLASH["hc_mult"], FLASH["hc_sinkhorn_iters"], FLASH["hc_eps"]
MIXES = STREAMS * (2 + STREAMS)
POST_SCALE = 2.0
COUNTS = (1, 2, 8, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129, 192, 193, 256, 257, 512, 513, 1024, 4224, 4225)
"""The first layer's split of K changes at 513, the others' at 129, 193, 257, ..., both are 1 from 4225 on; below 33 one kernel does post and pre."""
SPLITS = 16
"""what both splits of K are pinned to: the whole of the first layer's choice, and a count that keeps a decode step's GEMM wide"""
CONSTANTS = (EPS, HC_EPS, HC_EPS, POST_SCALE, ITERATIONS)
"""eps of the norm over the streams, of the pre weights, of Sinkhorn; factor of the post weights; Sinkhorn iterations"""


def mixing(x: torch.Tensor, fn: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp64: x [M, streams * hidden] -> weights pre [M, s], post [M, s], comb [M, s, s]."""
    s, x = STREAMS, x.double()
    mixes = (x @ fn.double().t()) * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    scale, base = scale.double(), base.double()
    pre = torch.sigmoid(mixes[:, :s] * scale[0] + base[:s]) + HC_EPS
    post = torch.sigmoid(mixes[:, s : 2 * s] * scale[1] + base[s : 2 * s]) * POST_SCALE
    comb = torch.softmax((mixes[:, 2 * s :] * scale[2] + base[2 * s :]).view(-1, s, s), -1) + HC_EPS
    comb = comb / (comb.sum(-2, keepdim=True) + HC_EPS)
    for _ in range(ITERATIONS - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + HC_EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + HC_EPS)
    return pre, post, comb


def pre_reference(x, fn, scale, base, norm, _):
    """x [M, hidden] is every stream: what the first layer sees."""
    streams = x[:, None].expand(-1, STREAMS, -1)
    pre, post, comb = mixing(streams.flatten(1), fn, scale, base)
    return _outputs(post, comb, rms((pre[..., None] * streams.double()).sum(1), norm))


def post_pre_reference(x, residual, post, comb, fn, scale, base, norm):
    streams = torch.einsum("mij,mih->mjh", comb.double(), residual.double()) + post.double() * x.double()[:, None]
    rounded = streams.to(torch.bfloat16)
    pre, post, comb = mixing(rounded.flatten(1), fn, scale, base)
    return torch.cat((rounded.double().flatten(1), _outputs(post, comb, rms((pre[..., None] * rounded.double()).sum(1), norm))), 1)


def head_reference(residual, fn, scale, base):
    x = residual.double().flatten(1)
    mixes = (x @ fn.double().t()) * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    pre = torch.sigmoid(mixes * scale.double() + base.double()) + HC_EPS
    return (pre[..., None] * residual.double()).sum(1)


def _outputs(post: torch.Tensor, comb: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.flatten(1).double() for t in (post, comb, x)], 1)


def _pre(x, fn, scale, base, norm, summed):
    from vllm.model_executor.kernels.mhc.tilelang import mhc_pre_broadcast_tilelang

    return mhc_pre_broadcast_tilelang(x, fn, scale, base, *CONSTANTS, norm_weight=norm, norm_eps=EPS, fn_broadcast=summed)


def stock_pre(*arguments):
    """bf16 x [M, 4096] -> fp32 [M, 4 + 16 + 4096]: post weights, combination, normalised input of the first block."""
    return columns(*_pre(*arguments)[1:])


def _post_pre(x, residual, post, comb, fn, scale, base, norm):
    from vllm.model_executor.kernels.mhc.tilelang import mhc_fused_post_pre_tilelang

    return mhc_fused_post_pre_tilelang(
        x, residual, post, comb, fn, scale, base, *CONSTANTS, n_splits=1, tile_n=1, norm_weight=norm, norm_eps=EPS)


def stock_post_pre(*arguments):
    """A block's output and the streams before it -> fp32 [M, 4 * 4096 + 4 + 16 + 4096]: the streams behind it, and as for `stock_pre`."""
    return columns(*_post_pre(*arguments))


def stock_head(residual, fn, scale, base):
    from vllm.model_executor.kernels.mhc.tilelang import hc_head_fused_kernel_tilelang

    return hc_head_fused_kernel_tilelang(residual, fn, scale, base, EPS, HC_EPS)


@contextmanager
def launches(splits: int | None, fused: bool = False) -> Iterator[None]:
    """Inside: one split of K for every row count (vLLM's choice if None), and no kernel of its own for few rows unless `fused`."""
    from vllm.model_executor.kernels.mhc import tilelang_kernels

    chosen: dict[str, Callable] = {} if splits is None else {"compute_num_split": lambda block, k, grid: splits}
    if not fused:
        chosen["mhc_fused_post_pre_split_config"] = lambda tokens, hidden, streams: None
    before = {name: getattr(tilelang_kernels, name) for name in chosen}
    try:
        for name, function in chosen.items():
            setattr(tilelang_kernels, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(tilelang_kernels, name, function)


def pinned(function: Function, splits: int | None = SPLITS, fused: bool = False) -> Function:
    """`function` with the same launch for every row count."""
    def call(*arguments):
        with launches(splits, fused):
            return function(*arguments)

    return call


def _shared(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    width = STREAMS * HIDDEN
    return (normal((MIXES, width), generator, width**-0.5, torch.float32), 1 + normal((3,), generator, 0.2, torch.float32),
            normal((MIXES,), generator, 0.5, torch.float32), (1 + normal((HIDDEN,), generator, 0.2, torch.float32)).bfloat16())


def _pre_inputs(rows: int, generator: torch.Generator) -> Inputs:
    shared = _shared(generator)
    summed = shared[0].view(MIXES, STREAMS, HIDDEN).sum(1)
    return Inputs((normal((rows, HIDDEN), generator),), (*shared, summed))


def _post_pre_inputs(rows: int, generator: torch.Generator) -> Inputs:
    shared = _shared(generator)
    comb = torch.rand(rows, STREAMS, STREAMS, generator=generator, device=generator.device)
    return Inputs((normal((rows, HIDDEN), generator), normal((rows, STREAMS, HIDDEN), generator),
                   2 * torch.rand(rows, STREAMS, 1, generator=generator, device=generator.device), comb / comb.sum(1, keepdim=True)), shared)


def _head_inputs(rows: int, generator: torch.Generator) -> Inputs:
    width = STREAMS * HIDDEN
    shared = (normal((STREAMS, width), generator, width**-0.5, torch.float32), 1 + normal((1,), generator, 0.2, torch.float32),
              normal((STREAMS,), generator, 0.5, torch.float32))
    return Inputs((normal((rows, STREAMS, HIDDEN), generator),), shared)


CASES = [
    Case("hyper_connection", "first layer", FAMILY, _pre_inputs, pinned(stock_pre), pre_reference, stock_pre, _pre, pinned(_pre),
         counts=COUNTS, most_rows=COUNTS[-1], configurations={f"{n} splits of K": pinned(stock_pre, n) for n in (1, 4)}, prefill=(2048,)),
    Case("hyper_connection", "between blocks", FAMILY, _post_pre_inputs, pinned(stock_post_pre), post_pre_reference, stock_post_pre, _post_pre,
         pinned(_post_pre), counts=COUNTS, most_rows=COUNTS[-1], prefill=(2048,),
         configurations={"one kernel for few rows": pinned(stock_post_pre, SPLITS, True), "1 split of K": pinned(stock_post_pre, 1),
                         "64 splits of K": pinned(stock_post_pre, 64)}),
    Case("hyper_connection", "head", FAMILY, _head_inputs, None, head_reference, stock_head, prefill=(2048,)),
]

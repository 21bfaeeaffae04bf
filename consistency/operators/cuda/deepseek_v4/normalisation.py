"""RMSNorms, and the kernel that normalises and rotates queries, rotates the key-value entry and stores it as FP8."""

import torch

from consistency.operators.cuda.case import Case, Inputs, columns, normal
from consistency.operators.cuda.deepseek_v4.shapes import (
    DIM,
    EPS,
    FAMILY,
    HEADS,
    HIDDEN,
    LONG_SWEEP,
    PAGE,
    empty_pages,
    read_cache,
    records,
    rms,
    rotary_table,
    rotate,
)
from consistency.operators.cuda.rms_norm import rms_norm

Q_RANK = 1024


def stock_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    import vllm._custom_ops as ops

    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, EPS)
    return out


def stock_q_kv(both: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor) -> torch.Tensor:
    """bf16 [M, 1024 + 512] -> the two parts normalised, one kernel."""
    from vllm.models.common.ops.fused_qk_rmsnorm import fused_q_kv_rmsnorm

    q, kv = both.split((Q_RANK, DIM), -1)
    return torch.cat(fused_q_kv_rmsnorm(q, kv, q_weight, kv_weight, EPS), 1)


def _insert(q, kv, positions, table):
    import vllm._custom_ops  # noqa: F401  (registers the engine's kernels)

    pages, slots = empty_pages(-(-q.shape[0] // PAGE), PAGE, q.device), torch.arange(q.shape[0], device=q.device)
    out = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        q, kv, records(pages, PAGE).flatten(1), slots, positions, table, HEADS, EPS, PAGE)
    return out, pages


def stock_insert(q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """q bf16 [M, 64, 512], kv bf16 [M, 512] -> fp32 [M, 64 * 512 + 512]: the query, and the entry as the attention will read it."""
    out, pages = _insert(q, kv, positions, table)
    return columns(out, read_cache(pages, PAGE)[: q.shape[0]])


def insert_reference(q, kv, positions, table):
    """The entry without quantisation, so the error includes the FP8 cache."""
    at = table[positions]
    return torch.cat((rotate(rms(q), at).flatten(1), rotate(kv, at)), 1)


def _weight(width: int, generator: torch.Generator) -> torch.Tensor:
    return (1 + normal((width,), generator, 0.2, torch.float32)).bfloat16()


def _norm_inputs(rows: int, generator: torch.Generator) -> Inputs:
    weight = _weight(HIDDEN, generator)
    return Inputs((normal((rows, HIDDEN), generator),), (weight,))


def _q_kv_inputs(rows: int, generator: torch.Generator) -> Inputs:
    shared = _weight(Q_RANK, generator), _weight(DIM, generator)
    return Inputs((normal((rows, Q_RANK + DIM), generator),), shared)


def _insert_inputs(rows: int, generator: torch.Generator) -> Inputs:
    positions = torch.randint(0, 8192, (rows,), generator=generator, device=generator.device)
    return Inputs((normal((rows, HEADS, DIM), generator), normal((rows, DIM), generator), positions), (rotary_table(8192, generator.device),))


CASES = [
    Case("rms_norm", f"final {HIDDEN}", FAMILY, _norm_inputs, lambda x, w: rms_norm(x, w, EPS), rms, stock_norm, counts=LONG_SWEEP,
         most_rows=LONG_SWEEP[-1], prefill=(2048,)),
    Case("rms_norm", f"q and kv, {Q_RANK} and {DIM}", FAMILY, _q_kv_inputs, None,
         lambda x, a, b: torch.cat((rms(x[:, :Q_RANK], a), rms(x[:, Q_RANK:], b)), 1), stock_q_kv, counts=LONG_SWEEP, most_rows=LONG_SWEEP[-1],
         prefill=(2048,)),
    Case("rotary", "q norm, rotation, FP8 cache entry", FAMILY, _insert_inputs, None, insert_reference, stock_insert, _insert, prefill=(2048,)),
]

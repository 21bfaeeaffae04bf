"""Router: the gate's GEMM, top-6 of the biased square root of softplus, and the weights of experts that a table names by token."""

from functools import partial

import torch

from consistency.models.deepseek_v4 import FLASH
from consistency.operators.cuda.case import Case, Inputs, columns, normal
from consistency.operators.cuda.deepseek_v4.linear import linear_fp32
from consistency.operators.cuda.deepseek_v4.shapes import FAMILY, HIDDEN, LONG_SWEEP
from consistency.operators.cuda.linear import tune

EXPERTS, TOP, SCALE = FLASH["n_routed_experts"], FLASH["num_experts_per_tok"], FLASH["routed_scaling_factor"]
VOCABULARY = FLASH["vocab_size"]


def stock_gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """bf16 [M, 4096] -> fp32 logits [M, 256]: a CuTe DSL kernel up to 16 rows, cuBLAS above."""
    if x.shape[0] <= 16:
        from vllm.model_executor.kernels.linear.cute_dsl.ll_bf16 import is_available, ll_bf16_gemm

        if is_available():
            return ll_bf16_gemm(x, weight)
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _kernel_for_few(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from vllm.model_executor.kernels.linear.cute_dsl.ll_bf16 import ll_bf16_gemm

    return ll_bf16_gemm(x, weight)


def _cublas(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def stock_top(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 logits [M, 256] -> (weights [M, 6], experts [M, 6]) in the order in which the experts' outputs will be added."""
    from vllm.model_executor.layers.fused_moe.router.dsv4_topk import dsv4_topk

    weights, ids = dsv4_topk(logits, bias, torch.int32, SCALE)
    return weights, ids


def _kernel_for_hash(logits: torch.Tensor, bias: torch.Tensor | None, tokens=None, table=None) -> tuple[torch.Tensor, torch.Tensor]:
    import vllm._custom_ops as ops

    weights = torch.empty(logits.shape[0], TOP, dtype=torch.float32, device=logits.device)
    ids, unused = (torch.empty(weights.shape, dtype=torch.int32, device=logits.device) for _ in range(2))
    ops.topk_hash_softplus_sqrt(weights, ids, unused, logits, True, SCALE, bias, tokens, table)
    return weights, ids


def stock_hash(logits, tokens, table):
    """The experts that the table names for each token, with normalised weights."""
    return columns(*_kernel_for_hash(logits, None, tokens, table))


def _scores(logits: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.softplus(logits.double()).sqrt()


def _normalised(chosen: torch.Tensor) -> torch.Tensor:
    return chosen / chosen.sum(-1, keepdim=True) * SCALE


def top_reference(logits, bias):
    """Ties: the expert with the smaller number first, as a stable descending sort gives it."""
    scores = _scores(logits)
    ids = (scores + bias.double()).sort(dim=-1, descending=True, stable=True).indices[:, :TOP]
    return torch.cat((_normalised(scores.gather(1, ids)), ids.double()), 1)


def hash_reference(logits, tokens, table):
    ids = table[tokens.long()].long()
    return torch.cat((_normalised(_scores(logits).gather(1, ids)), ids.double()), 1)


def _gate_inputs(rows: int, generator: torch.Generator) -> Inputs:
    weight = normal((EXPERTS, HIDDEN), generator, HIDDEN**-0.5)
    return Inputs((normal((rows, HIDDEN), generator),), (weight,))


def _top_inputs(rows: int, generator: torch.Generator) -> Inputs:
    """Every other row has logits of 4 bits, so that many experts tie."""
    bias = normal((EXPERTS,), generator, 0.02, torch.float32)
    logits = normal((rows, EXPERTS), generator, 1.0, torch.float32)
    coarse = (logits * 4).round() / 4
    bias[: EXPERTS // 2] = 0
    return Inputs((torch.where((torch.arange(rows, device=logits.device) % 2 == 1)[:, None], coarse, logits),), (bias,))


def _hash_inputs(rows: int, generator: torch.Generator) -> Inputs:
    table = torch.rand(VOCABULARY, EXPERTS, generator=generator, device=generator.device).topk(TOP).indices.int()
    tokens = torch.randint(0, VOCABULARY, (rows,), generator=generator, device=generator.device).int()
    return Inputs((normal((rows, EXPERTS), generator, 1.0, torch.float32), tokens), (table,))


CASES = [
    Case("router", f"gate {HIDDEN}x{EXPERTS}", FAMILY, _gate_inputs, linear_fp32, lambda x, w: x.double() @ w.double().t(), stock_gate,
         prepare=partial(tune, fp32_out=True),
         counts=LONG_SWEEP, most_rows=LONG_SWEEP[-1], prefill=(2048,), configurations={"cuBLAS": _cublas, "kernel for few rows": _kernel_for_few}),
    Case("router", f"top {TOP} of {EXPERTS}, slots in order", FAMILY, _top_inputs, None, top_reference,
         lambda *a: columns(*stock_top(*a)), stock_top, counts=LONG_SWEEP, most_rows=LONG_SWEEP[-1], prefill=(2048,),
         configurations={"kernel of the hash layers": lambda *a: columns(*_kernel_for_hash(*a))}),
    Case("router", f"hash table, {TOP} of {EXPERTS}", FAMILY, _hash_inputs, None, hash_reference, stock_hash,
         lambda logits, tokens, table: _kernel_for_hash(logits, None, tokens, table),
         counts=LONG_SWEEP, most_rows=LONG_SWEEP[-1], prefill=(2048,)),
]

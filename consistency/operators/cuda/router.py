"""Router of a sigmoid mixture of experts: logits, selection with a correction bias, weights.

Contract: bf16 hidden states and gate, logits in fp32. K is cut at absolute multiples of 384; each segment is one fp32 accumulator over
ascending K, and the segments are added in order in fp32. Few rows: one program for each segment, summed by the selection
kernel. Many rows: one program walks the segments and adds in registers. Same bits, no idle multiprocessors.
Scores are sigmoid(logits); the top-k is taken on scores + bias, a tie goes to the smaller expert id; weights are the scores
without bias, divided by their sum (added in slot order, plus 1e-20) and multiplied by `scale`, all in fp32.
"""

import torch
import triton
import triton.language as tl

from consistency.operators.cuda.case import SWEEP, Case, Inputs, check_gradients, normal
from consistency.operators.cuda.checks import assert_rows, assert_vector
from consistency.operators.cuda.eager import eager

SEGMENT = 384
FEW_ROWS = 2048
"""Rows up to which K is spread over programs. Free to change: both routes give the same bits."""
FEW = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
SOME = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
MANY = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}


def router_reference(x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch in the dtype of `x`. A stable sort gives ties to the smaller expert id."""
    scores = torch.sigmoid(x @ gate.to(x.dtype).t())
    chosen = torch.sort(scores + bias.to(x.dtype), dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, chosen)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale, chosen


@triton.jit
def _segment_kernel(x_ptr, gate_ptr, out_ptr, rows, x_stride, K: tl.constexpr, EXPERTS: tl.constexpr, SEGMENT: tl.constexpr,
                    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    segment = tl.program_id(2)
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(SEGMENT // BLOCK_K):
        k = segment * SEGMENT + step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + m[:, None].to(tl.int64) * x_stride + k[None, :], mask=(m[:, None] < rows) & (k[None, :] < K), other=0.0)
        gate = tl.load(gate_ptr + n[None, :] * K + k[:, None], mask=(k[:, None] < K) & (n[None, :] < EXPERTS), other=0.0)
        accumulator = tl.dot(x, gate, accumulator)
    tl.store(out_ptr + (segment.to(tl.int64) * rows + m[:, None]) * EXPERTS + n[None, :], accumulator,
             mask=(m[:, None] < rows) & (n[None, :] < EXPERTS))


@triton.jit
def _logits_kernel(x_ptr, gate_ptr, out_ptr, rows, x_stride, K: tl.constexpr, EXPERTS: tl.constexpr, SEGMENT: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for segment in range(tl.cdiv(K, SEGMENT)):
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(SEGMENT // BLOCK_K):
            k = segment * SEGMENT + step * BLOCK_K + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + m[:, None].to(tl.int64) * x_stride + k[None, :], mask=(m[:, None] < rows) & (k[None, :] < K), other=0.0)
            gate = tl.load(gate_ptr + n[None, :] * K + k[:, None], mask=(k[:, None] < K) & (n[None, :] < EXPERTS), other=0.0)
            accumulator = tl.dot(x, gate, accumulator)
        total += accumulator
    tl.store(out_ptr + m[:, None].to(tl.int64) * EXPERTS + n[None, :], total, mask=(m[:, None] < rows) & (n[None, :] < EXPERTS))


@triton.jit
def _select_kernel(parts_ptr, bias_ptr, weights_ptr, ids_ptr, rows, scale, PARTS: tl.constexpr, EXPERTS: tl.constexpr,
                   TOP_K: tl.constexpr, SLOTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    logits = tl.zeros((EXPERTS,), dtype=tl.float32)
    for part in tl.static_range(PARTS):
        logits += tl.load(parts_ptr + (part * rows + row) * EXPERTS + experts)
    scores = tl.sigmoid(logits)
    choice = scores + tl.load(bias_ptr + experts).to(tl.float32)
    slots = tl.arange(0, SLOTS)
    weights = tl.zeros((SLOTS,), dtype=tl.float32)
    ids = tl.zeros((SLOTS,), dtype=tl.int32)
    total = 0.0
    for slot in tl.static_range(TOP_K):
        best = tl.max(choice, axis=0)
        # a row of NaN (padding of a captured batch) must still name an expert that exists
        expert = tl.minimum(tl.min(tl.where(choice == best, experts, EXPERTS), axis=0), EXPERTS - 1)
        score = tl.sum(tl.where(experts == expert, scores, 0.0), axis=0)
        total += score
        weights = tl.where(slots == slot, score, weights)
        ids = tl.where(slots == slot, expert, ids)
        choice = tl.where(experts == expert, float("-inf"), choice)
    tl.store(weights_ptr + row * TOP_K + slots, weights / (total + 1e-20) * scale, mask=slots < TOP_K)
    tl.store(ids_ptr + row * TOP_K + slots, ids, mask=slots < TOP_K)


def _parts(x: torch.Tensor, gate: torch.Tensor, few: bool) -> torch.Tensor:
    """fp32 logits in parts [parts, rows, experts] that are to be added in order."""
    (rows, k), experts = x.shape, gate.shape[0]
    segments = triton.cdiv(k, SEGMENT)
    out = torch.empty(segments if few else 1, rows, experts, dtype=torch.float32, device=x.device)
    tiles = dict((FEW if rows <= 64 else SOME) if few else MANY)
    warps, stages = tiles.pop("num_warps"), tiles.pop("num_stages")
    grid = (triton.cdiv(rows, tiles["BLOCK_M"]), triton.cdiv(experts, tiles["BLOCK_N"]))
    kernel, grid = (_segment_kernel, (*grid, segments)) if few else (_logits_kernel, grid)
    kernel[grid](x, gate, out, rows, x.stride(0), k, experts, SEGMENT, **tiles, num_warps=warps, num_stages=stages)
    return out


@torch.library.custom_op("consistency_cuda::router", mutates_args=())
def router(x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights fp32 [rows, top_k] and expert ids int32 [rows, top_k] for `x` [rows, hidden], `gate` [experts, hidden], `bias` [experts]."""
    return _route(x, gate, bias, top_k, scale, x.shape[0] <= FEW_ROWS)


def _route(x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float, few: bool) -> tuple[torch.Tensor, torch.Tensor]:
    (rows, k), experts = x.shape, gate.shape[0]
    assert_rows(x, k, torch.bfloat16, torch.float16)
    assert_rows(gate, k, x.dtype)
    assert_vector(bias, experts, torch.float32)
    assert gate.is_contiguous() and triton.next_power_of_2(experts) == experts >= 64, f"{experts} experts"
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
    ids = torch.empty(rows, top_k, dtype=torch.int32, device=x.device)
    if rows:
        parts = _parts(x, gate, few)
        _select_kernel[(rows,)](
            parts, bias, weights, ids, rows, scale, parts.shape[0], experts, top_k, triton.next_power_of_2(top_k), num_warps=1)
    return weights, ids


@router.register_fake
def _(x, gate, bias, top_k, scale):
    return x.new_empty(x.shape[0], top_k, dtype=torch.float32), x.new_empty(x.shape[0], top_k, dtype=torch.int32)


def _setup(ctx, inputs, output):
    x, gate, _, _, ctx.scale = inputs
    ctx.save_for_backward(x, gate, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_weights, _):
    x, gate, ids = ctx.saved_tensors
    scores = torch.sigmoid(_parts(x, gate, False)[0])
    chosen = scores.gather(1, ids.long())
    total = chosen.sum(1, keepdim=True) + 1e-20
    grad_chosen = ctx.scale * (grad_weights / total - (grad_weights * chosen).sum(1, keepdim=True) / total.square())
    # each row names an expert once, so this scatter has one writer for each element
    grad_logits = torch.zeros_like(scores).scatter(1, ids.long(), grad_chosen * chosen * (1 - chosen)).to(x.dtype)
    return grad_logits @ gate, grad_logits.t() @ x, None, None, None


router.register_autograd(_backward, setup_context=_setup)


def dense(weights: torch.Tensor, ids: torch.Tensor, experts: int) -> torch.Tensor:
    """[rows, experts] with the weight of every chosen expert and zero elsewhere: independent of slot order."""
    return torch.zeros(weights.shape[0], experts, dtype=weights.dtype, device=weights.device).scatter(1, ids.long(), weights)


def _case(hidden: int, experts: int, top_k: int, scale: float) -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        return Inputs((normal((rows, hidden), generator),),
                      (normal((experts, hidden), generator, 2 * hidden**-0.5), normal((experts,), generator, 0.05, torch.float32)))

    def exact(x, gate, bias):
        return dense(*router(x, gate, bias, top_k, scale), experts)

    def stock(x, gate, bias):
        return dense(*_stock_route(x, gate, bias), experts)

    def _stock_route(x, gate, bias):
        import vllm._custom_ops as ops

        logits = _stock_logits(x, gate)
        return ops.grouped_topk(logits, 1, 1, top_k, True, scale, bias, 1)

    def _stock_logits(x, gate):
        if x.shape[0] <= 16:
            try:
                from vllm.model_executor.kernels.linear.cute_dsl.ll_bf16 import is_available, ll_bf16_gemm

                if is_available():
                    return ll_bf16_gemm(x, gate)
            except (ImportError, AttributeError, TypeError):
                pass
        return torch.mm(x, gate.t(), out_dtype=torch.float32)

    def gradients():
        x, gate, bias = inputs(300, torch.Generator("cuda").manual_seed(5)).take(300)
        ids = router(x, gate, bias, top_k, scale)[1].long()

        def formula(x, gate):
            chosen = torch.sigmoid(x @ gate.t()).gather(1, ids)
            return chosen / (chosen.sum(1, keepdim=True) + 1e-20) * scale

        return check_gradients(lambda x, gate: router(x, gate, bias, top_k, scale)[0], formula, {"x": x, "gate": gate})

    return Case("router", f"{hidden}x{experts} top {top_k}", ("nemotron-3.5",), inputs, exact,
                lambda x, gate, bias: dense(*router_reference(x.double(), gate, bias, top_k, scale), experts), stock,
                lambda *a: _stock_route(*a)[0], lambda x, gate, bias: router(x, gate, bias, top_k, scale)[0],
                configurations={"one program walks K": lambda *a: dense(*_route(*a, top_k, scale, False), experts),
                                "one program for each segment": lambda *a: dense(*_route(*a, top_k, scale, True), experts)},
                gradients=gradients, counts=(*SWEEP, 2048, 4096), most_rows=4096)


CASES = [_case(2688, 128, 6, 2.5)]


# ---- the contract's names ----------------------------------------------------------------------------------------------

stock_rollout = None
_eager = eager(router, _setup, _backward)


def exact_training(x: torch.Tensor, gate_weight: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, hidden], gate [experts, hidden], bias fp32 [experts] -> (weights fp32 [T, k] with the scale in them, ids int32 [T, k])."""
    return _eager(x, gate_weight, bias, top_k, scale)


exact_rollout = exact_training

"""Experts of a mixture: two grouped products with an activation between them, and the combination of the slots of a token.

Contract: bf16 operands; in both products one fp32 accumulator chained over ascending K, without split-K, so tiles may follow the number of
rows; h = bf16(activation(bf16(x W1))), activation in fp32 rounded once; o = bf16((h W2) * weight), the weight applied in fp32 before the
rounding; y = bf16(o[slot 0] + o[slot 1] + ...), added in slot order in fp32. The engine's fused Triton kernel gives the same o for any of its
tuned configurations; only its sum over slots is replaced.
"""

import torch
import triton
import triton.language as tl

from consistency.operators.cuda.case import Case, Inputs, check_gradients, equal_elements, normal
from consistency.operators.cuda.eager import eager
from consistency.operators.cuda.relu_squared import relu_squared
from consistency.operators.cuda.silu_and_mul import silu_and_mul

COMBINE_BLOCK = 1024


def moe_experts_reference(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gated: bool) -> torch.Tensor:
    """Plain torch in the dtype of `x`, expert by expert."""
    out = torch.zeros_like(x)
    for expert in range(w1.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        hidden = x[token] @ w1[expert].to(x.dtype).t()
        if gated:
            gate, up = hidden.chunk(2, -1)
            hidden = torch.nn.functional.silu(gate) * up
        else:
            hidden = torch.relu(hidden).square()
        out = out.index_add(0, token, hidden @ w2[expert].to(x.dtype).t() * weights.to(x.dtype)[token, slot, None])
    return out


@triton.jit
def _grouped_kernel(a_ptr, b_ptr, out_ptr, weights_ptr, order_ptr, offsets_ptr, blocks_ptr, n, k, a_stride, b_expert, b_n, b_k, out_stride,
                    experts, FAN_IN: tl.constexpr, WEIGHTED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """out[slot] = a[slot // FAN_IN] b[expert of slot]^T, slots taken in the order of their experts."""
    block = tl.program_id(1)
    lanes = tl.arange(0, EXPERTS)
    ends = tl.load(blocks_ptr + lanes, mask=lanes < experts, other=2147483647)
    expert = tl.sum((ends <= block).to(tl.int32), axis=0)
    if expert >= experts:
        return
    first_block = tl.load(blocks_ptr + expert - 1, mask=expert > 0, other=0)
    begin, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    index = begin + (block - first_block) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = index < end
    slot = tl.load(order_ptr + index, mask=live, other=0).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a = a_ptr + (slot // FAN_IN)[:, None] * a_stride + ks[None, :]
    b = b_ptr + expert.to(tl.int64) * b_expert + columns[None, :].to(tl.int64) * b_n + ks[:, None].to(tl.int64) * b_k
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K:
            left = tl.load(a, mask=live[:, None], other=0.0)
            right = tl.load(b, mask=columns[None, :] < n, other=0.0)
        else:
            left = tl.load(a, mask=live[:, None] & (start + ks < k)[None, :], other=0.0)
            right = tl.load(b, mask=(columns[None, :] < n) & (start + ks < k)[:, None], other=0.0)
        accumulator = tl.dot(left, right, accumulator)
        a += BLOCK_K
        b += BLOCK_K * b_k
    if WEIGHTED:
        accumulator *= tl.load(weights_ptr + slot, mask=live, other=0.0)[:, None]
    tl.store(out_ptr + slot[:, None] * out_stride + columns[None, :], accumulator.to(out_ptr.dtype.element_ty),
             mask=live[:, None] & (columns[None, :] < n))


@triton.jit
def _weight_grad_kernel(a_ptr, b_ptr, out_ptr, order_ptr, offsets_ptr, n, k, a_stride, b_stride, FAN_IN: tl.constexpr,
                        BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr):
    """out[expert] = sum over its slots, in order, of a[slot]^T b[slot // FAN_IN]."""
    expert = tl.program_id(2)
    columns_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    begin, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    accumulator = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in range(begin, end, BLOCK_M):
        index = start + tl.arange(0, BLOCK_M)
        live = index < end
        slot = tl.load(order_ptr + index, mask=live, other=0).to(tl.int64)
        a = tl.load(a_ptr + slot[None, :] * a_stride + columns_n[:, None], mask=live[None, :] & (columns_n < n)[:, None], other=0.0)
        b = tl.load(b_ptr + (slot // FAN_IN)[:, None] * b_stride + columns_k[None, :], mask=live[:, None] & (columns_k < k)[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator)
    out = out_ptr + expert.to(tl.int64) * n * k + columns_n[:, None].to(tl.int64) * k + columns_k[None, :]
    tl.store(out, accumulator.to(out_ptr.dtype.element_ty), mask=(columns_n < n)[:, None] & (columns_k < k)[None, :])


@triton.jit
def _combine_kernel(slots_ptr, out_ptr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        total += tl.load(slots_ptr + (row * TOP_K + slot) * WIDTH + columns, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, total.to(out_ptr.dtype.element_ty), mask=live)


def combine_into(slots: torch.Tensor, out: torch.Tensor) -> None:
    """out [rows, width] = sum of `slots` [rows, top_k, width] over the slots, in slot order and fp32, rounded once."""
    rows, top_k, width = slots.shape
    assert slots.is_cuda and slots.is_contiguous() and slots.dtype in (torch.bfloat16, torch.float16)
    assert out.shape == (rows, width) and out.is_contiguous() and out.dtype == slots.dtype
    if rows:
        _combine_kernel[(rows, triton.cdiv(width, COMBINE_BLOCK))](slots, out, width, top_k, COMBINE_BLOCK)


@torch.library.custom_op("consistency_cuda::moe_combine", mutates_args=())
def moe_combine(slots: torch.Tensor) -> torch.Tensor:
    """`combine_into` a new tensor."""
    out = slots.new_empty(slots.shape[0], slots.shape[2])
    combine_into(slots, out)
    return out


@moe_combine.register_fake
def _(slots):
    return slots.new_empty(slots.shape[0], slots.shape[2])


TILES = (
    (4, {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}),
    (24, {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}),
    (64, {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}),
    (192, {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}),
    (1 << 30, {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4}),
)
"""Launch settings by the mean number of slots of an expert, up to and including the first number. Free to change: tiles do not change bits."""


def tiles_for(slots: int, experts: int) -> dict[str, int]:
    """Launch settings for `slots` slots spread over `experts` experts."""
    return next(tiles for most, tiles in TILES if slots <= most * experts)


def _plan(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots sorted by expert (stable, so a token keeps its place) and the offset of each expert. No synchronisation."""
    flat = ids.flatten()
    sorted_ids, order = torch.sort(flat, stable=True)
    bounds = torch.arange(experts + 1, device=ids.device, dtype=flat.dtype)
    return order.int(), torch.searchsorted(sorted_ids, bounds, out_int32=True)


def _grouped(a: torch.Tensor, b: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, fan_in: int, weights: torch.Tensor | None,
             transposed: bool = False, tiles: dict[str, int] | None = None) -> torch.Tensor:
    """[slots, N] for `a` [slots / fan_in, K] and `b` [experts, N, K], or [experts, K, N] when `transposed`."""
    experts, n, k = (b.shape[0], b.shape[2], b.shape[1]) if transposed else b.shape
    strides = (b.stride(0), b.stride(2), b.stride(1)) if transposed else b.stride()
    slots, tiles = order.shape[0], dict(tiles or tiles_for(order.shape[0], experts))
    warps, stages = tiles.pop("num_warps"), tiles.pop("num_stages")
    out = torch.empty(slots, n, dtype=a.dtype, device=a.device)
    blocks = torch.cumsum((offsets.diff() + tiles["BLOCK_M"] - 1) // tiles["BLOCK_M"], 0, dtype=torch.int32)
    most = min(slots, triton.cdiv(slots, tiles["BLOCK_M"]) + experts)
    _grouped_kernel[(triton.cdiv(n, tiles["BLOCK_N"]), most)](
        a, b, out, weights, order, offsets, blocks, n, k, a.stride(0), *strides, n, experts, fan_in, weights is not None,
        triton.next_power_of_2(experts), **tiles, EVEN_K=k % tiles["BLOCK_K"] == 0, num_warps=warps, num_stages=stages)
    return out


def _weight_grad(a: torch.Tensor, b: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor, fan_in: int) -> torch.Tensor:
    """[experts, N, K] from `a` [slots, N] and `b` [slots / fan_in, K]."""
    experts, n, k = offsets.shape[0] - 1, a.shape[1], b.shape[1]
    out = torch.empty(experts, n, k, dtype=a.dtype, device=a.device)
    _weight_grad_kernel[(triton.cdiv(n, 128), triton.cdiv(k, 128), experts)](
        a, b, out, order, offsets, n, k, a.stride(0), b.stride(0), fan_in, 128, 128, 32, num_warps=8, num_stages=3)
    return out


@torch.library.custom_op("consistency_cuda::moe_experts", mutates_args=())
def moe_experts_op(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gated: bool) -> list[torch.Tensor]:
    (rows, width), (experts, inner, _), top_k = x.shape, w1.shape, ids.shape[1]
    assert x.is_cuda and x.is_contiguous() and x.dtype == w1.dtype == w2.dtype == torch.bfloat16
    assert w1.shape == (experts, inner, width) and w2.shape == (experts, width, inner // 2 if gated else inner)
    assert w1.is_contiguous() and w2.is_contiguous()
    assert weights.shape == ids.shape == (rows, top_k) and weights.dtype == torch.float32 and weights.is_contiguous()
    order, offsets = _plan(ids, experts)
    before = _grouped(x, w1, order, offsets, top_k, None)
    hidden = silu_and_mul(before) if gated else relu_squared(before)
    slots = _grouped(hidden, w2, order, offsets, 1, weights)
    return [moe_combine(slots.view(rows, top_k, width)), order, offsets, before, hidden]


@moe_experts_op.register_fake
def _(x, w1, w2, weights, ids, gated):
    slots, inner = ids.numel(), w1.shape[1]
    return [torch.empty_like(x), ids.new_empty(slots, dtype=torch.int32), ids.new_empty(w1.shape[0] + 1, dtype=torch.int32),
            x.new_empty(slots, inner), x.new_empty(slots, inner // 2 if gated else inner)]


def _setup(ctx, inputs, output):
    x, w1, w2, weights, _, ctx.gated = inputs
    ctx.save_for_backward(x, w1, w2, weights, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grads):
    x, w1, w2, weights, order, offsets, before, hidden = ctx.saved_tensors
    grad, (rows, top_k) = grads[0].contiguous(), weights.shape
    # gradient of the unweighted expert output, slot by slot
    grad_slots = (grad[:, None] * weights[..., None]).to(x.dtype).flatten(0, 1)
    outputs = _grouped(hidden, w2, order, offsets, 1, None)
    grad_weights = (grad.float()[:, None] * outputs.view(rows, top_k, -1).float()).sum(-1)
    grad_w2 = _weight_grad(grad_slots, hidden, order, offsets, 1)
    grad_hidden = _grouped(grad_slots, w2, order, offsets, 1, None, transposed=True).float()
    if ctx.gated:
        gate, up = before.float().chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        grad_before = torch.cat((grad_hidden * up * (sigmoid + gate * sigmoid * (1 - sigmoid)), grad_hidden * gate * sigmoid), -1)
    else:
        grad_before = grad_hidden * 2 * torch.relu(before.float())
    grad_before = grad_before.to(x.dtype)
    grad_w1 = _weight_grad(grad_before, x, order, offsets, top_k)
    grad_x = moe_combine(_grouped(grad_before, w1, order, offsets, 1, None, transposed=True).view(rows, top_k, -1))
    return grad_x, grad_w1, grad_w2, grad_weights, None, None


moe_experts_op.register_autograd(_backward, setup_context=_setup)


def moe_experts(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gated: bool = False) -> torch.Tensor:
    """x [rows, hidden], w1 [experts, inner (or 2 * inner when `gated`), hidden], w2 [experts, hidden, inner], weights fp32 and ids [rows, top_k]."""
    return moe_experts_op(x, w1, w2, weights, ids, gated)[0]


def engine_moe_experts(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The engine's tuned kernels with this combination: what a rollout under contract runs."""
    from vllm.model_executor.layers.fused_moe import fused_moe

    before = fused_moe.ops.moe_sum
    fused_moe.ops.moe_sum = lambda slots, out, *_, **__: out.copy_(moe_combine(slots))
    try:
        return _engine(x, w1, w2, weights, ids)
    finally:
        fused_moe.ops.moe_sum = before


def _engine(x, w1, w2, weights, ids):
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return fused_moe.fused_experts(x, w1, w2, weights, ids, activation=MoEActivation.RELU2_NO_MUL)


def _cases(hidden: int, inner: int, experts: int, top_k: int) -> list[Case]:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        device = generator.device
        ids = torch.rand(rows, experts, generator=generator, device=device).topk(top_k, -1).indices.int()
        weights = torch.rand(rows, top_k, generator=generator, device=device)
        weights = 2.5 * weights / weights.sum(-1, keepdim=True)
        w1 = torch.stack([normal((inner, hidden), generator, hidden**-0.5) for _ in range(experts)])
        w2 = torch.stack([normal((hidden, inner), generator, inner**-0.5) for _ in range(experts)])
        return Inputs((normal((rows, hidden), generator), weights, ids), (w1, w2))

    def exact(x, weights, ids, w1, w2):
        return moe_experts(x, w1, w2, weights, ids)

    def rollout(x, weights, ids, w1, w2):
        return engine_moe_experts(x, w1, w2, weights, ids)

    def stock(x, weights, ids, w1, w2):
        return _engine(x, w1, w2, weights, ids)

    def reference(x, weights, ids, w1, w2):
        return moe_experts_reference(x.double(), w1, w2, weights, ids, False)

    def phases():
        x, weights, ids, w1, w2 = inputs(130, torch.Generator("cuda").manual_seed(6)).take(130)
        full, found = exact(x, weights, ids, w1, w2), {}
        try:
            for rows in (1, 16, 130):
                engine = engine_moe_experts(x[:rows], w1, w2, weights[:rows], ids[:rows])
                found[f"engine kernels, {rows} rows"] = equal_elements(engine, full[:rows])
        except ImportError:
            pass
        return found

    def gradients():
        generator = torch.Generator("cuda").manual_seed(5)
        x, w1, w2 = normal((100, 256), generator), normal((16, 128, 256), generator, 1 / 16), normal((16, 256, 128), generator, 1 / 11)
        ids = torch.rand(100, 16, generator=generator, device="cuda").topk(top_k, -1).indices.int()
        weights = torch.rand(100, top_k, generator=generator, device="cuda")
        return check_gradients(lambda *t: moe_experts(*t, ids), lambda *t: moe_experts_reference(*t, ids, False),
                               {"x": x, "w1": w1, "w2": w2, "weights": weights})

    def with_tiles(tiles: dict[str, int]):
        def call(x, weights, ids, w1, w2):
            order, offsets = _plan(ids, experts)
            before = relu_squared(_grouped(x, w1, order, offsets, top_k, None, tiles=tiles))
            return moe_combine(_grouped(before, w2, order, offsets, 1, weights, tiles=tiles).view(*ids.shape, -1))

        return call

    tiles = {f"{m}x{n}x{k}, {w} warps": {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": w, "num_stages": 3}
             for m, n, k, w in ((16, 64, 64, 4), (32, 128, 64, 4), (64, 64, 128, 4), (128, 64, 32, 8))}
    shape, families = f"{experts} x {hidden}x{inner} top {top_k}", ("nemotron-3.5",)
    return [Case("moe_experts", f"rollout {shape}", families, inputs, rollout, reference, stock),
            Case("moe_experts", f"training {shape}", families, inputs, exact, reference, stock, phases=phases, gradients=gradients,
                 configurations={name: with_tiles(t) for name, t in tiles.items()})]


CASES = _cases(2688, 1856, 128, 6)


# ---- the contract's names ----------------------------------------------------------------------------------------------

exact_rollout = "ordered_combine"
"""On the rollout side the engine's tuned kernels stay and their sum over slots is replaced, see engines/vllm_cuda.py."""
stock_rollout = None
_eager = eager(moe_experts_op, _setup, lambda ctx, *grads: _backward(ctx, grads))


def exact_training(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, **_) -> torch.Tensor:
    """x [T, hidden], w1 [experts, inner, hidden], w2 [experts, hidden, inner], weights fp32 and ids [T, k] -> [T, hidden]. Differentiable."""
    return _eager(x, w1, w2, weights, ids, False)[0]

"""Routed experts in both published formats, as vLLM runs them on sm_90: Triton for FP8, Marlin for MXFP4; and the clamped SwiGLU."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.utils.weak import WeakIdKeyDictionary

from consistency.models.deepseek_v4 import FLASH
from consistency.models.deepseek_v4_weights import dequantise, quantise_mxfp4
from consistency.operators.cuda.case import SWEEP, Case, Function, Inputs, normal
from consistency.operators.cuda.deepseek_v4.shapes import FAMILY, HIDDEN, LONG_SWEEP, fp8_weight, spread

EXPERTS, TOP, INNER, LIMIT = FLASH["n_routed_experts"], FLASH["num_experts_per_tok"], FLASH["moe_intermediate_size"], FLASH["swiglu_limit"]
SCALE = FLASH["routed_scaling_factor"]
COUNTS = (*SWEEP, 2048)


def clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(min(gate, 10)) * clamp(up, -10, 10) of [..., 2 * inner], gate first, in the dtype of x."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)


def stock_swiglu(x: torch.Tensor) -> torch.Tensor:
    import vllm._custom_ops  # noqa: F401  (registers the engine's kernels)

    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    torch.ops._C.silu_and_mul_with_clamp(out, x, LIMIT, 1.0, 0.0)
    return out


@contextmanager
def _clamped():
    """The functional entry point of vLLM's experts knows no clamp; the layer's does, and calls this kernel."""
    from vllm.model_executor.layers.fused_moe import fused_moe

    before = fused_moe.apply_moe_activation
    fused_moe.apply_moe_activation = lambda activation, out, x, **_: torch.ops._C.silu_and_mul_with_clamp(out, x, LIMIT, 1.0, 0.0)
    try:
        yield
    finally:
        fused_moe.apply_moe_activation = before


def stock_fp8(x, weights, ids, w13, w13_scale, w2, w2_scale):
    """bf16 [M, 4096] -> bf16 [M, 4096]: quantise, grouped GEMM, clamped SwiGLU, quantise, grouped GEMM, sum over the slots."""
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

    config = fp8_w8a8_moe_quant_config(w13_scale, w2_scale, block_shape=[128, 128])
    with _clamped():
        return fused_moe.fused_experts(x, w13, w2, weights, ids, activation=MoEActivation.SILU, quant_config=config)


def with_tile(m: int, n: int, k: int, warps: int) -> Function:
    """`stock_fp8` with another tile, which vLLM would take from a tuned table."""
    tile = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 1, "SPLIT_K": 1, "num_warps": warps, "num_stages": 3}

    def call(*arguments):
        from vllm.model_executor.layers.fused_moe import override_config

        with override_config(tile):
            return stock_fp8(*arguments)

    return call


_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Marlin's order of a set of weights, which the engine computes once when it loads them"""


def stock_mxfp4(x, weights, ids, w13, w13_scale, w2, w2_scale):
    """bf16 activations and MXFP4 weights."""
    from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin
    from vllm.scalar_type import scalar_types

    if w13 not in _packed:
        layer = SimpleNamespace(params_dtype=torch.bfloat16)
        _packed[w13] = prepare_moe_mxfp4_layer_for_marlin(
            layer, w13.view(torch.uint8), w2.view(torch.uint8), w13_scale.view(torch.uint8), w2_scale.view(torch.uint8), None, None)
    first, second, first_scale, second_scale, *_ = _packed[w13]
    return fused_marlin_moe(
        hidden_states=x, w1=first, w2=second, bias1=None, bias2=None, w1_scale=first_scale, w2_scale=second_scale, topk_weights=weights,
        topk_ids=ids, quant_type_id=scalar_types.float4_e2m1f.id, global_num_experts=w13.shape[0], activation=MoEActivation.SILU,
        activation_config=ApplyMoEActivationConfig(clamp_limit=LIMIT))


def experts_reference(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, matrices) -> torch.Tensor:
    """fp64, unquantised activations. `matrices(expert)` gives (w13, w2) of one expert in fp64."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        rows, slots = torch.where(ids == expert)
        w13, w2 = matrices(expert)
        out.index_add_(0, rows, clamped_swiglu(x[rows].double() @ w13.t()) @ w2.t() * weights[rows, slots, None].double())
    return out


def fp8_reference(x, weights, ids, w13, w13_scale, w2, w2_scale):
    return experts_reference(x, weights, ids, lambda e: (spread(w13[e], w13_scale[e]), spread(w2[e], w2_scale[e])))


def mxfp4_reference(x, weights, ids, w13, w13_scale, w2, w2_scale):
    return experts_reference(x, weights, ids, lambda e: (dequantise(w13[e], w13_scale[e]).double(), dequantise(w2[e], w2_scale[e]).double()))


def _inputs(draw, experts: int = EXPERTS, hidden: int = HIDDEN, inner: int = INNER):
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        pairs = [[torch.stack(parts) for parts in zip(*(draw(*shape, generator) for _ in range(experts)), strict=True)]
                 for shape in ((2 * inner, hidden), (hidden, inner))]
        ids = torch.rand(rows, experts, generator=generator, device=generator.device).topk(TOP).indices.int()
        weights = torch.rand(rows, TOP, generator=generator, device=generator.device)
        return Inputs((normal((rows, hidden), generator), SCALE * weights / weights.sum(-1, keepdim=True), ids), (*pairs[0], *pairs[1]))

    return inputs


def mxfp4_weight(rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise_mxfp4(normal((rows, columns), generator, columns**-0.5, torch.float32))


SHAPE = f"{EXPERTS} x {HIDDEN}x{INNER} top {TOP}"
TILES = {f"{m}x{n}x{k}, {w} warps": with_tile(m, n, k, w) for m, n, k, w in (
    (16, 128, 128, 4), (64, 128, 128, 4), (64, 64, 128, 4), (128, 128, 128, 8), (64, 128, 64, 4))}
CASES = [
    Case("moe_experts", f"FP8 {SHAPE}", FAMILY, _inputs(fp8_weight), None, fp8_reference, stock_fp8, counts=COUNTS, most_rows=COUNTS[-1],
         configurations=TILES, prefill=(2048,)),
    Case("moe_experts", f"MXFP4 {SHAPE}", FAMILY, _inputs(mxfp4_weight), None, mxfp4_reference, stock_mxfp4, counts=COUNTS, most_rows=COUNTS[-1],
         prefill=(2048,)),
    Case("silu_and_mul", f"clamped, {INNER}", FAMILY, lambda rows, g: Inputs((normal((rows, 2 * INNER), g, 4.0),), ()), None,
         lambda x: clamped_swiglu(x.double()), stock_swiglu, counts=LONG_SWEEP, most_rows=LONG_SWEEP[-1], prefill=(2048,)),
]

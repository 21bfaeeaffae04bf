"""FP8 block linear layers, the grouped output projection, and the GEMMs that return fp32."""

from functools import partial

import torch

from consistency.operators.cuda.case import Case, Inputs, columns, normal
from consistency.operators.cuda.deepseek_v4.shapes import DIM, FAMILY, HEADS, HIDDEN, LONG_SWEEP, NOPE, ROPE, fp8_weight, rotary_table, rotate, spread
from consistency.operators.cuda.linear import linear, tune

GROUPS, RANK = 8, 1024


def _quantise(x: torch.Tensor, rounded: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    return per_token_group_quant_fp8(x, 128, column_major_scales=True, use_ue8m0=rounded)


def stock_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x bf16 [M, K] -> bf16 [M, N]: FlashInfer below 32 rows, DeepGEMM from 32 on; both quantise x to FP8 in groups of 128."""
    import vllm.model_executor.kernels.linear.scaled_mm.flashinfer  # noqa: F401  (registers the operator)
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    return torch.ops.vllm.dynamic_flashinfer_deepgemm_blockscale_gemm(x, weight, scale, 128, is_deep_gemm_e8m0_used())


def deep_gemm(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, rounded: bool = True) -> torch.Tensor:
    """DeepGEMM for every row count: what vLLM takes without FlashInfer's GEMM, or in batch-invariant mode.

    rounded: activation scales are powers of two, as this model asks for.
    """
    from vllm.utils.deep_gemm import fp8_gemm_nt

    quantised, x_scale = _quantise(x, rounded)
    out = x.new_empty(x.shape[0], weight.shape[0])
    fp8_gemm_nt((quantised, x_scale), (weight, scale), out, is_deep_gemm_e8m0_used=rounded)
    return out


def flash_infer(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FlashInfer's GEMM for every row count."""
    from vllm.utils.flashinfer import flashinfer_fp8_blockscale_gemm

    return flashinfer_fp8_blockscale_gemm(input=x, weight=weight, weight_scale=scale, out_dtype=torch.bfloat16)


def _triton(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8, w8a8_triton_block_scaled_mm

    quantised, x_scale = per_token_group_quant_fp8(x, 128, use_ue8m0=True)
    return w8a8_triton_block_scaled_mm(quantised, weight, x_scale, scale, [128, 128], torch.bfloat16)


def _emulated(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 sums of exactly dequantised FP8 values, one rounding to bf16: no kernel, a witness of what a block sum costs."""
    quantised, x_scale = _quantise(x)
    values = quantised.double() * x_scale.double().repeat_interleave(128, 1)
    return (values @ spread(weight, scale).t()).to(torch.bfloat16)


def linear_reference(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Unquantised activations: the error includes what FP8 does to them."""
    return x.double() @ spread(weight, scale).t()


def _fp8_case(label: str, k: int, n: int) -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        weight = fp8_weight(n, k, generator)
        return Inputs((normal((rows, k), generator),), weight)

    return Case("linear", f"FP8 {label} {k}x{n}", FAMILY, inputs, deep_gemm, linear_reference, stock_linear, counts=LONG_SWEEP,
                most_rows=LONG_SWEEP[-1],
                configurations={"FlashInfer": flash_infer, "Triton": _triton, "DeepGEMM, scales not rounded": partial(deep_gemm, rounded=False),
                                 "fp64 sums of the FP8 values": _emulated}, prefill=(2048,))


def _quantise_case() -> Case:
    def stock(x):
        quantised, scale = _quantise(x)
        return columns(quantised, scale)

    def reference(x):
        from consistency.models.deepseek_v4_weights import FP8_MAX, scale_exponent

        groups = x.float().view(x.shape[0], -1, 128)
        exponent = scale_exponent(groups.abs().amax(-1).clamp_min(1e-10), FP8_MAX)
        scaled = groups * torch.exp2(-exponent.float())[..., None]
        return columns(scaled.to(torch.float8_e4m3fn), torch.exp2(exponent.float()))

    return Case("linear", f"activation to FP8, {HIDDEN}", FAMILY, lambda rows, g: Inputs((normal((rows, HIDDEN), g),), ()), None, reference, stock,
                counts=LONG_SWEEP, most_rows=LONG_SWEEP[-1], prefill=(2048,))


def stock_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """bf16 x [M, K], weight [N, K] -> fp32 [M, N]; the compressors' projections."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


linear_fp32 = partial(linear, fp32_out=True)
"""the project's own: no split of K for any row count"""


def _fp32_case(label: str, n: int) -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        weight = normal((n, HIDDEN), generator, HIDDEN**-0.5)
        return Inputs((normal((rows, HIDDEN), generator),), (weight,))

    return Case("linear", f"fp32 result, {label} {HIDDEN}x{n}", FAMILY, inputs, linear_fp32, lambda x, w: x.double() @ w.double().t(), stock_fp32,
                prepare=partial(tune, fp32_out=True), counts=LONG_SWEEP, most_rows=LONG_SWEEP[-1], prefill=(2048,),
                configurations={"fp32 operands": lambda x, w: x.float() @ w.float().t()})


def _bf16_case(label: str, n: int, most: int) -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        weight = normal((n, HIDDEN), generator, HIDDEN**-0.5)
        return Inputs((normal((rows, HIDDEN), generator),), (weight,))

    return Case("linear", f"bf16 {label} {HIDDEN}x{n}", FAMILY, inputs, linear, lambda x, w: x.double() @ w.double().t(), torch.nn.functional.linear,
                prepare=tune, counts=LONG_SWEEP, most_rows=most, prefill=(2048,))


def stock_grouped(o: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Attention output bf16 [M, 64, 512] -> bf16 [M, 8 * 1024]: inverse rotation, FP8 cast and one GEMM per group of 8 heads."""
    from vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant import fused_inv_rope_fp8_quant
    from vllm.models.deepseek_v4.nvidia.ops.o_proj import compute_fp8_einsum_recipe
    from vllm.utils.deep_gemm import fp8_einsum

    recipe, aligned = compute_fp8_einsum_recipe()
    quantised, o_scale = fused_inv_rope_fp8_quant(
        o, positions, table, n_groups=GROUPS, heads_per_group=HEADS // GROUPS, nope_dim=NOPE, rope_dim=ROPE, quant_group_size=recipe[2],
        tma_aligned_scales=aligned, quantize=True)
    z = torch.empty(o.shape[0], GROUPS, RANK, dtype=torch.bfloat16, device=o.device)
    fp8_einsum("bhr,hdr->bhd", (quantised, o_scale), (weight, scale), z, recipe=recipe)
    return z.flatten(1)


def grouped_reference(o, positions, table, weight, scale):
    rotated = rotate(o, table[positions], inverse=True).view(o.shape[0], GROUPS, -1)
    return torch.einsum("bhr,hdr->bhd", rotated, spread(weight, scale)).flatten(1)


def _grouped_case() -> Case:
    def inputs(rows: int, generator: torch.Generator) -> Inputs:
        weight, scale = fp8_weight(GROUPS * RANK, HEADS // GROUPS * DIM, generator)
        table = rotary_table(8192, generator.device)
        positions = torch.randint(0, 8192, (rows,), generator=generator, device=generator.device)
        return Inputs((normal((rows, HEADS, DIM), generator), positions),
                      (table, weight.view(GROUPS, RANK, -1), scale.view(GROUPS, RANK // 128, -1)))

    return Case("linear", "grouped output projection 8 x 4096x1024", FAMILY, inputs, None, grouped_reference, stock_grouped, prefill=(2048,))


CASES = [
    *(_fp8_case(*shape) for shape in (("wq_a and wkv", HIDDEN, 1536), ("wq_b", 1024, HEADS * DIM), ("indexer wq_b", 1024, 8192),
                                      ("wo_b", GROUPS * RANK, HIDDEN), ("shared gate and up", HIDDEN, 4096), ("shared down", 2048, HIDDEN))),
    _grouped_case(),
    _quantise_case(),
    *(_fp32_case(*shape) for shape in (("compressor ratio 4", 2048), ("compressor ratio 128", 1024), ("indexer compressor", 512))),
    _bf16_case("indexer weights", 64, LONG_SWEEP[-1]),
    _bf16_case("lm_head", 129280, 1024),
]

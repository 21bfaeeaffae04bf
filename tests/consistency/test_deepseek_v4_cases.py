"""DeepSeek-V4's survey cases without a GPU: inputs, references against other implementations, and the engine's call sites."""

import ast
import importlib
import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch

from consistency.models import deepseek_v4 as family

pytest.importorskip("triton")
from bench.gpu.measure import load_cases
from bench.survey import bit_classes, describe, sweep
from consistency.operators.cuda.case import SWEEP, Case, Inputs, columns, relative_error
from consistency.operators.cuda.deepseek_v4 import (
    attention,
    compressor,
    hyper_connection,
    indexer,
    linear,
    log_softmax,
    moe_experts,
    normalisation,
    router,
    shapes,
)

CASES = {case.name: case for case in load_cases("deepseek-v4")}
HEAVY = ("moe_experts", "lm_head", "FP8 w", "FP8 i", "grouped", "shared", "hash table", "attention prefill")
"""cases whose weights take seconds to draw on a CPU"""
LIGHT = [name for name in CASES if not any(word in name for word in HEAVY)]


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- what a case says -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", LIGHT)
def test_inputs_and_reference(name):
    case = CASES[name]
    rows = 130 if case.causal else 3
    inputs = case.inputs(rows, generator())
    assert all(t.shape[0] == rows for t in inputs.rows) and all(t.is_contiguous() for t in inputs.shared)
    again = case.inputs(rows + 1, generator())
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(inputs.shared, again.shared, strict=True)), \
        "weights depend on the number of rows"
    if case.reference is None:
        return
    full = case.reference(*inputs.take(rows))
    assert full.shape[0] == rows and full.isfinite().all() and full.abs().sum() > 0
    if not case.causal:
        torch.testing.assert_close(case.reference(*inputs.row(1)), full[1:2])


def test_case_needs_something_to_ask_about():
    with pytest.raises(ValueError, match="neither"):
        Case("linear", "none", ("deepseek-v4",), lambda rows, g: Inputs((), ()), None, None)


def test_every_operator_of_the_family_has_a_case():
    surveyed = {case.operator for case in CASES.values()}
    assert surveyed == {"linear", "hyper_connection", "rms_norm", "rotary", "compressor", "indexer", "attention", "router", "moe_experts",
                        "silu_and_mul", "log_softmax"}


# ---- the survey -----------------------------------------------------------------------------------------------------

def changes_at(*borders: int):
    """A row-wise function whose bits depend on the number of rows, in the way a kernel that is chosen by it does."""
    def call(x):
        return x + sum(len(x) >= border for border in borders) * 2.0 ** -20
    return call


def cpu_case(exact, stock, **more):
    return Case("linear", "test", ("deepseek-v4",), lambda rows, g: Inputs((torch.rand(rows, 8, generator=g),), ()), exact, None, stock, **more)


def test_sweep_names_the_borders():
    case = cpu_case(None, changes_at(17, 300))
    found = sweep(case, case.subject, case.inputs(1024, generator()), 1024)
    assert found["borders"] == [[16, 17], [257, 300]]
    assert not found["equal"] and found["differing"][:-2] == [m for m in SWEEP if m < 300] and found["run_to_run"]
    assert found["differing"][-2:] == ["row 341 alone", "row 1023 alone"]


def test_exact_function_has_no_border_and_noise_is_seen():
    case = cpu_case(changes_at(), None)
    found = sweep(case, case.exact, case.inputs(1024, generator()), 1024)
    assert found["equal"] and found["borders"] == [] and found["worst_share"] == 1.0
    noise = generator(9)
    found = sweep(case, lambda x: x + torch.rand(1, generator=noise), case.inputs(1024, generator()), 1024)
    assert not found["run_to_run"]


def test_classes_of_a_stock_case_and_of_a_route_that_fails():
    def missing(x):
        raise ImportError("no such kernel")

    case = cpu_case(None, changes_at(), configurations={"same": changes_at(), "other": changes_at(1), "missing": missing})
    classes = bit_classes(case, case.inputs(64, generator()), 64)
    assert sorted(map(sorted, classes.values())) == [["default", "same"], ["missing"], ["other"]]
    assert classes["ImportError: no such kernel"] == ["missing"]


def test_describe_a_row_without_an_exact_implementation():
    row = {"operator": "linear", "shape": "x", "error": {"stock": 1e-3}, "classes": {}, "seconds": 1.0,
           "stock": {"equal": False, "differing": [1, 2], "borders": [[16, 17]], "run_to_run": False}}
    assert "changes between 16 and 17" in describe(row) and "runs DIFFER" in describe(row)
    assert "no DeepGEMM" in describe(row | {"stock": {"unavailable": "no DeepGEMM"}})


# ---- references against other implementations -----------------------------------------------------------------------

def test_cache_record():
    keys = torch.randn(100, shapes.DIM, generator=generator()).bfloat16()
    pages = shapes.empty_pages(2, 64, "cpu")
    shapes.write_cache(pages, 64, keys)
    back = shapes.read_cache(pages, 64)[:100]
    assert torch.equal(back[:, shapes.NOPE:], keys[:, shapes.NOPE:])
    assert relative_error(back, keys) < 0.03
    assert torch.equal(shapes.read_cache(pages, 64)[100:], torch.zeros(28, shapes.DIM).bfloat16())
    # the layout that the kernels document: 64 rows of 448 FP8 and 64 bf16 values, then 64 rows of 8 scale bytes, pages of a multiple of 576 bytes
    assert pages.shape[1] == 37440 and shapes.page_bytes(2) == 1728
    third = pages[0, 2 * 576 : 3 * 576]
    scale = torch.exp2(pages[0, 64 * 576 + 2 * 8].float() - 127)
    torch.testing.assert_close(third[:64].view(torch.float8_e4m3fn).float() * scale, back[2, :64].float(), rtol=0, atol=0)
    assert torch.equal(third[448:].view(torch.bfloat16), keys[2, 448:])
    view = shapes.records(pages, 64)
    assert view.shape == (2, 64, 584) and view.data_ptr() == pages.data_ptr() and view.stride() == (37440, 584, 1)


@pytest.mark.parametrize(("ratio", "layer"), [(4, "CSA"), (128, "HCA")])
def test_compressor_reference_is_the_training_engines_formula(ratio, layer):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

    config = family.config("tiny")
    module = getattr(hf, f"DeepseekV4{layer}Compressor")(config).double()
    dim, tokens = config.head_dim, 300
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.1, generator=generator(3))
        hidden = torch.randn(1, tokens, config.hidden_size, generator=generator(), dtype=torch.float64)
        seen = {}
        # the entry as it enters the norm's rotation: everything behind it is the attention's
        handle = module.kv_norm.register_forward_hook(lambda m, args, out: seen.update(norm=out))
        module(hidden, torch.randn(1, tokens, config.q_lora_rank, dtype=torch.float64), torch.arange(tokens)[None], None, 0)
        handle.remove()
        kv_score = torch.cat((module.kv_proj(hidden), module.gate_proj(hidden)), -1)[0]
    table = torch.cat((torch.ones(tokens, 32), torch.zeros(tokens, 32)), 1)
    own = compressor.compress_reference(kv_score, module.position_bias.detach(), module.kv_norm.weight.detach(), table)
    # transformers takes its softmax in fp32 and pairs the rotated values
    torch.testing.assert_close(own[ratio - 1 :: ratio], seen["norm"][0].double(), atol=2e-5, rtol=2e-5)
    assert own[: ratio - 1].abs().sum() == 0 and own.shape == (tokens, dim)


def test_rotation_is_the_training_engines():
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

    table = shapes.rotary_table(50, "cpu")
    x = torch.randn(1, 3, 50, 128, generator=generator())
    cos, sin = table.chunk(2, 1)
    theirs = hf.apply_rotary_pos_emb(x, cos[None], sin[None])
    own = shapes.rotate(x[0].transpose(0, 1), table).transpose(0, 1)
    torch.testing.assert_close(own, theirs[0].double(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shapes.rotate(own.transpose(0, 1), table, inverse=True), x[0].transpose(0, 1).double(), atol=1e-6, rtol=1e-6)


def test_hyper_connection_references_are_vllms_formula():
    pytest.importorskip("vllm")
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_torch

    inputs = CASES["hyper_connection between blocks"].inputs(5, generator())
    x, residual, post, comb, fn, scale, base, norm = inputs.take(5)
    streams = mhc_post_torch(x, residual, post, comb)
    post_next, comb_next, layer_input = mhc_pre_torch(streams, fn, scale, base, *hyper_connection.CONSTANTS)
    theirs = columns(streams, post_next, comb_next, shapes.rms(layer_input, norm))
    assert relative_error(theirs, hyper_connection.post_pre_reference(*inputs.take(5))) < 3e-3
    first = CASES["hyper_connection first layer"].inputs(5, generator())
    x, fn, scale, base, norm, summed = first.take(5)
    post, comb, layer_input = mhc_pre_torch(x[:, None].expand(-1, 4, -1).contiguous(), fn, scale, base, *hyper_connection.CONSTANTS)
    theirs = columns(post, comb, shapes.rms(layer_input, norm))
    assert relative_error(theirs, hyper_connection.pre_reference(*first.take(5))) < 3e-3
    torch.testing.assert_close(summed, fn.view(24, 4, -1).sum(1))


def test_swiglu_is_vllms_formula():
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.activation import SiluAndMulWithClamp

    x = torch.randn(4, 64, generator=generator()) * 20
    theirs = SiluAndMulWithClamp.forward_native(mock.Mock(swiglu_limit=10.0, alpha=1.0, beta=0.0), x)
    torch.testing.assert_close(moe_experts.clamped_swiglu(x), theirs)
    assert (x > 10).any(), "no value reaches the clamp"


@pytest.mark.parametrize("ratio", attention.EXTRA)
def test_attention_reference_by_hand(ratio):
    arguments = attention._inputs(ratio)(2, generator()).take(2)
    q, window, window_length, extra, extra_length, pages, extra_pages, sink = arguments
    own = attention.reference(*arguments).view(2, 64, 512)
    keys = shapes.read_cache(pages, 64)
    more = shapes.read_cache(extra_pages, 256 // ratio) if extra.shape[1] else keys[:0]
    for row in range(2):
        chosen = torch.cat((more[extra[row, : extra_length[row]].long()], keys[window[row, : window_length[row]].long()])).double()
        weights = (q[row].double() @ chosen.t() * 512**-0.5).exp()
        expected = weights @ chosen / (weights.sum(-1, keepdim=True) + sink.double().exp()[:, None])
        torch.testing.assert_close(own[row], expected)


def test_ties_go_to_the_expert_with_the_smaller_number():
    logits = torch.zeros(1, router.EXPERTS)
    logits[0, 200] = 1.0
    found = router.top_reference(logits, torch.zeros(router.EXPERTS))
    assert found[0, 6:].tolist() == [200, 0, 1, 2, 3, 4]
    assert float(found[0, :6].sum()) == pytest.approx(1.5)
    scores = torch.zeros(1, indexer.ENTRIES)
    assert indexer._torch_top(scores, torch.tensor([600]))[0].tolist() == list(range(512))
    assert indexer._torch_top(scores, torch.tensor([3]))[0, :4].tolist() == [0, 1, 2, indexer.ENTRIES]


@pytest.mark.parametrize(("weight", "reference"), [(moe_experts.mxfp4_weight, moe_experts.mxfp4_reference),
                                                   (shapes.fp8_weight, moe_experts.fp8_reference)])
def test_expert_references_by_hand(weight, reference):
    arguments = moe_experts._inputs(weight, experts=8, hidden=256, inner=128)(5, generator()).take(5)
    x, weights, ids, w13, w13_scale, w2, w2_scale = arguments
    assert w13.shape[0] == 8 and ids.unique().numel() > 6
    out = reference(*arguments)
    from consistency.models.deepseek_v4_weights import dequantise

    for row in range(5):
        expected = sum(
            weights[row, slot].double() * (moe_experts.clamped_swiglu(x[row].double() @ dequantise(w13[e], w13_scale[e]).double().t())
                                           @ dequantise(w2[e], w2_scale[e]).double().t())
            for slot, e in enumerate(ids[row].tolist()))
        torch.testing.assert_close(out[row], expected, atol=1e-3, rtol=1e-3)


# ---- the engine's call sites ----------------------------------------------------------------------------------------

def engine(target: str, result):
    """A patch of a function of the installed engine that accepts the real signature only and answers with `result(*args, **kwargs)`."""
    module, name = target.rsplit(".", 1)
    real = getattr(importlib.import_module(f"vllm.{module}"), name)
    return mock.patch(f"vllm.{target}", mock.create_autospec(real, side_effect=result))


def bf16(*shape: int):
    return lambda *args, **kwargs: torch.ones(*shape, dtype=torch.bfloat16)


QUANT = "model_executor.layers.quantization.utils.fp8_utils."
CALLS = {
    "hyper_connection first layer": (hyper_connection.stock_pre, {"model_executor.kernels.mhc.tilelang.mhc_pre_broadcast_tilelang": lambda *a, **k: (
        a[0], torch.ones(2, 4, 1), torch.ones(2, 4, 4), a[0])}),
    "hyper_connection between blocks": (hyper_connection.stock_post_pre, {
        "model_executor.kernels.mhc.tilelang.mhc_fused_post_pre_tilelang": lambda *a, **k: (a[1], a[2], a[3], a[0])}),
    "hyper_connection head": (hyper_connection.stock_head, {"model_executor.kernels.mhc.tilelang.hc_head_fused_kernel_tilelang": bf16(2, 4096)}),
    "rms_norm final 4096": (normalisation.stock_norm, {"_custom_ops.rms_norm": lambda out, *a: out.fill_(1)}),
    "rms_norm q and kv, 1024 and 512": (normalisation.stock_q_kv, {
        "models.common.ops.fused_qk_rmsnorm.fused_q_kv_rmsnorm": lambda q, kv, *a: (q, kv)}),
    "linear activation to FP8, 4096": (CASES["linear activation to FP8, 4096"].stock, {
        QUANT + "per_token_group_quant_fp8": lambda x, *a, **k: (x, x[:, :32].float())}),
    "router top 6 of 256, slots in order": (router.stock_top, {
        "model_executor.layers.fused_moe.router.dsv4_topk.dsv4_topk": lambda *a, **k: (torch.ones(2, 6), torch.ones(2, 6))}),
    "router gate 4096x256": (router._kernel_for_few, {"model_executor.kernels.linear.cute_dsl.ll_bf16.ll_bf16_gemm": bf16(2, 256)}),
    "indexer query to FP8, 64 x 128": (indexer.stock_query, {
        "models.deepseek_v4.common.ops.fused_indexer_q_rope_quant": lambda positions, q, table, weights, *a, **k: (q, weights.float())}),
    "indexer scores, prefill, 2048 keys": (indexer.prefill_scores, {"utils.deep_gemm.fp8_fp4_mqa_logits": lambda *a, **k: torch.ones(2, 2048)}),
    "indexer scores, decode, 2048 keys": (indexer.decode_scores, {
        "utils.deep_gemm.fp8_fp4_paged_mqa_logits": lambda *a, **k: torch.ones(2, 2048), "utils.deep_gemm.get_num_sms": lambda: 132,
        "utils.deep_gemm.get_paged_mqa_logits_metadata": lambda *a: torch.zeros(133, 2)}),
    "indexer top 512 of 2048, prefill": (indexer.prefill_top, {"_custom_ops.top_k_per_row_prefill": lambda *a: None}),
    "compressor of the indexer, ratio 4": (compressor.compress, {
        "models.deepseek_v4.common.ops.fused_compress_quant_cache.compress_norm_rope_store_triton": lambda **k: k["kv_cache"].fill_(1)}),
    "log_softmax 129280": (log_softmax.stock, {"v1.worker.gpu.sample.logprob.compute_token_logprobs": lambda logits, ids: torch.ones(2, 1)}),
}


@pytest.mark.engine
@pytest.mark.parametrize("name", CALLS)
def test_call_fits_the_engines_signature(name):
    pytest.importorskip("vllm")
    function, replacements = CALLS[name]
    rows = 8 if CASES[name].causal else 2
    arguments = CASES[name].inputs(rows, generator()).take(rows)
    saved = mock.patch("vllm.models.deepseek_v4.common.ops.save_partial_states._SAVE_PARTIAL_STATES_KERNEL")
    patches = [engine(target, result) for target, result in replacements.items()]
    with saved:
        for patch in patches:
            patch.start()
        try:
            out = function(*arguments)
        finally:
            for patch in patches:
                patch.stop()
    assert (out[0] if isinstance(out, tuple) else out).shape[0] == rows


@pytest.mark.engine
def test_experts_fit_the_engines_signatures():
    pytest.importorskip("vllm")
    arguments = moe_experts._inputs(moe_experts.mxfp4_weight, experts=8, hidden=256, inner=128)(3, generator()).take(3)
    places = "model_executor.layers."
    with engine(places + "quantization.utils.marlin_utils_fp4.prepare_moe_mxfp4_layer_for_marlin",
                lambda layer, *rest: rest) as prepare, \
            engine(places + "fused_moe.experts.marlin_moe.fused_marlin_moe", lambda **k: k["hidden_states"]):
        first, second = (moe_experts.stock_mxfp4(*arguments) for _ in range(2))
    assert torch.equal(first, second) and prepare.call_count == 1, "weights are packed once, as by the engine's loader"
    arguments = moe_experts._inputs(shapes.fp8_weight, experts=8, hidden=256, inner=128)(3, generator()).take(3)
    with engine(places + "fused_moe.fused_moe.fused_experts", lambda x, *rest, **k: x) as call:
        moe_experts.stock_fp8(*arguments)
    config = call.call_args.kwargs["quant_config"]
    assert config.use_fp8_w8a8 and list(config.block_shape) == [128, 128]


@pytest.mark.engine
def test_fp8_and_hash_fit_the_engines_signatures():
    pytest.importorskip("vllm")
    x, weight, scale = torch.ones(2, 256, dtype=torch.bfloat16), torch.ones(128, 256), torch.ones(1, 2)
    with engine(QUANT + "per_token_group_quant_fp8", lambda x, *a, **k: (x, x[:, :2].float())), \
            engine(QUANT + "w8a8_triton_block_scaled_mm", lambda a, b, *rest: torch.ones(2, b.shape[0])):
        assert linear._triton(x, weight, scale).shape == (2, 128)
        torch.testing.assert_close(linear._emulated(x, weight, scale).float(), torch.full((2, 128), 256.0))
    with engine("_custom_ops.topk_hash_softplus_sqrt", lambda weights, ids, *a: ids.zero_()):
        assert router.stock_hash(torch.ones(2, 256), torch.zeros(2).int(), torch.zeros(4, 6).int()).shape == (2, 12)


@pytest.mark.engine
def test_grouped_projection_fits_the_engines_signatures():
    pytest.importorskip("vllm")
    rows, groups, rank = 2, linear.GROUPS, linear.RANK
    o, positions, table = torch.ones(rows, 64, 512, dtype=torch.bfloat16), torch.arange(rows), shapes.rotary_table(8, "cpu")
    with engine("models.deepseek_v4.nvidia.ops.o_proj.compute_fp8_einsum_recipe", lambda: ((1, 128, 128), False)), \
            engine("models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant.fused_inv_rope_fp8_quant", lambda o, *a, **k: (o, o)), \
            mock.patch("vllm.utils.deep_gemm.fp8_einsum") as einsum:
        out = linear.stock_grouped(o, positions, table, torch.ones(groups, rank, 4096), torch.ones(groups, 8, 32))
    assert out.shape == (rows, groups * rank) and einsum.call_args.args[0] == "bhr,hdr->bhd" and einsum.call_args.kwargs == {"recipe": (1, 128, 128)}


@pytest.mark.engine
def test_compressor_names_every_argument_of_the_kernels_that_need_a_gpu():
    """CuTe DSL cannot be imported here, so the signature is read from the engine's source."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("needs vLLM")
    source = Path(found.origin).parent / "models/deepseek_v4/nvidia/ops/sparse_attn_compress_cutedsl.py"
    classes = [n for n in ast.parse(source.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "SparseAttnCompressorCuteDSL"]
    call = next(n for n in classes[0].body if isinstance(n, ast.FunctionDef) and n.name == "__call__")
    names = [a.arg for a in call.args.args[1:]]
    required = set(names[: len(names) - len(call.args.defaults)])
    own = ast.parse(Path(compressor.__file__).read_text())
    store = next(n for n in ast.walk(own) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "store")
    given = {k.arg for k in store.keywords if k.arg} | {"quant_block", "token_stride", "scale_dim"}
    assert required <= given <= set(names)


# ---- the candidates -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ratio", attention.EXTRA)
def test_a_decode_step_by_the_prefill_kernel_lists_the_same_keys_in_the_same_order(ratio):
    arguments = attention._inputs(ratio)(3, generator()).take(3)
    seen = []

    def kernel(q, kv, indices, sm_scale, attn_sink, topk_length, out):
        listed = [kv[i[i >= 0].long(), 0] for i in indices[:, 0]]
        assert [len(keys) for keys in listed] == topk_length.tolist() and indices.shape[-1] % 128 == 0
        seen.append(listed)

    with mock.patch("vllm.v1.attention.ops.flashmla.flash_mla_sparse_fwd", kernel):
        attention.prefill(*arguments)
        attention.through_prefill(*arguments)
    for prefill, decode in zip(*seen, strict=True):
        assert torch.equal(prefill, decode)


def test_selection_is_by_value_then_ascending():
    pytest.importorskip("vllm")
    from bench.gpu.deepseek_v4_candidates import select

    scores = torch.randn(5, 40, generator=generator()).mul(4).round()
    starts, ends = torch.tensor([0, 3, 0, 10, 39]), torch.tensor([40, 9, 1, 30, 40])
    for row, chosen in enumerate(select(scores, starts, ends, 8).tolist()):
        own = scores[row, starts[row] : ends[row]].tolist()
        best = sorted(sorted(range(len(own)), key=lambda place: (-own[place], place))[:8])
        assert chosen == best + [-1] * (8 - len(best))

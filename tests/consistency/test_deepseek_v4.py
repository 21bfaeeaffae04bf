"""DeepSeek-V4: number formats, the checkpoint against both engines' own loaders, and the training forward, at tiny widths."""

import contextlib
import copy
import json
import multiprocessing
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from consistency.models import deepseek_v4 as family
from consistency.models import deepseek_v4_weights as weights

INDEXER = "compressor.indexer."
"""parameters behind a top-k: the loss has no gradient for them"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Expert format -> folder."""
    folders = {experts: tmp_path_factory.mktemp("deepseek-v4") / experts for experts in family.EXPERTS}
    for experts, folder in folders.items():
        family.write("tiny", folder, experts=experts)
    return folders


@pytest.fixture(scope="module")
def model(checkpoints):
    torch.set_num_threads(1)
    return family.load_training(checkpoints["fp8"])


def stored(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: safe_open(folder / file, "pt").get_tensor(name) for name, file in index.items()}


def logprobs(model, ids):
    return torch.log_softmax(model(input_ids=ids, use_cache=False).logits.float(), -1)


# ---- number formats -------------------------------------------------------------------------------------------------

def matrix(rows=256, columns=384):
    """Blocks of very different size, one of them zero."""
    draw = torch.Generator().manual_seed(5)
    value = torch.randn(rows, columns, generator=draw)
    value[:128, :128] *= 2.0 ** -20
    value[128:, 128:256] *= 1e4
    value[128:, 256:] = 0
    return value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_round_trip(dtype):
    value = matrix()
    quantised, scale = weights.quantise_fp8(value, dtype)
    back = weights.dequantise(quantised, scale)
    assert quantised.shape == value.shape and scale.shape == (2, 3) and scale.dtype == dtype
    assert (torch.frexp(scale.float()).mantissa == 0.5).all(), "a scale is not a power of two"
    largest = value.abs().view(2, 128, 3, 128).amax((1, 3))
    assert (largest <= 448 * scale.float()).all() and ((largest > 224 * scale.float()) | (largest == 0)).all()
    # e4m3 keeps four significant bits of what is not subnormal in its block
    error = (back.float() - value).abs()
    assert (error <= value.abs() / 16 + weights._spread(scale, *value.shape) * 2.0 ** -10).all()
    again, same = weights.quantise_fp8(back.float(), dtype)
    assert torch.equal(weights.dequantise(again, same), back)


def test_mxfp4_round_trip():
    value = matrix()
    packed, scale = weights.quantise_mxfp4(value)
    back = weights.dequantise(packed, scale)
    assert packed.shape == (256, 192) and packed.dtype == torch.int8 and scale.shape == (256, 12) and scale.dtype == torch.float8_e8m0fnu
    step = weights._spread(scale, *value.shape)
    grid = torch.cat((weights.FP4_VALUES, -weights.FP4_VALUES))
    nearest = ((value / step)[..., None] - grid).abs().amin(-1) * step
    torch.testing.assert_close((back.float() - value).abs(), nearest)
    again, same = weights.quantise_mxfp4(back.float())
    assert torch.equal(weights.dequantise(again, same), back)


def test_transformers_dequantises_to_the_same_bits():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    value = matrix()
    for quantised, scale in (*(weights.quantise_fp8(value, dtype) for dtype in (torch.float32, torch.float8_e8m0fnu)), weights.quantise_mxfp4(value)):
        assert torch.equal(Fp8Dequantize(None)._dequantize_one(quantised, scale, torch.bfloat16), weights.dequantise(quantised, scale))


# ---- configuration and names ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("scale", family.SCALES)
def test_transformers_reads_the_published_configuration(scale, tmp_path):
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(family.published(scale)))
    config, own = AutoConfig.from_pretrained(tmp_path), family.config(scale)
    assert config.layer_types == ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"]
    assert config.mlp_layer_types == ["hash_moe", "hash_moe", "moe", "moe"]
    assert config.qk_rope_head_dim == 64 and config.rope_parameters["compress"]["rope_theta"] == 160000
    assert config.rope_parameters["compress"]["attention_factor"] == 1.0 and config.rope_parameters["main"]["rope_type"] == "default"
    assert (own.layer_types, own.mlp_layer_types, own.rope_parameters) == (config.layer_types, config.mlp_layer_types, config.rope_parameters)


def test_true_widths_are_the_defaults_of_transformers():
    from transformers import DeepseekV4Config

    defaults = DeepseekV4Config()
    for name in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window",
                 "index_n_heads", "index_head_dim", "index_topk", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
                 "routed_scaling_factor", "swiglu_limit", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "rms_norm_eps", "rope_theta",
                 "compress_rope_theta", "scoring_func"):
        assert family.FLASH[name] == getattr(defaults, name), name


@pytest.mark.parametrize("scale", family.SCALES)
def test_every_tensor_has_one_place_in_transformers(scale):
    from transformers import DeepseekV4ForCausalLM

    published = family.published(scale)
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(family.config(scale))
    slots = {n: torch.zeros_like(t, dtype=torch.int8, device="meta") for n, t in model.state_dict().items()}
    filled = dict.fromkeys(slots, 0)
    for entry in weights.entries(published):
        name, index = weights.transformers_place(entry.name, published["moe_intermediate_size"])
        assert tuple(slots[name][index].shape) == entry.shape, entry.name
        filled[name] += slots[name][index].numel()
    assert [n for n in slots if filled[n] != slots[n].numel()] == []


def test_values_depend_on_the_name_and_the_seed_only(tmp_path):
    published = family.published("tiny")
    entry = next(e for e in weights.entries(published) if e.name == "layers.2.ffn.experts.3.w2.weight")
    first = weights.stored(entry, published, 0)
    assert all(torch.equal(first[n].view(torch.uint8), t.view(torch.uint8)) for n, t in weights.stored(entry, published, 0).items())
    assert not torch.equal(first[entry.name].float(), weights.stored(entry, published, 1)[entry.name].float())


def test_checkpoint_is_sharded_and_never_held_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(weights, "SHARD_BYTES", 1 << 20)
    family.write("tiny", tmp_path / "c")
    files = sorted((tmp_path / "c").glob("*.safetensors"))
    assert len(files) > 5 and all(file.stat().st_size < 2 << 20 for file in files)
    assert {e.name for e in weights.entries(family.published("tiny"))} <= set(stored(tmp_path / "c"))
    assert list(tmp_path.iterdir()) == [tmp_path / "c"]


# ---- transformers ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("experts", family.EXPERTS)
def test_transformers_own_loader_finds_the_same_values(experts, checkpoints, tmp_path):
    """The same model written dequantised, under the published names, through from_pretrained: nothing missing, nothing left over."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    tensors = stored(checkpoints[experts])
    plain = {n: weights.dequantise(t, tensors[n.removesuffix("weight") + "scale"]) if n.removesuffix("weight") + "scale" in tensors else t
             for n, t in tensors.items() if not n.endswith(".scale")}
    save_file(plain, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(family.published("tiny", None)))
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    own = family.load_training(checkpoints[experts]).state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.double(), own[name].double()), name


def test_forward_and_backward_in_train_mode(model):
    model.train()
    ids = torch.randint(512, (2, 300), generator=torch.Generator().manual_seed(1))
    loads = []
    hooks = [layer.mlp.gate.register_forward_hook(lambda module, arguments, output: loads.append(torch.bincount(output[2].flatten(), minlength=16)))
             for layer in model.model.layers]
    logprob = logprobs(model, ids)
    for hook in hooks:
        hook.remove()
    (-logprob[:, :-1].gather(-1, ids[:, 1:, None]).mean()).backward()
    assert logprob.isfinite().all()
    # peaked: flat logits would give -ln 512 = -6.2; spread: no expert idle, none with most of the tokens
    assert -4.0 < float((logprob.exp() * logprob).detach().sum(-1).mean()) < -2.0
    assert all(n.min() > 0 and n.max() < 3 * n.float().mean() for n in loads), loads
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (INDEXER in name), name
        assert parameter.grad is None or (parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0), name
    model.zero_grad(set_to_none=True)


def test_every_kind_of_layer_changes_the_output(model):
    model.eval()
    ids = torch.randint(512, (1, 140), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        base = logprobs(model, ids)
        assert torch.equal(base, logprobs(model, ids))
        for name in ("layers.0.self_attn.sinks", "layers.0.mlp.gate.tid2eid", "layers.1.self_attn.compressor.position_bias",
                     "layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight", "layers.2.self_attn.compressor.gate_proj.weight",
                     "layers.2.mlp.gate.e_score_correction_bias", "layers.3.attn_hc.base", "layers.3.ffn_hc.scale", "hc_head.hc_fn", "norm.weight"):
            tensor = model.state_dict()["model." + name]
            kept = tensor.clone()
            tensor.copy_(tensor.flip(0) if tensor.ndim > 1 else tensor.roll(1))
            assert not torch.equal(base, logprobs(model, ids)), name
            tensor.copy_(kept)
        assert torch.equal(base, logprobs(model, ids))


def test_right_padding_does_not_reach_earlier_tokens(model):
    """A window of a compressor that holds padding ends behind every real token, so a padded batch is a valid layout (in fp32, up to rounding)."""
    exact = copy.deepcopy(model).float().eval()
    ids = torch.randint(512, (1, 150), generator=torch.Generator().manual_seed(4))
    padded = torch.cat((ids, torch.zeros(1, 110, dtype=torch.int64)), 1)
    with torch.no_grad():
        torch.testing.assert_close(logprobs(exact, padded)[:, :150], logprobs(exact, ids), atol=1e-3, rtol=0)


# ---- vLLM -----------------------------------------------------------------------------------------------------------

class Stub:
    def __init__(self, *arguments, **options):
        pass


def load_in_vllm(folders: dict[str, str]) -> dict[str, dict]:
    """Builds vLLM's CUDA model class on the CPU, loads each checkpoint with its own loader, compares what arrived. For a process of its own."""
    torch.set_num_threads(1)
    return {experts: load_one(folder, experts) for experts, folder in folders.items()}


def load_one(folder: str, experts: str) -> dict:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.models.deepseek_v4.nvidia.model import DeepseekV4ForCausalLM
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    config = EngineArgs(model=folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=1024, kv_cache_dtype="fp8").create_engine_config()
    with set_current_vllm_config(config), contextlib.ExitStack() as patches:
        for target, replacement in {
                "torch.cuda.Stream": Stub, "torch.cuda.Event": Stub,
                "vllm.models.deepseek_v4.nvidia.flashmla.compute_fp8_einsum_recipe": lambda: ((1, 128, 128), False),
                "vllm.model_executor.layers.quantization.fp8.init_fp8_linear_kernel": lambda **options: Stub(),
                "vllm.model_executor.layers.quantization.mxfp4.select_deepseek_v4_mxfp4_moe_backend":
                    lambda moe: (Mxfp4MoeBackend.MARLIN, MarlinExperts)}.items():
            patches.enter_context(mock.patch(target, replacement))
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}.group", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        model = DeepseekV4ForCausalLM(vllm_config=config)
        torch.set_default_dtype(torch.float32)
        for parameter in model.parameters():
            parameter.data.view(torch.uint8).fill_(0xAA)
        loaded = model.load_weights(DefaultModelLoader(config.load_config).get_all_weights(config.model_config, model))

    def same(left, right):
        return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))

    parameters, tensors = dict(model.named_parameters()), stored(Path(folder))
    sites = family.vllm_sites(model)
    modules = {site.path: model.get_submodule(site.path) for site in sites}
    hashed, routed = model.model.layers[1], model.model.layers[2]
    experts_of = routed.ffn.experts.routed_experts
    scale = getattr(experts_of, "w13_weight_scale_inv" if experts == "fp8" else "w13_weight_scale")
    value = torch.randn(256, 384, generator=torch.Generator().manual_seed(6))
    theirs, ours = per_block_cast_to_fp8(value, use_ue8m0=True), weights.quantise_fp8(value, torch.float32)
    return {
        "sites": [(site.path, site.site.key, site.site.operator, type(modules[site.path]).__name__) for site in sites],
        "missing": sorted(set(parameters) - loaded), "unknown": sorted(loaded - set(parameters)),
        "rotary": {"main": model.model.layers[0].attn.rotary_emb.cos_sin_cache[:1024].tolist(),
                   "compress": hashed.attn.rotary_emb.cos_sin_cache[:1024].tolist()},
        "broadcast": same(model.model.layers[0].hc_attn_fn_broadcast, tensors["layers.0.hc_attn_fn"].view(24, 4, 256).sum(1)),
        "w1": same(experts_of.w13_weight.data[3][:128], tensors["layers.2.ffn.experts.3.w1.weight"]),
        "w3": same(experts_of.w13_weight.data[3][128:], tensors["layers.2.ffn.experts.3.w3.weight"]),
        "w2": same(experts_of.w2_weight.data[3], tensors["layers.2.ffn.experts.3.w2.weight"]),
        "w3 scale": same(scale.data[3][scale.shape[1] // 2:], tensors["layers.2.ffn.experts.3.w3.scale"]),
        "wkv": same(routed.attn.fused_wqa_wkv.weight.data[128:], tensors["layers.2.attn.wkv.weight"]),
        "wkv scale": same(routed.attn.fused_wqa_wkv.weight_scale_inv.data[1:], tensors["layers.2.attn.wkv.scale"]),
        "sink": same(routed.attn.attn_sink.data[:4], tensors["layers.2.attn.attn_sink"]),
        "table": torch.equal(hashed.ffn.gate.tid2eid.long(), tensors["layers.1.ffn.gate.tid2eid"]),
        "indexer": same(hashed.attn.indexer.compressor.fused_wkv_wgate.weight.data[:256], tensors["layers.1.attn.indexer.compressor.wkv.weight"]),
        "quantised as vLLM does": same(theirs[0], ours[0]) and same(theirs[1], ours[1])}


def assert_sites(sites):
    """Every path is a module of vLLM's own model (get_submodule raised nothing), in execution order, under a key of its own."""
    from consistency.models.catalog import HELD_BACK, SITE_RANK

    assert len({key for _, key, _, _ in sites}) == len(sites) and {operator for _, _, operator, _ in sites} <= set(HELD_BACK["deepseek-v4"].operators)
    assert all(key.split(".")[-1] in SITE_RANK for _, key, _, _ in sites)
    kinds = {path.split("layers.1.")[-1]: kind for path, _, _, kind in sites}
    assert kinds["ffn.gate"] == "GateLinear" and kinds["ffn.shared_experts.act_fn"] == "SiluAndMulWithClamp"
    assert sum("indexer" in path for path, _, _, _ in sites) == 4, "two of the four layers have an indexer"


@pytest.mark.engine
def test_vllm_own_loader_takes_every_tensor(checkpoints):
    pytest.importorskip("vllm")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        reports = pool.apply(load_in_vllm, ({experts: str(folder) for experts, folder in checkpoints.items()},))
    rotary = {experts: report.pop("rotary") for experts, report in reports.items()}
    for report in reports.values():
        assert_sites(report.pop("sites"))
        assert report.pop("missing") == [] and report.pop("unknown") == []
        assert report == dict.fromkeys(report, True)
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    own = DeepseekV4RotaryEmbedding(family.config("tiny"))
    for kind, table in rotary["fp8"].items():
        angles = torch.cat(own(torch.zeros(1, dtype=torch.float32), torch.arange(1024)[None], layer_type=kind), -1)[0]
        torch.testing.assert_close(torch.tensor(table), angles, atol=1e-4, rtol=0)

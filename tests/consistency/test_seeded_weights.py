"""Weights from a seed and a name: the same bits in any order and in parts, a place for each in both engines, and what models they make."""

import json
import re
import subprocess
import sys

import pytest
import torch
import transformers

from consistency.contract import Contract, ContractError
from consistency.engines import seeded_weights
from consistency.engines.training import Forward, Training
from consistency.engines.weights import training_fingerprints, training_parameters
from consistency.jobs import make_checkpoint
from consistency.models import family as family_module
from consistency.models.catalog import FAMILIES
from consistency.models.seeded import Entry

SCALES = [(name, scale) for name in FAMILIES for scale in ("slice", "full")]


def made(entry, seed=0):
    return seeded_weights.fill(torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)), entry, seed)


def test_an_element_depends_on_seed_name_and_index_alone(monkeypatch):
    entry = Entry("model.layers.3.mlp.up_proj.weight", (60, 50), 0.3, 1.0)
    whole = made(entry)
    monkeypatch.setattr(seeded_weights, "CHUNK", 7)
    assert torch.equal(made(entry), whole)
    assert not torch.equal(made(entry, 1), whole) and not torch.equal(made(Entry("model.layers.4.mlp.up_proj.weight", (60, 50), 0.3, 1.0)), whole)


def test_known_elements():
    """The formula is a contract between engines, devices and versions: these bits may not move."""
    assert seeded_weights.noise(Entry("a", (4,), 1.0), 0, 0, 4, "cpu").view(torch.int32).tolist() == KNOWN


KNOWN = [1074106252, 1063575504, 1044419864, 1052994702]


@pytest.mark.parametrize("form", ["normal", "paired"])
def test_noise_is_close_to_normal(form):
    x = seeded_weights.noise(Entry("a", (1 << 20,), 1.0, form=form), 0, 0, 1 << 20, "cpu").double()
    assert abs(x.mean()) < 4e-3 and abs(x.var() - 1) < 6e-3 and abs((x ** 4).mean() - 2.7) < 0.02
    lagged = [float((x[:-lag] * x[lag:]).mean()) for lag in (1, 2, 3, 64, 2688)]
    assert max(map(abs, lagged[form == "paired":])) < 5e-3
    if form == "paired":
        assert torch.equal(x[::2], -x[1::2]) and abs(lagged[0] + 0.5) < 5e-3


@pytest.mark.parametrize("form", ["decay", "step"])
def test_small_vectors_lie_in_their_range(form):
    x = made(Entry("a", (4096,), 1.0, form=form)).double()
    value = x.exp() if form == "decay" else torch.nn.functional.softplus(x)
    low, high = (1, 16) if form == "decay" else (1e-3, 1e-1)
    assert value.min() > 0.98 * low and value.max() < 1.02 * high and value.max() / value.min() > 0.8 * high / low


@pytest.mark.parametrize(("name", "scale"), SCALES)
def test_every_parameter_of_transformers_has_a_tensor_and_the_reverse(name, scale):
    config = family_module(name).config(scale)
    with torch.device("meta"):
        model = getattr(transformers, FAMILIES[name].architecture)(config)
    table = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n.endswith("bias")}}
    seen: dict[str, set] = {}
    for entry in seeded_weights.entries(name, config):
        parameter, expert = seeded_weights.training_name(entry.name)
        shape = table[parameter].shape if expert is None else table[parameter].shape[1:]
        assert entry.shape == tuple(shape), entry.name
        seen.setdefault(parameter, set()).add(expert)
    assert set(seen) == set(table)
    experts = {len(found) for parameter, found in seen.items() if re.search(r"\.experts\.", parameter)}
    assert experts <= {getattr(config, "n_routed_experts", None)}


def test_names_are_those_that_transformers_own_conversion_reads(tmp_path):
    """Saved under the names of the entries, the tensors load through `from_pretrained` to the same bits."""
    from safetensors.torch import save_file

    seeded_weights.write("nemotron-3.5", "tiny-moe", tmp_path, 0)
    ours = Training("nemotron-3.5", tmp_path, Contract())
    config = ours.model.config
    save_file(dict(seeded_weights.tensors("nemotron-3.5", config, 0, "cpu")), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "seed.json").unlink()
    theirs = Training("nemotron-3.5", tmp_path, Contract())
    assert training_fingerprints(ours.model) == training_fingerprints(theirs.model)
    assert training_parameters(ours.model)["model.layers.1.mixer.gate.e_score_correction_bias"].dtype == torch.float32


def test_checkpoint_folder_of_a_true_scale_holds_a_seed_and_no_weights(tmp_path):
    make_checkpoint.write("nemotron-3.5", "full", tmp_path / "c", 7)
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"config.json", "generation_config.json", "seed.json"}
    assert seeded_weights.read(tmp_path / "c") == {"family": "nemotron-3.5", "scale": "full", "seed": 7}
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    kinds = config["layers_block_type"]
    assert config["architectures"] == ["NemotronHForCausalLM"] and config["mamba_ssm_cache_dtype"] == "float32"
    assert [kinds.count(k) for k in ("linear_attention", "moe", "full_attention")] == [23, 23, 6]
    (tmp_path / "c" / "seed.json").write_text("{}")
    with pytest.raises(ValueError, match=r"seed\.json: expected .* make the checkpoint again"):
        seeded_weights.read(tmp_path / "c")


# ---- a mixture of experts on the training side, which the CPU can run --------------------------------------------------


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    seeded_weights.write("nemotron-3.5", "tiny-moe", folder, 0)
    return Training("nemotron-3.5", folder, Contract())


def asked():
    draw = torch.Generator().manual_seed(3)
    return [{"prompt": torch.randint(512, (p,), generator=draw).tolist(), "tokens": torch.randint(512, (8,), generator=draw).tolist()}
            for p in (1, 15, 33, 70)]


def bits(arrays):
    return arrays["logprob"].view(torch.int32)


def test_forward_with_experts_equals_transformers_own(moe, monkeypatch):
    own, answer = moe.forward(asked(), Forward())
    untouched = moe.logits
    monkeypatch.setattr(moe, "logits", lambda ids, layout: untouched(ids, layout, lambda site, rows: None))
    ours, again = moe.forward(asked(), Forward())
    # the gradients that meet at a mixer's input are added in another order
    assert torch.equal(bits(own), bits(ours)) and answer == pytest.approx(again, rel=1e-5)


@pytest.mark.parametrize("bound", [{}, {"router": "reference", "moe_experts": "reference", "attention": "exact"}])
def test_recomputing_layers_changes_no_bit(moe, bound):
    moe.bindings.bind(Contract(training=bound))
    kept, answer = moe.forward(asked(), Forward("packed" if bound else "padded"))
    moe.checkpoint_layers(True)
    try:
        recomputed, again = moe.forward(asked(), Forward("packed" if bound else "padded"))
    finally:
        moe.checkpoint_layers(False)
        moe.bindings.bind(Contract())
    assert torch.equal(bits(kept), bits(recomputed)) and answer == again and answer["grad_norm"] > 0


def test_experts_are_spread_and_the_distribution_is_peaked(moe):
    from consistency.trace import Recorder

    requests = [{"prompt": r["prompt"], "tokens": r["tokens"] * 20} for r in asked()]
    recorder = Recorder([len(r["prompt"]) + len(r["tokens"]) for r in requests], ["001.router", "003.router"])
    moe.trace(requests, recorder, Forward())
    for rows in recorder.dumps.values():
        counts = torch.bincount(rows[:, 3:].long().flatten(), minlength=16)
        assert counts.min() > 0 and counts.max() < 4 * counts.float().mean()
    assert [s["role"] for s in recorder.site_list() if s["layer"] == 1] == [
        "input_residual", "input_norm", "up_proj", "relu_squared", "down_proj", "router", "experts", "moe_sum"]


def test_exact_experts_are_refused_on_the_cpu(moe):
    with pytest.raises(ContractError, match="operator 'router' has no implementation 'exact'"):
        moe.bindings.bind(Contract(training={"router": "exact"}))


def test_reload_writes_another_seed_in_place(moe, tmp_path):
    before, pointers = training_fingerprints(moe.model), [p.data_ptr() for p in moe.model.parameters()]
    seeded_weights.write("nemotron-3.5", "tiny-moe", tmp_path, 1)
    moe.reload(tmp_path)
    other = training_fingerprints(moe.model)
    moe.reload(None)
    assert all(other[name] != before[name] for name in before)
    assert training_fingerprints(moe.model) == before and [p.data_ptr() for p in moe.model.parameters()] == pointers


# ---- vLLM ---------------------------------------------------------------------------------------------------------------

ENGINE = """
import json, sys
from pathlib import Path
from consistency.engines.environment import prepare
prepare(1)
from consistency.engines import seeded_weights
seeded_weights.register_loader()
from vllm import LLM
from consistency.engines.weights import rollout_fingerprints
first, second = sys.argv[1:]
llm = LLM(first, load_format=seeded_weights.FORMAT, enforce_eager=True, skip_tokenizer_init=True, max_model_len=256, enable_prefix_caching=False)
model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
found = [rollout_fingerprints(model)]
llm.collective_rpc("reload_weights", kwargs={"weights_path": second})
found.append(rollout_fingerprints(model))
print("FOUND" + json.dumps(found))
"""


@pytest.mark.engine
def test_vllm_loads_and_reloads_the_bits_of_the_training_side(tmp_path):
    folders = [tmp_path / str(seed) for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        seeded_weights.write("nemotron-3.5", "tiny", folder, seed)
    done = subprocess.run([sys.executable, "-c", ENGINE, *map(str, folders)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.partition("FOUND")[2])
    want = [training_fingerprints(seeded_weights.build(folder, torch.bfloat16, "cpu")) for folder in folders]
    assert found == want and want[0] != want[1]

import json
import time
from pathlib import Path

import numpy as np
import pytest

from agent import arrays
from agent.checkpoint import seeded
from agent.errors import UserError
from agent.session import Answer
from agent.tools import evidence
from agent.tools.localize import LocalizeRequest, localize
from agent.tools.repro import ReproRequest, check_repros, make_repro
from agent.tools.semantics import explain_logprobs
from agent.tools.traces import LOGPROB, Run, Trace, compare
from agent.tools.weights import moved_checkpoint
from consistency.contract import Contract
from consistency.models.catalog import FAMILIES
from consistency.repro.calls import describe

LENGTHS = [4, 3]
SITES = [{"key": "embedding", "layer": -1, "operator": "embedding", "role": "embedding"},
         {"key": "000.o_proj", "layer": 0, "operator": "linear", "role": "o_proj"},
         {"key": "000.attention", "layer": 0, "operator": "attention", "role": "attention"},
         {"key": "logits", "layer": 1_000_000, "operator": "linear", "role": "logits"}]


def traced(requests=(0, 1), changed=(), absent=(), engine="rollout", steps=None, logprob=None):
    """A trace of two requests of 4 and 3 tokens, the last token of each sampled. changed, absent: (site, request, position)."""
    rows = [(i, r, p) for i, r in enumerate(requests) for p in range(LENGTHS[r])]
    data = {"row_request": np.array([i for i, _, _ in rows], np.int32), "row_position": np.array([p for _, _, p in rows], np.int32),
            "row_step": np.array(steps or [0] * len(rows), np.int32), "row_slot": np.arange(len(rows), dtype=np.int32)}
    for number, site in enumerate(SITES):
        def print_of(r, p, site=site, number=number):
            if (site["key"], r, p) in absent:
                return -1
            return 1000 * number + 10 * r + p + (500 if (site["key"], r, p) in changed else 0)
        data[f"fp/{site['key']}"] = np.array([print_of(r, p) for _, r, p in rows], np.int64)
    data |= {"request": np.arange(len(requests), dtype=np.int32), "position": np.zeros(len(requests), np.int32),
             "token": np.ones(len(requests), np.int64), "logprob": np.array(logprob or [-1.0 - r for r in requests], np.float32)}
    return Trace(Run(engine, "test", tuple(requests)), Answer("trace", {"sites": SITES}, data, 0.0, 0.0), LENGTHS)


def test_the_first_site_is_first_in_execution_not_in_the_list():
    found = compare(traced(), traced(changed={("000.o_proj", 0, 1), ("000.attention", 0, 2), ("logits", 0, 3)}))
    assert found.first.key == "000.attention"
    assert np.flatnonzero(found.unequal).tolist() == [2]
    assert [(c.site, c.rows, c.differing) for c in found.counts][:3] == [("embedding", 7, 0), ("000.attention", 7, 1), ("000.o_proj", 7, 1)]


def test_rows_are_paired_by_request_and_position():
    swapped = traced(requests=(1, 0))
    assert compare(traced(), swapped).first is None
    one = compare(traced(), traced(requests=(1,), changed={("000.attention", 1, 2)}))
    assert one.first.key == "000.attention" and np.flatnonzero(one.unequal).tolist() == [6]
    assert one.counts[0].rows == 3


def test_a_row_that_one_side_did_not_compute_is_not_compared():
    found = compare(traced(absent={("000.attention", 0, 3)}), traced(changed={("000.attention", 0, 3)}))
    assert found.first is None
    assert next(c.rows for c in found.counts if c.site == "000.attention") == 6


def test_log_probabilities_are_the_last_site_and_belong_to_the_row_before_their_token():
    found = compare(traced(), traced(logprob=[-1.0, -2.5]))
    assert found.first.key == LOGPROB and np.flatnonzero(found.unequal).tolist() == [4 + 1]


def test_a_shift_of_the_log_probabilities_is_told_from_a_scale():
    class Fixed:
        def __init__(self, values):
            self.values = np.array(values, np.float32)

        def logprobs(self):
            return self.values

    class Pair:
        def __init__(self, left, right):
            self.left, self.right = Fixed(left), Fixed(right)

    values = [-1.5, -0.25, -3.0, -0.75, -2.0, -1.25]
    assert "off by one" in explain_logprobs(Pair(values, values[1:] + values[:1]))["detail"]
    assert "0.7 times" in explain_logprobs(Pair(values, [0.7 * v for v in values]))["detail"]
    assert explain_logprobs(Pair(values, [*values[:5], -1.5]))["differing"] == 1


def test_calls_are_read_off_the_steps_and_slots_of_a_trace():
    decode = traced(steps=[0, 0, 0, 1, 0, 0, 1])
    assert evidence.spans(decode, "000.attention", 0, LENGTHS) == [[(0, 0, 3), (1, 0, 2)], [(0, 3, 4), (1, 2, 3)]]
    assert evidence.spans(traced(absent={("000.attention", 0, 1)}), "000.attention", 0, LENGTHS) == [[(0, 0, 1), (0, 2, 4), (1, 0, 3)]]


def test_evidence_is_read_back_as_it_was_written(tmp_path):
    written = {"bits": np.array([[0x3F80, 0xBF80]], np.uint16), "wide": np.array([1.5, -2.0], np.float32), "ids": np.arange(3)}
    evidence.save(tmp_path / "x.safetensors", written)
    found = arrays.read(tmp_path / "x.safetensors")
    assert {name: array.tolist() for name, array in found.items()} == {name: array.tolist() for name, array in written.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_of_a_family_has_a_call_whose_inputs_come_before_it(family):
    checkpoint = seeded(family, "tiny")
    config = json.loads((checkpoint / "config.json").read_text())
    layers = config.get("layers_block_type") or ["attention and mlp"] * config["num_hidden_layers"]
    seen = {"tokens"}
    roles = {"linear_attention": ["in_proj", "conv1d", "scan", "gated_norm", "out_proj"], "full_attention": ["qkv_proj", "attention", "o_proj"],
             "mlp": ["up_proj", "relu_squared", "down_proj"],
             "attention and mlp": ["qkv_proj", "q_norm", "k_norm", "rotary", "attention", "o_proj", "post_residual", "post_norm", "gate_up_proj",
                                   "activation", "down_proj"]}
    sites = ["embedding"]
    for number, kind in enumerate(layers):
        sites += [f"{number:03d}.{role}" for role in ["input_residual"] * (number > 0) + ["input_norm", *roles[kind]]]
    for site in [*sites, "final_residual", "final_norm", "logits", "log_softmax"]:
        call = describe(family, config, site)
        assert call is not None, site
        assert {a.site for a in call.arguments.values()} <= seen, site
        seen.add(site)
    assert describe(family, config, LOGPROB) is None


def test_a_moved_checkpoint_differs_in_the_last_bit_of_every_weight(tmp_path):
    source = seeded("qwen3", "tiny")
    assert moved_checkpoint(source, tmp_path / "moved")
    old, new = (arrays.read(folder / "model.safetensors") for folder in (source, tmp_path / "moved"))
    assert old.keys() == new.keys()
    assert all(((old[name] ^ new[name]) == 1).all() for name in old)


def test_bad_requests_are_refused_before_an_engine_starts(tmp_path):
    with pytest.raises(UserError, match="unknown model"):
        localize(LocalizeRequest(family="gpt", checkpoint=tmp_path, contract=Contract(), work_dir=tmp_path))
    with pytest.raises(UserError, match="cross_gpu"):
        localize(LocalizeRequest(family="qwen3", checkpoint=tmp_path, contract=Contract(), work_dir=tmp_path, dimensions=["cross_gpu"]))


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """What localize says about the untouched engines of Nemotron-H."""
    folder = tmp_path_factory.mktemp("localize")
    began = time.monotonic()
    report = localize(LocalizeRequest(family="nemotron-3.5", checkpoint=seeded("nemotron-3.5", "tiny"), contract=Contract(), work_dir=folder))
    assert report.seconds <= time.monotonic() - began
    return report


@pytest.mark.engine
def test_stock_engines_differ_where_their_formulas_do(stock):
    first = {d.dimension: d for d in stock.divergences if d.order == 0}
    assert "determinism" in stock.exact_dimensions
    # transformers' attention depends on the batch in a handful of elements; whether these requests hit one is a matter of the processor.
    assert first.get("batch") is None or (first["batch"].operator, first["batch"].cause) == ("attention", "reduction order")
    assert (first["phase"].operator, first["phase"].site, first["phase"].cause) == ("causal_conv1d", "000.conv1d", "extra rounding")
    assert (first["engine"].operator, first["engine"].site, first["engine"].cause) == ("rms_norm", "000.input_norm", "extra rounding")
    assert first["engine"].deviating == ["training"] and first["phase"].deviating == ["rollout"]
    assert all(d.confirmed and d.substituted_with == "exact" for d in stock.divergences)
    assert all(d.differing > 0 and d.elements >= d.differing and d.max_abs > 0 and d.max_ulps > 0 for d in stock.divergences)


@pytest.mark.engine
def test_the_operators_behind_the_first_come_in_order_of_execution_until_all_is_equal(stock):
    chain = [d for d in stock.divergences if d.dimension == "engine"]
    assert [d.operator for d in chain] == ["rms_norm", "causal_conv1d", "mamba2_scan", "attention"]
    assert [d.next_site for d in chain] == [*(d.site for d in chain[1:]), None]


@pytest.mark.engine
def test_every_probe_was_answered_and_the_operator_alone_gives_the_traced_rows(stock):
    for divergence in stock.divergences:
        assert {p.name for p in divergence.probes} == {"as traced", "same input twice", "row alone"}
        assert all(p.equal for p in divergence.probes if p.name != "row alone"), divergence.site


@pytest.mark.engine
def test_repros_of_stock_differ_and_are_fixed_by_the_exact_contract(stock, tmp_path):
    made = [make_repro(ReproRequest(divergence=d, directory=tmp_path / str(i), check=False)) for i, d in enumerate(stock.divergences)]
    assert all(report.reproduced for report in made), [report.reason for report in made]
    folders = [report.directory for report in made]
    assert [(1, report.expected_line) for report in made] == check_repros(folders)
    exact = Contract(*(dict.fromkeys(FAMILIES["nemotron-3.5"].operators, "exact") for _ in range(2)))
    assert [code for code, _ in check_repros(folders, exact)] == [0] * len(made)
    assert all(report.size["rows"] <= 12 for report in made)
    for divergence in stock.divergences:
        assert Path(divergence.evidence).is_dir()

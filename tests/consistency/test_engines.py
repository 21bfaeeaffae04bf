"""Both real engines side by side: the jobs, their traces, schedules and weight steps."""

import random

import numpy as np
import pytest

from agent.errors import JobFailed, StepFailed
from agent.session import Job, Session
from consistency.contract import Contract
from consistency.models.catalog import FAMILIES

pytestmark = pytest.mark.engine
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 129, 200)


def exact(family):
    names = dict.fromkeys(FAMILIES[family].operators, "exact")
    return Contract(names, names)


class Pair:
    """A rollout and a training session on one checkpoint, and requests the rollout sampled."""

    def __init__(self, family, checkpoint, folder):
        self.family = family
        self.rollout = Session(Job("rollout", family, checkpoint, Contract()), folder / "rollout")
        self.training = Session(Job("training", family, checkpoint, Contract()), folder / "training")
        draw = random.Random(11)
        prompts = [{"prompt": [draw.randrange(512) for _ in range(n)]} for n in LENGTHS]
        sampled = self.rollout.run({"kind": "generate", "requests": prompts, "max_tokens": 12, "seed": 5, "temperature": 1.0}).arrays
        self.requests = [{**p, "tokens": sampled["token"][sampled["request"] == i].tolist()} for i, p in enumerate(prompts)]

    def bind(self, contract):
        for session in (self.rollout, self.training):
            session.run({"kind": "bind", "contract": contract.as_dict()})

    def replay(self, **schedule):
        return self.rollout.run({"kind": "replay", "requests": self.requests, **schedule})

    def forward(self, **how):
        return self.training.run({"kind": "forward", "requests": self.requests, **how})


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory):
    pair = Pair(*model, tmp_path_factory.mktemp("jobs"))
    yield pair
    pair.rollout.close()
    pair.training.close()


@pytest.fixture(autouse=True)
def bound_exact(pair):
    pair.bind(exact(pair.family))


def differing(a, b):
    assert np.array_equal(a["token"], b["token"]) and np.array_equal(a["request"], b["request"]) and len(a["token"])
    return int((a["logprob"].view(np.int32) != b["logprob"].view(np.int32)).sum())


def test_stock_engines_differ_and_the_exact_contract_makes_them_equal(pair):
    assert differing(pair.replay().arrays, pair.forward().arrays) == 0
    pair.bind(Contract())
    assert differing(pair.replay().arrays, pair.forward().arrays) > 0


def test_every_site_is_equal_in_both_phases_and_both_engines(pair):
    traces = [pair.rollout.run({"kind": "trace", "mode": mode, "requests": pair.requests}) for mode in ("decode", "prefill")]
    traces.append(pair.training.run({"kind": "trace", "requests": pair.requests}))
    keys = [[s["key"] for s in t.data["sites"]] for t in traces]
    assert keys[0] == keys[1] == keys[2] and len(keys[0]) >= 38
    assert {s["operator"] for s in traces[0].data["sites"]} == set(FAMILIES[pair.family].operators)
    for key in keys[0]:
        prints = [t.arrays["fp/" + key] for t in traces]
        for other in prints[1:]:
            both = (prints[0] >= 0) & (other >= 0)
            assert both.sum() >= len(LENGTHS) * 12 - len(LENGTHS) and np.array_equal(prints[0][both], other[both]), key
    assert differing(traces[0].arrays, pair.replay().arrays) == 0


def test_trace_names_the_first_operator_that_was_changed(pair, tmp_path):
    contract = exact(pair.family)
    before = pair.training.run({"kind": "trace", "requests": pair.requests})
    changed = contract.with_("linear", "reference", "training").with_("attention", "stock", "training")
    pair.training.run({"kind": "bind", "contract": changed.as_dict()})
    after = pair.training.run({"kind": "trace", "requests": pair.requests})
    first = next(s for s in after.data["sites"] if not np.array_equal(before.arrays["fp/" + s["key"]], after.arrays["fp/" + s["key"]]))
    assert first["operator"] == "attention"


def test_dumped_rows_have_the_fingerprints_of_the_trace(pair):
    key = "000.input_norm"
    trace = pair.training.run({"kind": "trace", "requests": pair.requests, "dump": [key]})
    assert trace.arrays["dump/" + key].shape == (sum(n + 12 for n in LENGTHS), 128)
    assert (trace.arrays["fp/" + key] >= 0).all()


SCHEDULES = [
    {"groups": [[i] for i in range(len(LENGTHS))]}, {"groups": [list(range(7)), list(range(7, 12))]},
    {"chunk": 7}, {"chunk": 16}, {"chunk": 32}, {"chunk": 33}, {"preempt_every": 5}, {"stagger": 3},
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_schedule_changes_a_bit(pair, schedule):
    answer = pair.replay(**schedule)
    assert differing(pair.replay().arrays, answer.arrays) == 0
    if "preempt_every" in schedule:
        assert answer.data["preemptions"] > 0
    if "chunk" in schedule:
        assert answer.data["prefill_chunks"] > len(LENGTHS)


def test_scoring_by_prefill_equals_decode(pair):
    assert differing(pair.replay().arrays, pair.rollout.run({"kind": "score", "requests": pair.requests, "chunk": 50}).arrays) == 0


def test_warm_prefix_cache(pair):
    if "prefix_cache" in FAMILIES[pair.family].cannot:
        pytest.skip(FAMILIES[pair.family].cannot["prefix_cache"])
    warm = pair.replay(prefix_cache="warm")
    assert warm.data["cached_tokens"] >= 128
    assert differing(pair.replay().arrays, warm.arrays) == 0


@pytest.mark.parametrize("side", ["rollout", "training"])
def test_one_ulp_in_one_weight_is_seen_and_a_reload_takes_it_back(pair, side):
    session = getattr(pair, side)
    run = pair.replay if side == "rollout" else pair.forward
    before, prints = run().arrays, session.run({"kind": "weights"}).data["weights"]
    moved = session.run({"kind": "perturb", "ulps": 1}).data
    assert moved["before"] != moved["after"]
    assert differing(before, run().arrays) > 0
    changed = session.run({"kind": "weights"}).data["weights"]
    assert [n for n in prints if prints[n] != changed[n]] == [moved["parameter"]]
    session.run({"kind": "reload"})
    assert differing(before, run().arrays) == 0
    assert session.run({"kind": "weights"}).data["weights"] == prints


def test_both_engines_hold_the_same_weights(pair):
    a, b = (s.run({"kind": "weights"}).data["weights"] for s in (pair.rollout, pair.training))
    assert a == b and len(a) >= 20


def test_bad_steps_are_one_line_and_the_job_goes_on(pair):
    with pytest.raises(StepFailed, match="unknown operator 'softmax'"):
        pair.rollout.run({"kind": "bind", "contract": {"rollout": {"softmax": "exact"}}})
    with pytest.raises(StepFailed, match="no parameter 'nothing'"):
        pair.training.run({"kind": "perturb", "parameter": "nothing", "ulps": 1})
    assert differing(pair.replay().arrays, pair.forward().arrays) == 0


def test_an_unusable_contract_stops_the_start(model, tmp_path):
    job = Job("training", *model, Contract(training={"linear": "fast"}))
    with Session(job, tmp_path / "job") as session, pytest.raises(JobFailed, match="no implementation 'fast'"):
        session.wait(session.start)

"""The oracle on synthetic arrays: what counts as equal, and each rule that makes a verdict void."""

import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from agent import oracle
from agent.arrays import BadArrays, LogProbs, read, widen
from agent.oracle import Timed, arrange, compare, decide, difference
from agent.rules import Objection
from agent.verdict import ConditionResult, ControlResult
from consistency.conditions import Condition, Probe

SAMPLED = {0: [11, 12, 13], 1: [21], 2: [31, 32]}


def logprobs(order=None, **changed):
    """Log-probabilities of SAMPLED, spread enough not to look flat."""
    rows = [(r, p, t) for r, tokens in SAMPLED.items() for p, t in enumerate(tokens)]
    request, position, token = (np.array(column) for column in zip(*rows, strict=True))
    arrays = {"request": request.astype(np.int32), "position": position.astype(np.int32), "token": token.astype(np.int64),
              "logprob": np.linspace(-3, -0.25, len(rows), dtype=np.float32)}
    if order is not None:
        arrays = {name: values[order] for name, values in arrays.items()}
    return LogProbs.from_arrays(arrays | changed)


def table(values=None):
    found, objections = arrange(logprobs() if values is None else logprobs(logprob=np.asarray(values, np.float32)), SAMPLED)
    assert found is not None and not objections
    return found


def test_the_order_of_rows_does_not_matter():
    shuffled, _ = arrange(logprobs(order=[5, 0, 3, 1, 4, 2]), SAMPLED)
    assert shuffled is not None
    assert compare(table(), shuffled) == (6, 0)


def test_one_ulp_is_a_mismatch():
    moved = table().logprob.copy()
    moved[3] = np.nextafter(moved[3], np.float32(0))
    assert compare(table(), table(moved)) == (6, 1)


def test_equality_is_of_bits():
    zero = np.zeros(6, np.float32)
    assert compare(table(zero), table(-zero)) == (6, 6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_equal_bits_that_are_not_finite_are_mismatches(value):
    values = table().logprob.copy()
    values[2] = value
    assert compare(table(values), table(values)) == (6, 1)


def test_only_shared_keys_are_compared():
    part, _ = arrange(LogProbs(np.array([0, 0], np.int32), np.array([0, 1], np.int32), np.array([31, 32]), np.array([-9, -9], np.float32)),
                      {0: [31, 32]})
    assert part is not None
    assert compare(table(), part.renumber([2])) == (2, 2)
    assert compare(table(), table().of([0])) == (3, 0)
    assert compare(table(), table().of([])) == (0, 0)


def test_a_step_may_list_the_requests_in_any_order():
    """The step listed 2, 0, 1 of SAMPLED as its requests 0, 1, 2."""
    listed = {0: SAMPLED[2], 1: SAMPLED[0], 2: SAMPLED[1]}
    values = dict(zip(table().key.tolist(), table().logprob.tolist(), strict=True))
    request = np.array([0, 0, 1, 1, 1, 2], np.int32)
    position = np.array([0, 1, 0, 1, 2, 0], np.int32)
    token = np.array([t for tokens in listed.values() for t in tokens], np.int64)
    logprob = np.array([values[(original << 32) + p] for original, p in zip([2, 2, 0, 0, 0, 1], position.tolist(), strict=True)], np.float32)
    found, objections = arrange(LogProbs(request, position, token, logprob), listed)
    assert found is not None and not objections
    assert compare(table(), found.renumber([2, 0, 1])) == (6, 0)
    assert compare(table(), found.renumber([0, 1, 2]))[1] > 0


def test_difference_by_hand():
    rollout, training = table([-1, -1, -1, -1, -1, -1]), table([-1, -0.5, -1, -1, -1, np.nan])
    found = difference(rollout, training)
    assert found.mismatches == 2
    assert found.max_abs == 0.5
    assert found.k3 == pytest.approx((math.exp(0.5) - 1.5) / 5)


def test_k3_of_tiny_differences_is_not_lost():
    """In fp32, exp(r) - r - 1 is 0 or negative for most r below 1e-4."""
    training = table().logprob + np.float32(2e-5)
    assert 0 < difference(table(), table(training)).k3 < 1e-9


@pytest.mark.parametrize(("rows", "objection"), [
    ([0, 1, 2, 3, 4], "1 missing tokens"),
    ([0, 1, 2, 3, 4, 5, 5], "1 duplicated tokens"),
    ([], "6 missing tokens"),
])
def test_missing_and_duplicated_keys(rows, objection):
    assert arrange(logprobs(order=rows), SAMPLED) == (None, [objection])


@pytest.mark.parametrize(("name", "value"), [("request", 7), ("request", -1), ("position", 3), ("position", -1)])
def test_unknown_keys(name, value):
    changed = getattr(logprobs(), name).copy()
    changed[2] = value
    found, objections = arrange(logprobs(**{name: changed}), SAMPLED)
    assert found is None
    assert objections == ["1 missing tokens", "1 unknown tokens"]


def test_other_tokens():
    token = logprobs().token.copy()
    token[4] += 1
    assert arrange(logprobs(token=token), SAMPLED) == (None, ["1 log-probabilities are of tokens that were not sampled"])


def test_malformed_arrays():
    good = {"request": np.zeros(2, np.int32), "position": np.zeros(2, np.int32), "token": np.zeros(2, np.int64), "logprob": np.zeros(2, np.float32)}
    LogProbs.from_arrays(good)
    for name, bad in (("logprob", np.zeros(2, np.float64)), ("logprob", np.zeros(3, np.float32)), ("token", np.zeros((2, 1), np.int64))):
        with pytest.raises(BadArrays, match=name):
            LogProbs.from_arrays(good | {name: bad})
    del good["position"]
    with pytest.raises(BadArrays, match="'position' is missing"):
        LogProbs.from_arrays(good)


def test_reading_keeps_bits_and_notices_truncation(tmp_path):
    values = np.array([-1.1754942e-38, -0.0, -7.25, np.nan], np.float32)
    save_file({"logprob": values}, tmp_path / "a.safetensors")
    np.testing.assert_array_equal(read(tmp_path / "a.safetensors")["logprob"].view(np.int32), values.view(np.int32))
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-1])
    for name in ("b", "absent"):
        with pytest.raises(BadArrays, match=f"{name}.safetensors cannot be read"):
            read(tmp_path / f"{name}.safetensors")


def test_bfloat16_is_widened_exactly():
    values = np.array([1.0, -2.5, 3.140625, 1e-30, np.inf], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(widen(bits)[[0, 1, 2, 4]], values[[0, 1, 2, 4]])


def test_flat_log_probabilities():
    uniform = -math.log(512)
    assert oracle.flat(table(), 512) == []
    assert oracle.flat(table([-2.0] * 6), 512) == ["all log-probabilities are equal"]
    assert "flat distribution over 512" in oracle.flat(table(uniform + np.linspace(-0.05, 0.05, 6)), 512)[0]
    assert oracle.flat(table(uniform + np.linspace(0.5, 1.5, 6)), 512) == []


PROBE = Probe("rollout", "replay")


@pytest.mark.parametrize(("counter", "more_than", "counters", "fine"), [
    ("preemptions", "zero", {"preemptions": 1}, True),
    ("preemptions", "zero", {"preemptions": 0}, False),
    ("preemptions", "zero", {}, False),
    ("preemptions", "zero", {"preemptions": "many"}, False),
    ("prefill_chunks", "requests", {"prefill_chunks": 6}, False),
    ("prefill_chunks", "requests", {"prefill_chunks": 7}, True),
    (None, "zero", {}, True),
])
def test_counters_show_whether_a_condition_took_place(counter, more_than, counters, fine):
    condition = Condition("c", "phase", PROBE, PROBE, happened=counter, more_than=more_than)
    assert (oracle.took_place(condition, counters, requests=6) is None) is fine


def test_accuracy_allows_twice_the_distance_of_stock():
    reference = table([-1, -2, -1, -2, -1, -2])

    def at(distance):
        return table(reference.logprob + np.float32(distance) * np.array([1, -1, 1, -1, 1, -1], np.float32))

    assert oracle.accuracy(reference, at(0.01), at(0.0199)).ok
    assert not oracle.accuracy(reference, at(0.01), at(0.0201)).ok
    assert not oracle.accuracy(reference, at(0.01), table([np.nan, -2, -1, -2, -1, -2])).ok
    assert not oracle.accuracy(reference, at(0.01), at(0).of([])).ok


def timed(seconds, tokens=100):
    return Timed(tokens, seconds)


def test_throughput_is_the_median_of_pairwise_ratios():
    """The machine halves its speed after the second pair; ratios of neighbours do not notice."""
    pairs = [(timed(1.0), timed(1.25)), (timed(1.0), timed(1.25)), (timed(2.0), timed(2.5)), (timed(2.0), timed(2.0)), (timed(2.0), timed(2.5))]
    result, objections = oracle.throughput(pairs, 100)
    assert result is not None and not objections
    assert result.ratio == pytest.approx(0.8)
    assert result.spread == pytest.approx((0.8, 1.0))
    assert result.stock == pytest.approx(50)


def test_a_run_that_made_fewer_tokens_is_not_timed():
    result, objections = oracle.throughput([(timed(1.0), timed(1.0, tokens=99))], 100)
    assert result is None
    assert objections == ["throughput: a candidate run made 99 tokens instead of 100"]


def test_no_pairs_is_not_a_ratio():
    assert oracle.throughput([], 100) == (None, ["throughput: no pairs were timed"])


def test_configurations_are_compared_field_by_field():
    stock = {"plugin": False, "graphs": True, "scheduler": {"max_num_seqs": 64, "chunked": True}, "dtype": "bfloat16"}
    same = {**stock, "plugin": True}
    assert oracle.configuration_objections(stock, same, ("plugin",)) == []
    other = {**same, "graphs": False, "scheduler": {"max_num_seqs": 8}}
    found = [line.removeprefix("the engines are configured differently: ") for line in oracle.configuration_objections(stock, other, ("plugin",))]
    assert found == ["graphs: True -> False", "scheduler.chunked: True -> absent", "scheduler.max_num_seqs: 64 -> 8"]


@pytest.mark.parametrize("absent", [{}, None])
def test_a_configuration_that_nobody_reported_is_not_equal(absent):
    assert oracle.configuration_objections({"graphs": True}, absent) and oracle.configuration_objections(absent, absent)


def condition(**changed):
    return ConditionResult(**{"name": "c", "dimension": "batch", "ran": True, "tokens": 100, "mismatches": 0, **changed})


CONTROL = ControlResult(name="one ulp", ran=True, tokens=10, mismatches=3)


def verdict(conditions=None, controls=(CONTROL,), **changed):
    options = {"tokens": 100, "least_tokens": 100, "void": [], "accuracy": None, **changed}
    return decide([condition()] if conditions is None else conditions, list(controls), **options)


def test_a_clean_verdict_is_exact():
    found = verdict()
    assert found.exact and not found.void and found.reasons == []


def test_one_mismatch_is_not_exact_and_not_void():
    found = verdict([condition(), condition(mismatches=1)])
    assert (found.exact, found.void, found.mismatches, found.reasons) == (False, False, 1, [])


@pytest.mark.parametrize(("bad", "reason"), [
    (condition(ran=False, tokens=0, reason="no kernel"), "did not run: no kernel"),
    (condition(tokens=0), "compared no token"),
])
def test_a_condition_without_a_result_is_not_exact(bad, reason):
    found = verdict([condition(), bad])
    assert not found.exact and not found.void
    assert reason in found.reasons[0]


def test_a_condition_that_the_family_cannot_have_is_excused_but_not_alone():
    excused = condition(ran=False, tokens=0, excused=True, reason="no such cache")
    assert verdict([condition(), excused]).exact
    assert not verdict([excused]).exact
    assert not verdict([]).exact


@pytest.mark.parametrize("changed", [
    {"controls": ()},
    {"controls": [CONTROL, ControlResult(name="deaf", ran=True, tokens=10, mismatches=0)]},
    {"controls": [ControlResult(name="absent", ran=False, reason="step failed")]},
    {"tokens": 99},
    {"tokens": 0},
    {"void": [Objection("incomplete_answer", "score: 3 missing tokens")]},
])
def test_void(changed):
    found = verdict(**changed)
    assert found.void and not found.exact and found.reasons


def test_poor_accuracy_is_not_exact():
    poor = oracle.accuracy(table(), table(table().logprob + np.float32(0.01)), table(table().logprob + np.float32(0.1)))
    found = verdict(accuracy=poor)
    assert not found.exact and not found.void and "nats from the reference" in found.reasons[0]

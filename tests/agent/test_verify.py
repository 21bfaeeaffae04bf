"""`verify` from the request to the report, against real processes that run a toy model."""

import json
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from fake_job import FakeSandbox

from agent import plan
from agent.checkpoint import seeded
from agent.draw import Draw
from agent.errors import JobFailed, UserError
from agent.model_facts import ModelFacts, read_facts
from agent.tools.verify import TIMED_CONDITION, VerifyRequest, verify
from consistency.conditions import MATRICES, REQUIRED, Probe, RequestSet
from consistency.contract import Contract
from consistency.models.catalog import FAMILIES

EXACT = Contract({"linear": "exact"}, {"linear": "exact"})


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512, "eos_token_id": 2}))
    return folder


def run(checkpoint, *faults, level="quick", family="qwen3", sandbox=None, **changed):
    progress = changed.pop("progress", lambda _: None)
    request = VerifyRequest(**{"family": family, "checkpoint": checkpoint, "contract": EXACT, "level": level,
                               "directory": checkpoint.parent / "evidence", **changed})
    return verify(request, progress, sandbox or FakeSandbox(*faults))


def results(report):
    return {c.name: c for c in report.verdict.conditions}


def children():
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def test_quick_exact(checkpoint):
    report = run(checkpoint)
    assert report.verdict.exact and not report.verdict.void and report.verdict.reasons == []
    assert report.verdict.tokens == 17 * 24
    assert all(c.ran and c.tokens > 0 and c.mismatches == 0 for c in report.verdict.conditions)
    assert report.baseline is not None and report.baseline.mismatches == 0
    assert all(c.mismatches > 0 for c in report.controls)
    assert report.throughput is None and not report.fast_enough
    assert not children()


def test_full_exact(checkpoint):
    sandbox, seen = FakeSandbox(), []
    report = run(checkpoint, sandbox=sandbox, level="full", progress=seen.append)
    assert report.verdict.exact, report.verdict.reasons
    assert report.verdict.tokens >= 2000
    assert [c.name for c in report.verdict.conditions] == [*(c.name for c in REQUIRED["tiny"]), TIMED_CONDITION]
    assert all(c.ran and c.tokens > 0 for c in report.verdict.conditions)
    assert report.throughput is not None and 0.5 < report.throughput.ratio < 2
    low, high = report.throughput.spread
    assert low <= report.throughput.ratio <= high
    assert Counter(sandbox.started) == Counter(["rollout", "training", "stock-rollout", "second-rollout", "reference"])
    assert [s.phase for s in seen if s.phase != seen[0].phase][-1] == "done"
    assert seen[-1].done == seen[-1].conditions == len(REQUIRED["tiny"])
    assert seen[-1].ratio == report.throughput.ratio
    assert not children()


def test_the_report_is_kept_with_everything_raw(checkpoint):
    report = run(checkpoint, level="full")
    folder = checkpoint.parent / "evidence"
    assert json.loads((folder / "report.json").read_text()) == report.model_dump(mode="json")
    assert {"exact", "void", "tokens", "mismatches", "conditions"} <= report.verdict.model_dump().keys()
    assert {"name", "dimension", "ran", "tokens", "mismatches", "reason"} <= report.verdict.conditions[0].model_dump().keys()
    assert {p.name for p in (folder / "jobs").iterdir()} == {"rollout", "training", "stock-rollout", "second-rollout", "reference"}
    assert list((folder / "jobs" / "training" / "out").glob("*.safetensors"))
    assert (folder / "jobs" / "rollout" / "log").exists()
    assert report.environment["sandbox"]["isolation"] == "process"
    assert len(report.harness) == 64
    assert report.environment["stock rollout"]["engine"]["graphs"] is True
    assert not list(folder.rglob("*.draft"))


def test_candidate_code_stays_out_of_the_stock_and_reference_processes(checkpoint):
    run(checkpoint, level="full", kernels=checkpoint)
    jobs = {p.name: json.loads((p / "job.json").read_text()) for p in (checkpoint.parent / "evidence" / "jobs").iterdir()}
    for name in ("rollout", "second-rollout", "training"):
        assert jobs[name]["contract"] == EXACT.as_dict() and jobs[name]["kernels"] == str(checkpoint)
    assert jobs["stock-rollout"]["contract"] == {"rollout": {}, "training": {}}
    assert jobs["stock-rollout"]["engine"]["plugin"] is False and jobs["rollout"]["engine"]["plugin"] is True
    assert set(jobs["reference"]["contract"]["training"].values()) == {"reference"}
    assert jobs["stock-rollout"]["kernels"] is None and jobs["reference"]["kernels"] is None
    shared = {k: v for k, v in jobs["stock-rollout"]["engine"].items() if k != "plugin"}
    assert shared.items() <= jobs["second-rollout"]["engine"].items()


def test_prompts_are_fresh_unless_a_seed_is_given(checkpoint):
    def prompts(name, **options):
        run(checkpoint, directory=checkpoint.parent / name, **options)
        return (checkpoint.parent / name / "prompts.json").read_text()

    first = prompts("a")
    assert prompts("b") != first
    assert prompts("c", seed="s") == prompts("d", seed="s") != first


@pytest.mark.parametrize(("fault", "name"), [
    ({"in": "training", "kind": "forward", "fault": "ulp"}, "rollout against the loss"),
    ({"in": "rollout", "kind": "score", "fault": "ulp"}, "decode against prefill"),
    ({"in": "training", "kind": "forward", "fault": "nan"}, "rollout against the loss"),
])
def test_a_difference_is_counted_where_it_is(checkpoint, fault, name):
    report = run(checkpoint, fault)
    assert not report.verdict.exact and not report.verdict.void
    assert results(report)[name].mismatches == 1


def test_a_difference_in_a_new_process(checkpoint):
    report = run(checkpoint, {"in": "second-rollout", "kind": "replay", "fault": "ulp"}, level="full")
    assert {name for name, c in results(report).items() if c.mismatches} == {"new process"}
    assert not report.verdict.exact and not report.verdict.void


@pytest.mark.parametrize("process", ["rollout", "training"])
def test_a_reload_without_effect_is_found(checkpoint, process):
    report = run(checkpoint, {"in": process, "kind": "reload", "fault": "deaf"}, level="full")
    timed = {TIMED_CONDITION} if process == "training" else set()  # training scores the timed runs with the weights it has by then
    assert {name for name, c in results(report).items() if c.mismatches} == {f"{process} after a reload", *timed}


@pytest.mark.parametrize(("fault", "reason"), [
    ({"in": "training", "kind": "forward", "fault": "missing"}, "training, forward: 1 missing tokens"),
    ({"in": "rollout", "kind": "score", "fault": "duplicate"}, "rollout, score: 1 duplicated tokens"),
    ({"in": "training", "kind": "forward", "fault": "other tokens"}, "1 log-probabilities are of tokens that were not sampled"),
    ({"in": "", "kind": "forward", "fault": "uniform"}, "all log-probabilities are equal"),
    ({"in": "training", "kind": "perturb", "fault": "deaf"}, "negative control 'one ulp in training'"),
    ({"in": "rollout", "kind": "perturb", "fault": "deaf"}, "negative control 'one ulp in the rollout'"),
    ({"in": "training", "kind": "perturb", "fault": "fail"}, "negative control 'one ulp in training' did not run: "),
    ({"in": "rollout", "kind": "replay", "fault": "set", "fields": {"preemptions": 0}}, "'preemption and resume': it did not take place"),
    ({"in": "rollout", "kind": "replay", "fault": "set", "fields": {"prefill_chunks": 6}}, "'chunked prefill off the grid': it did not take place"),
])
def test_void(checkpoint, fault, reason):
    report = run(checkpoint, fault)
    assert report.verdict.void and not report.verdict.exact
    assert any(reason in line for line in report.verdict.reasons), report.verdict.reasons


@pytest.mark.parametrize(("fault", "reason"), [
    ({"in": "second-rollout", "kind": "start", "fault": "set", "fields": {"engine": {"graphs": False, "scheduler": {"max_num_seqs": 8}}}},
     "the engines are configured differently: graphs: True -> False"),
    ({"in": "second-rollout", "kind": "step_config", "fault": "set", "fields": {"engine": {"graphs": False, "scheduler": {"max_num_seqs": 64}}}},
     "the engines are configured differently: graphs: True -> False"),
    ({"in": "second-rollout", "kind": "generate", "fault": "missing"}, "a candidate run made 1023 tokens instead of 1024"),
    ({"in": "reference", "kind": "forward", "fault": "fail"}, "accuracy: the training job failed in 'forward'"),
])
def test_void_in_a_full_verify(checkpoint, fault, reason):
    report = run(checkpoint, fault, level="full")
    assert report.verdict.void and not report.verdict.exact
    assert any(reason in line for line in report.verdict.reasons), report.verdict.reasons


def test_a_candidate_that_is_exact_but_wrong(checkpoint):
    """Both sides agree, but sit ten times further from the reference than stock does (the noise has one shape, scaled)."""
    report = run(checkpoint, {"in": "stock-rollout", "kind": "replay", "fault": "noise", "nats": 1.1e-2},
                 {"in": "reference", "kind": "forward", "fault": "noise", "nats": 1e-2}, level="full")
    assert report.accuracy is not None
    assert report.accuracy.stock == pytest.approx(1e-3, rel=0.1) and report.accuracy.candidate == pytest.approx(1e-2, rel=0.1)
    assert report.verdict.mismatches == 0
    assert not report.verdict.exact and not report.verdict.void


def test_a_step_that_fails_is_a_condition_that_did_not_run(checkpoint):
    report = run(checkpoint, {"in": "rollout", "kind": "score", "fault": "fail"})
    condition = results(report)["decode against prefill"]
    assert not condition.ran and not condition.excused and "no kernel for this shape" in condition.reason
    assert not report.verdict.exact and not report.verdict.void


def test_a_feature_that_the_family_cannot_have_is_excused(checkpoint):
    report = run(checkpoint, level="full", family="nemotron-3.5")
    condition = results(report)["prefix-cache hit"]
    assert not condition.ran and condition.excused and condition.tokens == 0 and "Mamba2" in condition.reason
    assert report.verdict.exact
    steps = (checkpoint.parent / "evidence" / "jobs" / "rollout" / "steps").iterdir()
    assert not any("warm" in step.read_text() for step in steps)


@pytest.mark.parametrize("process", ["rollout", "training"])
def test_a_dead_engine_ends_the_verify(checkpoint, process):
    kind = "score" if process == "rollout" else "forward"
    with pytest.raises(JobFailed, match=f"the {process} job ended with exit code 13 during '{kind}'") as caught:
        run(checkpoint, {"in": process, "kind": kind, "fault": "die"})
    assert "the engine fell over" in caught.value.log_tail
    assert not children()


def test_a_sample_that_is_too_short_ends_the_verify(checkpoint):
    with pytest.raises(JobFailed, match="request 16 has 23 tokens, 24 of the vocabulary were asked for"):
        run(checkpoint, {"in": "rollout", "kind": "generate", "fault": "missing"})
    assert not children()


def test_an_interrupt_leaves_nothing_behind(checkpoint):
    def stop(progress):
        if progress.phase == "compare":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(checkpoint, {"kind": "reload", "fault": "hang"}, progress=stop)
    assert not children()


def test_control_c_in_a_terminal(checkpoint):
    """SIGINT while the engines hang: the parent ends with KeyboardInterrupt and takes the jobs along."""
    code = textwrap.dedent(f"""
        import pathlib, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_verify import run
        run(pathlib.Path({str(checkpoint)!r}), {{"kind": "forward", "fault": "hang"}}, progress=lambda p: print(p.phase, flush=True))
        """)
    process = psutil.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stdout=-1, stderr=-1, text=True)
    deadline = time.monotonic() + 20
    while "compare" not in process.stdout.readline():
        assert time.monotonic() < deadline
    jobs = process.children(recursive=True)
    assert len(jobs) == 2
    process.send_signal(2)
    _, errors = process.communicate(timeout=10)
    assert "KeyboardInterrupt" in errors
    assert not [job for job in jobs if job.is_running() and job.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(("changed", "message"), [
    ({"family": "qwen33"}, "unknown model 'qwen33'; known: qwen3"),
    ({"scale": "huge"}, "no verification matrix for scale 'huge'"),
])
def test_bad_requests(checkpoint, changed, message):
    with pytest.raises(UserError, match=message):
        run(checkpoint, **changed)


def test_bad_checkpoints_and_used_directories(checkpoint):
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(UserError, match="not the configuration of a language model"):
        run(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        run(checkpoint)
    with pytest.raises(UserError, match="is not empty"):
        run(checkpoint, directory=checkpoint.parent)
    (checkpoint.parent / "file").touch()
    with pytest.raises(UserError, match="cannot be used for the evidence"):
        run(checkpoint, directory=checkpoint.parent / "file" / "evidence")


def test_the_matrix_is_three_way_and_covers_every_dimension_of_one_device():
    for level in ("quick", "full"):
        matrix = MATRICES["tiny", level]
        steps = {(c.left.step, c.right.step) for c in matrix.conditions}
        assert {("generate", "score"), ("generate", "forward")} <= steps
        assert matrix.loss.mode == "train" and matrix.loss.grad is True
        assert {c.process for control in matrix.controls for c in (control.after,)} == {"rollout", "training"}
    assert {c.dimension for c in REQUIRED["tiny"]} == {"determinism", "batch", "phase", "engine"}
    assert len({c.name for c in REQUIRED["tiny"]}) == len(REQUIRED["tiny"])
    assert set(MATRICES["tiny", "quick"].conditions) <= set(REQUIRED["tiny"])


def test_weights_are_moved_after_everything_else_and_restored_last():
    for probes in plan.probes(MATRICES["tiny", "full"], REQUIRED["tiny"]).values():
        states = [probe.weights for probe in probes]
        assert states == sorted(states, key=["loaded", "updated", "reloaded"].index)
        assert len(probes) == len(set(probes))


def test_draw():
    model = ModelFacts(vocabulary=20, special=frozenset({0, 7}), scan_chunk=100)
    wanted = RequestSet(33, 8, (1, 16, -1))
    prompts = Draw(model, "s").prompts("main", wanted)
    assert {len(p.tokens) for p in prompts if p.boundary} == {1, 2, 15, 16, 17, 99, 100, 101}
    assert len(prompts) == 33
    assert {t for p in prompts for t in p.tokens} == set(range(20)) - {0, 7}
    assert prompts == Draw(model, "s").prompts("main", wanted) != Draw(model, "t").prompts("main", wanted)
    assert Draw(model).seed != Draw(model).seed
    assert len(Draw(model, "s").prompts("few", RequestSet(5, 8, (16, 64)))) == 5


def test_facts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "eos_token_id": [3, 4], "pad_token_id": None, "chunk_size": 128}))
    assert read_facts(tmp_path) == ModelFacts(9, frozenset({3, 4}), 128)


@pytest.mark.parametrize("scan", [None, 8, 16, 64, 128, 256, 100])
def test_chunks_lie_on_and_off_the_grid(scan):
    model = ModelFacts(512, frozenset(), scan)
    assert plan.chunk_tokens("on grid", model) % (scan or 64) == 0
    assert plan.chunk_tokens("off grid", model) % (scan or 64) != 0
    assert 0 < plan.chunk_tokens("off grid", model) < plan.chunk_tokens("on grid", model)


def test_groups_cover_every_request_once():
    model = ModelFacts(512, frozenset(), None)
    prompts = Draw(model, "s").prompts("main", RequestSet(17, 8))
    step = plan.scoring_step(Probe("rollout", "replay", together=7), prompts, {i: [1, 2] for i in range(17)}, model)
    assert step["groups"] == [list(range(7)), list(range(7, 14)), [14, 15, 16]]
    assert "chunk" not in step and "layout" not in step


@pytest.mark.engine
@pytest.mark.parametrize("family", FAMILIES)
def test_real_engines(tmp_path, family):
    """The stock engines differ, the exact contract makes them equal, and the control notices one ulp in both cases."""
    def measure(name, contract):
        request = VerifyRequest(family=family, checkpoint=seeded(family, "tiny"), contract=contract, level="quick", directory=tmp_path / name)
        return verify(request)

    exact = dict.fromkeys(FAMILIES[family].operators, "exact")
    stock, candidate = measure("stock", Contract()), measure("exact", Contract(exact, exact))
    for report in (stock, candidate):
        assert not report.verdict.void, report.verdict.reasons
        assert all(control.mismatches > 0 for control in report.controls)
    assert stock.baseline is not None and stock.baseline.mismatches > 0.9 * stock.verdict.tokens and 1e-3 < stock.baseline.max_abs < 1
    assert candidate.verdict.exact, candidate.verdict
    assert not children()

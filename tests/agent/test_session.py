"""The parent's end of the job protocol, against real processes that speak it."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from fake_job import FakeSandbox

from agent.errors import JobFailed, StepFailed
from agent.session import Job, Session
from consistency.contract import Contract
from sandboxes import Limits

REQUESTS = [{"prompt": [1, 2, 3], "tokens": [4, 5]}, {"prompt": [7], "tokens": [8, 9]}]
SCORE = {"kind": "score", "requests": REQUESTS}


def open_session(tmp_path, *faults, engine="rollout", name="job", **options):
    options.setdefault("start_timeout", 20)
    options.setdefault("step_timeout", 20)
    job = Job(engine, "qwen3", tmp_path, Contract(rollout={"linear": "exact"}), settings={"threads": 1})
    return Session(job, tmp_path / name, sandbox=FakeSandbox(*faults), **options)


def gone(session):
    pid = session._handle.pid
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_steps_are_answered_in_order(tmp_path):
    with open_session(tmp_path) as session:
        first = session.run(SCORE)
        second = session.run({"kind": "replay", "requests": REQUESTS, "preempt_every": 1})
    assert session.started["environment"] == {"engine": "rollout"}
    assert first.kind == "score" and second.data["preemptions"] == 3
    np.testing.assert_array_equal(first.arrays["token"], [4, 5, 8, 9])
    assert first.arrays["logprob"].dtype == np.float32
    assert first.wall_seconds >= first.seconds > 0
    assert gone(session)


def test_queued_steps_and_two_sessions_at_once(tmp_path):
    with open_session(tmp_path, name="a") as rollout, open_session(tmp_path, name="b", engine="training") as training:
        slow = {"kind": "generate", "requests": REQUESTS, "max_tokens": 1, "seed": 1}
        tickets = [session.submit(step) for session in (rollout, training) for step in (slow, SCORE)]
        answers = [rollout.wait(t) for t in tickets[:2]] + [training.wait(t) for t in tickets[2:]]
    assert [a.kind for a in answers] == ["generate", "score"] * 2
    np.testing.assert_array_equal(answers[1].arrays["logprob"], answers[3].arrays["logprob"])


def test_a_death_is_reported_with_the_end_of_the_log(tmp_path):
    with pytest.raises(JobFailed, match="ended with exit code 13 during 'score'") as caught, \
            open_session(tmp_path, {"kind": "score", "fault": "die"}) as session:
        session.run(SCORE)
    assert "fatal: the engine fell over" in caught.value.log_tail
    assert "fatal: the engine fell over" in str(caught.value)
    assert gone(session)


def test_a_death_at_the_start(tmp_path):
    with pytest.raises(JobFailed, match="exit code 13 during 'start'"), open_session(tmp_path, {"kind": "start", "fault": "die"}) as session:
        session.run(SCORE)


def test_a_refusal_at_the_start_is_not_a_failed_step(tmp_path):
    with pytest.raises(JobFailed, match="failed in 'start': no kernel") as caught, \
            open_session(tmp_path, {"kind": "start", "fault": "fail"}) as session:
        session.run(SCORE)
    assert not isinstance(caught.value, StepFailed)


def test_a_hang_is_ended(tmp_path):
    begun = time.monotonic()
    with pytest.raises(JobFailed, match="no answer within 0 s during 'score'"), open_session(tmp_path, {"kind": "score", "fault": "hang"}) as session:
        session.wait(session.start)
        session.run(SCORE, timeout=0.4)
    assert time.monotonic() - begun < 10
    assert gone(session)


def test_a_step_does_not_pay_for_the_one_before_it(tmp_path):
    slow = {"kind": "generate", "requests": REQUESTS, "max_tokens": 1, "seed": 1}
    with open_session(tmp_path) as session:
        session.wait(session.start)
        tickets = [session.submit(slow, timeout=0.5) for _ in range(40)]  # 40 x 20 ms queue up behind one another
        assert len([session.wait(ticket) for ticket in tickets]) == 40


def test_the_sandbox_wall_clock(tmp_path):
    with pytest.raises(JobFailed, match="wall clock"), \
            open_session(tmp_path, {"kind": "score", "fault": "hang"}, limits=Limits(wall_seconds=1.0)) as session:
        session.run(SCORE)


def test_a_failed_step_leaves_the_session_usable(tmp_path):
    with open_session(tmp_path, {"kind": "replay", "fault": "fail"}) as session:
        with pytest.raises(StepFailed, match="failed in 'replay': no kernel for this shape"):
            session.run({"kind": "replay", "requests": REQUESTS})
        assert session.run(SCORE).kind == "score"


def test_unreadable_arrays(tmp_path):
    with pytest.raises(JobFailed, match="answer to 'score' cannot be read"), open_session(tmp_path, {"kind": "score", "fault": "garbage"}) as session:
        session.run(SCORE)


def test_an_exception_of_the_caller_ends_the_job_at_once(tmp_path):
    begun = None
    with pytest.raises(KeyboardInterrupt), open_session(tmp_path, {"kind": "score", "fault": "hang"}) as session:
        session.wait(session.start)
        session.submit(SCORE)
        begun = time.monotonic()
        raise KeyboardInterrupt
    assert begun is not None and time.monotonic() - begun < 2
    assert gone(session)


def test_waiting_can_be_interrupted(tmp_path):
    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), open_session(tmp_path, {"kind": "score", "fault": "hang"}) as session:
        session.run(SCORE, on_wait=stop)
    assert gone(session)


@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="needs prctl"))])
def test_a_job_ends_when_its_parent_is_killed(tmp_path, busy):
    owner = textwrap.dedent(f"""
        import os, pathlib, signal, sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_session import SCORE, open_session
        session = open_session(pathlib.Path({str(tmp_path)!r}), {{"kind": "score", "fault": "hang"}})
        session.wait(session.start)
        if {busy}:
            session.submit(SCORE)
            time.sleep(0.3)
        print(session._handle.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    done = subprocess.run([sys.executable, "-c", owner], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    pid = int(done.stdout)
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

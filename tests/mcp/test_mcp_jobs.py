import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mcp_helpers import call, ended, exists, patience, until

from agent.mcp import jobs as jobs_module
from agent.mcp.fakes import ANSWERS
from agent.mcp.jobs import TOKEN, JobError, Jobs
from agent.mcp.processes import Identity, descendants, identify, running, signal_group

PROGRESS_LINE = '@progress {"text": "batch 3", "done": 3, "of": 12}'


def test_a_job_runs_apart_from_who_started_it(jobs, fake, monkeypatch):
    monkeypatch.setenv(TOKEN, "secret-of-the-server")
    fake.behave(log=("loading", "comparing"), seconds=0.3)
    begun = time.monotonic()
    job = jobs.submit(call("--json"))
    assert time.monotonic() - begun < patience(0.1) and job.state == "queued"
    job = until(jobs, job, lambda now: now.state == "running")
    leader = job.record.process
    assert os.getsid(leader.pid) == leader.pid != os.getsid(0) and running(leader)
    assert b"secret-of-the-server" not in Path(f"/proc/{leader.pid}/environ").read_bytes()
    job = ended(jobs, job)
    assert job.state == "completed" and job.record.exit_code == 0 and job.output == ANSWERS["verify"] and job.progress() == "comparing"
    assert job.record.created <= job.record.started <= job.record.ended and 0.3 <= job.seconds < 10
    assert fake.calls == [["verify", "--json"]]


@pytest.mark.parametrize(("log", "told"), [
    ((PROGRESS_LINE, "a last line"), "batch 3 (3 of 12)"),
    (("engine up", "@progress {broken", "@progress [1]"), "engine up"),
    (('@progress {"text": "loading"}',), "loading"),
    ((), "")])
def test_what_a_job_says_about_itself(jobs, fake, log, told):
    fake.behave(log=log)
    assert ended(jobs, jobs.submit(call())).progress() == told


@pytest.mark.parametrize(("how", "state", "error"), [
    ({"exit_code": 1}, "completed", ""),
    ({"exit_code": 3}, "completed", ""),
    ({"exit_code": 2, "text": "", "log": ("agent: unknown model 'x'; did you mean y?",)}, "failed", "unknown model 'x'; did you mean y?"),
    ({"exit_code": 1, "text": "", "log": ("Traceback", "RuntimeError: no")}, "failed", "Traceback\nRuntimeError: no"),
    ({"text": "{not json"}, "failed", ""),
    ({"exit_code": -9}, "failed", "")])
def test_how_a_job_ends(jobs, fake, how, state, error):
    fake.behave(**how)
    job = ended(jobs, jobs.submit(call()))
    assert job.state == state
    assert state == "completed" or job.error() == error


def test_a_command_that_cannot_be_started(tmp_path):
    jobs = Jobs(tmp_path / "state", ["/no/such/command"])
    job = ended(jobs, jobs.submit(call()))
    assert job.state == "failed" and "/no/such/command cannot be started" in job.error()


def test_cancelling_ends_the_whole_group_within_a_second_also_a_grandchild_that_ignores_sigterm(jobs, fake):
    fake.behave(stubborn=True, seconds=600)
    job = until(jobs, jobs.submit(call()), lambda now: len(fake.pids) == 2)
    everyone = [job.record.process.pid, *fake.pids]
    assert all(map(exists, everyone)) and len({os.getsid(pid) for pid in everyone}) == 3
    begun = time.monotonic()
    job = jobs.cancel(job.record.id)
    took = time.monotonic() - begun
    assert job.state == "cancelled" and job.record.exit_code == -signal.SIGKILL
    assert not any(map(exists, everyone))
    assert took < max(1.0, patience(0.7)), took
    assert jobs.cancel(job.record.id).record.ended == job.record.ended


def test_what_a_command_leaves_behind_does_not_keep_the_device(jobs, fake):
    sleeper = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True).pid)"
    jobs.command = (sys.executable, "-c", sleeper)
    job = ended(jobs, jobs.submit(call()))
    assert job.state == "completed" and not exists(job.output)


def test_one_job_per_device_in_order_with_places(jobs, fake):
    fake.behave(seconds=0.5)
    first, second, third = (jobs.submit(call(f"--n={n}")) for n in range(3))
    other = jobs.submit(call(device="cuda:1"))
    assert jobs.waiting("cpu") == 3 and jobs.waiting("cuda:1") == 1 and jobs.waiting("cuda:7") == 0
    assert jobs.find(third.record.id).waiting_for == (first.record.id, second.record.id)
    until(jobs, first, lambda now: now.state == "running")
    until(jobs, other, lambda now: now.state != "queued")
    third = jobs.cancel(third.record.id)
    assert third.state == "cancelled" and third.record.started is None
    first, second = ended(jobs, first), ended(jobs, second)
    assert second.record.started >= first.record.ended
    assert [arguments[-1] for arguments in fake.calls if len(arguments) > 1] == ["--n=0", "--n=1"]


def test_the_same_call_finds_its_unfinished_job(jobs, fake):
    fake.behave(seconds=30)
    patch = call("--set=a=b", tool="patch_kernel", files={"input/0.py": "x = 1"})
    first = jobs.submit(patch)
    assert jobs.submit(patch).record.id == first.record.id
    assert jobs.submit(call("--set=a=b", tool="patch_kernel", files={"input/0.py": "x = 2"})).record.id != first.record.id
    jobs.cancel(first.record.id)
    assert jobs.submit(patch).record.id != first.record.id


def test_a_queue_has_an_end(jobs, fake, monkeypatch):
    monkeypatch.setattr(jobs_module, "MAX_WAITING", 1)
    fake.behave(seconds=30)
    jobs.submit(call("--n=1"))
    jobs.submit(call("--n=2"))
    with pytest.raises(JobError, match="1 jobs wait for cpu already; wait for one to end or end one with job_cancel"):
        jobs.submit(call("--n=3"))


def test_a_killed_supervisor_takes_its_command_along_and_the_queue_goes_on(jobs, fake):
    fake.behave(seconds=600)
    job = until(jobs, jobs.submit(call()), lambda now: now.state == "running" and fake.calls)
    fake.behave()
    second = jobs.submit(call("--n=2"))
    os.kill(job.record.supervisor.pid, signal.SIGKILL)
    assert ended(jobs, job).state == "lost"
    assert not exists(job.record.process.pid)
    assert ended(jobs, second).state == "completed"


def test_a_hung_supervisor_does_not_save_its_job(jobs, fake, monkeypatch):
    monkeypatch.setattr(jobs_module, "CANCEL_SECONDS", 0.2)
    fake.behave(seconds=600)
    job = until(jobs, jobs.submit(call()), lambda now: now.state == "running" and fake.calls)
    os.kill(job.record.supervisor.pid, signal.SIGSTOP)
    assert jobs.cancel(job.record.id).state == "cancelled"
    assert not exists(job.record.process.pid) and not exists(job.record.supervisor.pid)


def test_a_number_that_now_belongs_to_another_process_is_not_touched():
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        known = identify(bystander.pid)
        stale = Identity(bystander.pid, known.started + "0")
        signal_group(stale, signal.SIGKILL)
        assert running(known) and not running(stale) and bystander.poll() is None and bystander.pid in descendants(os.getpid())
    finally:
        bystander.kill()
        bystander.wait()


def test_another_server_on_the_same_folder_sees_and_ends_the_jobs(jobs, fake):
    fake.behave(seconds=600)
    job = until(jobs, jobs.submit(call()), lambda now: now.state == "running" and fake.calls)
    other = Jobs(jobs.state, fake.command)
    assert other.newest(5)[0].state == "running"
    assert other.cancel(job.record.id).state == "cancelled" and jobs.find(job.record.id).state == "cancelled"


@pytest.mark.parametrize("name", ["", "x", "../../etc", "0" * 32, "a" * 10_000])
def test_an_id_that_no_job_has(jobs, name):
    with pytest.raises(JobError, match="there is no job"):
        jobs.find(name)


def test_a_torn_record_is_an_error_that_says_what_to_do(jobs):
    job = ended(jobs, jobs.submit(call()))
    (job.folder / "job.json").write_text('{"id":')
    with pytest.raises(JobError, match="start the tool again"):
        jobs.find(job.record.id)
    assert jobs.newest(5) == []


def test_old_jobs_are_removed_and_living_ones_are_not(jobs, fake, monkeypatch):
    monkeypatch.setattr(jobs_module, "KEPT", 2)
    fake.behave(seconds=600)
    living = until(jobs, jobs.submit(call(device="slow")), lambda now: now.state == "running" and fake.calls)
    fake.behave()
    done = [ended(jobs, jobs.submit(call(f"--n={n}"))) for n in range(4)]
    kept = {job.record.id for job in jobs.newest(100)}
    assert living.record.id in kept and done[-1].record.id in kept and done[0].record.id not in kept
    assert (jobs.state.stat().st_mode & 0o777) == 0o700


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"])
def test_text_that_no_command_line_can_carry(jobs, text):
    with pytest.raises(JobError, match="plain text"):
        jobs.submit(call(text))
    with pytest.raises(JobError, match="plain text"):
        jobs.submit(call(files={"input/0.py": text}))
    assert jobs.newest(5) == []

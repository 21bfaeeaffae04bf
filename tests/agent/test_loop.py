import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent import state as states
from agent.errors import BudgetEnded, JobFailed
from agent.fakes import FakeTools, SilentObserver
from agent.judge import worse_conditions
from agent.loop import Run
from agent.policies import Patch, Stop, Verify
from agent.policies.playbook import Playbook
from agent.state import RunState, load_current
from agent.tools.patch_kernel import Binding
from agent.verdict import ConditionResult, Verdict
from agent.workspace import Workspace
from consistency.contract import Contract

WORLD = {"engine": ["rms_norm", "linear", "mamba2_scan"], "batch": ["linear"], "phase": ["attention"]}


def begin(workspace: Workspace, run: str = "r1") -> RunState:
    return states.begin(workspace, run=run, checkpoint="none", device="cpu", policy="playbook", target=0.913)


def carry_on(workspace: Workspace, tools: FakeTools, policy=None, minutes: float = 5, attempts: int = 20) -> RunState:
    return Run(workspace, load_current(workspace), policy or Playbook(), tools, SilentObserver(), minutes=minutes, attempts=attempts).go()


def test_a_run_ends_exact_with_every_fix_on_its_branch(workspace):
    begin(workspace)
    tools = FakeTools(WORLD)
    state = carry_on(workspace, tools)
    assert state.outcome == "exact"
    assert Contract.load(workspace.path / "contract.toml") == Contract.from_dict(state.contract)
    for operator in ("rms_norm", "linear", "mamba2_scan", "attention"):
        assert state.contract["rollout"][operator] == state.contract["training"][operator] == "exact"
    # rms_norm and linear (from `batch`) go at once; mamba2_scan shows only when both are gone.
    assert [(a.outcome, a.title) for a in state.attempts] == [
        ("kept", "rms_norm=exact, linear=exact, attention=exact"), ("kept", "mamba2_scan=exact")]
    assert workspace.repo.active_branch.name == "agent/r1/main"
    assert Path(state.pull_request or "") == workspace.path / "PULL_REQUEST.md"
    assert workspace._git("status", "--porcelain") == ""
    # The first attempt leaves mamba2_scan behind rms_norm, so only the second is worth the full matrix.
    assert [call for call in tools.calls if call.startswith("verify")] == ["verify quick", "verify quick", "verify full"]
    assert state.final == state.attempts[-1].verify
    assert json.loads((workspace.path / "evidence" / "final.json").read_text())["level"] == "full"


def test_every_evidence_file_is_named_by_a_trailer(workspace):
    begin(workspace)
    state = carry_on(workspace, FakeTools(WORLD, useless=("linear=exact",)))
    names = {p.name for p in (workspace.path / "evidence").iterdir()}
    assert {"baseline.json", "localize-0.json", "attempt-2.json"} <= names
    for attempt in state.attempts:
        assert workspace.evidence_trailers(attempt.branch) == [attempt.evidence]
        stored = json.loads(workspace.show(attempt.branch, f"evidence/attempt-{attempt.number}.json"))
        assert stored["outcome"] == attempt.outcome and stored["reason"] == attempt.reason


def test_evidence_names_no_folder_of_this_machine(workspace):
    class Placed(FakeTools):
        def verify(self, contract, kernels, level, progress):
            report = super().verify(contract, kernels, level, progress)
            return report.model_copy(update={"evidence": str(workspace.path / ".agent" / "jobs" / level)})

    begin(workspace)
    carry_on(workspace, Placed(WORLD))
    found = [path.read_text() for path in sorted((workspace.path / "evidence").iterdir())]
    assert any('"evidence": ".agent/jobs/full"' in text for text in found)
    assert not any(str(workspace.path) in text for text in found)


def test_rejected_attempts_keep_branch_and_reason_and_the_next_is_tried(workspace):
    begin(workspace)
    state = carry_on(workspace, FakeTools({"engine": ["rms_norm"], "batch": ["linear"], "determinism": []}, broken=("linear=exact",)))
    together, rms_norm, linear = state.attempts
    assert [str(b) for b in together.bindings] == ["rms_norm=exact", "linear=exact"] and together.outcome == "rejected"
    assert together.reason == "worse in determinism 1: 0 of 64 before, 64 of 64 now"
    assert rms_norm.outcome == "kept" and [str(b) for b in rms_norm.bindings] == ["rms_norm=exact"]
    assert linear.outcome == "rejected"
    assert state.outcome == "inexact" and "nothing left to try for linear" in state.why
    assert {h.name for h in workspace.repo.heads} == {"main", "agent/r1/main", *(f"agent/r1/attempt-{n}" for n in (1, 2, 3))}
    message = str(workspace.repo.heads["agent/r1/attempt-1"].commit.message)
    assert "(rejected)" in message and together.reason in message
    assert "linear" not in Contract.load(workspace.path / "contract.toml").rollout


def test_an_attempt_whose_repro_still_differs_is_rejected_without_a_verify(workspace):
    begin(workspace)
    tools = FakeTools({"engine": ["linear"]}, useless=("linear=exact",))
    state = carry_on(workspace, tools)
    assert state.attempts[0].outcome == "rejected" and "does not pass" in state.attempts[0].reason
    assert tools.calls == ["verify quick", "localize", "repro linear", "check linear", "check linear"]


def test_a_candidate_that_crashes_the_engine_is_rejected_and_a_stock_crash_ends_the_call(workspace):
    begin(workspace)
    state = carry_on(workspace, FakeTools({"engine": ["linear"]}, crashing=("linear=exact",)))
    assert state.attempts[0].outcome == "rejected" and "signal 11" in state.attempts[0].reason and state.attempts[0].crashes == 2

    def once(call: str, calls=[]) -> None:  # noqa: B006
        calls.append(call)
        if calls.count("check linear") == 2 and call == "check linear":
            raise JobFailed("lost", Path("jobs/0"))

    begin(workspace, "r3")
    state = carry_on(workspace, FakeTools({"engine": ["linear"]}, before=once))
    assert state.outcome == "exact" and state.attempts[0].crashes == 1 and state.attempts[0].repros[0].after == 0

    def stock(call: str) -> None:
        if call == "verify full":
            raise JobFailed("no memory", Path("jobs/003-verify-full/jobs/stock-rollout"))

    begin(workspace, "r4")
    with pytest.raises(JobFailed, match="no memory"):
        carry_on(workspace, FakeTools({"engine": ["linear"]}, before=stock))
    assert load_current(workspace).open_attempt is not None

    def crash(call: str) -> None:
        if call == "verify quick":
            raise JobFailed("the rollout job died", Path("jobs/0"), "last words")

    begin(workspace, "r2")
    with pytest.raises(JobFailed, match="last words"):
        carry_on(workspace, FakeTools(WORLD, before=crash))
    assert carry_on(workspace, FakeTools(WORLD)).outcome == "exact"


def test_void_is_never_exact(workspace):
    begin(workspace)
    state = carry_on(workspace, FakeTools({"engine": []}, void=True))
    assert state.outcome == "inexact" and state.why == "no negative control" and state.attempts == []


def test_exact_but_slow_is_another_outcome(workspace):
    begin(workspace)
    assert carry_on(workspace, FakeTools(WORLD, ratio=0.9)).outcome == "slow"


def test_a_stock_that_is_exact_needs_no_pull_request(workspace):
    begin(workspace)
    state = carry_on(workspace, FakeTools({"engine": []}))
    assert (state.outcome, state.attempts, state.pull_request) == ("exact", [], None)


def test_mismatches_only_in_the_full_matrix_reopen_the_search(workspace):
    begin(workspace)

    class Sneaky(FakeTools):
        """Batch differences show in the full matrix only."""

        def verify(self, contract, kernels, level, progress):
            kept, self.world = self.world, WORLD if level == "full" else {"engine": ["rms_norm"]}
            try:
                return super().verify(contract, kernels, level, progress)
            finally:
                self.world = kept

    tools = Sneaky({"engine": ["rms_norm"], "batch": ["linear"], "phase": ["attention", "mamba2_scan"]})
    state = carry_on(workspace, tools)
    assert state.outcome == "exact" and tools.calls.count("verify full") == 2


def test_budgets_end_a_call_and_the_next_call_goes_on(workspace):
    begin(workspace)
    with pytest.raises(BudgetEnded, match="wall-clock"):
        carry_on(workspace, FakeTools(WORLD), minutes=0)
    with pytest.raises(BudgetEnded, match="attempts"):
        carry_on(workspace, FakeTools(WORLD), attempts=1)
    assert [a.outcome for a in load_current(workspace).attempts] == ["kept"]
    with pytest.raises(BudgetEnded, match="wall-clock"):
        carry_on(workspace, FakeTools(WORLD, before=lambda call: time.sleep(0.05)), minutes=0.02 / 60)
    assert carry_on(workspace, FakeTools(WORLD)).outcome == "exact"


def test_an_interrupt_and_a_full_disk_leave_a_run_that_can_go_on(workspace):
    begin(workspace)
    for error in (KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")):
        calls = []

        def fail(call: str, error=error, calls=calls) -> None:
            calls.append(call)
            if len(calls) == 3:
                raise error

        with pytest.raises(type(error)):
            carry_on(workspace, FakeTools(WORLD, before=fail))
    assert carry_on(workspace, FakeTools(WORLD)).outcome == "exact"


class Scripted:
    """Plays a list of actions, then stops."""

    name = "scripted"

    def __init__(self, *actions):
        self.actions = list(actions)

    def decide(self, state):
        return self.actions.pop(0) if self.actions else Stop(why="end of script")


def test_a_policy_cannot_skip_the_rules(workspace):
    begin(workspace)
    patch = Patch(bindings=[Binding(operator="linear", implementation="exact")], addresses=[], why="guess")
    state = carry_on(workspace, FakeTools(WORLD), Scripted(
        Verify(), Patch(files={"../escape.py": "x"}, addresses=[], why="escape"), Patch(addresses=["engine:000.rms_norm"], why="no repro"),
        patch, patch, Verify(), Stop(why="trust me, it is exact")))
    assert state.outcome == "inexact"
    refused = [step for step in state.steps if "refused" in step]
    assert len(refused) == 3 and "outside" not in refused[1] and "still open" in refused[2]
    assert not list(workspace.private.rglob("escape.py"))
    three = Scripted(*[Patch(addresses=["nothing"], why="x")] * 5)
    begin(workspace, "r2")
    assert "3 actions in a row were refused" in carry_on(workspace, FakeTools(WORLD), three).why


@pytest.mark.parametrize(("before", "after", "worse"), [
    ((64, 0), (64, 1), True), ((64, 10), (64, 12), False), ((64, 10), (64, 50), True), ((64, 64), (64, 64), False), ((64, 60), (6, 6), False),
    ((64, 1), (0, 0), False)])
def test_a_condition_is_worse_only_beyond_noise(before, after, worse):
    def verdict(tokens, mismatches):
        condition = ConditionResult(name="c", dimension="batch", ran=True, tokens=tokens, mismatches=mismatches)
        return Verdict(exact=False, void=False, tokens=tokens, mismatches=mismatches, conditions=[condition])

    assert bool(worse_conditions(verdict(*before), verdict(*after))) == worse


def test_a_condition_that_no_longer_runs_is_worse():
    ran = ConditionResult(name="c", dimension="batch", ran=True, tokens=4, mismatches=4)
    gone = ran.model_copy(update={"ran": False, "reason": "crashed"})
    verdicts = [Verdict(exact=False, void=False, tokens=4, mismatches=4, conditions=[c]) for c in (ran, gone)]
    assert worse_conditions(*verdicts) == ["c: no longer runs"]


DRIVER = """
import os, signal, sys
from pathlib import Path
from agent import workspace as w, state as s
from agent.fakes import FakeTools, SilentObserver
from agent.loop import Run
from agent.policies.playbook import Playbook

path, kill_at = Path(sys.argv[1]), int(sys.argv[2])
count, real_git, real_write = 0, w.call_git, w.write_atomic

def point():
    global count
    count += 1
    if count == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

def call_git(*arguments, **named):
    point()
    result = real_git(*arguments, **named)
    point()
    return result

def write_atomic(*arguments):
    point()
    real_write(*arguments)
    point()

w.call_git, w.write_atomic, s.write_atomic = call_git, write_atomic, write_atomic
log = open(path.parent / "calls", "a", buffering=1)

class Tools(FakeTools):
    def _begin(self, call, contract):
        point()
        super()._begin(call, contract)
        print(call, contract and contract.as_dict(), file=log)

ws = w.Workspace.open(path)
with ws.lock():
    run = Run(ws, s.load_current(ws), Playbook(), Tools({"engine": ["rms_norm", "linear"], "batch": ["attention"]}, broken=("attention=exact",)),
              SilentObserver(), minutes=5, attempts=20)
    state = run.go()
print(count, state.outcome, [(a.number, a.outcome, a.title) for a in state.attempts])
"""


def drive(workspace: Workspace, kill_at: int) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", DRIVER, str(workspace.path), str(kill_at)], capture_output=True, text=True, timeout=300)


def outline(workspace: Workspace) -> dict[str, list[str]]:
    """What must not depend on being killed: subjects of every branch, and the files of the run branch."""
    names = sorted(h.name for h in workspace.repo.heads)
    log = {name: [str(c.summary) for c in workspace.repo.iter_commits(name)] for name in names}
    return log | {"files": sorted(str(b.path) for b in workspace.repo.commit("agent/r1/main").tree.traverse())}


def test_kill_9_anywhere_loses_at_most_the_step_in_flight(tmp_path):
    from agent.config import Config

    def fresh(name: str) -> Workspace:
        workspace = Workspace.create(tmp_path / name / "ws", Config(model="nemotron-3.5", scale="tiny"))
        begin(workspace)
        return workspace

    whole = fresh("whole")
    done = drive(whole, 0)
    assert done.returncode == 0, done.stderr
    points = int(done.stdout.split()[0])
    expected, calls = outline(whole), (tmp_path / "whole" / "calls").read_text().splitlines()
    assert points > 100
    for kill_at in [*range(1, points, max(1, points // 14)), points]:
        workspace = fresh(f"killed-{kill_at}")
        first = drive(workspace, kill_at)
        assert first.returncode == -signal.SIGKILL, (kill_at, first.stderr)
        second = drive(workspace, 0)
        assert second.returncode == 0, (kill_at, second.stderr)
        assert second.stdout.split(" ", 1)[1] == done.stdout.split(" ", 1)[1], kill_at
        assert outline(workspace) == expected, kill_at
        assert workspace._git("status", "--porcelain") == ""
        made = (tmp_path / f"killed-{kill_at}" / "calls").read_text().splitlines()
        assert len(made) <= len(calls) + 3, kill_at  # the step in flight again: at most two repros and their check


def test_two_kills_in_a_row_and_a_kill_from_outside(tmp_path):
    from agent.config import Config

    workspace = Workspace.create(tmp_path / "ws", Config(model="nemotron-3.5", scale="tiny"))
    begin(workspace)
    for kill_at in (40, 12, 25):
        assert drive(workspace, kill_at).returncode == -signal.SIGKILL
    child = subprocess.Popen([sys.executable, "-c", DRIVER, str(workspace.path), "0"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    time.sleep(0.9)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert drive(workspace, 0).stdout.split()[1] == "inexact"

import re

import pytest

from agent import pull_request
from agent import state as states
from agent.errors import UserError
from agent.fakes import FakeTools, SilentObserver
from agent.loop import Run
from agent.policies.playbook import Playbook
from agent.state import RunState, load_current
from agent.workspace import Workspace

WORLD = {"engine": ["rms_norm", "linear"], "batch": ["linear"], "determinism": []}


def finish(workspace: Workspace, tools: FakeTools) -> RunState:
    states.begin(workspace, run="r1", checkpoint="none", device="cpu", policy="playbook", target=0.913)
    return Run(workspace, load_current(workspace), Playbook(), tools, SilentObserver(), minutes=5, attempts=9).go()


def text(workspace: Workspace) -> str:
    return (workspace.path / "PULL_REQUEST.md").read_text()


def section(body: str, name: str) -> str:
    return body.split(f"## {name}\n", 1)[1].split("\n## ", 1)[0]


def test_every_part_a_reviewer_needs(workspace):
    state = finish(workspace, FakeTools(WORLD))
    body = text(workspace)
    assert body.startswith("# nemotron-3.5: rollout and training log-probabilities equal, bit for bit\n")
    assert "**Claim.** 0 mismatches in 3 required conditions that compare 192 log-probabilities" in body
    assert "the untouched stack has 128 in 3" in body and "0.970 of stock, between 0.960 and 0.980 over pairs of runs (required: 0.913)" in body
    causes = section(body, "What differed first, and why")
    assert all(part in causes for part in ("`rms_norm`", "`linear`", "37 of 4096", "0.002, 3 ulps", "substituting `exact`", "reduction order"))
    assert "| unequal log-probabilities, all conditions | 128 | 0 |" in section(body, "Before and after")
    assert "| batch 1 | batch | 64 of 64 | 0 of 64 |" in section(body, "Conditions")
    commands = section(body, "Check it")
    assert "agent verify --model nemotron-3.5 --scale tiny --workspace . --level full" in commands
    assert "# full verdict: exact, 0 mismatches, 64 sampled tokens" in commands
    assert "# stock: 37 of 4096 elements differ (exit code 1)" in commands
    folders = re.findall(r"cd (repros/\S+) ", commands)
    assert folders and all((workspace.path / folder / "repro.py").exists() for folder in folders)
    assert "Nothing: the first patch held." in section(body, "Tried and dropped")
    assert "training weight | 64 of 64 reported" in section(body, "Negative control")
    assert "only; other devices" in section(body, "Not tested")
    assert all(attempt.evidence in section(body, "Provenance") for attempt in state.attempts)


def test_rejected_attempts_are_listed_with_their_reason(workspace):
    state = finish(workspace, FakeTools({"engine": ["rms_norm"], "batch": ["linear"], "determinism": []}, broken=("linear=exact",)))
    body = text(workspace)
    assert body.startswith("# nemotron-3.5: fewer unequal log-probabilities") and "**Claim.** 64 mismatches" in body
    dropped = section(body, "Tried and dropped")
    for attempt in state.attempts:
        assert (attempt.reason in dropped) == (attempt.outcome == "rejected")


def test_conditions_that_did_not_run_are_limits_not_passes(workspace):
    class Partial(FakeTools):
        def verify(self, contract, kernels, level, progress):
            report = super().verify(contract, kernels, level, progress)
            skipped = {"ran": False, "tokens": 0, "mismatches": 0, "excused": True, "reason": "no cache"}
            report.verdict.conditions[-1] = report.verdict.conditions[-1].model_copy(update=skipped)
            return report

    finish(workspace, Partial(WORLD))
    body = text(workspace)
    assert "0 mismatches in 2 required conditions" in body
    assert "- not run: determinism 1 (determinism): no cache" in section(body, "Not tested")
    assert "| determinism 1 | determinism | not run | not run |" in section(body, "Conditions")


def test_figures_come_from_evidence_and_changed_evidence_is_refused(workspace):
    state = finish(workspace, FakeTools(WORLD))
    honest = text(workspace)
    # State that was edited after the fact changes no figure: they are read back from the commits.
    assert state.final is not None
    state.final.verdict.mismatches, state.final.verdict.tokens = 7, 7
    assert pull_request.write(workspace, state) == honest
    final = workspace.path / "evidence" / "final.json"
    final.write_text(final.read_text().replace('"ratio": 0.97', '"ratio": 1.97'))
    state.head = workspace.commit(workspace.path, "Tidy evidence")
    with pytest.raises(UserError, match=r"evidence/final\.json .* do not trust"):
        pull_request.write(workspace, state)


def test_table_cells_cannot_break_the_table(workspace):
    class Odd(FakeTools):
        def localize(self, contract, kernels, progress):
            report = super().localize(contract, kernels, progress)
            return report.model_copy(update={"divergences": [d.model_copy(update={"cause_detail": "a | b\nc"}) for d in report.divergences]})

    finish(workspace, Odd(WORLD))
    rows = [line for line in section(text(workspace), "What differed first, and why").splitlines() if line.startswith("| `")]
    assert rows and all(row.count(" | ") == 7 for row in rows) and all("a \\| b c" in row for row in rows)

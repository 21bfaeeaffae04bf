"""A trajectory for people, and a person's word on each patch."""

import io

import pytest
from rich.console import Console
from runs import KERNEL, carry_on, hard_tools, make, trajectory
from test_llm_policy import SOLVED

from agent.errors import UserError
from agent.llm.approval import Approved, Asker
from agent.llm.branching import fork
from agent.llm.conversation import Answer
from agent.llm.fakes import ScriptedModel, calling
from agent.llm.reading import markdown, plain, steps
from agent.policies import Patch
from agent.policies.hybrid import Hybrid
from agent.policies.playbook import Playbook
from agent.tools.patch_kernel import Binding


def test_the_whole_trajectory_can_be_read(workspace, state):
    evil = Answer(text="\x1b[2Jcleared\x07 ```fence```", thinking="why not", end="end", items=[{}])
    carry_on(workspace, make(workspace, ScriptedModel(evil, *SOLVED)), hard_tools())
    record = trajectory(workspace)
    views = steps(record)
    assert [v.number for v in views] == [1, 2, 3, 4] and views[0].thinking == "why not" and "No tool was called" in views[1].told[0]
    assert views[3].calls[0].files == {"kernels/ordered.py": KERNEL} and "kept" in views[3].calls[0].result
    text = markdown(record)
    assert "\x1b" not in text and "\x07" not in text and "## Step 4" in text and "**patch_kernel**" in text and "kernels/ordered.py:" in text
    assert "sums over k in one fixed order" in text.lower() and "Spent: 0.0" in text


def test_a_call_that_ended_the_run_says_so(workspace, state):
    carry_on(workspace, make(workspace, ScriptedModel(calling(("stop", {"claim": "give_up", "why": "x"})))), hard_tools())
    assert steps(trajectory(workspace))[0].calls[0].result == "the run ended here"


def test_a_fork_says_what_it_inherited(workspace, state):
    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED)), hard_tools())
    forked = fork(workspace, "r1", 1)
    assert "Forked from r1" in markdown(trajectory(workspace, forked.run)) and "## Step 1*" in markdown(trajectory(workspace, forked.run))


def test_long_texts_are_shortened():
    assert plain("x" * 10_000).endswith("(6000 more characters)") and plain("a\tb\nc\u202e") == "a\tb\nc\N{REPLACEMENT CHARACTER}"


def test_a_person_is_shown_what_would_change(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "ordered.py").write_text("old = 1\n")
    shown = io.StringIO()
    answers = iter(["y", "", "no", "it is slow"])
    asker = Asker(Console(file=shown, width=120), tmp_path, lambda prompt: next(answers))
    patch = Patch(bindings=[Binding(operator="linear", implementation="kernels:ordered.linear")], files={"kernels/ordered.py": "new = 2\n"},
                  addresses=[], why="one order")
    assert [asker(patch) for _ in range(4)] == [None, "", "", "it is slow"]
    text = shown.getvalue()
    assert "linear=kernels:ordered.linear" in text and "-old = 1" in text and "+new = 2" in text and "one order" in text


def test_approval_needs_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(UserError, match="--approve asks on a terminal"):
        Asker(Console(), tmp_path)


def test_a_refused_playbook_patch_hands_over_to_the_model(workspace, state):
    asked: list[str] = []

    def ask(patch: Patch) -> str | None:
        asked.append(", ".join(map(str, patch.bindings)))
        return "not that one"

    model = ScriptedModel(calling(("stop", {"claim": "give_up", "why": "x"})))
    policy = Hybrid("hybrid:scripted", Approved(Playbook(), ask), make(workspace, model))
    ended = carry_on(workspace, policy, hard_tools())
    assert asked == ["linear=exact, rms_norm=exact"], "asked once, not at every decision"
    assert not ended.attempts and "a person refused the patch linear=exact, rms_norm=exact (not that one)" in model.requests[0].turns[0].text

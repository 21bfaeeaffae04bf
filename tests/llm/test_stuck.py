"""A model that goes in circles is told so, and then the run pauses."""

import pytest
from runs import carry_on, hard_tools, make, patch, told
from test_llm_policy import SOLVED

from agent.errors import BudgetEnded
from agent.llm.conversation import Answer, Call
from agent.llm.fakes import ScriptedModel, calling, saying
from agent.llm.stuck import Watch
from agent.state import load_current


@pytest.mark.parametrize(("replies", "problem"), [
    ([calling(("list", {"root": "workspace", "path": "."}))], "was repeated 3 times with the same result"),
    ([saying("I think it is exact now.")], "the last 3 answers called no tool"),
    ([calling(patch([], {"linear": "exact"}))], "was repeated 3 times with the same result"),
])
def test_circles(workspace, state, replies, problem):
    model = ScriptedModel(*replies)
    with pytest.raises(BudgetEnded, match=f"the model is stuck: .*{problem}.*agent fork"):
        carry_on(workspace, make(workspace, model), hard_tools())
    assert len(model.requests) == 9 and sum(problem in text for text in told(workspace)) == 2
    assert load_current(workspace).outcome is None


def test_alternation_and_errors_only(workspace, state):
    one, two = (calling(("read", {"root": "workspace", "path": name})) for name in ("contract.toml", "consistency.toml"))
    with pytest.raises(BudgetEnded, match="alternate with the same results"):
        carry_on(workspace, make(workspace, ScriptedModel(*[one, two] * 20)), hard_tools())


def test_errors_only(workspace, state):
    wrong = [calling(("read", {"root": "workspace", "path": f"gone{n}"})) for n in range(40)]
    with pytest.raises(BudgetEnded, match="the last 6 calls were all errors"):
        carry_on(workspace, make(workspace, ScriptedModel(*wrong)), hard_tools())


def test_a_warning_that_helps_costs_nothing(workspace, state):
    model = ScriptedModel(*[calling(("list", {"root": "workspace", "path": "."}))] * 3, *SOLVED)
    assert carry_on(workspace, make(workspace, model), hard_tools()).outcome == "exact"


def test_progress_forgives():
    watch = Watch()
    for _ in range(2):
        for _ in range(3):
            watch.result("a", "same", False)
        assert watch.warning()
    watch.progress()
    assert watch.warnings == 0 and watch.warning() is None and not watch.hopeless


def test_different_results_are_no_circle():
    watch = Watch()
    for n in range(20):
        watch.result("verify", f"{'x' * n}", False)
        assert watch.warning() is None


def test_what_a_model_writes_cannot_break_the_one_line(workspace, state):
    junk = Answer(end="calls", items=[{}], calls=[Call(id="a", name="rm\n\x1b[2J" * 9000, arguments=None, raw="\n\x1b[2J" * 9000)])
    with pytest.raises(BudgetEnded) as caught:
        carry_on(workspace, make(workspace, ScriptedModel(junk)), hard_tools())
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value) and len(str(caught.value)) < 600
    refusal = Answer(end="refusal", detail="no\n\x1b[2J")
    with pytest.raises(BudgetEnded) as caught:
        carry_on(workspace, make(workspace, ScriptedModel(refusal)), hard_tools())
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)

"""Fork and replay."""

import pytest
from runs import LINEAR, carry_on, hard_tools, make, patch, told, trajectory
from test_llm_policy import FIX, SOLVED

from agent.errors import BudgetEnded, UserError
from agent.llm.branching import fork, replay
from agent.llm.fakes import ScriptedModel, calling
from agent.llm.recorded import differences
from agent.llm.settings import LlmSettings
from agent.llm.spec import policy_from_spec
from agent.policies.hybrid import Hybrid
from agent.policies.playbook import Playbook
from agent.policies.recipe import RecipeFirst
from agent.recipes import matching
from agent.state import begin, load_current
from consistency.models.catalog import FAMILIES

GIVE_UP = calling(("stop", {"claim": "give_up", "why": "enough"}))
WRONG = calling(patch([LINEAR], {"linear": "exact"}))


def policy_of(workspace, name: str):
    return policy_from_spec(name, workspace=workspace, run=load_current(workspace).run, settings=LlmSettings())


def test_fork_goes_back_to_a_step_and_takes_another_way(workspace, state):
    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED[:2], WRONG, GIVE_UP)), hard_tools())
    forked = fork(workspace, "r1", 2, say="write a kernel instead")
    assert forked.run != "r1" and load_current(workspace).run == forked.run and forked.outcome is None and len(forked.attempts) == 1
    model, tools = ScriptedModel(calling(FIX)), hard_tools()
    ended = carry_on(workspace, make(workspace, model), tools)
    assert ended.outcome == "exact" and [a.outcome for a in ended.attempts] == ["kept", "kept"]
    assert "localize" not in tools.calls, "what the first two steps measured is not measured again"
    turns = model.requests[0].turns
    assert [t.kind for t in turns] == ["said", "answered", "results", "answered", "results", "said"] and turns[-1].text == "write a kernel instead"
    spent = trajectory(workspace, forked.run).spent
    assert spent.steps == 1 and trajectory(workspace, forked.run).steps == 3, "limits of a fork count from zero"
    assert [a.branch for a in ended.attempts] == ["agent/r1/attempt-1", f"agent/{forked.run}/attempt-2"]
    assert sorted(path.name for path in trajectory(workspace, forked.run).attempts.iterdir()) == ["2"]
    assert trajectory(workspace).steps == 4 and workspace.has_branch("agent/r1/attempt-2"), "the run it came from is untouched"
    assert model.requests[0].cache_key == "r1"


def test_fork_at_the_beginning_and_at_the_end(workspace, state):
    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED[:2], GIVE_UP)), hard_tools())
    begun = fork(workspace, "r1", 0)
    assert carry_on(workspace, make(workspace, ScriptedModel(*SOLVED)), hard_tools()).outcome == "exact"
    assert trajectory(workspace, begun.run).steps == 3
    fork(workspace, "r1", 3, say="do not give up")
    model = ScriptedModel(calling(FIX))
    assert carry_on(workspace, make(workspace, model), hard_tools()).outcome == "exact"


def test_a_fork_of_a_fork(workspace, state):
    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED[:2], GIVE_UP)), hard_tools())
    first = fork(workspace, "r1", 2)
    carry_on(workspace, make(workspace, ScriptedModel(WRONG, GIVE_UP)), hard_tools())
    fork(workspace, first.run, 1)
    assert carry_on(workspace, make(workspace, ScriptedModel(*SOLVED[1:])), hard_tools()).outcome == "exact"


def test_fork_to_another_model_hands_the_facts_over(workspace, state):
    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED[:2], GIVE_UP)), hard_tools())
    forked = fork(workspace, "r1", 2, policy="openai:other", price="1,2")
    assert forked.policy == "openai:other" and trajectory(workspace, forked.run).header.price.output == 2
    model = ScriptedModel(calling(FIX))
    assert carry_on(workspace, make(workspace, model), hard_tools()).outcome == "exact"
    (only,) = model.requests[0].turns
    assert "rms_norm=exact: kept" in only.text and "repros/00-engine-linear" in only.text


def test_a_step_that_is_not_finished_is_not_forked(workspace, state):
    with pytest.raises(BudgetEnded):
        carry_on(workspace, make(workspace, ScriptedModel(*SOLVED)), hard_tools(before=_end_at("check linear")))
    assert load_current(workspace).open_attempt
    with pytest.raises(UserError, match=r"step 3 of run r1 is not finished.*fork at step 2"):
        fork(workspace, "r1", 3)
    fork(workspace, "r1", 2)
    assert carry_on(workspace, make(workspace, ScriptedModel(calling(FIX))), hard_tools()).outcome == "exact"


def test_what_cannot_be_forked_is_one_line(workspace, state):
    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED)), hard_tools())
    for run, at, said in (("r1", 9, "--at takes 0 to 3"), ("r1", -1, "--at takes"), ("r2", 1, "no run 'r2'; it has r1"), ("../runs/r1", 1, "no run"),
                          ("", 0, "no run")):
        with pytest.raises(UserError, match=said):
            fork(workspace, run, at)
    assert load_current(workspace).run == "r1"


def test_replay_answers_from_the_record_and_runs_the_tools(workspace, state):
    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED)), first := hard_tools())
    again = replay(workspace, "r1")
    assert again.policy == "replay:r1"
    tools = hard_tools()
    ended = carry_on(workspace, policy_of(workspace, again.policy), tools)
    assert ended.outcome == "exact" and tools.calls == first.calls
    spent = trajectory(workspace, again.run).spent
    assert spent.usd == 0 and spent.tokens == 0 and spent.steps == 3
    assert differences(workspace, "r1", again.run) == []


def test_replay_shows_where_the_tools_now_differ(workspace, state):
    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED)), hard_tools())
    again = replay(workspace, "r1")
    with pytest.raises(BudgetEnded, match="the record of r1 ends after 3 answers"):
        carry_on(workspace, policy_of(workspace, again.policy), hard_tools(broken=("linear=kernels:ordered.linear",)))
    (line,) = differences(workspace, "r1", again.run)
    assert line.startswith("step 3, patch_kernel:") and "kept" in line and "rejected" in line


def test_a_replay_can_be_resumed(workspace, state):
    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED)), hard_tools())
    again = replay(workspace, "r1")
    with pytest.raises(BudgetEnded, match="later"):
        carry_on(workspace, policy_of(workspace, again.policy), hard_tools(before=_end_at("check rms_norm")))
    assert carry_on(workspace, policy_of(workspace, again.policy), hard_tools()).outcome == "exact"


def test_a_replayed_hybrid_lets_the_playbook_go_first(workspace, state):
    model = ScriptedModel(calling(FIX))
    inner = make(workspace, model)
    inner.trajectory.header.policy = "hybrid:scripted"
    (inner.trajectory.folder / "header.json").write_text(inner.trajectory.header.model_dump_json())
    before = carry_on(workspace, Hybrid("hybrid:scripted", Playbook(), inner), hard_tools())
    again = replay(workspace, "r1")
    after = carry_on(workspace, policy_of(workspace, again.policy), hard_tools())
    assert [a.title for a in after.attempts] == [a.title for a in before.attempts] and after.outcome == "exact"


def test_say_is_told_even_when_nothing_was_said_yet(workspace, state):
    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED)), hard_tools())
    forked = fork(workspace, "r1", 0, say="look at linear")
    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED)), hard_tools())
    assert told(workspace, forked.run)[:2][-1] == "look at linear"


def test_a_recipe_comes_before_the_model_which_is_told_and_before_its_replay(workspace):
    recipe, _ = matching("nemotron-3.5", FAMILIES["nemotron-3.5"].scales["tiny"])
    begin(workspace, run="r1", checkpoint="none", device="cpu", policy="scripted", target=0.913, recipe=recipe)
    model, tools = ScriptedModel(calling(("localize", {})), calling(("repro", {"divergences": [LINEAR]})), calling(FIX)), hard_tools()
    ended = carry_on(workspace, RecipeFirst(make(workspace, model)), tools)
    assert ended.outcome == "exact" and [a.title.partition(":")[0] for a in ended.attempts] == ["recipe nemotron-3.5-cpu", "linear=kernels"]
    assert "recipe nemotron-3.5-cpu: attention=exact" in told(workspace)[0] and ": kept, not exact here, but" in told(workspace)[0]
    assert trajectory(workspace).steps == 3 and "verify full" in tools.calls
    again = replay(workspace, "r1")
    assert again.recipe == recipe
    repeated = hard_tools()
    assert carry_on(workspace, RecipeFirst(policy_of(workspace, again.policy)), repeated).outcome == "exact" and repeated.calls == tools.calls


def _end_at(name: str):
    """The wall clock ends once, at a tool call."""
    armed = [True]

    def before(call: str) -> None:
        if call == name and armed:
            armed.clear()
            raise BudgetEnded("later")

    return before

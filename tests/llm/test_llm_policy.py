"""A model in the loop: what it can do, and what it cannot get away with."""

import json

import pytest
from fake_server import PROVIDERS, Chat, FakeServer
from providers import model_for
from runs import HARD, KERNEL, LINEAR, NORM, USELESS, carry_on, hard_tools, make, patch, told, trajectory

from agent.errors import BudgetEnded
from agent.fakes import FakeTools
from agent.llm.conversation import Answer, Call, Usage
from agent.llm.fakes import ScriptedModel, calling, kernel_writer, last_results, saying
from agent.policies.hybrid import Hybrid
from agent.policies.playbook import Playbook
from agent.state import load_current

FIX = patch([LINEAR], {"linear": "kernels:ordered.linear"}, {"kernels/ordered.py": KERNEL})
SOLVED = [calling(("localize", {})), calling(("repro", {"divergences": [LINEAR, NORM]}), patch([NORM], {"rms_norm": "exact"})), calling(FIX)]


def test_the_playbook_cannot_solve_what_the_tests_below_use(workspace, state):
    assert carry_on(workspace, Playbook(), hard_tools()).outcome == "inexact"


def test_a_model_writes_the_kernel_that_was_missing(workspace, state):
    model, tools = ScriptedModel(*SOLVED), hard_tools()
    ended = carry_on(workspace, make(workspace, model), tools)
    assert ended.outcome == "exact" and ended.why == "exact in every required condition"
    assert (workspace.path / "kernels" / "ordered.py").read_text() == KERNEL
    assert ended.contract["rollout"]["linear"] == ended.contract["training"]["linear"] == "kernels:ordered.linear"
    assert [a.outcome for a in ended.attempts] == ["kept", "kept"] and len(model.requests) == 3
    assert tools.calls.count("verify full") == 1 and tools.calls[-1] == "verify full"
    message = str(workspace.repo.commit(ended.attempts[1].commit).message)
    assert "fixed order" in message and "Assisted-by: agent" in message and "(r1" not in message


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda p: p.kind)
def test_the_same_over_every_provider(provider, workspace, state):
    """The whole way: SDK, wire, history, tools, loop."""
    script = [provider.answer(*[provider.call(f"{n}{m}", call.name, call.arguments) for m, call in enumerate(answer.calls)])
              for n, answer in enumerate(SOLVED)]
    with FakeServer(*script) as server:
        policy = make(workspace, model_for(provider, server.url))
        assert carry_on(workspace, policy, hard_tools()).outcome == "exact"
        assert len(server.seen) == 3
    key = "input" if provider.kind == "openai" else "messages"
    sizes = [len(body[key]) for body in server.bodies]
    assert sizes == sorted(sizes) and server.bodies[2][key][:sizes[1]] == server.bodies[1][key]


def test_what_the_model_is_told(workspace, state):
    model = ScriptedModel(*SOLVED)
    carry_on(workspace, make(workspace, model), hard_tools())
    first, second, third = model.requests
    opening = first.turns[0].text
    assert "128 " not in opening and "64 of 64 log-probabilities differ" in opening and "contract of the run branch: empty" in opening
    assert first.system == second.system == third.system and first.tools == third.tools and third.turns[:len(second.turns)] == second.turns
    (localized,) = last_results(second)
    assert LINEAR in localized and "reduction order" in localized and "no repro yet" in localized
    repros, norm = last_results(third)
    assert "repros/00-engine-linear, exit code 1" in repros
    assert "attempt 1 (rms_norm=exact) kept" in norm and f"- {LINEAR}: linear" in norm and "repro: repros/00-engine-linear" in norm


def test_hybrid_asks_the_model_only_when_the_playbook_is_at_its_end(workspace, state):
    model = ScriptedModel(calling(FIX))
    policy = Hybrid("hybrid:scripted", Playbook(), make(workspace, model))
    ended = carry_on(workspace, policy, hard_tools())
    assert ended.outcome == "exact" and len(model.requests) == 1
    assert [a.title for a in ended.attempts] == ["linear=exact, rms_norm=exact", "linear=exact", "rms_norm=exact", "linear=exact",
                                                 "linear=kernels:ordered.linear"]
    opening = model.requests[0].turns[0].text
    assert "The playbook stopped here: the catalogue has nothing left to try for linear" in opening
    assert "rms_norm=exact: kept" in opening and "linear=exact: rejected" in opening and "repro: repros/00-engine-linear" in opening


def test_hybrid_needs_no_model_for_what_the_playbook_can_do(workspace, state):
    model = ScriptedModel(saying("never asked"))
    policy = Hybrid("hybrid:scripted", Playbook(), make(workspace, model))
    assert carry_on(workspace, policy, FakeTools({"engine": ["linear"]})).outcome == "exact" and not model.requests


def test_bad_calls_come_back_as_errors_that_can_be_acted_on(workspace, state):
    bad = Answer(end="calls", items=[{}], calls=[
        Call(id="a", name="shell", arguments={"command": "ls"}), Call(id="b", name="read", arguments=None, raw='{"root": "wor'),
        Call(id="c", name="read", arguments={"root": "home", "path": "x", "mode": 7}),
        Call(id="d", name="repro", arguments={"divergences": ["engine:9"]})])
    model = ScriptedModel(bad, *SOLVED)
    assert carry_on(workspace, make(workspace, model), hard_tools()).outcome == "exact"
    shell, cut, wrong, repro = last_results(model.requests[1])
    assert "no tool 'shell'; the tools are localize, repro" in shell
    assert "not a JSON object" in cut and '{"root": "wor' in cut
    assert "root" in wrong and "mode" in wrong and "correct them" in wrong
    assert "not run" not in wrong and "Not carried out" in repro, "an action after a failed call was planned for another state"
    assert all(result.error for result in model.requests[1].turns[-1].results)


@pytest.mark.parametrize(("call", "said"), [
    (patch([LINEAR], {"linear": "exact"}), "has no repro"),
    (patch([], {"linear": "fast"}), "no implementation 'fast'"),
    (patch([], {"linear": "kernels:gone.linear"}), "kernels/gone.py does not exist"),
    (patch([], {"linear": "exact"}, {"../contract.toml": "x"}), "not a plain relative path"),
    (patch([], {"linear": "exact"}, {"evidence/baseline.json": "{}"}), "outside the allowed paths"),
    (patch([], {"linear": "exact"}, {"kernels/a.py": "#" * 300_000}), "the limit is"),
    (patch([], {}), "the patch is empty"),
    (("verify", {"level": "full"}), "the quick matrix still differs"),
])
def test_a_patch_that_cannot_be_made_costs_nothing(workspace, state, call, said):
    model, tools = ScriptedModel(calling(call), calling(("stop", {"claim": "give_up", "why": "enough"}))), hard_tools()
    ended = carry_on(workspace, make(workspace, model), tools)
    assert said in last_results(model.requests[1])[0]
    assert not ended.attempts and tools.calls == ["verify quick"] and "refused" not in "".join(ended.steps)


def test_verify_decides_and_not_the_model(workspace, state):
    lie = calling(("stop", {"claim": "exact", "why": "all log-probabilities are equal now"}))
    model = ScriptedModel(lie, saying("It is exact, trust me."), lie, calling(("stop", {"claim": "give_up", "why": "I was wrong"})))
    ended = carry_on(workspace, make(workspace, model), hard_tools())
    assert ended.outcome == "inexact" and ended.why == "I was wrong"
    assert "the run is not exact" in last_results(model.requests[1])[0] and "64 of 64 log-probabilities differ" in last_results(model.requests[1])[0]
    assert any("No tool was called" in text for text in told(workspace))


def test_calls_after_a_rejected_attempt_are_not_carried_out(workspace, state):
    batch = calling(("localize", {}), ("repro", {"divergences": [LINEAR]}), patch([LINEAR], {"linear": "exact"}),
                    patch([NORM], {"rms_norm": "exact"}), ("list", {"root": "workspace", "path": "repros"}))
    model = ScriptedModel(batch, calling(("stop", {"claim": "give_up", "why": "x"})))
    ended = carry_on(workspace, make(workspace, model), hard_tools())
    *_, rejected, skipped, looked = last_results(model.requests[1])
    assert "attempt 1 (linear=exact) rejected: the repro of engine:000.linear " in rejected
    assert "Not carried out" in skipped and looked == "00-engine-linear/" and len(ended.attempts) == 1


def test_a_crashing_kernel_is_a_rejected_attempt_with_its_last_words(workspace, state):
    crash = patch([], {"linear": "kernels:ordered.linear"}, {"kernels/ordered.py": KERNEL})
    model = ScriptedModel(calling(crash), calling(("stop", {"claim": "give_up", "why": "x"})))
    carry_on(workspace, make(workspace, model), hard_tools(crashing=("linear=kernels:ordered.linear",)))
    assert "died with signal 11" in last_results(model.requests[1])[0] and "Segmentation fault" in last_results(model.requests[1])[0]


def test_a_slow_exact_contract_is_given_to_the_model_to_improve(workspace, state):
    model = ScriptedModel(*SOLVED, calling(("stop", {"claim": "exact", "why": "no faster kernel found"})))
    ended = carry_on(workspace, make(workspace, model), hard_tools(ratio=0.5))
    assert ended.outcome == "slow" and "throughput: 0.500 of stock" in "".join(told(workspace)[-1:])


def test_a_void_measurement_is_not_the_models_business(workspace, state):
    model = ScriptedModel(saying("never asked"))
    assert carry_on(workspace, make(workspace, model), FakeTools(HARD, void=True)).outcome == "inexact" and not model.requests


def test_no_more_calls_than_the_limit_per_answer(workspace, state):
    flood = calling(*[("list", {"root": "workspace", "path": f"folder{n}"}) for n in range(3)], *[("list", {"root": "workspace", "path": "."})] * 197)
    model = ScriptedModel(flood, calling(("stop", {"claim": "give_up", "why": "x"})))
    carry_on(workspace, make(workspace, model), hard_tools())
    results = last_results(model.requests[1])
    assert len(results) == 200 and sum("may hold 16 calls" in text for text in results) == 184


def test_a_flood_of_text_is_cut_off_told_and_paused(workspace, state):
    cut = Call(id="a", name="patch_kernel", arguments={})
    flood = Answer(end="length", text="blah " * 50_000, detail="max_tokens", usage=Usage(input=10, output=20_000), calls=[cut])
    model = ScriptedModel(flood)
    with pytest.raises(BudgetEnded, match="stuck: the last 3 answers called no tool"):
        carry_on(workspace, make(workspace, model), hard_tools())
    assert len(model.requests) == 9
    note = model.requests[1].turns[-1].text
    assert "cut off after 20000 tokens in the middle of a call of patch_kernel" in note and len(note) < 2000
    assert all(turn.kind == "said" for turn in model.requests[8].turns), "half answers stay out of the history"


def test_a_refusal_is_answered_once_and_then_pauses_the_run(workspace, state):
    refusal = Answer(end="refusal", detail="frontier_llm")
    model = ScriptedModel(refusal, calling(("localize", {})), refusal, refusal)
    with pytest.raises(BudgetEnded, match=r"refuses to go on \(frontier_llm\)"):
        carry_on(workspace, make(workspace, model), hard_tools())
    assert len(model.requests) == 4 and "withheld by the provider (frontier_llm)" in model.requests[1].turns[-1].text
    assert load_current(workspace).outcome is None
    assert carry_on(workspace, make(workspace, ScriptedModel(*SOLVED[1:])), hard_tools()).outcome == "exact", "resuming lets it try again"


def test_a_paused_turn_goes_on_without_a_word(workspace, state):
    model = ScriptedModel(Answer(end="pause", items=[{"text": "so far"}]), *SOLVED)
    assert carry_on(workspace, make(workspace, model), hard_tools()).outcome == "exact"
    assert model.requests[1].turns[-1].kind == "answered"


def test_a_full_context_starts_a_fresh_conversation_with_the_facts(workspace, state):
    model = ScriptedModel(*SOLVED[:2], Answer(end="context", detail="prompt is too long"), calling(FIX))
    assert carry_on(workspace, make(workspace, model), hard_tools()).outcome == "exact"
    (fresh,) = model.requests[3].turns
    assert "rms_norm=exact: kept" in fresh.text and "repros/00-engine-linear" in fresh.text and "rms_norm=exact (rollout)" in fresh.text


def test_a_context_that_cannot_hold_the_task_pauses(workspace, state):
    with pytest.raises(BudgetEnded, match="does not even hold the task"):
        carry_on(workspace, make(workspace, ScriptedModel(Answer(end="context", detail="too long"))), hard_tools())


def test_a_person_may_refuse_a_patch(workspace, state):
    asked = []

    def approve(wanted):
        asked.append(wanted)
        return "use fp32 accumulation" if len(asked) == 1 else None

    model = ScriptedModel(*SOLVED, calling(patch([NORM], {"rms_norm": "exact"})))
    ended = carry_on(workspace, make(workspace, model, approve=approve), hard_tools())
    assert ended.outcome == "exact" and len(asked) == 3
    assert "a person refused this patch: use fp32 accumulation" in last_results(model.requests[2])[1]


def test_the_answers_cost_is_added_up(workspace, state):
    model = ScriptedModel(*SOLVED, usage=Usage(input=1000, output=200, cache_read=10_000, cache_write=500))
    carry_on(workspace, make(workspace, model), hard_tools())
    spent = trajectory(workspace).spent
    assert spent.steps == 3 and spent.tokens == 3 * 11_700 and spent.usd == pytest.approx(3 * (0.01 + 0.01 + 0.01 + 0.01))
    assert json.loads((workspace.private / "runs" / "r1" / "trajectory" / "0001.json").read_text())["body"]["usd"] == pytest.approx(0.04)


def solved_by_a_new_kernel(workspace, tools, bindings, files):
    """Shared with real engines: only `tools`, the operators and the kernel's text differ."""
    ended = carry_on(workspace, make(workspace, kernel_writer(bindings, files)), tools)
    assert ended.outcome == "exact" and ended.attempts[-1].outcome == "kept", ended.steps
    assert all((workspace.path / path).read_text() == text for path, text in files.items())
    return ended


def test_a_scripted_kernel_writer_needs_to_know_no_site(workspace, state):
    ended = solved_by_a_new_kernel(workspace, FakeTools({"engine": ["linear"], "phase": ["linear"]}, useless=USELESS),
                                   {"linear": "kernels:ordered.linear"}, {"kernels/ordered.py": KERNEL})
    assert ended.attempts[0].addresses == [LINEAR, "phase:000.linear"]


def test_broken_text_from_a_server_is_survived(workspace, state):
    """Half a surrogate pair and arguments nested beyond reason."""
    broken = Chat.answer(Chat.text("\ud83d oops"), Chat.call("a", "read", '{"root": "workspace", "path": "\\ud83d"}'),
                         Chat.call("b", "read", "[" * 100_000))
    with FakeServer(broken, *[Chat.answer(Chat.call("z", "stop", {"claim": "give_up", "why": "\ud83d"}))] * 2) as server:
        ended = carry_on(workspace, make(workspace, model_for(Chat, server.url)), hard_tools())
        assert ended.outcome == "inexact" and len(server.seen) == 2
    first, second = [r.body.result.text for r in trajectory(workspace).records if r.body.kind == "result"]
    assert "does not exist" in first and "not a JSON object" in second


def test_it_says_what_it_waits_for(workspace, state):
    heard: list[str] = []
    policy = make(workspace, ScriptedModel(*SOLVED))
    policy.tell = heard.append
    carry_on(workspace, policy, hard_tools())
    assert len(heard) == 3 and heard[2].startswith("asking scripted; so far 0.03 USD, 2 answers")


def test_the_kernel_of_a_rejected_attempt_can_be_read_again(workspace, state):
    wrong = patch([], {"linear": "kernels:wrong.linear"}, {"kernels/wrong.py": KERNEL})
    look = calling(("list", {"root": "attempts", "path": "."}), ("read", {"root": "attempts", "path": "1/kernels/wrong.py"}))
    model = ScriptedModel(look, calling(wrong), look, calling(("stop", {"claim": "give_up", "why": "x"})))
    carry_on(workspace, make(workspace, model), hard_tools(broken=("linear=kernels:wrong.linear",)))
    assert last_results(model.requests[1])[0] == "(empty)"
    assert last_results(model.requests[3])[0] == "1/" and "one fixed order" in last_results(model.requests[3])[1]

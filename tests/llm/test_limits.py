"""Limits pause a run with everything saved; a higher limit carries it on."""

import pytest
from runs import PRICE, carry_on, hard_tools, make, trajectory
from test_llm_policy import SOLVED

from agent.errors import BudgetEnded, UserError
from agent.llm.conversation import Answer, Usage
from agent.llm.fakes import ScriptedModel
from agent.llm.limits import Meter, Spent
from agent.llm.prices import known_models, price_of
from agent.llm.settings import Limits
from agent.state import load_current

ONE = Usage(input=1000, output=100)


@pytest.mark.parametrize(("low", "high", "said"), [
    ({"steps": 2}, {"steps": 10}, "the limit of 2 answers is reached .*--max-steps"),
    ({"usd": 0.03}, {"usd": 1}, "the limit of 0.03 USD is reached .*--max-usd"),
    ({"tokens": 2200}, {"tokens": 10_000}, "the limit of 2200 tokens is reached .*--max-tokens"),
])
def test_a_limit_pauses_and_a_higher_one_goes_on_without_paying_again(workspace, state, low, high, said):
    model, tools = ScriptedModel(*SOLVED, usage=ONE), hard_tools()
    with pytest.raises(BudgetEnded, match=said) as caught:
        carry_on(workspace, make(workspace, model, **low), tools)
    assert caught.value.exit_code == 3 and "agent/r1/main holds 1 kept of 1 attempts" in str(caught.value)
    assert len(model.requests) == 2 and load_current(workspace).attempts[0].outcome == "kept", "what there is is handed back"
    with pytest.raises(BudgetEnded, match=said):
        carry_on(workspace, make(workspace, model, **low), tools)
    assert len(model.requests) == 2, "resuming refills nothing"
    assert carry_on(workspace, make(workspace, model, **high), tools).outcome == "exact"
    assert len(model.requests) == 3 and trajectory(workspace).spent.steps == 3


def test_wall_clock_is_of_one_call(workspace, state):
    model = ScriptedModel(*SOLVED)
    with pytest.raises(BudgetEnded, match="0 minutes"):
        carry_on(workspace, make(workspace, model, minutes=0), hard_tools())
    assert not model.requests and carry_on(workspace, make(workspace, model), hard_tools()).outcome == "exact"


def test_a_request_may_not_outlast_the_wall_clock(workspace, state):
    model = ScriptedModel(*SOLVED)
    carry_on(workspace, make(workspace, model, minutes=1), hard_tools())
    assert 0 < model.requests[0].timeout <= 60


def test_device_time_counts_on_a_device_only(workspace, state, monkeypatch):
    clock = iter(range(0, 100_000, 50))
    monkeypatch.setattr("agent.policies.llm.time.monotonic", lambda: next(clock))
    state.device = "cuda"
    state.save(workspace)
    model = ScriptedModel(*SOLVED)
    with pytest.raises(BudgetEnded, match=r"the limit of 60 GPU seconds is reached .*--max-gpu-seconds"):
        carry_on(workspace, make(workspace, model, gpu_seconds=60), hard_tools(), minutes=1e6)
    spent = trajectory(workspace).spent
    assert spent.gpu_seconds >= 60 and "GPU seconds" in str(spent)


def test_no_device_time_on_a_cpu(workspace, state):
    assert carry_on(workspace, make(workspace, ScriptedModel(*SOLVED), gpu_seconds=0.001), hard_tools()).outcome == "exact"


def test_an_unknown_price_is_an_error_unless_given():
    with pytest.raises(UserError, match="price of anthropic:nobody is unknown; give it with --price") as caught:
        price_of("anthropic:nobody")
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert price_of("anthropic:nobody", "3,15").cost(Usage(input=1_000_000, output=1_000_000)) == 18
    for bad in ("3", "3,x", "1,2,3,4,5", "-1,2", "nan,1", "inf,1", ""):
        with pytest.raises(UserError, match="--price"):
            price_of("anthropic:nobody", bad)


def test_prices_of_the_table(tmp_path):
    usage = Usage(input=100_000, output=10_000, cache_read=100_000, cache_write=10_000)
    assert price_of("openai:gpt-6-sol").cost(usage) == pytest.approx(0.2 + 0.1 + 0.02 + 0.025)
    long = usage.model_copy(update={"cache_read": 200_000})
    assert price_of("openai:gpt-6-sol").cost(long) == pytest.approx(0.4 + 0.15 + 0.08 + 0.05)
    assert price_of("x", "2,10").cost(usage) == pytest.approx(0.2 + 0.1 + 0.2 + 0.04), "cache prices that are not known count as the dearest"
    (broken := tmp_path / "prices.toml").write_text('["x"]\ninput = "free"\noutput = 1')
    with pytest.raises(UserError, match=r"prices\.toml"):
        price_of("x", table=broken)
    assert all(price_of(name) for name in known_models())


def test_limits_of_zero_and_none():
    assert Meter(Limits(steps=0)).reached(Spent()) and not Meter(Limits(gpu_seconds=None)).reached(Spent(gpu_seconds=1e9))


def test_usage_without_a_cache_is_priced(workspace, state):
    model = ScriptedModel(*SOLVED[:2], lambda request: Answer(**SOLVED[2].model_dump() | {"usage": Usage(input=10, output=1, estimated=True)}))
    carry_on(workspace, make(workspace, model), hard_tools())
    assert trajectory(workspace).records[-3].body.kind in ("answer", "action", "result") and PRICE.cost(Usage(input=10, output=1)) == 15e-5

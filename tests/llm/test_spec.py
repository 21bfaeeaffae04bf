"""`--policy`: every form, and one line for everything that is wrong with it."""

import io
import subprocess
import sys

import pytest
from rich.console import Console

from agent.config import Config
from agent.errors import UserError
from agent.llm.options import LlmOptions, choose_policy
from agent.llm.prices import known_models
from agent.llm.settings import Limits, LlmSettings
from agent.llm.spec import check_policy, make_model, parse_spec, policy_from_spec
from agent.policies.hybrid import Hybrid
from agent.policies.llm import LlmPolicy
from agent.policies.playbook import Playbook

KEYS = {"ANTHROPIC_API_KEY": "k" * 20, "OPENAI_API_KEY": "o" * 20}
LOCAL = "chat:org/model:tag@http://127.0.0.1:8000/v1"


@pytest.mark.parametrize("text", ["playbook", "anthropic:some-model", "openai:some-model", LOCAL, "hybrid:anthropic:some-model", f"hybrid:{LOCAL}",
                                  "replay:20260101-120000"])
def test_a_name_makes_the_same_policy_again(text):
    assert parse_spec(text).name == text and parse_spec(parse_spec(text).name) == parse_spec(text)


def test_forms():
    spec = parse_spec("chat:me@home/model@https://host/v1/")
    assert (spec.model, spec.url) == ("me@home/model", "https://host/v1")
    assert parse_spec("hybrid", "openai:m").name == "hybrid:openai:m"


@pytest.mark.parametrize("text", ["", "gpt", "anthropic", "anthropic:", "openai: ", "chat:", "chat:model", "chat:@http://h/v1", "chat:m@ftp://h",
                                  "chat:m@http://", "chat:m@http://[::1", "replay:", "hybrid:playbook", "hybrid:hybrid:openai:m",
                                  "hybrid:replay:x", "playbook:x", "Anthropic:m"])
def test_unknown_forms_are_one_line(text):
    with pytest.raises(UserError, match="unknown policy") as caught:
        parse_spec(text)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_hybrid_needs_a_model():
    with pytest.raises(UserError, match="hybrid:anthropic:MODEL"):
        parse_spec("hybrid")


@pytest.mark.parametrize("url", ["http://user:secret-pass@h/v1", "http://h/v1?key=secret-pass", "http://h/v1#secret-pass"])
def test_no_credentials_in_an_address(url):
    with pytest.raises(UserError, match="no credentials") as caught:
        parse_spec(f"chat:m@{url}")
    assert "secret-pass" not in str(caught.value)


def test_what_is_missing_is_said_before_a_run_begins():
    settings = LlmSettings()
    with pytest.raises(UserError, match="needs a key; set ANTHROPIC_API_KEY"):
        check_policy("anthropic:claude-opus-5-5", settings, environment={})
    with pytest.raises(UserError, match="needs a key; set OPENAI_API_KEY"):
        check_policy("hybrid:openai:m", settings, "1,2", environment={"OPENAI_API_KEY": " "})
    with pytest.raises(UserError, match="price of anthropic:nobody is unknown"):
        check_policy("anthropic:nobody", settings, environment=KEYS)
    with pytest.raises(UserError, match="price of chat:"):
        check_policy(LOCAL, settings, environment={})
    assert check_policy("anthropic:claude-opus-5-5", settings, environment=KEYS) == "anthropic:claude-opus-5-5"
    assert check_policy(LOCAL, settings, "0,0", environment={}) == LOCAL
    assert check_policy("hybrid", LlmSettings(model="openai:m"), "1,2", environment=KEYS) == "hybrid:openai:m"
    assert check_policy("playbook", settings, environment={}) == "playbook"


def test_policies(workspace, state):
    def make(text: str, price: str | None = "1,2"):
        return policy_from_spec(text, workspace=workspace, run="r1", price=price, environment=KEYS)

    assert isinstance(make("playbook"), Playbook)
    policy = make("anthropic:m")
    assert isinstance(policy, LlmPolicy) and policy.name == policy.model.name == "anthropic:m"
    hybrid = make("hybrid:anthropic:m", None)
    assert isinstance(hybrid, Hybrid) and hybrid.name == "hybrid:anthropic:m"
    assert hybrid.model.price.output == 2, "the price a run was begun with stays"
    with pytest.raises(UserError, match="key"):
        policy_from_spec("openai:m", workspace=workspace, run="r1", price="1,2", environment={})


def test_an_openai_key_goes_to_openai_only():
    model = make_model(parse_spec(LOCAL), LlmSettings(), KEYS)
    assert model.client.api_key == "none"  # pyright: ignore
    assert make_model(parse_spec(LOCAL), LlmSettings(), {"CHAT_API_KEY": "mine"}).client.api_key == "mine"  # pyright: ignore


def test_no_sdk_is_imported_before_a_model_is_made():
    code = ("import sys, agent.llm.spec as spec, agent.llm.branching, agent.policies.hybrid\n"
            "from agent.llm.settings import LlmSettings\n"
            "spec.check_policy('anthropic:x', LlmSettings(), '1,2', {'ANTHROPIC_API_KEY': 'k'})\n"
            "bad = [m for m in ('torch', 'vllm', 'transformers', 'anthropic', 'openai') if m in sys.modules]\n"
            "assert not bad, bad")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_settings_in_the_workspace(tmp_path):
    llm = LlmSettings(model="openai:m", thinking=False, effort="high", limits=Limits(usd=2.5, gpu_seconds=60))
    config = Config(model="qwen3", scale="tiny", llm=llm)
    (path := tmp_path / "consistency.toml").write_text(config.dumps())
    assert Config.load(path) == config and "[llm" not in Config(model="qwen3", scale="tiny").dumps()
    path.write_text(path.read_text().replace("usd = 2.5", "usd = -1"))
    with pytest.raises(UserError, match=r"llm\.limits\.usd.*found -1"):
        Config.load(path)


def test_the_command_line_goes_over_the_workspace():
    options = LlmOptions(usd=3, tokens=7)
    limits = options.over(LlmSettings(limits=Limits(usd=1, steps=5)), minutes=9).limits
    assert (limits.usd, limits.tokens, limits.steps, limits.minutes) == (3, 7, 5, 9)


def test_the_question_and_its_default():
    def ask(answer: str, environment=KEYS, quiet=False, settings=LlmSettings()):
        shown = io.StringIO()
        return *choose_policy(settings, Console(file=shown, width=300), quiet, environment, lambda prompt: answer), shown.getvalue()

    assert ask("", {}) == ("playbook", False, ""), "without a key there is nothing to choose"
    policy, asked, shown = ask("")
    assert (policy, asked) == (f"hybrid:{known_models()[0]}", True) and "at most 10 USD a run" in shown
    assert ask(str(len(known_models())))[:2] == ("playbook", True) and ask("playbook")[:2] == ("playbook", True)
    assert "openai" not in ask("", {"ANTHROPIC_API_KEY": "k" * 20})[2]
    last = known_models()[-1]
    assert ask("", settings=LlmSettings(model=last))[0] == f"hybrid:{last}", "the workspace's own model comes first"
    with pytest.raises(UserError, match="unknown policy '99'"):
        ask("99")


def test_where_nobody_can_answer_the_playbook_leads_and_one_line_says_how_to_choose():
    for quiet in (True, False):  # --json, and a standard input that is no terminal
        shown = io.StringIO()
        assert choose_policy(LlmSettings(), Console(file=shown, width=80), quiet, KEYS) == ("playbook", False)
        (line,) = shown.getvalue().splitlines()
        assert "ANTHROPIC_API_KEY and OPENAI_API_KEY set" in line and f"--policy hybrid:{known_models()[0]}" in line

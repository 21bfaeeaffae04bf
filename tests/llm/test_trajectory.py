"""Everything is on disk after every step, and a run goes on from it."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_server import PROVIDERS, FakeServer
from providers import KEY, spec_of
from runs import HARD, PRICE, USELESS, carry_on, hard_tools, make, trajectory
from test_llm_policy import SOLVED

from agent.errors import BudgetEnded, JobFailed, UserError
from agent.fakes import FakeTools
from agent.llm.calling import Unavailable
from agent.llm.conversation import Answer
from agent.llm.fakes import ScriptedModel
from agent.llm.redact import MARK, secrets
from agent.llm.settings import LlmSettings
from agent.llm.spec import make_model
from agent.policies.llm import LlmPolicy
from agent.state import folder, load_current


def files(workspace) -> list[Path]:
    return sorted((workspace.private / "runs" / "r1" / "trajectory").rglob("*.json"))


def test_a_record_is_there_before_the_next_thing_happens(workspace, state):
    seen = []

    def before(call: str) -> None:
        seen.append((call, [record.body.kind for record in trajectory(workspace).records]))

    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED)), hard_tools(before=before))
    assert seen[0] == ("verify quick", []) and seen[1] == ("localize", ["told", "answer", "action"])
    assert all(not path.name.startswith(".") for path in files(workspace))


@pytest.mark.parametrize("call", [2, 3, 4, 6, 7, 10])
def test_a_run_killed_at_any_tool_call_goes_on_without_paying_again(workspace, state, call):
    """Killed as a process is: nothing but the disk is left."""
    left = [call]

    def before(name: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    model = ScriptedModel(*SOLVED)
    tools = hard_tools(before=before)
    with contextlib.suppress(KeyboardInterrupt):
        carry_on(workspace, make(workspace, model), tools)
    ended = carry_on(workspace, make(workspace, model), tools)
    assert ended.outcome == "exact" and len(model.requests) == 3 == trajectory(workspace).spent.steps
    assert [a.outcome for a in ended.attempts] == ["kept", "kept"]
    answered = [record.body.result.call for record in trajectory(workspace).records if record.body.kind == "result"]
    assert len(answered) == sum(len(answer.calls) for answer in SOLVED), "each call has one result"


def test_killed_by_a_signal_between_a_look_and_an_action(workspace, state, tmp_path):
    """The same with a real SIGKILL, in the middle of an answer's calls."""
    code = (
        "import os, signal, sys; from pathlib import Path; sys.path[:0] = [sys.argv[2]]\n"
        "from runs import *; from test_llm_policy import SOLVED; from agent.llm.fakes import ScriptedModel\n"
        "import agent.policies.llm as llm\n"
        "settle = llm.LlmPolicy._settle\n"
        "def kill(self, acting, state): os.kill(os.getpid(), signal.SIGKILL) if acting.action.kind == 'repro' else settle(self, acting, state)\n"
        "llm.LlmPolicy._settle = kill\n"
        "w = Workspace.open(Path(sys.argv[1])); carry_on(w, make(w, ScriptedModel(*SOLVED)), hard_tools())\n")
    ran = subprocess.run([sys.executable, "-c", code, str(workspace.path), str(Path(__file__).parent)], capture_output=True, text=True)
    assert ran.returncode == -9, ran.stderr
    assert trajectory(workspace).pending() is not None
    model = ScriptedModel(SOLVED[2])
    tools = hard_tools()
    assert carry_on(workspace, make(workspace, model), tools).outcome == "exact"
    assert len(model.requests) == 1 and tools.calls[0] == "check rms_norm", "what was done before the kill is not done again"


def test_an_engine_that_crashes_outside_an_attempt_leaves_the_call_open(workspace, state):
    broken = [True]

    def before(name: str) -> None:
        if name == "localize" and broken:
            broken.clear()
            raise JobFailed("the job hangs", Path("x"))

    model = ScriptedModel(*SOLVED)
    with pytest.raises(JobFailed):
        carry_on(workspace, make(workspace, model), hard_tools(before=before))
    assert carry_on(workspace, make(workspace, model), hard_tools()).outcome == "exact" and len(model.requests) == 3


def test_an_unusable_trajectory_is_one_line(workspace, state):
    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED)), hard_tools())
    files(workspace)[1].write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        make(workspace, ScriptedModel(*SOLVED))


def test_a_run_without_a_model_has_none(workspace, state):
    with pytest.raises(UserError, match="has no trajectory"):
        trajectory(workspace)


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda p: p.kind)
def test_keys_are_never_written(provider, workspace, state, monkeypatch):
    """Not by the adapters, not from an error message, and not when a model or a kernel's log repeats them."""
    for name in ("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "CHAT_API_KEY"):
        monkeypatch.setenv(name, KEY)
    leak = provider.answer(provider.text(f"the key is {KEY}"), provider.call("a", "read", {"root": "workspace", "path": "kernels/leak.txt"}),
                           provider.call("b", "read", {"root": "workspace", "path": KEY}))
    with FakeServer(leak, provider.error(400, f"no such key: {KEY}")) as server:
        model = make_model(spec_of(provider, server.url), LlmSettings(), {
            "ANTHROPIC_API_KEY": KEY, "OPENAI_API_KEY": KEY, "CHAT_API_KEY": KEY, "ANTHROPIC_BASE_URL": server.url,
            "OPENAI_BASE_URL": f"{server.url}/v1"})
        (workspace.tree("r1", "main") / "kernels" / "leak.txt").write_text(f"password {KEY}\n")
        workspace.commit(workspace.tree("r1", "main"), "leak")
        state.head = workspace.head(workspace.tree("r1", "main"))
        state.save(workspace)
        policy = LlmPolicy(model.name, model, workspace, "r1", LlmSettings(), PRICE)
        with pytest.raises(UserError) as caught:
            carry_on(workspace, policy, hard_tools())
        assert KEY in json.dumps(server.seen[0]["headers"]) and f"password {KEY}" not in json.dumps(server.seen[1]["body"])
    assert KEY not in str(caught.value)
    written = [path for path in (workspace.private / "runs").rglob("*") if path.is_file()]
    assert len(written) > 5 and not [path for path in written if KEY.encode() in path.read_bytes()]
    assert any(MARK in path.read_text() for path in written)


def test_what_counts_as_a_secret():
    found = secrets({"A_API_KEY": "a" * 20, "GH_TOKEN": "b" * 30, "HOME": "c" * 30, "SHORT_KEY": "abc", "ANTHROPIC_CUSTOM_HEADERS": "d" * 15})
    assert found == ["b" * 30, "a" * 20, "d" * 15]


def test_resuming_does_not_send_more_than_the_conversation(workspace, state):
    model = ScriptedModel(*SOLVED)
    with pytest.raises(BudgetEnded):
        carry_on(workspace, make(workspace, model, steps=2), hard_tools())
    carry_on(workspace, make(workspace, model), hard_tools())
    before, after = model.requests[1], model.requests[2]
    assert after.turns[:len(before.turns)] == before.turns and len(after.turns) == len(before.turns) + 2 and after.cache_key == before.cache_key


def test_a_reply_that_was_not_reacted_to_is_reacted_to_after_a_kill(workspace, state):
    """The worst place: the answer is saved, the note about it is not."""
    class Killed(Exception):
        pass

    model = ScriptedModel(Answer(end="end", text="hm", items=[{}]), *SOLVED)
    policy = make(workspace, model)
    policy._react = lambda answer, state: (_ for _ in ()).throw(Killed)
    with pytest.raises(Killed):
        carry_on(workspace, policy, hard_tools())
    assert carry_on(workspace, make(workspace, model), hard_tools()).outcome == "exact"
    assert model.requests[1].turns[-1].kind == "said" and "No tool was called" in model.requests[1].turns[-1].text


def test_state_is_kept_when_it_changed(workspace, state):
    carry_on(workspace, make(workspace, ScriptedModel(*SOLVED)), FakeTools(HARD, useless=USELESS))
    kept = sorted(path.name for path in (folder(workspace, "r1") / "trajectory" / "states").iterdir())
    assert kept == ["0001.json", "0002.json", "0003.json"] and load_current(workspace).outcome == "exact"


def test_a_silent_provider_pauses_and_the_run_goes_on_later(workspace, state):
    down = [True]

    def reply(request):
        if down:
            down.clear()
            raise Unavailable("openai:m does not answer (503 later); `agent resume` asks again")
        return SOLVED[1]

    model = ScriptedModel(SOLVED[0], reply, reply, SOLVED[2])
    with pytest.raises(BudgetEnded, match="does not answer"):
        carry_on(workspace, make(workspace, model), hard_tools())
    assert carry_on(workspace, make(workspace, model), hard_tools()).outcome == "exact" and trajectory(workspace).spent.steps == 3

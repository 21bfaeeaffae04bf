"""The same through the command line."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from fake_server import FakeServer, Responses
from providers import KEY
from runs import HARD, USELESS
from test_llm_policy import SOLVED
from typer.testing import CliRunner

from agent import models
from agent.cli import app
from agent.fakes import FakeTools
from agent.state import load_current
from agent.workspace import Workspace

POLICY = ("--policy", "openai:m", "--price", "1,2")


@pytest.fixture(autouse=True)
def no_gpu_no_recipe(monkeypatch):
    monkeypatch.setattr(models, "gpu_present", lambda: False)
    monkeypatch.setattr(models, "RECIPES", Path("none"))


@pytest.fixture
def server(monkeypatch):
    script = [Responses.answer(*[Responses.call(f"{n}{m}", call.name, call.arguments) for m, call in enumerate(answer.calls)])
              for n, answer in enumerate(SOLVED)]
    with FakeServer(*script) as fake:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{fake.url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        yield fake


def agent(*arguments: object, tools: FakeTools | None = None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], obj=tools or FakeTools(HARD, useless=USELESS))


def test_run_pause_resume_report_replay_fork(tmp_path, server):
    ws = tmp_path / "ws"
    paused = agent("run", "--model", "qwen3", "--workspace", ws, *POLICY, "--max-steps", 2, "--json")
    assert paused.exit_code == 3 and "with a higher --max-steps goes on" in paused.stderr, paused.output
    first = json.loads(paused.stdout)["run"]
    done = agent("resume", ws, "--max-steps", 5, "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["outcome"] == "exact" and len(server.seen) == 3, done.output
    assert agent("report", ws).exit_code == 0
    page = (ws / "report.html").read_text()
    assert "What the model did" in page and "kernels/ordered.py" in page and "3 answers" in page
    again = agent("replay", first, "--workspace", ws, "--json")
    assert again.exit_code == 0 and len(server.seen) == 3, again.output
    server.script.append(Responses.answer(Responses.call("z", "stop", {"claim": "give_up", "why": "enough"})))
    forked = agent("fork", first, "--at", 2, "--workspace", ws, "--say", "stop", "--json")
    assert forked.exit_code == 1 and json.loads(forked.stdout)["why"] == "enough" and len(server.seen) == 4, forked.output
    assert agent("fork", first, "--at", 7, "--workspace", ws).exit_code == 2


@pytest.mark.parametrize(("more", "said"), [
    (("--policy", "gpt"), "unknown policy 'gpt'"), (("--policy", "openai:m"), "give it with --price"),
    (("--policy", "anthropic:m"), "ANTHROPIC_API_KEY"),
    (("--policy", "hybrid"), "hybrid:anthropic:MODEL"), ((*POLICY, "--price", "free"), "--price free"), ((*POLICY, "--approve"), "on a terminal")])
def test_what_is_wrong_is_one_line(tmp_path, server, more, said):
    result = agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws", *more)
    assert result.exit_code == 2 and said in result.stderr and len(result.stderr.strip().splitlines()) == 1, result.output
    assert not server.seen


ASKED = """
import sys
from pathlib import Path
from agent import models
from agent.cli import app
from agent.fakes import FakeTools
models.gpu_present, models.RECIPES = lambda: False, Path("none")
app(["run", "--workspace", sys.argv[1], *sys.argv[2:]], obj=FakeTools({"engine": ["linear"]}))
"""


def at_a_terminal(answer: str, *arguments: object) -> str:
    """What a person sees who types `answer`, if asked."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "ANTHROPIC_API_KEY": KEY, "COLUMNS": "200", "TERM": "dumb"}
    with subprocess.Popen([sys.executable, "-c", ASKED, *map(str, arguments)], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, env=environment) as process:
        os.close(theirs)
        os.write(ours, f"{answer}\n".encode())
        shown = process.communicate(timeout=60)[0]
    os.close(ours)
    assert process.returncode in (0, 1), shown
    return shown


def test_a_person_with_a_key_is_asked_once_per_workspace(tmp_path):
    ws = tmp_path / "ws"
    first = at_a_terminal("playbook", ws, "--model", "qwen3")
    assert "ANTHROPIC_API_KEY set. Who picks the steps" in first and "0  hybrid:anthropic:" in first
    assert "Who picks" not in at_a_terminal("", ws), "the answer is remembered"
    assert load_current(Workspace.open(ws)).policy == "playbook"


def test_a_workspace_made_where_nobody_could_answer_asks_later(tmp_path, monkeypatch):
    ws = tmp_path / "ws"
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    made = agent("run", "--model", "qwen3", "--workspace", ws, tools=FakeTools({"engine": ["linear"]}))
    assert made.exit_code == 0 and "nobody to ask: the playbook picks the steps; choose with --policy" in made.output, made.output
    monkeypatch.delenv("OPENAI_API_KEY")
    assert "Who picks the steps" in at_a_terminal("", ws)
    assert load_current(Workspace.open(ws)).policy.startswith("hybrid:anthropic:"), "Enter takes the hybrid"
    (ws / "consistency.toml").write_text('policy = "playbook"\n' + (ws / "consistency.toml").read_text())
    Workspace.open(ws).commit(ws, "choose")
    assert "Who picks" not in at_a_terminal("", ws) and load_current(Workspace.open(ws)).policy == "playbook", "consistency.toml comes first"

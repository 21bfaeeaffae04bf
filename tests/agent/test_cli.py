import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent import checkpoint, models, toolset
from agent.cli import app
from agent.errors import UserError
from agent.fakes import FakeTools
from agent.workspace import Workspace, call_git

WORLD = {"engine": ["rms_norm", "linear"], "batch": ["linear"], "phase": []}
KEYS = {"model", "scale", "verdict", "baseline", "throughput", "attempts", "branch", "pull_request", "seconds"}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(models, "gpu_present", lambda: False)
    monkeypatch.setattr(models, "RECIPES", Path("none"))  # tests/agent/test_recipes.py is about them
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def agent(*arguments: object, tools: FakeTools | None = None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], obj=tools or FakeTools(WORLD))


def refused(result, *said: str) -> None:
    """One clear line, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert all(part in result.stderr for part in said), result.stderr


def test_help_imports_no_engine_and_answers_within_a_second():
    code = ("import sys, time; t = time.perf_counter(); import agent.cli, agent.commands\n"
            "bad = [m for m in ('torch', 'vllm', 'transformers', 'anthropic', 'openai') if m in sys.modules]\n"
            "assert not bad, bad")
    subprocess.run([sys.executable, "-c", code], check=True)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        shown = subprocess.run([sys.executable, "-m", "agent", "--help"], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0
    for command in ("run", "verify", "localize", "repro", "patch", "resume", "report", "doctor", "models"):
        assert command in shown.stdout


def test_no_module_of_the_agent_imports_an_engine():
    code = ("import sys, pkgutil, importlib, agent\n"
            "for m in pkgutil.walk_packages(agent.__path__, 'agent.'):\n"
            "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
            "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_run_says_what_it_takes_and_ends_with_one_screen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = agent("run", "--model", "nemotron-3.5")
    assert result.exit_code == 0, result.output
    assert "no GPU here: scale tiny" in result.stdout
    assert "exact and fast enough" in result.stdout
    assert "consistency-nemotron-3.5/PULL_REQUEST.md" in "".join(result.stdout.split())
    assert "agent/" in result.stdout and "/main" in result.stdout
    assert (tmp_path / "consistency-nemotron-3.5" / "PULL_REQUEST.md").exists()


def test_run_json_is_one_object_on_stdout(tmp_path):
    result = agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws", "--target-throughput", 0.5, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data.keys() >= KEYS
    assert data["model"] == "qwen3" and data["scale"] == "tiny" and data["outcome"] == "exact"
    assert data["verdict"]["exact"] is True and data["verdict"]["void"] is False and data["verdict"]["mismatches"] == 0
    assert {"name", "dimension", "ran", "tokens", "mismatches", "reason"} <= data["verdict"]["conditions"][0].keys()
    assert data["baseline"].keys() >= {"mismatches", "k3", "max_abs"} and data["baseline"]["mismatches"] > 0
    assert data["throughput"].keys() >= {"stock", "candidate", "ratio", "spread"}
    assert [a["outcome"] for a in data["attempts"]] == ["kept"]
    assert Path(data["pull_request"]).read_text().startswith("# qwen3: rollout and training")


@pytest.mark.parametrize(("tools", "arguments", "code", "outcome"), [
    (FakeTools(WORLD, ratio=0.9), [], 1, "slow"),
    (FakeTools(WORLD, ratio=0.9), ["--target-throughput", "0.8"], 0, "exact"),
    (FakeTools(WORLD, useless=("linear=exact",)), [], 1, "inexact"),
    (FakeTools(WORLD, void=True), [], 1, "inexact"),
    (FakeTools(WORLD), ["--attempts", "0"], 3, None),
    (FakeTools(WORLD), ["--minutes", "0"], 3, None)])
def test_exit_codes(tmp_path, tools, arguments, code, outcome):
    result = agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws", "--json", *arguments, tools=tools)
    assert result.exit_code == code, result.output
    assert json.loads(result.stdout)["outcome"] == outcome
    if code == 3:
        assert "resume" in result.stderr
        assert agent("resume", tmp_path / "ws", tools=tools).exit_code == 0


def test_resume_of_a_finished_run_shows_it_again(tmp_path):
    agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws")
    tools = FakeTools(WORLD)
    result = agent("resume", tmp_path / "ws", "--json", tools=tools)
    assert result.exit_code == 0 and json.loads(result.stdout)["outcome"] == "exact" and tools.calls == []


def test_a_second_run_in_the_same_workspace_starts_over_from_main(tmp_path):
    agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws")
    result = agent("run", "--workspace", tmp_path / "ws", "--json")
    assert result.exit_code == 0 and len(json.loads(result.stdout)["attempts"]) == 1


def test_plain_lines_carry_phase_attempt_divergence_and_time(tmp_path):
    result = agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws")
    for part in (" baseline, ", " localize, ", "first divergence rms_norm at 000.rms_norm (engine)", "attempt 1: rms_norm=exact, linear=exact",
                 "time left", "tokens compared 192", "mismatches 128", " verify, attempt 1:"):
        assert part in result.stdout, (part, result.stdout)


@pytest.mark.parametrize(("arguments", "said"), [
    (["--model", "nemotron"], ["unknown model 'nemotron'", "did you mean nemotron-3.5"]),
    (["--model", "qwen"], ["did you mean qwen3"]),
    (["--model", "zzz"], ["known: qwen3, nemotron-3.5"]),
    (["--model", "qwen3", "--scale", "tinny"], ["no scale 'tinny'", "did you mean tiny"]),
    ([], ["--model"]),
    (["--model", "qwen3", "--policy", "magic"], ["unknown policy 'magic'", "playbook"])])
def test_unknown_names_come_with_suggestions(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    refused(agent("run", *arguments), *said)
    assert list(tmp_path.iterdir()) == []


def test_a_workspace_that_cannot_be_used(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").touch()
    refused(agent("run", "--model", "qwen3", "--workspace", tmp_path / "plain"), "not a git repository")
    refused(agent("resume", tmp_path / "absent"), "not a folder")
    refused(agent("report", tmp_path / "plain"), "not a git repository")
    workspace = tmp_path / "ws"
    agent("run", "--model", "qwen3", "--workspace", workspace, "--minutes", 0)
    refused(agent("run", "--model", "nemotron-3.5", "--workspace", workspace), "workspace for model qwen3, not nemotron-3.5")
    (workspace / "contract.toml").write_text("[training]\n")
    refused(agent("run", "--model", "qwen3", "--workspace", workspace), "uncommitted changes (contract.toml)")
    call_git(("checkout", "--quiet", "contract.toml"), workspace)
    with Workspace.open(workspace).lock():
        for command in (["run", "--workspace"], ["resume"], ["verify", "--workspace"], ["patch", "--set", "linear=exact", "--workspace"]):
            refused(agent(*command, workspace), f"in use by another run (pid {os.getpid()})")
    assert agent("run", "--model", "qwen3", "--workspace", workspace).exit_code == 0


def test_a_workspace_without_a_run(tmp_path, workspace):
    refused(agent("resume", workspace.path), "no run yet")
    refused(agent("report", workspace.path), "no run yet")


def test_no_git_identity(tmp_path, git_identity, monkeypatch):
    (git_identity / ".gitconfig").write_text("")
    monkeypatch.delenv("EMAIL", raising=False)
    refused(agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws"), "git config --global user.name")


def test_unwritable_and_full_disks(tmp_path):
    (tmp_path / "file").touch()
    refused(agent("run", "--model", "qwen3", "--workspace", tmp_path / "file" / "ws"), "cannot write")

    def full(call: str) -> None:
        if call == "localize":
            raise OSError(errno.ENOSPC, "No space left on device", "evidence.json")

    refused(agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws", tools=FakeTools(WORLD, before=full)), "evidence.json", "No space left")
    assert agent("resume", tmp_path / "ws").exit_code == 0


@pytest.mark.parametrize(("missing", "device", "extra"), [("vllm", "cpu", "[cpu]"), ("torch", "cuda", "[gpu]")])
def test_a_missing_engine_names_the_extra(tmp_path, monkeypatch, missing, device, extra):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == missing else object())
    monkeypatch.setattr(models.require_engines, "__defaults__", (models.importlib.util.find_spec, models.importlib.metadata.version))
    result = CliRunner().invoke(app, ["run", "--model", "qwen3", "--workspace", str(tmp_path / "ws")])
    refused(result, f"{missing} not installed", "pip install 'train-inference-consistency[cpu]'")
    assert not (tmp_path / "ws").exists()
    with pytest.raises(Exception, match=extra.replace("[", r"\[")):
        models.require_engines(device)


@pytest.mark.parametrize(("content", "said"), [
    ('[operators]\nrms_nrom = "exact"\n', "unknown operator 'rms_nrom'"),
    ('[operators]\nrms_norm = "fast"\n', "no implementation 'fast'"),
    ('[training]\nlinear = "kernels:nothing.exact"\n', "kernels/nothing.py does not exist"),
    ("[operators\n", "not valid TOML")])
def test_a_bad_contract(workspace, content, said):
    (workspace.path / "contract.toml").write_text(content)
    workspace.commit(workspace.path, "contract")
    refused(agent("run", "--workspace", workspace.path), said)
    refused(agent("verify", "--workspace", workspace.path), said)


INTERRUPTED = """
import sys, time
from agent import models
from agent.cli import app
from agent.fakes import FakeTools

def before(call):
    if call.startswith("verify") and slow:
        print("waiting", flush=True)
        time.sleep(60)

slow = sys.argv[1] == "run"
app(sys.argv[1:], obj=FakeTools({"engine": ["linear"]}, before=before))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_clean_and_resumable(tmp_path, number):
    script = [sys.executable, "-c", INTERRUPTED]
    command = [*script, "run", "--model", "qwen3", "--workspace", str(tmp_path / "ws")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    while child.stdout.readline().strip() != "waiting":
        assert child.poll() is None
    child.send_signal(number)
    assert child.wait(20) == 130
    assert child.stderr.read().strip() == "agent: stopped; every finished step is saved, `agent resume WORKSPACE` goes on"
    again = subprocess.run([*script, "resume", str(tmp_path / "ws")], capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr


def test_an_engine_crash_shows_the_end_of_the_log_and_can_be_resumed(tmp_path):
    from agent.errors import JobFailed

    def crash(call: str) -> None:
        raise JobFailed("the rollout job was killed by signal 9 during 'generate'", Path("jobs/rollout"), "last line of the log")

    result = agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws", tools=FakeTools(WORLD, before=crash))
    assert result.exit_code == 1 and "signal 9" in result.stderr and "last line of the log" in result.stderr and "Traceback" not in result.stderr
    assert agent("resume", tmp_path / "ws").exit_code == 0


def test_a_bug_keeps_its_traceback(tmp_path):
    def bug(call: str) -> None:
        raise ZeroDivisionError("a bug")

    result = agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws", tools=FakeTools(WORLD, before=bug))
    assert isinstance(result.exception, ZeroDivisionError)


def test_each_tool_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = agent("localize", "--model", "qwen3", "--json")
    assert found.exit_code == 1
    assert [(d["dimension"], d["operator"]) for d in json.loads(found.stdout)["divergences"]] == [("engine", "rms_norm"), ("batch", "linear")]
    shown = agent("localize", "--model", "qwen3")
    assert "reduction order" in shown.stdout and "37 of 4096" in shown.stdout
    made = agent("repro", "--model", "qwen3", "--dimension", "batch", "--out", "cut", "--json")
    assert made.exit_code == 0 and json.loads(made.stdout)["divergence"]["operator"] == "linear" and (tmp_path / "cut" / "repro.py").exists()
    refused(agent("repro", "--model", "qwen3", "--out", "cut"), "exists")
    nothing = agent("repro", "--model", "qwen3", "--dimension", "phase", "--out", "none")
    assert nothing.exit_code == 1 and "nothing to reproduce in phase" in nothing.stderr
    stock = agent("verify", "--model", "qwen3", "--json", "--level", "quick")
    assert stock.exit_code == 1 and json.loads(stock.stdout)["verdict"]["mismatches"] == 128
    (tmp_path / "c.toml").write_text('[operators]\nlinear = "exact"\nrms_norm = "exact"\n')
    assert agent("verify", "--model", "qwen3", "--contract", "c.toml").exit_code == 0
    refused(agent("verify", "--model", "qwen3", "--level", "thorough"), "quick, full")
    refused(agent("verify"), "--model")


def test_evidence_goes_where_it_is_wanted(tmp_path, monkeypatch):
    asked = []

    def verify(request, *rest):
        asked.append(request)
        raise UserError("far enough")

    monkeypatch.setattr(toolset, "verify", verify)
    monkeypatch.setattr(checkpoint, "seeded", lambda family, scale: tmp_path)
    monkeypatch.setattr(models, "require_engines", lambda device: None)
    monkeypatch.chdir(tmp_path)
    for more in ((), ("--evidence", "proof")):
        said = CliRunner().invoke(app, ["verify", "--model", "qwen3", *more])
        assert "far enough" in said.output, said.output
    assert asked[0].directory.parent != tmp_path and asked[1].directory == tmp_path / "proof"
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    for place in ("used", "used/file"):
        refused(agent("verify", "--model", "qwen3", "--evidence", tmp_path / place), "--evidence", "not an empty folder")


def test_patch_by_hand(tmp_path, workspace):
    (tmp_path / "k.py").write_text("def exact(x):\n    return x\n")
    result = agent("patch", "--workspace", workspace.path, "--set", "linear=kernels:mine.exact", "--set", "rollout:rms_norm=exact",
                   "--file", f"kernels/mine.py={tmp_path / 'k.py'}", "--message", "--amend", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["branch"] == "agent/manual/attempt-1" and data["changed"] == ["contract.toml", "kernels/mine.py"]
    assert data["contract"]["rollout"] == {"linear": "kernels:mine.exact", "rms_norm": "exact"}
    assert workspace.repo.commit(data["commit"]).summary == "--amend"
    refused(agent("patch", "--workspace", workspace.path, "--file", f"../x.py={tmp_path / 'k.py'}"), "patch refused")
    refused(agent("patch", "--workspace", workspace.path, "--set", "linear"), "expected")
    refused(agent("patch", "--workspace", workspace.path, "--set", "inference:linear=exact"), "unknown side")
    refused(agent("patch", "--workspace", workspace.path), "empty")
    assert [h.name for h in workspace.repo.heads] == ["agent/manual/attempt-1", "main"]


def test_patch_of_another_repository(tmp_path):
    repo = tmp_path / "engine"
    repo.mkdir()
    call_git(("init", "--quiet", "--initial-branch=trunk"), repo)
    (repo / "csrc").mkdir()
    (repo / "csrc" / "norm.cu").write_text("old\n")
    refused(agent("patch", "--repo", repo, "--diff", tmp_path / "p.diff", "--allow", "csrc/**"), "cannot be read")
    call_git(("add", "--all"), repo)
    call_git(("commit", "--quiet", "--message=start"), repo)
    (tmp_path / "p.diff").write_text("--- a/csrc/norm.cu\n+++ b/csrc/norm.cu\n@@ -1 +1 @@\n-old\n+new\n")
    refused(agent("patch", "--repo", repo, "--diff", tmp_path / "p.diff"), "--allow")
    refused(agent("patch", "--repo", repo, "--diff", tmp_path / "p.diff", "--allow", "tests/*"), "outside the allowed paths")
    result = agent("patch", "--repo", repo, "--diff", tmp_path / "p.diff", "--allow", "csrc/**", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert call_git(("show", f"{data['commit']}:csrc/norm.cu"), repo) == "new"
    assert (repo / "csrc" / "norm.cu").read_text() == "old\n" and call_git(("status", "--porcelain"), repo) == ""


def test_models_and_doctor():
    listed = json.loads(agent("models", "--json").stdout)
    assert {m["name"] for m in listed} >= {"qwen3", "nemotron-3.5"} and all(m["scales"] and m["operators"] for m in listed)
    shown = agent("models").stdout
    assert "nemotron-3.5" in shown and "dense" in shown
    checks = {c["name"]: c for c in json.loads(agent("doctor", "--json").stdout)["checks"]}
    assert {"Python", "git", "git identity", "torch", "vllm", "cache", "GPU"} <= checks.keys()


def test_doctor_says_what_to_do(git_identity):
    (git_identity / ".gitconfig").write_text("")
    result = agent("doctor", "--json")
    identity = next(c for c in json.loads(result.stdout)["checks"] if c["name"] == "git identity")
    assert result.exit_code == 1 and not identity["ok"] and "user.email" in identity["remedy"]


def test_weights_are_looked_over_before_an_engine_starts(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(checkpoint, "check", lambda folder, family: asked.append((folder, family.name)) or folder)
    agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws", "--weights", tmp_path)
    assert asked == [(tmp_path, "qwen3")]

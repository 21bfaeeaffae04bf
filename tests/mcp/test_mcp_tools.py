import json
import shutil
import subprocess
import sys
import time

import anyio
import pytest
from mcp import Client, MCPDeprecationWarning, MCPError
from mcp_helpers import call, ended, patience, until
from typer.testing import CliRunner

from agent import config
from agent.cli import app
from agent.fakes import FakeTools
from agent.mcp import arguments, devices, tools
from agent.mcp.calls import Calls, Subject
from agent.mcp.fakes import ANSWERS
from agent.mcp.results import report
from agent.tools import diffs
from agent.workspace import Workspace

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings(f"error::{MCPDeprecationWarning.__module__}.{MCPDeprecationWarning.__name__}")]
NAMES = ["localize", "repro", "patch_kernel", "verify", "run", "job_status", "job_cancel", "models"]
CALLS = {
    "localize": {"model": "qwen3"},
    "repro": {"model": "qwen3", "dimension": "engine"},
    "patch_kernel": {"workspace": "ws", "bindings": ["rms_norm=kernels:mine.norm", "rollout:linear=exact"],
                     "files": {"kernels/mine.py": "x = 1\n"}, "message": "--help"},
    "verify": {"model": "qwen3", "level": "quick", "target_throughput": 0.5, "contract": "[operators]\nrms_norm = \"exact\"\n"},
    "run": {"model": "qwen3", "workspace": "ws", "minutes": 5, "attempts": 2},
}


async def told(client: Client, name: str, **given) -> dict:
    """Structured answer of a call that must not fail."""
    answer = await client.call_tool(name, given)
    assert not answer.is_error, answer.content[0].text
    assert json.loads(answer.content[0].text) == answer.structured_content
    return answer.structured_content


async def refused(client: Client, name: str, **given) -> str:
    answer = await client.call_tool(name, given)
    assert answer.is_error
    return answer.content[0].text


async def test_every_tool_answers_with_its_typed_result(server, fake, mode):
    async with Client(server, mode=mode) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(listed) == NAMES
        assert all(tool.output_schema and tool.annotations and tool.description and tool.title for tool in listed.values())
        assert listed["job_status"].annotations.read_only_hint and listed["job_cancel"].annotations.destructive_hint
        for name, given in CALLS.items():
            said = await told(client, name, **given)
            assert said["state"] == "completed" and said["result"]["kind"] == name and said["device"] == ("host" if name == "patch_kernel" else "cpu")
            assert await told(client, "job_status", job_id=said["job_id"]) == said == await told(client, "job_status")
        assert (await told(client, "run", workspace="ws", model="qwen3", resume=True))["result"]["outcome"] == "exact"
    assert [arguments[0] for arguments in fake.calls] == ["localize", "repro", "patch", "verify", "run", "resume"]


async def test_models_names_families_scales_and_devices(server, mode):
    async with Client(server, mode=mode) as client:
        said = await told(client, "models")
    assert {family["name"] for family in said["families"]} >= {"qwen3", "nemotron-3.5"} and said["devices"] == ["cpu"]
    assert said["families"][0]["scales"][0]["name"] == "tiny"


async def test_a_long_call_reports_progress_and_then_hands_over_a_handle(server, fake, mode, monkeypatch):
    monkeypatch.setattr(tools, "REPORT_EVERY", 0.1)
    fake.behave(seconds=600, log=('@progress {"text": "batch 3", "done": 3, "of": 12}',))
    seen = []

    async def progress(done, total, message):
        seen.append((done, message))

    async with Client(server, mode=mode) as client:
        begun = time.monotonic()
        answer = await client.call_tool("verify", {"model": "qwen3", "wait_s": 2}, progress_callback=progress)
        assert 2 <= time.monotonic() - begun < 2 + patience(1)
        said = answer.structured_content
        assert said["state"] == "running" and said["result"] is None and "job_status" in said["next"] and said["progress"] == "batch 3 (3 of 12)"
        assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and len(seen) >= 3
        assert seen[-1][1].startswith("verify, ") and seen[-1][1].endswith("s: batch 3 (3 of 12)")
        again = await told(client, "verify", model="qwen3", wait_s=0)
        assert again["job_id"] == said["job_id"]
        queued = await told(client, "localize", model="qwen3", wait_s=0)
        assert queued["state"] == "queued" and queued["place"] == 1 and "1 job(s) have cpu first" in queued["next"]
        assert (await told(client, "job_cancel", job_id=queued["job_id"]))["state"] == "cancelled"
        assert (await told(client, "job_cancel", job_id=said["job_id"]))["state"] == "cancelled"
        assert "cancelled after" in (await told(client, "job_status", job_id=said["job_id"]))["error"]


async def test_status_can_wait_for_the_end(server, fake):
    fake.behave(seconds=1)
    async with Client(server) as client:
        said = await told(client, "verify", model="qwen3", wait_s=0)
        assert said["state"] == "queued"
        assert (await told(client, "job_status", job_id=said["job_id"], wait_s=30))["state"] == "completed"


async def test_a_client_that_gives_up_leaves_the_job_running(server, fake, jobs, mode):
    fake.behave(seconds=600)
    async with Client(server, mode=mode) as client:
        with pytest.raises(MCPError):
            await client.call_tool("verify", {"model": "qwen3"}, read_timeout_seconds=0.3)
        with anyio.move_on_after(0.3):
            await client.call_tool("verify", {"model": "qwen3"})
        assert (await told(client, "job_status", wait_s=0))["state"] in ("queued", "running")
    assert len(jobs.newest(9)) == 1
    until(jobs, jobs.newest(1)[0], lambda now: now.state == "running")


@pytest.mark.parametrize(("name", "given", "said"), [
    ("verify", {}, "give a model (the tool `models` lists them)"),
    ("verify", {"model": "qwen"}, "did you mean qwen3?"),
    ("verify", {"model": "qwen3", "scale": "huge"}, "no scale 'huge'"),
    ("verify", {"model": "qwen3", "level": "half"}, "level"),
    ("verify", {"model": "qwen3", "wait_s": 99}, "less than or equal to 50"),
    ("verify", {"model": "qwen3", "weights": "a\0b"}, "plain text"),
    ("verify", {"model": 3}, "model"),
    ("verify", {"model": "x" * 5000}, "at most 4096"),
    ("run", {"resume": True}, "give a model"),
    ("patch_kernel", {"files": {"../x.py": ""}}, "files"),
    ("patch_kernel", {"files": {"kernels/x.py": "x" * (arguments.MAX_SOURCE + 1)}}, "files"),
    ("patch_kernel", {"diff": "x" * (arguments.MAX_SOURCE + 1)}, "diff"),
    ("job_status", {}, "there is no job yet"),
    ("job_status", {"job_id": "../../etc/passwd"}, "there is no job '../../etc/passwd'"),
    ("job_cancel", {"job_id": ""}, "there is no job ''"),
    ("job_cancel", {}, "job_id"),
    ("no_such_tool", {}, "no_such_tool")])
async def test_refusals_say_what_to_do_and_start_nothing(server, fake, jobs, name, given, said):
    async with Client(server) as client:
        assert said in await refused(client, name, **given)
    assert fake.calls == [] and jobs.newest(1) == []


@pytest.mark.parametrize(("how", "said"), [
    ({"exit_code": 2, "text": "", "log": ("agent: ws is in use by another run (pid 7); wait for it or stop it",)},
     "verify failed with exit code 2: ws is in use by another run (pid 7); wait for it or stop it. read job://"),
    ({"text": "not json"}, "verify failed with exit code 0"),
    ({"answer": [1, 2]}, "the result is not one of verify"),
    ({"answer": {"model": "qwen3"}}, "the result is not one of verify")])
async def test_a_job_that_fails_is_a_tool_error(server, fake, how, said):
    fake.behave(**how)
    async with Client(server) as client:
        assert said in await refused(client, "verify", model="qwen3")
        assert (await told(client, "job_status"))["error"]


async def test_the_workspace_decides_about_the_device_and_a_gpu_gets_its_own_queue(server, fake, tmp_path, monkeypatch, jobs):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    devices.gpus.cache_clear()
    monkeypatch.setattr(devices.models, "resolve", lambda model, scale, gpu: (None, type("Scale", (), {"device": "cuda" if gpu else "cpu"}), ""))
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "consistency.toml").write_text(config.Config(model="qwen3", scale="tiny").dumps())
    fake.behave(seconds=600)
    async with Client(server) as client:
        got = [await told(client, name, workspace="ws", wait_s=0) for name in ("verify", "localize", "repro")]
        assert [said["device"] for said in got] == ["cuda:0", "cuda:3", "cuda:0"]
        assert (await told(client, "run", workspace="ws", gpu="3", wait_s=0))["device"] == "cuda:3"
        assert "there is no GPU '7'; visible: 0, 3" in await refused(client, "run", workspace="ws", gpu="7")
    job = until(jobs, jobs.find(got[1]["job_id"]), lambda now: now.state == "running")
    assert job.record.environment["CUDA_VISIBLE_DEVICES"] == "3"


async def test_a_state_folder_that_is_gone_is_told(server, jobs):
    shutil.rmtree(jobs.state)
    async with Client(server) as client:
        assert "start it with another --state" in await refused(client, "verify", model="qwen3")
    jobs.state.joinpath("jobs").mkdir(parents=True)


async def test_prompts(server, mode):
    async with Client(server, mode=mode) as client:
        assert [prompt.name for prompt in (await client.list_prompts()).prompts] == ["localise", "fix", "review"]
        text = (await client.get_prompt("fix", {"model": "nemotron-3.5", "workspace": "/tmp/ws"})).messages[0].content.text
    assert "nemotron-3.5" in text and "/tmp/ws" in text and "patch_kernel" in text


def test_paths_are_relative_to_the_servers_folder_and_values_are_never_options(jobs, tmp_path):
    calls, folder = Calls(jobs, tmp_path), tmp_path / "job"
    subject = Subject(model="qwen3", weights="w", contract="c.toml", workspace="--help")
    assert calls.engine("repro", subject, dimension="batch").arguments(folder) == [
        "repro", "--model=qwen3", f"--workspace={tmp_path}/--help", f"--weights={tmp_path}/w", f"--contract={tmp_path}/c.toml",
        f"--out={folder}/repro", "--dimension=batch", "--json"]
    assert f"--out={tmp_path}/new" in calls.engine("repro", subject, out="new").arguments(folder)
    assert not any(text.startswith("--out") for text in calls.engine("verify", subject, level="quick").arguments(folder))
    assert f"--evidence={folder}/evidence" in calls.engine("verify", Subject(model="qwen3")).arguments(folder), "it stays with the job"
    assert f"--evidence={tmp_path}/proof" in calls.engine("verify", Subject(workspace="w", model="qwen3"), evidence="proof").arguments(folder)
    assert not any(part.startswith("--evidence") for tool, workspace in (("verify", "w"), ("localize", None))
                   for part in calls.engine(tool, Subject(model="qwen3", workspace=workspace)).arguments(folder))
    assert "--from-scratch" in calls.run(Subject(model="qwen3"), False, None, None, None, None, True).arguments(folder)
    assert "--from-scratch" not in calls.run(Subject(model="qwen3"), False, None, None, None, None).arguments(folder)
    inline = calls.engine("localize", Subject(model="qwen3", contract="[operators]\n"))
    assert inline.files == {"input/contract.toml": "[operators]\n"} and f"--contract={folder}/input/contract.toml" in inline.arguments(folder)


# The border to the command line: what the server sends must be what the command line takes, and the other way round.


@pytest.fixture
def identity(monkeypatch, tmp_path):
    (tmp_path / ".gitconfig").write_text("[user]\n\tname = Tester\n\temail = tester@example.org\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / ".gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")


async def test_the_real_command_line_takes_these_calls_and_its_answers_are_understood(server, fake, jobs, tmp_path, identity, monkeypatch):
    from agent.mcp import results

    Workspace.create(tmp_path / "ws", config.Config(model="qwen3", scale="tiny"))
    async with Client(server) as client:
        for name, given in CALLS.items():
            await told(client, name, **given)
    world = FakeTools({"engine": ["rms_norm", "linear"], "batch": ["linear"]})
    for line in fake.calls:
        job = next(job for job in jobs.newest(9) if job.record.argv[len(fake.command):] == line)
        done = CliRunner().invoke(app, line, obj=world)
        assert done.exit_code in (0, 1) and done.stdout.startswith("{"), (line, done.output)
        said = results._ANY.validate_python({**json.loads(done.stdout), "kind": job.record.tool})
        assert said.kind == job.record.tool


async def test_not_finite_numbers_are_null_and_understood(server, fake, jobs):
    answer = {**ANSWERS["verify"], "baseline": {"mismatches": 3, "k3": None, "max_abs": None}}
    fake.behave(answer=answer, exit_code=1)
    assert report(ended(jobs, jobs.submit(call()))).result.baseline.k3 is None


def test_limits_are_those_of_the_tool_itself():
    assert arguments.MAX_SOURCE == diffs.MAX_BYTES


def test_a_quick_command_of_the_real_command_line_as_a_job(tmp_path):
    from agent.mcp.jobs import Call, Jobs

    jobs = Jobs(tmp_path / "state")
    (tmp_path / "agent").mkdir()  # a folder of that name where the user works must not be imported
    (tmp_path / "agent" / "__init__.py").write_text("raise SystemExit('wrong package')")
    job = ended(jobs, jobs.submit(Call("models", lambda _: ["models", "--json"], "host", tmp_path)), within=60)
    assert job.state == "completed" and {family["name"] for family in job.output} >= {"qwen3"}


def test_the_server_holds_no_engine(tmp_path):
    code = ("import sys, agent.server as s, pathlib; s.build(pathlib.Path(sys.argv[1]))\n"
            "print([m for m in ('torch', 'vllm', 'transformers', 'numpy', 'git', 'anthropic', 'openai') if m in sys.modules])")
    shown = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"

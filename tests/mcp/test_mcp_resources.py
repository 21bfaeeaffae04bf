import json
import os

import pytest
from mcp import Client, MCPError
from mcp_helpers import call, ended

from agent import config
from agent.errors import BudgetEnded
from agent.fakes import FakeTools, SilentObserver
from agent.loop import Run
from agent.mcp import resources
from agent.mcp.fakes import ANSWERS
from agent.mcp.jobs import Jobs
from agent.mcp.workspaces import PRIVATE, Workspaces, checkout, current, workspace_id
from agent.policies.playbook import Playbook
from agent.state import begin, load_current, new_run_id
from agent.workspace import PRIVATE as PRIVATE_OF_WORKSPACE
from agent.workspace import Workspace

pytestmark = pytest.mark.anyio


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Workspace:
    """A workspace with a finished run, found because of its name and place."""
    (tmp_path / ".gitconfig").write_text("[user]\n\tname = Tester\n\temail = tester@example.org\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / ".gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    made = Workspace.create(tmp_path / "consistency-qwen3", config.Config(model="qwen3", scale="tiny"))
    run(made, minutes=60)
    return made


def run(workspace: Workspace, minutes: float) -> None:
    state = begin(workspace, run=new_run_id(workspace), checkpoint="none", device="cpu", policy="playbook", target=0.9)
    tools = FakeTools({"engine": ["rms_norm", "linear"]})
    Run(workspace, state, Playbook(), tools, SilentObserver(), minutes=minutes, attempts=9).go()


async def read(client: Client, uri: str) -> str:
    return (await client.read_resource(uri)).contents[0].text


async def test_a_run_can_be_read_from_its_list_down_to_every_file(server, workspace, mode):
    async with Client(server, mode=mode) as client:
        listed = json.loads(await read(client, "consistency://workspaces"))
        assert [(line["path"], line["outcome"], line["model"]) for line in listed] == [(str(workspace.path), "exact", "qwen3")]
        name = listed[0]["id"]
        state = json.loads(await read(client, f"run://{name}"))
        assert state["outcome"] == "exact" and state["attempts"][0]["outcome"] == "kept" and "verify" not in state
        assert (await read(client, f"run://{name}/pull-request")).startswith("# qwen3")
        assert "<html" in await read(client, f"run://{name}/report")
        evidence = json.loads(await read(client, f"evidence://{name}"))
        assert "baseline.json" in [line["path"] for line in evidence]
        assert json.loads(await read(client, f"evidence://{name}/baseline.json"))["family"]
        repros = [line["path"] for line in json.loads(await read(client, f"repro://{name}"))]
        assert repros and (await read(client, f"repro://{name}/{repros[0]}"))


async def test_a_run_that_is_still_going_is_read_from_its_worktree(server, workspace):
    with pytest.raises(BudgetEnded):
        run(workspace, minutes=0)
    assert checkout(workspace.path) == workspace.tree(load_current(workspace).run, "main") != workspace.path
    assert current(workspace.path)["outcome"] is None
    async with Client(server) as client:
        assert json.loads(await read(client, f"evidence://{workspace_id(workspace.path)}")) == []


async def test_logs_and_only_logs_of_engines_are_served_from_the_private_folder(server, workspace):
    place = workspace.private / "runs" / "r" / "jobs" / "000-verify"
    place.mkdir(parents=True)
    (place / "log").write_text("x" * resources.MAX_LOG + "the end")
    (place / "job.json").write_text("{}")
    name = workspace_id(workspace.path)
    async with Client(server) as client:
        assert [line["path"] for line in json.loads(await read(client, f"log://{name}"))] == ["runs/r/jobs/000-verify/log"]
        text = await read(client, f"log://{name}/runs/r/jobs/000-verify/log")
        assert text.endswith("the end") and len(text) == resources.MAX_LOG
        with pytest.raises(MCPError, match="is not a log"):
            await read(client, f"log://{name}/runs/r/jobs/000-verify/job.json")


async def test_jobs_with_result_log_and_repro(server, fake, jobs):
    fake.behave(log=("one", "two"))
    job = ended(jobs, jobs.submit(call(tool="repro")))
    (job.folder / "repro").mkdir()
    (job.folder / "repro" / "repro.py").write_text("print(1)\n")
    name = job.record.id
    async with Client(server) as client:
        assert json.loads(await read(client, "consistency://jobs"))[0]["job_id"] == name
        assert json.loads(await read(client, f"job://{name}"))["state"] == "completed"
        assert json.loads(await read(client, f"job://{name}/result"))["expected_line"]
        assert await read(client, f"job://{name}/log") == "one\ntwo\n"
        assert await read(client, f"job://{name}/repro/repro.py") == "print(1)\n"
        schemes = {found.uri_template.partition(":")[0] for found in (await client.list_resource_templates()).resource_templates}
        assert schemes == {"job", "run", "evidence", "repro", "log", "skill"}
        assert {str(found.uri) for found in (await client.list_resources()).resources} == {"consistency://workspaces", "consistency://jobs"}


async def test_nothing_outside_the_folder_is_ever_read(server, workspace, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    folder = workspace.path / "evidence"
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "link-to-file").symlink_to(tmp_path / "outside" / "secret")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    async with Client(server) as client:
        for path in ("../contract.toml", "../../etc/passwd", "%2e%2e/contract.toml", "..%2fcontract.toml", "/etc/passwd", "%2Fetc%2Fpasswd", "",
                     "link/secret", "link-to-file", "folder", "fifo", "none", "a%00b", "..\\contract.toml", "x" * 5000):
            with pytest.raises(MCPError) as refused:
                await read(client, f"evidence://{workspace_id(workspace.path)}/{path}")
            assert refused.value.code == -32602, path
        listed = json.loads(await read(client, f"evidence://{workspace_id(workspace.path)}"))
        assert not {"link-to-file", "fifo", "link/secret"} & {line["path"] for line in listed}
        folder.rename(tmp_path / "moved")
        folder.symlink_to(tmp_path / "outside")
        assert json.loads(await read(client, f"evidence://{workspace_id(workspace.path)}")) == []
        with pytest.raises(MCPError):
            await read(client, f"evidence://{workspace_id(workspace.path)}/secret")


async def test_large_and_binary_files_are_refused_with_their_place(server, workspace):
    folder = workspace.path / "evidence"
    (folder / "large").write_bytes(b"x" * (resources.MAX_BYTES + 1))
    (folder / "binary").write_bytes(b"\xff\xfe")
    name = workspace_id(workspace.path)
    async with Client(server) as client:
        for file, said in (("large", "only files up to"), ("binary", "is not text")):
            with pytest.raises(MCPError, match=said) as refused:
                await read(client, f"evidence://{name}/{file}")
            assert str(folder / file) in refused.value.message


async def test_the_evidence_that_a_tool_alone_names_in_its_result(server, fake, jobs, tmp_path):
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "report.json").write_text("{}")
    fake.behave(answer={**ANSWERS["verify"], "evidence": str(tmp_path / "left")})
    with_some = ended(jobs, jobs.submit(call())).record.id
    fake.behave()
    without = ended(jobs, jobs.submit(call("--n=2"))).record.id
    async with Client(server) as client:
        assert json.loads(await read(client, f"job://{with_some}/evidence")) == [{"path": "report.json", "bytes": 2}]
        assert await read(client, f"job://{with_some}/evidence/report.json") == "{}"
        for uri in (f"job://{with_some}/evidence/../how.json", f"job://{without}/evidence"):
            with pytest.raises(MCPError):
                await read(client, uri)


@pytest.mark.parametrize("uri", ["run://nobody", "job://" + "0" * 32, "job://x/log", "evidence://nobody/x", "nothing://x", "consistency://x", "run://"])
async def test_unknown_resources(server, uri):
    async with Client(server) as client:
        with pytest.raises(MCPError) as refused:
            await read(client, uri)
    assert refused.value.code == -32602


def test_workspaces_come_from_jobs_and_from_the_servers_folder_and_ids_differ(jobs, tmp_path):
    used, here = tmp_path / "elsewhere" / "w s", tmp_path / "here" / "consistency-a"
    for path in (used, here):
        path.mkdir(parents=True)
        (path / "consistency.toml").write_text("")
    jobs.submit(call(workspace=used))
    jobs.submit(call("--n=2", workspace=tmp_path / "gone"))
    assert Workspaces(jobs, tmp_path / "here").all() == {workspace_id(used): used, workspace_id(here): here}
    assert workspace_id(used).startswith("w-s-") and workspace_id(used) != workspace_id(tmp_path / "w s")
    assert current(used) is None and checkout(used) == used
    assert isinstance(jobs, Jobs) and PRIVATE == PRIVATE_OF_WORKSPACE

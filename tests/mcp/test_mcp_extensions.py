import asyncio
import hashlib
from typing import Any, Literal

import pytest
from mcp import Client, MCPError
from mcp.client.extension import ClaimContext, ClientExtension, ResultClaim
from mcp.types import CallToolResult, Request, RequestParams, Result
from mcp_helpers import until
from pydantic import ConfigDict

from agent.mcp.skills import FOLDER, Skills, frontmatter

pytestmark = pytest.mark.anyio
SKILL = """---
name: demo-skill
description: >
  Finds what differs,
  and says why.
metadata:
  version: "0.1"
---
# Demo
"""


class Params(RequestParams):
    task_id: str | None = None
    uri: str | None = None


class Ask(Request[Params, str]):
    method: str
    params: Params


class Answer(Result):
    model_config = ConfigDict(extra="allow")


class Handle(Result):
    result_type: Literal["task"] = "task"
    task_id: str
    status: str
    poll_interval_ms: int
    created_at: str
    ttl_ms: int | None


class TaskClient(ClientExtension):
    """What a host does: poll until the status is final."""

    identifier = "io.modelcontextprotocol/tasks"

    def __init__(self) -> None:
        self.handles: list[Handle] = []

    def claims(self):
        async def resolve(handle: Handle, ctx: ClaimContext) -> CallToolResult:
            self.handles.append(handle)
            while True:
                said = await ask(ctx.session, "tasks/get", task_id=handle.task_id)
                if said["status"] == "completed":
                    return CallToolResult.model_validate(said["result"])
                if said["status"] == "cancelled":
                    return CallToolResult(content=[], is_error=True)
                await asyncio.sleep(0.05)

        return [ResultClaim(result_type="task", model=Handle, resolve=resolve)]


async def ask(session, method: str, **params: Any) -> dict[str, Any]:
    return (await session.send_request(Ask(method=method, params=Params(**params)), Answer)).model_dump(by_alias=True)


@pytest.fixture
def skill(tmp_path):
    folder = tmp_path / "skills" / "demo-skill"
    (folder / "references").mkdir(parents=True)
    (folder / "SKILL.md").write_text(SKILL)
    (folder / "references" / "method.md").write_text("Localise first.\n")
    (folder / "image.bin").write_bytes(b"\xff\x00")
    (folder / ".hidden").write_text("x")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"x")
    (folder / "outside").symlink_to("/etc/hostname")
    return folder


async def test_a_client_with_the_extension_gets_a_task_and_its_result(server, fake):
    fake.behave(seconds=0.3, log=("half way",))
    tasks = TaskClient()
    async with Client(server, extensions=[tasks]) as client:
        said = await client.call_tool("verify", {"model": "qwen3"})
        assert said.structured_content["result"]["verdict"]["exact"] and not said.is_error
        handle = tasks.handles[0]
        assert handle.status == "working" and handle.poll_interval_ms == 2000 and handle.created_at.endswith("Z") and handle.ttl_ms is None
        same = await client.call_tool("job_status", {"job_id": handle.task_id})
        assert same.structured_content == said.structured_content
        assert (await ask(client.session, "tasks/get", task_id=handle.task_id))["resultType"] == "complete"


async def test_a_task_that_fails_is_a_completed_task_with_an_error_of_the_tool(server, fake):
    fake.behave(text="", exit_code=2, log=("agent: no such model",))
    async with Client(server, extensions=[TaskClient()]) as client:
        said = await client.call_tool("verify", {"model": "qwen3"})
        assert said.is_error and "no such model" in said.content[0].text


async def test_what_is_refused_or_quick_is_answered_at_once(server, fake):
    tasks = TaskClient()
    async with Client(server, extensions=[tasks]) as client:
        assert (await client.call_tool("verify", {"model": "nope"})).is_error
        assert (await client.call_tool("models", {})).structured_content["families"]
    assert tasks.handles == []


async def test_a_task_is_cancelled_also_by_another_client_after_a_restart(server, fake, jobs, tmp_path):
    from agent.server import build

    fake.behave(seconds=600)
    tasks = TaskClient()
    async with Client(server, extensions=[tasks]) as client:
        waiting = asyncio.create_task(client.call_tool("run", {"model": "qwen3"}))
        while not tasks.handles:
            await asyncio.sleep(0.02)
        task = tasks.handles[0].task_id
        until(jobs, jobs.find(task), lambda now: now.state == "running")
        async with Client(build(tmp_path / "state", cwd=tmp_path), extensions=[TaskClient()]) as other:
            assert (await ask(other.session, "tasks/get", task_id=task))["status"] == "working"
            assert (await ask(other.session, "tasks/update", task_id=task))["resultType"] == "complete"
            await ask(other.session, "tasks/cancel", task_id=task)
            assert (await ask(other.session, "tasks/get", task_id=task))["status"] == "cancelled"
        assert (await waiting).is_error


async def test_tasks_are_only_for_those_who_list_them_in_the_newer_era(server, fake):
    async with Client(server) as client:
        job = (await client.call_tool("verify", {"model": "qwen3"})).structured_content
        assert job["state"] == "completed"
        with pytest.raises(MCPError) as refused:
            await ask(client.session, "tasks/get", task_id=job["job_id"])
        assert refused.value.code == -32021
    async with Client(server, mode="legacy", extensions=[TaskClient()]) as client:
        assert (await client.call_tool("verify", {"model": "qwen3"})).structured_content["state"] == "completed"
        with pytest.raises(MCPError) as refused:
            await ask(client.session, "tasks/get", task_id=job["job_id"])
        assert refused.value.code == -32601
    async with Client(server, extensions=[TaskClient()]) as client:
        for method in ("tasks/get", "tasks/cancel", "tasks/update"):
            with pytest.raises(MCPError) as refused:
                await ask(client.session, method, task_id="nobody")
            assert refused.value.code == -32602


async def test_skills_are_listed_with_frontmatter_sizes_and_digests_that_hold(skill, server, mode, tmp_path):
    from agent.server import build

    server = build(tmp_path / "state", cwd=tmp_path, skills=tmp_path / "skills")
    async with Client(server, mode=mode) as client:
        listed = await ask(client.session, "skills/list")
        assert len(listed["skills"]) == 1 and listed["ttlMs"] > 0
        entry = listed["skills"][0]
        assert entry["uri"] == "skill://demo-skill/SKILL.md"
        assert entry["frontmatter"] == {"name": "demo-skill", "description": "Finds what differs, and says why.\n", "metadata": {"version": "0.1"}}
        assert [file["uri"].removeprefix("skill://demo-skill/") for file in entry["resources"]] == ["SKILL.md", "image.bin", "references/method.md"]
        for file in entry["resources"]:
            data = (skill / file["uri"].removeprefix("skill://demo-skill/")).read_bytes()
            assert file["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}" and file["size"] == len(data)
        assert (await ask(client.session, "skills/get", uri=entry["uri"]))["skill"] == entry
        assert (await client.read_resource("skill://demo-skill/SKILL.md")).contents[0].text == SKILL
        assert (await client.read_resource("skill://demo-skill/references/method.md")).contents[0].text == "Localise first.\n"
        assert (await client.read_resource("skill://demo-skill/image.bin")).contents[0].blob == "/wA="
        resource = next(found for found in (await client.list_resources()).resources if found.name == "demo-skill")
        assert resource.mime_type == "text/markdown" and resource.description.startswith("Finds what differs")
        (skill / "references" / "method.md").write_text("Changed.\n")
        assert (await ask(client.session, "skills/list"))["skills"][0] != entry
        for uri in ("skill://other/SKILL.md", "skill://demo-skill", "skill://demo-skill/references/method.md"):
            with pytest.raises(MCPError) as refused:
                await ask(client.session, "skills/get", uri=uri)
            assert refused.value.code == -32602
        for uri in ("skill://demo-skill/outside", "skill://demo-skill/.hidden", "skill://demo-skill/__pycache__/x.pyc", "skill://demo-skill/../x",
                    "skill://other/SKILL.md", "skill://demo-skill/references"):
            with pytest.raises(MCPError):
                await client.read_resource(uri)


@pytest.mark.parametrize("text", ["# No head\n---\na: b\n---\n", "---\na: [\n---\n", "---\n- list\n---\n", ""])
def test_a_skill_without_readable_frontmatter_has_none(tmp_path, text):
    (tmp_path / "SKILL.md").write_text(text)
    assert frontmatter(tmp_path) == {}


def test_the_shipped_skill_is_named_like_its_folder():
    for shipped in Skills(FOLDER).all():
        assert frontmatter(shipped)["name"] == shipped.name and frontmatter(shipped)["description"]

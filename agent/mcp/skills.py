"""Skills over MCP (io.modelcontextprotocol/skills): the skill folders of this project as skill:// resources with digests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcp.server.context import HandlerResult
from mcp.server.mcpserver import Extension, MCPServer, MethodBinding
from mcp.server.mcpserver.exceptions import ResourceNotFoundError
from mcp.server.mcpserver.resources import FunctionResource
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS, PaginatedRequestParams, RequestParams

from agent.mcp.resources import inside
from agent.models import SKILLS

FOLDER = SKILLS
MAIN = "SKILL.md"
TTL_MS = 60_000
"""How long a client may keep the list."""
_FRONTMATTER = re.compile(r"\A---\r?\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)
_HIDDEN = re.compile(r"(^|/)(\.|__pycache__/)")


class GetSkill(RequestParams):
    uri: str


class Skills(Extension):
    """Reads the folders anew on each request, so that an edited skill is served with its new digest."""

    identifier = "io.modelcontextprotocol/skills"

    def __init__(self, folder: Path = FOLDER):
        self.folder = folder

    def methods(self) -> Sequence[MethodBinding]:
        return [MethodBinding("skills/list", PaginatedRequestParams, self._list), MethodBinding("skills/get", GetSkill, self._get)]

    async def _list(self, _: Any, params: PaginatedRequestParams) -> HandlerResult:
        return {"skills": [entry(skill) for skill in self.all()], "ttlMs": TTL_MS, "cacheScope": "public"}

    async def _get(self, _: Any, params: GetSkill) -> HandlerResult:
        for skill in self.all():
            if params.uri == _uri(skill, MAIN):
                return {"skill": entry(skill)}
        known = ", ".join(_uri(skill, MAIN) for skill in self.all())
        raise MCPError(code=INVALID_PARAMS, message=f"there is no skill {params.uri!r}; served: {known or 'none'}")

    def all(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"*/{MAIN}"))

    def register(self, server: MCPServer) -> None:
        """Add the files as resources: each SKILL.md by name, the rest through a template."""
        for skill in self.all():
            front = frontmatter(skill)
            server.add_resource(FunctionResource.from_function(
                fn=lambda skill=skill: self.read(skill.name, MAIN), uri=_uri(skill, MAIN), name=skill.name,
                description=str(front.get("description", "")), mime_type="text/markdown"))
        server.resource("skill://{name}/{+path}", title="File of a skill", mime_type="text/plain")(self.read)

    def read(self, name: str, path: str) -> str | bytes:
        """A file of a skill, byte for byte. Raises ResourceNotFoundError."""
        skills = {skill.name: skill for skill in self.all()}
        if name not in skills or _HIDDEN.search(path):
            raise ResourceNotFoundError(f"there is no file {path!r} in a skill {name!r}; served: {', '.join(skills) or 'no skill'}")
        data = inside(skills[name], path).read_bytes()
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


def entry(skill: Path) -> dict[str, Any]:
    """One skill as `skills/list` shows it: frontmatter, and every file with size and digest."""
    return {"uri": _uri(skill, MAIN), "frontmatter": frontmatter(skill), "resources": [_file(skill, path) for path in _files(skill)]}


def frontmatter(skill: Path) -> dict[str, Any]:
    """The YAML head of SKILL.md; empty if it has none that can be read."""
    import yaml

    found = _FRONTMATTER.match((skill / MAIN).read_text(encoding="utf-8"))
    try:
        data = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        data = None
    return data if isinstance(data, dict) else {}


def _files(skill: Path) -> list[Path]:
    found = (path for path in skill.rglob("*") if path.is_file() and path.resolve().is_relative_to(skill.resolve()))
    return sorted(path for path in found if not _HIDDEN.search(path.relative_to(skill).as_posix()))


def _file(skill: Path, path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"uri": _uri(skill, path.relative_to(skill).as_posix()), "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}


def _uri(skill: Path, name: str) -> str:
    return f"skill://{skill.name}/{name}"

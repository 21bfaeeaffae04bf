"""What the model may ask for: one pydantic model per tool, and the JSON schema that strict providers want."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent.llm import prompts
from agent.llm.conversation import Call, Tool

Root = Literal["workspace", "attempts", "operators", "stack"]


class ToolRequest(BaseModel):
    """Arguments of one tool. An optional field may be missing, although strict providers always send it, as null."""

    model_config = ConfigDict(extra="forbid")


class LocalizeCall(ToolRequest):
    pass


class ReproCall(ToolRequest):
    divergences: list[str] = Field(description="Keys of divergences, DIMENSION:SITE, as localize reports them.")


class BindingArgument(ToolRequest):
    operator: str
    implementation: str = Field(description="A name from the catalogue, stock, or kernels:FILE.NAME for NAME in kernels/FILE.py.")
    side: Literal["both", "rollout", "training"] = "both"


class KernelFile(ToolRequest):
    path: str = Field(description="kernels/NAME.py")
    text: str = Field(description="The whole file.")


class PatchCall(ToolRequest):
    why: str = Field(description="One or two sentences for the commit: what differed, why this removes it.")
    addresses: list[str] = Field(description="Keys of the divergences that this shall remove; each needs a repro.")
    bindings: list[BindingArgument]
    files: list[KernelFile] = Field(default=[], description="New or rewritten files in kernels/.")
    diff: str | None = Field(default=None, description="Unified diff of the engine's checkout if the workspace has one, else of kernels/*.py.")


class VerifyCall(ToolRequest):
    level: Literal["quick", "full"] = "quick"


class StopCall(ToolRequest):
    claim: Literal["exact", "give_up"] = Field(description="exact is checked against the last full verify; give_up ends the run with what is kept.")
    why: str


class ListCall(ToolRequest):
    root: Root
    path: str = Field(default=".", description="Folder, relative to the root.")


class ReadCall(ToolRequest):
    root: Root
    path: str = Field(description="File, relative to the root.")
    first_line: int | None = Field(default=None, description="From 1; null: the first.")
    last_line: int | None = Field(default=None, description="Inclusive; null: as far as one answer goes.")


class SearchCall(ToolRequest):
    root: Root
    path: str = Field(default=".", description="Folder or file, relative to the root; in `stack` not the root itself.")
    pattern: str = Field(description="Extended regular expression (grep -E), matched line by line.")


REQUESTS: dict[str, type[ToolRequest]] = {
    "localize": LocalizeCall, "repro": ReproCall, "patch_kernel": PatchCall, "verify": VerifyCall, "stop": StopCall,
    "list": ListCall, "read": ReadCall, "search": SearchCall}


class Unusable(Exception):
    """A call that cannot be carried out; the text tells the model what to do instead."""


def parse(call: Call) -> ToolRequest:
    """The typed request. Raises Unusable."""
    if call.name not in REQUESTS:
        raise Unusable(f"there is no tool {call.name[:60]!r}; the tools are {', '.join(REQUESTS)}")
    if call.arguments is None:
        raise Unusable(f"the arguments are not a JSON object: {call.raw[:200]!r}; send the call again with valid JSON")
    given = {name: value for name, value in call.arguments.items() if value is not None}
    try:
        return REQUESTS[call.name].model_validate(given)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(str(part) for part in e['loc']) or 'arguments'}: {e['msg']}" for e in error.errors()[:5])
        raise Unusable(f"the arguments do not fit {call.name} ({wrong}); correct them and call again") from None


def tools() -> list[Tool]:
    """All tools, in a fixed order. Descriptions come from prompts/tools.md."""
    texts = prompts.sections("tools")
    return [Tool(name=name, description=texts[name], parameters=schema(request)) for name, request in REQUESTS.items()]


def schema(request: type[BaseModel]) -> dict[str, Any]:
    """JSON schema without references, defaults and titles, every field required, nothing else allowed."""
    whole = request.model_json_schema()
    return _strict(whole, whole.get("$defs", {}))


def _strict(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_strict(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _strict(definitions[node["$ref"].rpartition("/")[2]], definitions)
    if node.get("type") == "object":
        properties = {name: _strict(value, definitions) for name, value in node.get("properties", {}).items()}
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {name: _strict(value, definitions) for name, value in node.items() if name not in ("title", "default", "$defs")}

"""Schemas of the tools, and the prompts that go with them."""

import pytest

from agent.llm import prompts
from agent.llm.conversation import Call
from agent.llm.requests import REQUESTS, PatchCall, ReadCall, Unusable, parse, tools


def walk(schema):
    yield schema
    for inner in [*schema.get("properties", {}).values(), *schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])]:
        yield from walk(inner)


def test_schemas_are_strict():
    for tool in tools():
        for node in walk(tool.parameters):
            assert not {"$ref", "$defs", "default", "title"} & set(node), node
            if node.get("type") == "object":
                assert node["additionalProperties"] is False and node["required"] == list(node["properties"])
    assert [tool.name for tool in tools()] == list(REQUESTS) == list(prompts.sections("tools"))


def test_optional_fields_may_be_null_or_missing():
    assert parse(Call(id="1", name="read", arguments={"root": "stack", "path": "x", "first_line": None})) == ReadCall(root="stack", path="x")
    call = parse(Call(id="1", name="patch_kernel", arguments={"why": "w", "addresses": [], "bindings": [{"operator": "o", "implementation": "i"}]}))
    assert isinstance(call, PatchCall) and call.bindings[0].side == "both" and call.files == []


def test_wrong_arguments_are_named():
    with pytest.raises(Unusable, match=r"bindings\.0\.side.*correct them"):
        parse(Call(id="1", name="patch_kernel", arguments={
            "why": "w", "addresses": [], "bindings": [{"operator": "o", "implementation": "i", "side": "x"}]}))


def test_every_prompt_is_filled_with_what_it_names():
    assert prompts.filled("{a} {b}", a="{b}", b=1) == "{b} 1"
    for name in ("no call", "cut off", "withheld", "stuck", "not run", "too many calls", "meanwhile"):
        assert prompts.sections("notes")[name]
    system = prompts.text("system")
    assert "{" not in system and all(word in system for word in ("determinism", "batch", "phase", "cross_gpu", "engine", "give_up"))
    assert len(system) < 8000

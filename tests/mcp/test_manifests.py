import json
import tomllib
from pathlib import Path

import pytest

from agent import __version__
from agent.models import PACKAGE
from agent.server import NAME

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PLUGINS = ("plugin.json", ".claude-plugin/plugin.json", ".codex-plugin/plugin.json")
SERVER = {"consistency": {"type": "stdio", "command": "agent", "args": ["serve"]}}


CODEX_MARKET = ".agents/plugins/marketplace.json"


def load(name: str) -> dict:
    return json.loads((ROOT / name).read_text(encoding="utf-8"))


def test_one_name_and_one_version_everywhere():
    registry, market, codex = load("server.json"), load(".claude-plugin/marketplace.json"), load(CODEX_MARKET)
    names = [load(file)["name"] for file in PLUGINS] + [codex["name"], codex["plugins"][0]["name"],
                                                        market["name"], market["plugins"][0]["name"], registry["packages"][0]["identifier"],
                                                        registry["name"].rpartition("/")[2], NAME, PACKAGE]
    versions = [load(file)["version"] for file in PLUGINS] + [market["plugins"][0]["version"], registry["version"],
                                                              registry["packages"][0]["version"], __version__]
    assert set(names) == {PROJECT["name"]} and set(versions) == {PROJECT["version"]}


def test_descriptions_and_licence_are_those_of_the_package():
    entries = [*(load(file) for file in PLUGINS), load(".claude-plugin/marketplace.json")["plugins"][0]]
    assert {entry["description"] for entry in entries} == {PROJECT["description"]}
    assert {entry["license"] for entry in entries} == {PROJECT["license"]}


@pytest.mark.parametrize("file", ["mcp.json", ".mcp.json"])
def test_hosts_start_the_command_that_the_package_installs(file):
    assert load(file)["mcpServers"] == SERVER
    assert SERVER["consistency"]["command"] in PROJECT["scripts"]


def test_tool_names_fit_into_what_hosts_accept():
    longest = max(("localize", "repro", "patch_kernel", "verify", "run", "job_status", "job_cancel", "models"), key=len)
    assert len(f"mcp__plugin_{NAME}_{next(iter(SERVER))}__{longest}") <= 128


def test_the_portable_plugin_keeps_to_its_closed_schema():
    known = {"$schema", "name", "version", "description", "author", "homepage", "repository", "license", "keywords", "extensions"}
    assert load("plugin.json").keys() <= known and load("plugin.json")["$schema"].endswith("/1.0.0/plugin.schema.json")
    assert load("mcp.json").keys() == {"$schema", "mcpServers"} and load("mcp.json")["$schema"].endswith("/1.0.0/mcp.schema.json")


def test_the_registry_entry_keeps_to_its_limits():
    entry = load("server.json")
    assert len(entry["description"]) <= 100 and entry["name"].count("/") == 1 and entry["packages"][0]["transport"] == {"type": "stdio"}
    readme = ROOT / "README.md"
    assert not readme.exists() or f"mcp-name: {entry['name']}" in readme.read_text(encoding="utf-8")


def test_paths_in_manifests_exist_or_are_where_skills_go():
    codex = load(".codex-plugin/plugin.json")
    assert (ROOT / codex["mcpServers"]).is_file() and codex["skills"] == "./skills/"
    assert (ROOT / load(".claude-plugin/marketplace.json")["plugins"][0]["source"]).resolve() == ROOT
    (entry,) = load(CODEX_MARKET)["plugins"]
    assert entry["source"]["source"] == "local" and (ROOT / entry["source"]["path"]).resolve() == ROOT, "Codex leaves out an entry it cannot read"
    assert entry["policy"] == {"installation": "AVAILABLE", "authentication": "ON_INSTALL"} and entry["category"]


def test_the_readme_sets_both_hosts_up_in_three_lines():
    """The marketplace's and the plugin's names in the commands are those of the manifests."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [part.strip().splitlines() for part in readme.split("## Set up Claude Code or Codex")[1].split("\n## ")[0].split("\n\n")
              if part.startswith("    ")]
    claude, codex = ([line.split("  #")[0].strip() for line in block] for block in blocks)
    plugin = f"{PROJECT['name']}@{load('.claude-plugin/marketplace.json')['name']}"
    assert claude[1:] == ["claude plugin marketplace add ./", f"claude plugin install {plugin}"] and len(claude) == len(codex) == 3
    assert codex[1:] == ["codex plugin marketplace add ./", f"codex plugin add {PROJECT['name']}@{load(CODEX_MARKET)['name']}"]
    assert claude[0] == codex[0] and claude[0].startswith(f"pip install '{PROJECT['name']}[")

"""The skill keeps to the format, names only what exists, and works where nothing but it and the package or the server is."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from mcp import Client

from agent.cli import app
from agent.mcp.skills import FOLDER
from agent.models import PACKAGE, RECIPES
from agent.server import build
from consistency.contract import Contract

SKILL = FOLDER / PACKAGE
TEXTS = [SKILL / "SKILL.md", *sorted((SKILL / "references").glob("*.md"))]
KEYS = {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
MAIN = (SKILL / "SKILL.md").read_text(encoding="utf-8")
FRONT, BODY = MAIN.split("---\n", 2)[1:]


def test_the_front_matter_keeps_to_the_rules_of_the_format():
    front = yaml.safe_load(FRONT)
    assert front.keys() <= KEYS and front["name"] == SKILL.resolve().name == PACKAGE
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", front["name"]) and len(front["name"]) <= 64
    assert 0 < len(front["description"]) <= 1024 and 0 < len(front["compatibility"]) <= 500 and isinstance(front["license"], str)
    assert all(isinstance(name, str) and isinstance(value, str) for name, value in front["metadata"].items())


def test_the_body_is_short_and_points_at_every_file_one_level_down():
    assert len(BODY.splitlines()) < 500 and len(BODY) / 4 < 5000
    linked = {link for link in re.findall(r"\]\(([^)]+)\)", BODY)}
    assert all((SKILL / link).exists() and not link.startswith(("/", "..")) for link in linked), linked
    assert {f"references/{path.name}" for path in (SKILL / "references").iterdir()} <= linked, "a file that nothing points at is never read"
    assert all(f"scripts/{path.name} " in BODY for path in (SKILL / "scripts").iterdir())
    for text in TEXTS[1:]:
        for link in re.findall(r"\]\(([^)]+)\)", text.read_text(encoding="utf-8")):
            assert (text.parent / link).exists(), (text.name, link)


def test_it_covers_what_it_has_to():
    assert {path.stem for path in TEXTS[1:]} == {"dimensions", "localising", "minimal-repro", "rounding-contracts", "verification", "recipes"}
    models = (SKILL / "references" / "recipes.md").read_text(encoding="utf-8")
    assert all(f"## {path.stem} (" in models for path in RECIPES.glob("*.toml") if "-cpu" not in path.stem and "-slice" not in path.stem)


def test_recipes_in_the_text_are_those_in_the_files():
    models = (SKILL / "references" / "recipes.md").read_text(encoding="utf-8")
    for family in ("qwen3", "nemotron-3.5"):
        part = models.partition(f"## {family} (")[2].partition("\n## ")[0]
        told = dict(re.findall(r'`(\w+) = "(\w+)"`', part))
        results = json.loads((Path(__file__).parents[2] / "docs" / "results" / f"cpu-{family}.json").read_text())
        named = {d["operator"] for d in results["localize"]["divergences"]}
        assert told and told.keys() == named, "each operator that the committed result names, and no other"
        contract = Contract.load(RECIPES / f"{family}-cpu.toml")
        assert told.items() <= contract.rollout.items() and told.items() <= contract.training.items()
        assert f"throughput {results['run']['throughput']['ratio']:.2f} of stock" in part


def test_every_command_in_the_texts_exists():
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {name: {option for parameter in command.params for option in parameter.opts} for name, command in commands.items()}
    sources = [path.read_text(encoding="utf-8") for path in [*TEXTS, *sorted((SKILL / "scripts").iterdir())]]
    calls = [call for text in sources for call in re.findall(r"(?:^|[`($ ])agent ([a-z]+)((?: [^`\n|]*)?)", text)]
    found = [(name, rest) for name, rest in calls if name in known]
    assert {"run", "resume", "doctor", "models", "verify", "localize", "repro", "patch"} <= {name for name, _ in found}
    for name, rest in found:
        for option in re.findall(r"(?<=[\s\"'])--[a-z-]+", rest.partition(" | ")[0]):
            assert option in known[name], (name, option)


@pytest.mark.anyio
async def test_the_server_alone_serves_it_and_has_the_tools_that_it_names(tmp_path):
    async with Client(build(tmp_path / "state", cwd=tmp_path)) as client:
        tools = {tool.name: set(tool.input_schema["properties"]) for tool in (await client.list_tools()).tools}
        for path in [path for path in SKILL.rglob("*") if path.is_file()]:
            served = await client.read_resource(f"skill://{PACKAGE}/{path.relative_to(SKILL)}")
            assert served.contents[0].text == path.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d .*\| `(\w+)` with (.*) \|$", BODY, re.MULTILINE)
    assert [tool for tool, _ in rows] == ["verify", "localize", "repro", "patch_kernel", "verify", "verify"]
    for tool, words in rows:
        assert {word.partition("=")[0] for word in re.findall(r"`([^`]+)`", words)} <= tools[tool], (tool, words)
    assert {"run", "models", "job_status"} <= tools.keys() and "wait_s" in tools["job_status"] and "resume" in tools["run"]


@pytest.fixture
def elsewhere(tmp_path):
    """A copy of the skill outside of the repository, and an `agent` on the path that is the installed command with stand-ins for the engines."""
    copy = shutil.copytree(SKILL, tmp_path / "skills" / PACKAGE)
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "agent"
    command.write_text(f"#!{sys.executable}\nfrom agent import models\nfrom agent.cli import app\nfrom agent.fakes import FakeTools\n"
                       "models.gpu_present = lambda: False\n"
                       "app(obj=FakeTools({'engine': ['rms_norm', 'rotary'], 'phase': ['attention']}))\n")
    command.chmod(0o755)
    (tmp_path / ".gitconfig").write_text("[user]\n\tname = Tester\n\temail = tester@example.org\n")
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "GIT_CONFIG_GLOBAL": str(tmp_path / ".gitconfig")}

    def run(script: str, *arguments: str, path: str = "") -> subprocess.CompletedProcess:
        return subprocess.run(["sh", str(copy / "scripts" / script), *arguments], cwd=tmp_path, capture_output=True, text=True,
                              env={**environment, "PATH": path or environment["PATH"]})

    return run


def test_scripts_work_with_a_shell_alone(elsewhere, tmp_path):
    found = elsewhere("first_divergence.sh", "qwen3", "cut")
    assert found.returncode == 1 and "engine: rms_norm at 000.rms_norm" in found.stdout and (tmp_path / "cut" / "repro.py").exists(), found
    recipe = f"skills/{PACKAGE}/recipes/qwen3.toml"
    proven = elsewhere("check_contract.sh", "qwen3", recipe, "proof")
    assert proven.returncode == 0 and "full verdict: exact" in proven.stdout, proven
    assert elsewhere("check_contract.sh", "qwen3", "none.toml").returncode == 2
    assert elsewhere("first_divergence.sh", "qwen9").returncode == 2
    made = subprocess.run([str(tmp_path / "bin" / "agent"), "run", "--model", "qwen3", "--workspace", "ws", "--minutes", "0"], cwd=tmp_path,
                          capture_output=True, env={**os.environ, "GIT_CONFIG_GLOBAL": str(tmp_path / ".gitconfig")})
    assert made.returncode == 3, made
    tried = elsewhere("try_patch.sh", "qwen3", "ws", "--set", "rms_norm=exact")
    assert tried.returncode == 1 and "branch agent/manual/attempt-1" in tried.stdout and "quick verdict: not exact" in tried.stdout, tried
    assert elsewhere("try_patch.sh", "qwen3", "ws", "--set", "rms_norm=magic").returncode == 2


@pytest.mark.parametrize("script", sorted(path.name for path in (SKILL / "scripts").iterdir()))
def test_scripts_explain_themselves(elsewhere, script):
    assert elsewhere(script, "--help").returncode == 0 and elsewhere(script, "--help").stdout.startswith(f"usage: {script}")
    assert elsewhere(script).returncode == 2
    missing = elsewhere(script, "qwen3", "a", "b", path="/usr/bin:/bin")
    assert missing.returncode == 2 and "pip install" in missing.stderr

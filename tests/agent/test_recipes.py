"""A recipe is measured before anything is searched for; what it leaves to do is the loop's."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent import models, recipes, report, state
from agent.cli import app
from agent.errors import UserError
from agent.fakes import FakeTools, SilentObserver
from agent.loop import Run
from agent.policies import Patch, Verify
from agent.policies.playbook import Playbook
from agent.policies.recipe import RecipeFirst, binding
from agent.recipes import Recipe, matching
from agent.state import load_current
from agent.tools.patch_kernel import Binding
from consistency.contract import Contract
from consistency.models.catalog import FAMILIES, Scale

QWEN3 = ("attention", "rms_norm", "rotary")
TINY = FAMILIES["qwen3"].scales["tiny"]
FASTER, SLOWER = 0.99, 0.95


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(models, "gpu_present", lambda: False)


def agent(*arguments: object, tools: FakeTools):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], obj=tools)


def ran(tmp_path, tools: FakeTools, *more: str) -> dict:
    result = agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws", "--json", *more, tools=tools)
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def test_an_exact_recipe_ends_the_run_with_the_proof_that_stock_differs(tmp_path):
    tools = FakeTools({"engine": ["rms_norm", "rotary"], "phase": ["attention"]})
    told = ran(tmp_path, tools)
    assert told["outcome"] == "exact" and tools.calls == ["verify quick", "verify full"]
    assert told["baseline"]["mismatches"] == 128 and told["verdict"]["mismatches"] == 0
    assert told["recipe"] == {"name": "qwen3-cpu", "sha256": recipes.load(models.RECIPES / "qwen3-cpu.toml").sha256, "outcome": "kept"}
    assert [a["change"] for a in told["attempts"]] == ["recipe qwen3-cpu: attention=exact, rms_norm=exact, rotary=exact"]
    workspace = tmp_path / "ws"
    assert Contract.load(workspace / "contract.toml").as_dict() == recipes.load(models.RECIPES / "qwen3-cpu.toml").contract
    assert json.loads((workspace / "evidence" / "baseline.json").read_text())["verdict"]["mismatches"] == 128
    assert json.loads((workspace / "evidence" / "attempt-1.json").read_text())["recipe"] == "qwen3-cpu"
    text = (workspace / "PULL_REQUEST.md").read_text()
    assert "Nothing was localized" in text and "128" in text, "the mismatch of stock is in it all the same"


def test_it_is_seen_on_the_screen_and_in_the_report(tmp_path):
    result = agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws", tools=FakeTools({"engine": list(QWEN3)}))
    for said in ("recipe qwen3-cpu first; --from-scratch leaves it out", "recipe        qwen3-cpu: kept, exact"):
        assert said in result.stdout, result.stdout
    page = report.render(load_current_of(tmp_path / "ws"))
    assert "qwen3-cpu: kept, exact" in page and "sha256:" in page


def test_from_scratch_leaves_it_out(tmp_path):
    tools = FakeTools({"engine": ["rms_norm"]})
    told = ran(tmp_path, tools, "--from-scratch")
    assert told["outcome"] == "exact" and told["recipe"] is None and "localize" in tools.calls
    assert [a["change"] for a in told["attempts"]] == ["rms_norm=exact"]


def test_a_recipe_that_is_not_enough_is_where_the_loop_begins(tmp_path):
    tools = FakeTools({"engine": ["rms_norm", "linear"], "phase": ["attention"]})
    told = ran(tmp_path, tools)
    assert told["outcome"] == "exact" and told["recipe"]["outcome"] == "kept"
    assert [(a["change"], a["outcome"]) for a in told["attempts"]] == [
        ("recipe qwen3-cpu: attention=exact, rms_norm=exact, rotary=exact", "kept"), ("linear=exact", "kept")]
    assert "not exact here, but 50.0% of the log-probabilities differ and not 100.0%" in told["attempts"][0]["reason"]
    assert tools.calls[:3] == ["verify quick", "verify full", "localize"]


@pytest.mark.parametrize(("tools", "reason"), [
    (FakeTools({"engine": ["rms_norm"], "batch": []}, broken=("rotary=exact",)), "worse in batch 1"),
    (FakeTools({"engine": ["rms_norm"]}, crashing=("rotary=exact",)), "signal 11"),
    (FakeTools({"engine": ["linear", "rms_norm"]}), "without it")])
def test_a_recipe_that_does_not_help_is_dropped_and_the_loop_begins_at_stock(tmp_path, tools, reason):
    told = ran(tmp_path, tools)
    assert told["recipe"]["outcome"] == "rejected" and reason in told["attempts"][0]["reason"]
    assert told["outcome"] == "exact" and not any("rotary" in a["change"] for a in told["attempts"][1:])
    assert "rotary" not in Contract.load(tmp_path / "ws" / "contract.toml").rollout


def test_a_stock_that_is_exact_needs_none(tmp_path):
    told = ran(tmp_path, FakeTools({"engine": []}))
    assert told["outcome"] == "exact" and told["recipe"]["outcome"] is None and not told["attempts"]


def test_a_workspace_with_a_contract_of_its_own_goes_on_from_that(workspace):
    (workspace.path / "contract.toml").write_text('[operators]\nlinear = "exact"\n')
    workspace.commit(workspace.path, "mine")
    result = agent("run", "--workspace", workspace.path, "--json", tools=FakeTools({"engine": ["rms_norm"]}))
    assert json.loads(result.stdout)["recipe"] is None and "a contract of its own" in result.stderr, result.output


def test_a_killed_run_goes_on_with_the_recipe_that_it_began_with(tmp_path):
    def before(call: str) -> None:
        if call == "verify full":
            raise KeyboardInterrupt

    stopped = agent("run", "--model", "qwen3", "--workspace", tmp_path / "ws", tools=FakeTools({"engine": list(QWEN3)}, before=before))
    assert stopped.exit_code == 130, stopped.output
    tools = FakeTools({"engine": list(QWEN3)})
    done = agent("resume", tmp_path / "ws", "--json", tools=tools)
    assert json.loads(done.stdout)["outcome"] == "exact" and tools.calls == ["verify full"]


def test_a_person_who_refuses_it_gets_the_loop(workspace):
    recipe, _ = matching("nemotron-3.5", FAMILIES["nemotron-3.5"].scales["tiny"])
    state.begin(workspace, run="r1", checkpoint="none", device="cpu", policy="playbook", target=0.9, recipe=recipe)
    asked = []
    policy = RecipeFirst(Playbook(), lambda patch: asked.append(patch.recipe) or "no")
    ended = Run(workspace, load_current(workspace), policy, FakeTools({"engine": ["rms_norm"]}), SilentObserver(), minutes=5, attempts=5).go()
    assert asked == ["nemotron-3.5-cpu"] and ended.outcome == "exact" and [a.recipe for a in ended.attempts] == [""]


def test_which_recipe_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "RECIPES", tmp_path)
    assert matching("qwen3", TINY) == (None, "there is no recipe for qwen3 at scale tiny")
    for stem, name in (("qwen3", "exact"), ("qwen3-cpu", "stock"), ("qwen3-extra", "exact")):
        (tmp_path / f"{stem}.toml").write_text(f'[operators]\nrms_norm = "{name}"\n')
    assert matching("qwen3", TINY)[0].name == "qwen3-cpu" and [p.stem for p in models.recipes("qwen3")] == ["qwen3", "qwen3-cpu"]
    (tmp_path / "qwen3-tiny.toml").write_text('[training]\nrms_norm = "exact"\n')
    found, _ = matching("qwen3", TINY)
    assert found.name == "qwen3-tiny" and binding(found).bindings == [Binding(operator="rms_norm", implementation="exact", side="training")]
    (tmp_path / "qwen3-tiny.toml").write_text('[operators]\nrms_norm = "magic"\n')
    assert matching("qwen3", TINY) == (None, "recipe qwen3-tiny is left out: rms_norm has no implementation 'magic' for the rollout side on cpu")
    nowhere = Scale("slice", "tpu", 1.0, "", "")
    assert "has no implementation 'exact' for the rollout side on tpu" in matching("qwen3", nowhere)[1]
    (tmp_path / "qwen3-tiny.toml").write_text("[operators\n")
    with pytest.raises(UserError, match="--from-scratch leaves it out"):
        matching("qwen3", TINY)


def test_shipped_recipes_fit_every_scale_of_their_family():
    shipped = {family.name: family for family in FAMILIES.values() if models.recipes(family.name)}
    assert shipped.keys() >= {"qwen3", "nemotron-3.5"}
    assert {path for name in shipped for path in models.recipes(name)} == set(models.RECIPES.glob("*.toml")), "a file that no family takes"
    for family in shipped.values():
        for scale in family.scales.values():
            found, said = matching(family.name, scale)
            assert isinstance(found, Recipe), said


def test_the_wheel_holds_recipes_and_skill(tmp_path):
    """What a user installs has what `agent run` and the MCP server read, and the editable install reads the same files."""
    root = Path(models.__file__).parents[1]
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "agent", "skills", "pyproject.toml", "README.md", "LICENSE"],
                            cwd=root, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        target = tmp_path / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (root / name).is_symlink():
            target.symlink_to((root / name).readlink())
        elif (root / name).is_file():
            target.write_bytes((root / name).read_bytes())
    subprocess.run([sys.executable, "-m", "pip", "wheel", str(tmp_path / "tree"), "--no-deps", "--no-build-isolation", "--quiet",
                    "--disable-pip-version-check", "-w", str(tmp_path)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("agent/skills/")}
        assert held == {f"agent/skills/{path.relative_to(models.SKILLS)}" for path in models.SKILLS.rglob("*") if path.is_file()}
        recipe = archive.read(f"agent/skills/{models.PACKAGE}/recipes/qwen3.toml")
    assert recipe == (models.RECIPES / "qwen3.toml").read_bytes()


class Improving:
    """Once exact, tries one more contract; the throughput of each is given."""

    name = "improving"

    def __init__(self):
        self.inner, self.tried = Playbook(), False

    def decide(self, state):
        if state.open_attempt:
            return Verify()
        if state.final and state.final.verdict.exact and not self.tried:
            self.tried = True
            return Patch(bindings=[Binding(operator="rotary", implementation="exact")], addresses=[], why="perhaps faster")
        return self.inner.decide(state)


@pytest.mark.parametrize(("second", "outcome", "reason"), [
    (FASTER, "kept", "exact: 0 mismatches"), (SLOWER, "rejected", "exact, but not faster: 0.950 of stock, 0.970 before")])
def test_of_exact_contracts_the_fastest_is_kept(workspace, second, outcome, reason):
    class Timed(FakeTools):
        def verify(self, contract, kernels, level, progress):
            self.ratio = second if "rotary" in contract.rollout else 0.97
            found = super().verify(contract, kernels, level, progress)
            return found if level == "full" else found.model_copy(update={"throughput": None})  # as the quick matrix, which times nothing

    state.begin(workspace, run="r1", checkpoint="none", device="cpu", policy="improving", target=0.9)
    tools = Timed({"engine": ["rms_norm"]})
    ended = Run(workspace, load_current(workspace), Improving(), tools, SilentObserver(), minutes=5, attempts=9).go()
    assert [(a.outcome, a.title) for a in ended.attempts] == [("kept", "rms_norm=exact"), (outcome, "rotary=exact")]
    assert reason in ended.attempts[1].reason and ended.final.throughput.ratio == max(0.97, second) and ended.outcome == "exact"
    assert ended.attempts[1].verify.level == "full", "throughput is measured there only"


def load_current_of(path: Path):
    from agent.workspace import Workspace

    return load_current(Workspace.open(path))

"""Cheating does not pay: every candidate is refused by the rule that is about it, and the machine it ran on is as it was.

Real processes in the machine's sandbox, real protocol, guard, bindings and comparisons; only the model is small (`toy_job.py`). The same
candidates on vLLM and transformers: `python -m tests.adversarial.run --engines`.
"""

import json
import shutil
from pathlib import Path
from unittest import mock

import psutil
import pytest

from agent.config import Config
from agent.errors import UserError
from agent.fakes import FakeTools, SilentObserver
from agent.kernel_source import inspect_kernels, inspect_source
from agent.loop import Run
from agent.policies.playbook import Playbook
from agent.pull_request import Evidence
from agent.rules import RULES
from agent.state import begin, new_run_id
from agent.tools.patch_kernel import PatchRequest, patch_kernel
from agent.tools.verify import VerifyRequest, verify
from agent.workspace import Workspace
from consistency.contract import Contract
from sandboxes import choose
from sandboxes.handle import folder_bytes
from sandboxes.local import LocalSandbox
from tests.adversarial.run import DISK_BYTES, Tight, checkpoint, judge
from tests.adversarial.table import CANDIDATES, HONEST, KERNELS, TOUCHING, groups

NAMES = [c.file for c in KERNELS]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """One verify per group, made when the first of its candidates is asked for."""
    made = {}

    def outcome(name):
        group = next(g for g in groups() if name in [c.file for c in g])
        if group not in made:
            scratch = tmp_path_factory.mktemp(group[0].file)
            made[group] = (judge(group, scratch), scratch)
        found, scratch = made[group]
        return next(o for o in found if o.candidate.file == name), scratch

    return outcome


@pytest.mark.parametrize("name", NAMES)
def test_refused_by_name(outcomes, name):
    outcome, scratch = outcomes(name)
    assert outcome.candidate.rule in outcome.rules, outcome.report and outcome.report.verdict.reasons
    assert outcome.refused_by, "the rule was broken, but nothing says that it was this candidate"
    assert outcome.rejected and not outcome.report.verdict.exact
    assert json.loads((scratch / "evidence" / "report.json").read_text()) == outcome.report.model_dump(mode="json"), "the verdict is the parent's"
    assert outcome.report.environment["sandbox"]["name"] == choose().capabilities().name
    assert outcome.report.environment["sandbox"]["not_guarded"]


@pytest.mark.parametrize("name", NAMES)
def test_the_host_is_unharmed(outcomes, name):
    _, scratch = outcomes(name)
    assert sorted(p.name for p in scratch.iterdir()) == ["checkpoint", "evidence", "kernels"]
    assert sorted(p.name for p in (scratch / "evidence").iterdir()) == ["jobs", "prompts.json", "report.json"]
    assert folder_bytes(scratch) < 12 * DISK_BYTES
    assert not [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(scratch) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.skipif(choose().capabilities().name != "bubblewrap", reason="bubblewrap does not work here")
def test_an_honest_kernel_passes_and_what_no_python_event_shows_is_held_by_the_sandbox(tmp_path):
    """Without the first half, a rule that refuses everything would pass as well. torch writes files natively: only the file system says no."""
    outcome, touching = judge((HONEST, TOUCHING), tmp_path)
    assert outcome.report is not None and outcome.report.verdict.exact, outcome.report and outcome.report.verdict
    assert outcome.rules == [] and outcome.source == [] and outcome.report.throughput is not None
    assert touching.source
    assert not list(tmp_path.rglob("adversarial-marker"))
    job = tmp_path / "evidence" / "jobs" / "rollout"
    assert json.loads((job / "job.json").read_text())["family"] == "qwen3"
    assert json.loads((job / "steps" / "0000.json").read_text())["kind"] == "generate"


def test_without_a_private_file_system_changed_files_are_noticed(tmp_path):
    outcome = judge((TOUCHING,), tmp_path, sandbox=LocalSandbox())[0]
    assert "harness_files_changed" in outcome.rules
    assert any("job.json is not what the parent wrote" in line for line in outcome.report.verdict.reasons)


@pytest.mark.parametrize("candidate", KERNELS, ids=NAMES)
def test_the_look_at_the_source(candidate):
    """The first line says where; those that only compute pass it, and are refused by what they compute."""
    found = inspect_source(f"{candidate.file}.py", (CANDIDATES / f"{candidate.file}.py").read_text())
    assert bool(found) == candidate.source, found
    assert all(line.rule == "forbidden_source" and f"kernels/{candidate.file}.py, line " in line for line in found)


def test_ordinary_kernels_pass_the_look_at_the_source():
    folder = ROOT / "consistency" / "operators"
    allowed = ("kernels_library.py", "catalog.py")  # not kernels
    found = [line for path in folder.glob("*.py") if path.name not in allowed for line in inspect_source(path.name, path.read_text())]
    assert found == []


def test_a_refused_source_is_never_started(tmp_path):
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    shutil.copy(CANDIDATES / "sends_results.py", kernels)
    contract = Contract({"linear": "kernels:sends_results.linear"})
    request = VerifyRequest(family="qwen3", checkpoint=checkpoint(tmp_path, False), contract=contract, kernels=kernels, level="quick",
                            directory=tmp_path / "evidence")
    with mock.patch("agent.tools.verify.Session") as session:
        report = verify(request, sandbox=Tight(choose(), False))
    assert not session.called
    assert report.verdict.void and report.verdict.rules[0] == "forbidden_source"
    assert "kernels/sends_results.py, line 4: imports socket" in report.verdict.reasons
    assert len(report.verdict.conditions) == 6 and not any(c.ran for c in report.verdict.conditions)


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    (tmp_path / "gitconfig").write_text("[user]\n\tname = Tester\n\temail = tester@example.org\n")
    return Workspace.create(tmp_path / "ws", Config(model="qwen3", scale="tiny"))


def diff_of(path, old, new):
    return f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-{old}\n+{new}\n"


@pytest.mark.parametrize(("change", "rule"), [
    ({"files": {"evidence/final.json": "{}"}}, "outside_allowed_paths"),
    ({"files": {"kernels/../consistency.toml": "model = 'qwen3'"}}, "outside_allowed_paths"),
    ({"files": {"/etc/hosts": "x"}}, "outside_allowed_paths"),
    ({"files": {".git/hooks/post-commit": "x"}}, "outside_allowed_paths"),
    ({"diff": diff_of("consistency.toml", 'model = "qwen3"', 'model = "easier"')}, "outside_allowed_paths"),
    ({"files": {"kernels/linked/x.py": "x = 1\n"}}, "outside_allowed_paths"),
    ({"files": {"kernels/net.py": (CANDIDATES / "sends_results.py").read_text()}}, "forbidden_source"),
])
def test_patches_that_are_refused(workspace, change, rule):
    (workspace.path / "kernels" / "linked").symlink_to("/tmp")
    before = {p: p.read_bytes() for p in workspace.path.rglob("*") if p.is_file() and ".git" not in p.parts}
    with pytest.raises(UserError, match=rf"patch refused: .*\[{rule}\]"):
        patch_kernel(PatchRequest(worktree=workspace.path, **change))
    assert {p: p.read_bytes() for p in workspace.path.rglob("*") if p.is_file() and ".git" not in p.parts} == before


def test_evidence_edited_after_the_fact(workspace):
    """A run's report is made prettier in a later commit; the pull request is not written from it."""
    state = begin(workspace, run=new_run_id(workspace), checkpoint="none", device="cpu", policy="playbook", target=0.9)
    Run(workspace, state, Playbook(), FakeTools({"engine": ["linear"]}), SilentObserver(), minutes=5, attempts=5).go()
    Evidence.load(workspace, state)
    tree = workspace.path
    final = tree / "evidence" / "final.json"
    report = json.loads(final.read_text())
    report["throughput"]["ratio"] = 1.5
    final.write_text(json.dumps(report))
    state.head = workspace.commit(tree, "Tidy up")
    with pytest.raises(UserError, match=r"evidence/final\.json at .* \[evidence_changed\]"):
        Evidence.load(workspace, state)


def test_the_table_names_real_rules_and_files():
    assert len(KERNELS) >= 22
    assert {c.rule for c in KERNELS} <= set(RULES)
    assert {p.stem for p in CANDIDATES.glob("*.py")} == {*NAMES, HONEST.file, TOUCHING.file}
    assert inspect_kernels(CANDIDATES), "the folder itself is full of objections"
    text = (ROOT / "docs" / "how-verify-decides.md").read_text()
    assert [name for name in [*RULES, *NAMES] if f"`{name}`" not in text] == []

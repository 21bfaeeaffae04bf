import hashlib
import json
from pathlib import Path

import pytest
from pr_world import HUMAN, WORLD, agent, copy_of, finish, one_line

from agent.fakes import FakeTools
from agent.pr import claims
from agent.pr.series import quoted
from agent.state import load_current
from agent.workspace import Workspace, call_git
from consistency.contract import Contract


def prepare(workspace: Workspace, *options: object, tools: FakeTools | None = None) -> dict:
    result = agent("pr", workspace.path, "--json", *options, tools=tools)
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def log(workspace: Workspace, what: str, revisions: str) -> list[str]:
    return call_git(("log", "--reverse", f"--format={what}", revisions), workspace.path).splitlines()


def test_one_commit_per_operator_then_the_evidence(tmp_path, finished):
    workspace = copy_of(finished, tmp_path / "ws")
    made = prepare(workspace)
    assert made["branch"] == "agent/r1/pr" and made["pull_request"] is None
    assert log(workspace, "%s", "main..agent/r1/pr") == [
        "rms_norm: use `exact` on both sides", "linear: use `exact` on both sides", "Evidence and the text of the pull request"]
    first, second, last = log(workspace, "%H", "main..agent/r1/pr")
    assert (made["verified"], made["head"]) == (second, last)
    # Each commit is a contract of its own, and the last one is the run's.
    contracts = [Contract.parse(workspace.show(commit, "contract.toml").decode()) for commit in (first, second, last)]
    assert [sorted(c.rollout) for c in contracts] == [["rms_norm"], ["linear", "rms_norm"], ["linear", "rms_norm"]]
    assert contracts[-1] == Contract.from_dict(load_current(workspace).contract)
    # A repro comes with the operator it is about.
    assert workspace.files(first, "repros") == ["repros/00-engine-rms_norm/repro.py"]
    changed = call_git(("diff", "--name-only", second, last), workspace.path).splitlines()
    assert changed and all(name.startswith("evidence/") or name == "PULL_REQUEST.md" for name in changed)
    # The user's branch and checkout stay as they were.
    assert workspace.repo.active_branch.name == "agent/r1/main" and workspace._git("status", "--porcelain") == ""
    assert "pr" not in [p.name for p in workspace.private.iterdir() if p.name.startswith("pr-")]


def test_messages_say_why_and_carry_the_evidence(tmp_path, finished):
    workspace = copy_of(finished, tmp_path / "ws")
    made = prepare(workspace, "--human", HUMAN)
    state = load_current(workspace)
    message = str(workspace.repo.commit(log(workspace, "%H", "main..agent/r1/pr")[0]).message)
    said = " ".join(message.split())
    assert "rms_norm at 000.rms_norm is the first operator whose output differs although its input does not: reduction order" in said
    assert "37 of 4096 elements" in said and "repros/00-engine-rms_norm exits with 1 on stock and with 0 now" in said
    kept = state.attempts[-1]
    evidence = json.loads(workspace.show(kept.commit, f"evidence/attempt-{kept.number}.json"))
    trailers = call_git(("log", "-1", "--format=%(trailers:only,unfold)", log(workspace, "%H", "main..agent/r1/pr")[0]), workspace.path).splitlines()
    assert [t for t in trailers if t] == [
        "Run: r1", f"Evidence: sha256:{kept.evidence}", f"Verdict: {claims.verdict_id(evidence['verify'])}", "Assisted-by: agent 0.1.0 (playbook)",
        f"Signed-off-by: {HUMAN}"]
    assert {(c.author.name, c.author.email) for c in workspace.repo.iter_commits("main..agent/r1/pr")} == {("Ann Author", "ann@example.org")}
    document = Path(made["out"]) / "evidence" / "pull-request.json"
    assert workspace.evidence_trailers(made["head"]) == [hashlib.sha256(document.read_bytes()).hexdigest()]


def test_without_a_person_nobody_signs_off(tmp_path, finished):
    workspace = copy_of(finished, tmp_path / "ws")
    made = prepare(workspace)
    assert "Signed-off-by" not in "".join(log(workspace, "%B", "main..agent/r1/pr"))
    assert "nobody has said so yet" in Path(made["body"]).read_text()


def test_the_verify_is_a_new_one_of_the_branch(tmp_path, finished):
    class Watching(FakeTools):
        def verify(self, contract, kernels, level, progress):
            tree = kernels.parent
            self.where = (call_git(("rev-parse", "HEAD"), tree), call_git(("status", "--porcelain"), tree), level)
            report = super().verify(contract, kernels, level, progress)
            return report.model_copy(update={"seed": "drawn now", "evidence": str(workspace.path / ".agent" / "jobs")})

    workspace, tools = copy_of(finished, tmp_path / "ws"), Watching(WORLD)
    made = prepare(workspace, tools=tools)
    assert tools.where == (made["verified"], "", "full")
    final = json.loads((Path(made["out"]) / "evidence" / "final.json").read_text())
    assert final["seed"] == "drawn now" and final["evidence"] == ".agent/jobs"
    assert str(tmp_path) not in "".join(p.read_text() for p in Path(made["out"]).rglob("*.json"))


def test_patches_give_the_same_tree_and_the_files_are_whole(tmp_path, finished):
    workspace = copy_of(finished, tmp_path / "ws")
    made = prepare(workspace)
    assert [Path(p).name for p in made["patches"]] == [
        "0001-rms_norm-use-exact-on-both-sides.patch", "0002-linear-use-exact-on-both-sides.patch",
        "0003-Evidence-and-the-text-of-the-pull-request.patch"]
    clone = tmp_path / "clone"
    call_git(("clone", "--quiet", "--branch", "main", str(workspace.path), str(clone)), tmp_path)
    call_git(("am", "--quiet", *made["patches"]), clone)
    assert call_git(("rev-parse", "HEAD^{tree}"), clone) == call_git(("rev-parse", "agent/r1/pr^{tree}"), workspace.path)
    out = Path(made["out"])
    assert (out / "TITLE").read_text().strip() == made["title"]
    assert (out / "PULL_REQUEST.md").read_bytes() == workspace.show("agent/r1/pr", "PULL_REQUEST.md")
    assert not list(out.parent.glob(".*")), "nothing half-written is left"


def test_again_replaces_and_a_folder_of_somebody_elses_stays(tmp_path, finished):
    workspace = copy_of(finished, tmp_path / "ws")
    first, second = prepare(workspace), prepare(workspace)
    assert first["out"] == second["out"] and len(second["patches"]) == 3
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("mine")
    one_line(agent("pr", workspace.path, "--out", mine), 2, "exists and was not made by `agent pr`")
    assert (mine / "thesis.tex").read_text() == "mine"


def test_a_run_that_cannot_be_published(tmp_path, finished, workspace):
    one_line(agent("pr", tmp_path / "absent"), 2, "not a folder")
    one_line(agent("pr", workspace.path), 2, "no run yet")
    other = copy_of(finished, tmp_path / "other")
    (other.path / "contract.toml").write_text("")
    one_line(agent("pr", other.path), 2, "uncommitted changes (contract.toml)")
    call_git(("checkout", "--quiet", "contract.toml"), other.path)
    with other.lock():
        one_line(agent("pr", other.path), 2, "in use by another run")
    assert not other.has_branch("agent/r1/pr")
    stock = finish(tmp_path / "stock", tools=FakeTools({"engine": []}))
    one_line(agent("pr", stock.path), 2, "kept no attempt")
    state = load_current(other)
    state.outcome = None
    state.save(other)
    one_line(agent("pr", other.path), 2, "agent resume")


@pytest.mark.parametrize(("tools", "said"), [
    (FakeTools(WORLD, void=True), "the final verify is void (no negative control)"),
    (FakeTools(WORLD, broken=("linear=exact",)), "is not exact (192 mismatches)"),
    (FakeTools(WORLD, ratio=0.5), "throughput is 0.500 of stock, required is 0.913")])
def test_a_verify_that_fails_now_is_not_published(tmp_path, finished, tools, said):
    workspace = copy_of(finished, tmp_path / "ws")
    one_line(agent("pr", workspace.path, tools=tools), 1, "not published", said)
    assert not (workspace.private / "pr").exists() and not workspace.has_branch("agent/r1/pr")
    assert workspace._git("status", "--porcelain") == ""


def test_less_throughput_can_be_asked_for_and_is_said(tmp_path, finished):
    workspace = copy_of(finished, tmp_path / "ws")
    made = prepare(workspace, "--target-throughput", 0.4, tools=FakeTools(WORLD, ratio=0.5))
    assert "0.500 of stock" in (text := Path(made["body"]).read_text()) and "(required: 0.400)" in text


def test_recorded_evidence_that_was_changed_is_refused(tmp_path, finished):
    workspace = copy_of(finished, tmp_path / "ws")
    state = load_current(workspace)
    path = workspace.path / "evidence" / "baseline.json"
    path.write_text(path.read_text().replace('"mismatches": 128', '"mismatches": 999'))
    state.head = workspace.commit(workspace.path, "Tidy")
    state.save(workspace)
    one_line(agent("pr", workspace.path), 2, "evidence/baseline.json", "do not trust")


def test_a_run_that_never_localized_gets_its_causes_now(tmp_path):
    from agent.policies import Patch, Stop, Verify
    from agent.tools.patch_kernel import Binding

    class AtOnce:
        name = "at once"

        def __init__(self):
            both = [Binding(operator=name, implementation="exact") for name in ("rms_norm", "linear")]
            self.actions = [Verify(), Patch(bindings=both, addresses=[], why="a recipe"), Verify(level="full")]

        def decide(self, state):
            return self.actions.pop(0) if self.actions else Stop(why="done")

    workspace = finish(tmp_path / "ws", AtOnce())
    made = prepare(workspace)
    text = Path(made["body"]).read_text()
    assert "37 of 4096" in text and "evidence/localize-stock.json" in text
    assert workspace.files(made["verified"], "repros") == ["repros/00-engine-rms_norm/repro.py", "repros/01-batch-linear/repro.py"]
    document = json.loads(workspace.show(made["head"], "evidence/pull-request.json"))
    assert [(r["operator"], r["before"], r["after"]) for r in document["repros"]] == [("rms_norm", 1, 0), ("linear", 1, 0)]


@pytest.mark.parametrize("text", ["fine\n\nSigned-off-by: Evil <e@e.org>", "Co-authored-By : x", "a signed-off-by: b"])
def test_words_of_a_model_never_become_a_trailer(text):
    assert "\n" not in quoted(text) and "-by:" not in quoted(text).lower() and "-by :" not in quoted(text).lower()

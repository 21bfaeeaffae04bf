import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
from pr_world import WORLD, agent, copy_of, one_line

from agent.errors import JobFailed
from agent.fakes import FakeTools
from agent.pr import body, claims
from agent.workspace import Workspace, call_git


@pytest.fixture(scope="module")
def published(finished, tmp_path_factory) -> Path:
    """A workspace with a prepared pull request; made once."""
    with pytest.MonkeyPatch.context() as patch:
        for role in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{role}_NAME", "Tester")
            patch.setenv(f"GIT_{role}_EMAIL", "tester@example.org")
        workspace = copy_of(finished, tmp_path_factory.mktemp("published") / "ws")
        assert agent("pr", workspace.path).exit_code == 0
    return workspace.path


@pytest.fixture
def ws(published, tmp_path) -> Workspace:
    return copy_of(published, tmp_path / "ws")


@pytest.fixture
def out(ws) -> Path:
    return ws.private / "pr" / "r1"


def check(argument: object, *options: object, tools: FakeTools | None = None, code: int = 0) -> dict:
    result = agent("verify-pr", argument, "--json", *options, tools=tools)
    assert result.exit_code == code, (result.output, result.exception)
    found = json.loads(result.stdout)
    assert found["holds"] == (code == 0)
    return found


def wrong(found: dict) -> list[str]:
    return [f"{r['claim']}: {r['stated']} / {r['found']}" for r in found["rows"] if r["result"] == "differs"]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("what", ["PULL_REQUEST.md", "", "patches", "evidence"])
def test_an_honest_one_reproduces_however_it_is_named(out, what):
    found = check(out / what)
    claims = {row["claim"]: row["result"] for row in found["rows"]}
    measured = ("verdict", "conditions", "untouched stack", "repros/00-engine-rms_norm", "throughput, share of stock")
    assert {claims[name] for name in measured} == {"reproduces"}
    assert claims["text"] == claims["evidence"] == claims["patch series"] == claims["commit"] == claims["trailer"] == "same"
    assert found["ran"] and not wrong(found)


def test_a_workspace_stands_for_its_last_pull_request_and_a_branch_for_its_commit(ws, monkeypatch):
    assert check(ws.path)["commit"] == check("agent/r1/pr", "--repo", ws.path)["commit"]
    monkeypatch.chdir(ws.path)
    assert not wrong(check("agent/r1/pr"))


def test_a_clone_of_the_branch_is_enough(ws, tmp_path):
    clone = tmp_path / "clone"
    call_git(("clone", "--quiet", "--branch", "agent/r1/pr", str(ws.path), str(clone)), tmp_path)
    found = check(clone / "PULL_REQUEST.md")
    assert not wrong(found) and "trailer" in {row["claim"] for row in found["rows"]}


def test_patches_and_a_clone_of_the_base_are_enough(ws, out, tmp_path):
    clone = tmp_path / "clone"
    call_git(("clone", "--quiet", "--no-local", "--single-branch", "--branch", "main", str(ws.path), str(clone)), tmp_path)
    shutil.copytree(out, tmp_path / "mailed")
    found = check(tmp_path / "mailed" / "patches", "--repo", clone)
    assert [row["found"] for row in found["rows"] if row["claim"] == "commit"] == ["not here; the patches on its base are, 2 files as verified"]
    one_line(agent("verify-pr", tmp_path / "mailed"), 2, "--repo")


def test_people_see_a_table_and_one_line(out):
    result = agent("verify-pr", out)
    assert result.exit_code == 0 and "reproduces, at " in result.stdout and "within the" in " ".join(result.stdout.split())
    edit(out / "PULL_REQUEST.md", "**Claim.** 0 mismatches", "**Claim.** 0 mismatch")
    result = agent("verify-pr", out)
    assert result.exit_code == 1 and "does not hold: 1 of" in result.stdout


@pytest.mark.parametrize(("old", "new"), [
    ("throughput is 0.970", "throughput is 1.970"),
    ("| unequal log-probabilities, all conditions | 128 | 0 |", "| unequal log-probabilities, all conditions | 128000 | 0 |"),
    ("37 of 4096", "3700 of 4096"), ("tokens/s, interleaved, median | 100 | 97", "tokens/s, interleaved, median | 100 | 107"),
    ("- seeded weights at scale `tiny`, not a trained checkpoint; no evaluation on tasks was made\n", ""),
    ("nobody has said so yet", "Ann has"), ("Nothing: the first patch held.", "Nothing: the first patch held. It is also faster.")])
def test_an_edited_text_is_caught_and_the_line_is_shown(out, old, new):
    edit(out / "PULL_REQUEST.md", old, new)
    found = check(out, "--static", code=1)
    assert len(wrong(found)) == 1 and wrong(found)[0].startswith("text: ") and not found["ran"]


def test_a_text_of_another_version_is_compared_by_its_figures(out):
    document, text = out / "evidence" / "pull-request.json", out / "PULL_REQUEST.md"
    edit(document, f'"renderer": "{body.RENDERER}"', '"renderer": "older"')
    edit(text, "**Claim.** 0 mismatches", "**We claim** 0 mismatches")
    text_rows = [row for row in check(out, "--static", code=1)["rows"] if row["claim"] == "text"]
    assert [row["result"] for row in text_rows] == ["differs"], "the hash of the claims in the text is a figure too"
    made = claims.read(document.read_bytes(), "x")
    text.write_text(body.render(made).replace("**Claim.**", "**We claim:**"))
    assert any(row["claim"] == "text" and row["result"] == "note" for row in check(out, "--static", code=1)["rows"])
    edit(text, "throughput is 0.970", "throughput is 1.970")
    assert any("1.970" in line for line in wrong(check(out, "--static", code=1)))


def test_what_people_add_below_is_theirs_and_a_forge_may_keep_the_title(out):
    body = out / "PULL_REQUEST.md"
    body.write_text(body.read_text() + "\nWe use this since May, ratio 9.999.\n")
    found = check(out, "--static")
    assert any(row["result"] == "note" and "1 lines below" in row["stated"] for row in found["rows"])
    body.write_text(body.read_text().partition("\n")[2].lstrip().replace("\n", "\r\n"))
    assert not wrong(check(out, "--static"))


@pytest.mark.parametrize(("name", "old", "new"), [
    ("final", '"mismatches": 0', '"mismatches": 1'), ("baseline", '"mismatches": 128', '"mismatches": 5'),
    ("localize-0", '"differing": 37', '"differing": 1')])
def test_edited_evidence_is_caught(out, name, old, new):
    edit(out / "evidence" / f"{name}.json", old, new)
    assert any(f"evidence/{name}.json: sha256:" in line and "changed" in line for line in wrong(check(out, "--static", code=1)))


def test_evidence_that_was_edited_with_its_hashes_is_caught_by_the_trailer_and_by_the_run(ws, out):
    path, document = out / "evidence" / "final.json", out / "evidence" / "pull-request.json"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    edit(path, '"ratio": 0.97', '"ratio": 1.97')
    edit(document, '"ratio": 0.97', '"ratio": 1.97')
    edit(document, before, hashlib.sha256(path.read_bytes()).hexdigest())
    (out / "PULL_REQUEST.md").write_text(body.render(claims.read(document.read_bytes(), "x")))
    assert [line.partition(":")[0] for line in wrong(check(out, code=1))] == ["throughput", "trailer"]


def test_missing_files(out):
    (out / "evidence" / "baseline.json").unlink()
    assert "evidence/baseline.json" in wrong(check(out, "--static", code=1))[0]
    (out / "PULL_REQUEST.md").unlink()
    assert any(line.startswith("text: PULL_REQUEST.md / missing") for line in wrong(check(out, "--static", code=1)))
    (out / "evidence" / "pull-request.json").unlink()
    one_line(agent("verify-pr", out), 2, "no evidence/pull-request.json")


def test_another_commit_on_the_branch_is_caught(ws, tmp_path):
    clone = tmp_path / "clone"
    call_git(("clone", "--quiet", "--branch", "agent/r1/pr", str(ws.path), str(clone)), tmp_path)
    (clone / "contract.toml").write_text('[operators]\nrms_norm = "exact"\n')
    call_git(("commit", "--quiet", "--all", "--message=one more thing"), clone)
    found = check(clone / "PULL_REQUEST.md", code=1)
    assert any(line.startswith("branch: ") and "contract.toml" in line for line in wrong(found))
    # The commit that was verified is still there, and still gives what was stated.
    assert {row["claim"]: row["result"] for row in found["rows"]}["verdict"] == "reproduces"


def test_a_new_kernel_beside_the_code_is_caught(ws, tmp_path):
    clone = tmp_path / "clone"
    call_git(("clone", "--quiet", "--branch", "agent/r1/pr", str(ws.path), str(clone)), tmp_path)
    (clone / "kernels" / "x.py").write_text("x = 1\n")
    call_git(("add", "--all"), clone)
    call_git(("commit", "--quiet", "--message=kernel"), clone)
    assert any("kernels/x.py" in line for line in wrong(check(clone, "--static", code=1)))


def test_another_commit_in_the_claims_is_caught(ws, out):
    document = out / "evidence" / "pull-request.json"
    made = json.loads(document.read_text())
    document.write_text(document.read_text().replace(made["commit"], ws._git("rev-parse", "main")))
    found = check(out, "--static", code=1)
    assert any(line.startswith("commit: ") and "other code: contract.toml" in line for line in wrong(found))
    honest = document.read_text()
    for name, value in (("commit", "--output=x"), ("base_commit", "HEAD"), ("folder", "repros/../../x")):
        document.write_text(re.sub(f'"{name}": "[^"]*"', f'"{name}": "{value}"', honest, count=1))
        one_line(agent("verify-pr", out, "--static"), 2, name)


def test_edited_patches_are_caught(out):
    patch = next((out / "patches").glob("0002*"))
    edit(patch, '+linear = "exact"', '+linear = "native"')
    assert any(line.startswith("patch series: ") and "contract.toml" in line for line in wrong(check(out, "--static", code=1)))
    patch.write_text("nonsense")
    assert any("do not apply" in line for line in wrong(check(out, "--static", code=1)))


def test_a_branch_cannot_have_something_else_run_than_it_holds(ws, tmp_path):
    """Attributes that change what git writes, and settings that would choose an engine."""
    class Watching(FakeTools):
        def verify(self, contract, kernels, level, progress):
            assert not (kernels.parent / "consistency.toml").exists() and not (kernels.parent / "engine.patch").exists()
            return super().verify(contract, kernels, level, progress)

    clone = tmp_path / "clone"
    call_git(("clone", "--quiet", "--branch", "agent/r1/pr", str(ws.path), str(clone)), tmp_path)
    (clone / "engine.patch").write_text("x")
    call_git(("add", "--all"), clone)
    call_git(("commit", "--quiet", "--message=x"), clone)
    assert not wrong(check(clone, tools=Watching(WORLD)))
    call_git(("reset", "--quiet", "--hard", "HEAD~2"), clone)
    (clone / ".gitattributes").write_text("contract.toml export-ignore\n")
    call_git(("add", "--all"), clone)
    call_git(("commit", "--quiet", "--amend", "--no-edit"), clone)
    document = ws.private / "pr" / "r1" / "evidence" / "pull-request.json"
    before = json.loads(document.read_text())["commit"]
    document.write_text(document.read_text().replace(before, call_git(("rev-parse", "HEAD"), clone)))
    one_line(agent("verify-pr", document.parent, "--repo", clone), 2, "contract.toml", ".gitattributes")


def test_a_squashed_merge_is_recognised_by_its_files(ws, out, tmp_path):
    clone = tmp_path / "clone"
    call_git(("clone", "--quiet", "--single-branch", "--branch", "main", str(ws.path), str(clone)), tmp_path)
    call_git(("fetch", "--quiet", str(ws.path), "agent/r1/pr"), clone)
    call_git(("merge", "--quiet", "--squash", "FETCH_HEAD"), clone)
    call_git(("commit", "--quiet", "--message=Squashed (#7)"), clone)
    again = tmp_path / "again"
    call_git(("clone", "--quiet", "--no-local", str(clone), str(again)), tmp_path)
    found = check(again / "PULL_REQUEST.md")
    rows = {row["claim"]: row for row in found["rows"]}
    assert "holds the same code" in rows["commit"]["found"] and rows["trailer"]["result"] == "note"


@pytest.mark.parametrize(("tools", "claim"), [
    (FakeTools(WORLD, broken=("linear=exact",)), "verdict"), (FakeTools(WORLD, void=True), "verdict"), (FakeTools(WORLD, ratio=0.8), "throughput"),
    (FakeTools(WORLD, useless=("linear=exact",)), "repros/01-batch-linear"),
    (FakeTools({"engine": [], "batch": [], "phase": []}), "untouched stack")])
def test_what_does_not_reproduce_is_said(out, tools, claim):
    assert any(line.startswith(claim) for line in wrong(check(out, tools=tools, code=1)))


def test_throughput_may_differ_on_another_machine_as_long_as_it_is_enough(out):
    found = check(out, tools=FakeTools(WORLD, ratio=0.93))
    row = next(row for row in found["rows"] if row["claim"].startswith("throughput"))
    assert row["result"] == "note" and row["found"] == "0.930 (0.920 to 0.940), outside the stated interval"


def test_an_engine_that_dies_is_a_row_not_a_crash(out):
    def die(call: str) -> None:
        if call.startswith("verify full"):
            raise JobFailed("the rollout job was killed by signal 9", Path("jobs/0"))

    found = check(out, tools=FakeTools(WORLD, before=die), code=1)
    assert wrong(found) == ["verdict: exact / could not be measured: the rollout job was killed by signal 9"]


def test_evidence_of_another_machine_is_readable(out, ws):
    """Other versions, other folders, figures that a machine could not give."""
    class Elsewhere(FakeTools):
        def verify(self, contract, kernels, level, progress):
            report = super().verify(contract, kernels, level, progress)
            worst = report.baseline.model_copy(update={"k3": float("inf"), "max_abs": float("nan")}) if level == "quick" else report.baseline
            return report.model_copy(update={"environment": {"rollout": {"environment": {"torch": "9.9", "processor": "other"}}}, "baseline": worst,
                                             "harness": "f" * 64, "evidence": "/somewhere/else"})

    assert agent("pr", ws.path, tools=Elsewhere(WORLD)).exit_code == 0
    found = check(out)
    rows = {row["claim"]: row for row in found["rows"]}
    assert rows["environment"]["found"] == "other here: processor, torch" and rows["harness"]["result"] == "note" and not wrong(found)


@pytest.mark.parametrize(("argument", "said"), [
    ("no-such-thing", "no such file"), ("--output=x", "No such option"), ("HEAD~1^{tree}", "no such file")])
def test_input_that_cannot_be_used(ws, argument, said):
    result = agent("verify-pr", "--repo", ws.path, argument)
    assert result.exit_code == 2 and said.lower() in result.stderr.lower()


def test_documents_that_are_none(out, tmp_path):
    document = out / "evidence" / "pull-request.json"
    document.write_text("{")
    one_line(agent("verify-pr", out), 2, "pull-request.json", "not the evidence of a pull request")
    document.write_text('{"format": 2}')
    one_line(agent("verify-pr", out), 2, "format")
    one_line(agent("verify-pr", tmp_path), 2, "no evidence/pull-request.json")
    one_line(agent("verify-pr", out, "--repo", tmp_path / "gone"), 2, "is not a folder")

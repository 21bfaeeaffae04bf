import json
from datetime import date
from pathlib import Path

import fake_forge
import pytest
from fake_forge import TOKEN, FakeForge
from pr_world import HUMAN, agent, copy_of, one_line

from agent.errors import UserError
from agent.pr import upstream
from agent.pr.body import SECTIONS
from agent.workspace import call_git

SOURCE = "https://github.com/vllm-project/vllm/blob/"


@pytest.fixture
def at(tmp_path, finished, monkeypatch):
    """`agent pr` towards a forge that holds one named repository."""
    monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
    bare = tmp_path / "bare.git"
    call_git(("init", "--quiet", "--bare", str(bare)), tmp_path)
    workspace = copy_of(finished, tmp_path / "ws")
    with FakeForge() as fake:
        def call(repository: str, *options):
            monkeypatch.setattr(fake_forge, "REPO", repository)
            return agent("pr", workspace.path, "--repo", repository, "--base-url", fake.url, "--remote-url", f"file://{bare}", *options)

        call.forge, call.workspace, call.bare = fake, workspace, bare
        yield call


def test_every_profile_names_its_sources_and_only_sections_that_exist():
    known = upstream.profiles()
    assert {"vllm", "transformers"} <= known.keys()
    for profile in known.values():
        assert profile.sources and all(source.startswith("https://github.com/") for source in profile.sources)
        assert date.fromisoformat(profile.read_on) and profile.match and profile.human
        assert {name for names in profile.template.values() for name in names} <= SECTIONS.keys()


def test_a_profile_follows_from_the_repository_and_cannot_be_put_aside():
    assert upstream.choose(None, "VLLM-Project/vllm", None).name == "vllm"
    assert upstream.choose(None, "somebody/vllm", None).name == "" and upstream.choose(None, None, "vllm").name == "vllm"
    assert upstream.choose("vllm", "somebody/vllm", None).name == "vllm"
    with pytest.raises(UserError, match="rules of its own"):
        upstream.choose("transformers", "vllm-project/vllm", None)


def test_nothing_goes_to_vllm_without_a_person(at):
    one_line(at("vllm-project/vllm"), 2, "named person", "--human", SOURCE)
    one_line(at("vllm-project/vllm", "--human", HUMAN), 2, "unattended program", "--i-have-read-every-line")
    assert not at.workspace.has_branch("agent/r1/pr") and call_git(("for-each-ref",), at.bare) == ""
    assert [what for what, _ in at.forge.seen if not what.startswith("GET")] == []
    # Preparing it prepares nothing that could be published later without the person.
    assert agent("pr", at.workspace.path, "--profile", "vllm", "--human", HUMAN).exit_code == 0
    one_line(at("vllm-project/vllm", "--human", HUMAN, "--prepared"), 2, "had not confirmed")


def test_with_a_person_it_is_in_the_form_that_vllm_asks_for(at):
    result = at("vllm-project/vllm", "--human", HUMAN, "--i-have-read-every-line", "--json")
    assert result.exit_code == 0, result.output
    pull = at.forge.pulls[0]
    assert pull["draft"] is True and pull["title"].startswith("[Bugfix][CPU] nemotron-3.5: ")
    headings = [line[3:] for line in pull["body"].splitlines() if line.startswith("## ")]
    assert headings[:3] == ["Purpose", "Test Plan", "Test Result"]
    assert "AI assistance was used" in pull["body"] and "has confirmed having read every changed line" in pull["body"]
    assert "open pull requests for `batch invariant in:title`: none" in pull["body"]
    for commit in at.workspace.repo.iter_commits("main..agent/r1/pr"):
        trailers = [line for line in call_git(("log", "-1", "--format=%(trailers:only)", commit.hexsha), at.workspace.path).splitlines() if line]
        assert trailers[-2:] == ["Co-authored-by: agent 0.1.0 (playbook)", f"Signed-off-by: {HUMAN}"] and commit.author.email == "ann@example.org"
    assert agent("verify-pr", json.loads(result.stdout)["body"], "--static").exit_code == 0


def test_transformers_wants_an_issue_first(at):
    options = ["--human", HUMAN, "--i-have-read-every-line"]
    one_line(at("huggingface/transformers", *options), 2, "agreed in an issue first", "--coordination")
    result = at("huggingface/transformers", *options, "--coordination", "https://github.com/huggingface/transformers/issues/1")
    assert result.exit_code == 0, result.output
    assert "Agreed with the maintainers in https://github.com/huggingface/transformers/issues/1." in at.forge.pulls[0]["body"]
    assert "Signed-off-by" not in at.workspace.repo.commit("agent/r1/pr").message


def test_a_change_that_is_too_large_is_not_opened(at, monkeypatch):
    known = upstream.profiles()
    monkeypatch.setattr(upstream, "profiles", lambda: known | {"vllm": known["vllm"].model_copy(update={"largest": 2})})
    one_line(at("vllm-project/vllm", "--human", HUMAN, "--i-have-read-every-line"), 2, "the change has 4 lines", "design discussion")
    assert at.forge.pulls == []


@pytest.mark.parametrize(("answer", "confirmed"), [("I have read every changed line", True), ("i have read every changed line.", True)])
def test_a_person_at_the_terminal_is_asked(answer, confirmed):
    asked = []
    profile = upstream.profiles()["vllm"]
    assert upstream.confirm(profile, HUMAN, False, "4 lines", lambda text: asked.append(text) or answer) is confirmed
    assert "4 lines" in asked[0] and HUMAN in asked[0]


@pytest.mark.parametrize("answer", ["", "y", "yes", "no", "sure"])
def test_anything_else_is_a_no(answer):
    with pytest.raises(UserError, match="has not confirmed"):
        upstream.confirm(upstream.profiles()["vllm"], HUMAN, False, "4 lines", lambda text: answer)
    assert upstream.confirm(upstream.PLAIN, HUMAN, False, "4 lines", lambda text: answer) is False


@pytest.mark.parametrize("text", ["", "Ann", "ann@example.org", "Ann <ann>", "Ann <ann@localhost>", "Ann <a@b.org> <c@d.org>", "Ann\n<a@b.org>",
                                  "renovate[bot] <r@b.org>", "Ann <noreply@example.org>"])
def test_who_is_no_person(text):
    with pytest.raises(UserError, match="--human"):
        upstream.person(text)


def test_a_person_is_read():
    assert upstream.person(HUMAN) == ("Ann Author", "ann@example.org")
    assert Path(upstream.FILE).name == "upstream.toml"

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_forge import REPO, TOKEN, FakeForge
from pr_world import HUMAN, agent, copy_of, one_line

from agent.pr import forge as forges
from agent.pr.forge import ForgeError
from agent.state import load_current
from agent.workspace import call_git

PULLS = f"/repos/{REPO}/pulls"
TITLE = "nemotron-3.5: rollout and training log-probabilities equal, bit for bit"


@pytest.fixture(scope="module")
def prepared(finished, tmp_path_factory) -> Path:
    """A workspace whose pull request is ready; made once."""
    with pytest.MonkeyPatch.context() as patch:
        for role in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{role}_NAME", "Tester")
            patch.setenv(f"GIT_{role}_EMAIL", "tester@example.org")
        workspace = copy_of(finished, tmp_path_factory.mktemp("prepared") / "ws")
        assert agent("pr", workspace.path).exit_code == 0
    return workspace.path


class Nothing:
    def __getattr__(self, name):
        raise AssertionError("nothing is to be measured again")


@pytest.fixture
def target(tmp_path, finished, prepared, monkeypatch):
    """A workspace, a bare repository to push to, and a forge; `open` calls `agent pr` with them."""
    monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
    waited: list[float] = []
    monkeypatch.setattr(forges, "pause", waited.append)
    bare = tmp_path / "bare.git"
    call_git(("init", "--quiet", "--bare", str(bare)), tmp_path)
    workspace = copy_of(finished, tmp_path / "ws")

    class Target:
        def ready(self, *options):
            """With what was prepared, so that nothing is measured."""
            if not self.workspace.has_branch("agent/r1/pr"):
                shutil.rmtree(self.workspace.path)
                self.workspace = copy_of(prepared, self.workspace.path)
            return self.open("--prepared", *options, tools=Nothing())

        def open(self, *options, **more):
            return agent("pr", workspace.path, "--repo", REPO, "--base-url", self.forge.url, "--remote-url", f"file://{bare}", *options, **more)

    with FakeForge() as fake:
        made = Target()
        made.forge, made.bare, made.workspace, made.waited = fake, bare, workspace, waited
        yield made


def heads(bare: Path) -> dict[str, str]:
    rows = call_git(("for-each-ref", "--format=%(refname:short) %(objectname)", "refs/heads"), bare).splitlines()
    return dict(row.split() for row in rows)


def posted(fake: FakeForge) -> list[str]:
    return [what for what, _ in fake.seen if not what.startswith("GET")]


def test_a_draft_is_opened_for_the_branch_that_was_pushed(target):
    result = target.open("--human", HUMAN, "--i-have-read-every-line", "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["pull_request"] == f"https://forge.example/{REPO}/pull/1" and not made["updated"]
    assert heads(target.bare) == {"agent/r1/pr": made["head"]}
    sent = json.loads(next(body for what, body in target.forge.seen if what == f"POST {PULLS}"))
    assert sent["draft"] is True and sent["title"] == TITLE and sent["head"] == "agent/r1/pr" and sent["base"] == "trunk"
    written = Path(made["body"]).read_text()
    assert sent["body"] == written.partition("\n")[2].lstrip("\n") and "Ann Author" in sent["body"]
    assert f"open pull requests for `{TITLE} in:title`: none" in sent["body"]
    assert load_current(target.workspace).pull_request == made["pull_request"]


def test_the_token_is_nowhere(target, tmp_path):
    result = target.open("--human", HUMAN)
    assert result.exit_code == 0
    out = result.output + result.stderr + "".join(body for _, body in target.forge.seen)
    out += "".join(p.read_text(errors="replace") for root in (target.workspace.path, target.bare) for p in root.rglob("*") if p.is_file())
    assert TOKEN not in out and forges.b64encode(f"x-access-token:{TOKEN}".encode()).decode() not in out


def test_a_forge_that_repeats_the_token_is_not_repeated(target):
    target.forge.failures[f"GET /repos/{REPO}"] = [(403, {"message": f"token {TOKEN} has no scope"}, {})]
    assert TOKEN not in one_line(target.open(), 1, "[removed: a secret]")


def test_git_gets_the_token_in_its_environment_and_only_for_the_forge(tmp_path, finished, monkeypatch):
    """A `git` that notes what it was given, in front of the real one."""
    note = tmp_path / "note"
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "git"
    fake.write_text(f"#!{sys.executable}\nimport json, os, sys\nopen({str(note)!r}, 'a').write(json.dumps([sys.argv, dict(os.environ)]) + '\\n')\n"
                    "sys.exit(128 if 'ls-remote' in sys.argv else 0)\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin")
    for remote in ("https://forge.example/own/target.git", "https://elsewhere.example/own/target.git"):
        with pytest.raises(ForgeError, match="could not be pushed"):
            forges.push(tmp_path, "0" * 40, "agent/r1/pr", remote, "https://api.forge.example", TOKEN)
    own, other = map(json.loads, note.read_text().splitlines())
    secret = forges.b64encode(f"x-access-token:{TOKEN}".encode()).decode()
    assert TOKEN not in " ".join(own[0]) and secret not in " ".join(own[0])
    assert secret in json.dumps(own[1]) and secret not in json.dumps(other[1]) and TOKEN not in json.dumps(other[1])


def test_dry_run_pushes_and_opens_nothing(target):
    result = target.open("--dry-run")
    assert result.exit_code == 0 and "nothing was pushed or opened" in result.stdout
    assert heads(target.bare) == {} and posted(target.forge) == []
    assert target.workspace.has_branch("agent/r1/pr")


def test_an_open_pull_request_of_the_same_branch_is_updated_only_on_request(target):
    assert target.open().exit_code == 0
    before = heads(target.bare)
    one_line(target.open(), 1, "#1", "--update")
    assert posted(target.forge) == [f"POST {PULLS}"] and heads(target.bare) == before
    result = target.open("--update", "--json", "--human", HUMAN)
    assert json.loads(result.stdout)["updated"] is True and len(target.forge.pulls) == 1
    assert heads(target.bare) == {"agent/r1/pr": json.loads(result.stdout)["head"]} and heads(target.bare) != before
    assert "Ann Author" in target.forge.pulls[0]["body"] or "nobody has said so yet" in target.forge.pulls[0]["body"]


def test_work_of_others_on_the_branch_is_left_alone(target, tmp_path):
    assert target.ready().exit_code == 0
    clone = tmp_path / "clone"
    call_git(("clone", "--quiet", "--branch", "agent/r1/pr", str(target.bare), str(clone)), tmp_path)
    call_git(("commit", "--quiet", "--allow-empty", "--message=review"), clone)
    call_git(("push", "--quiet", "origin", "agent/r1/pr"), clone)
    theirs = heads(target.bare)
    one_line(target.open("--update"), 1, "was not made here", "left alone")
    assert heads(target.bare) == theirs


@pytest.mark.parametrize(("search", "existing"), [
    (True, {"title": TITLE}), (False, {"title": "Same thing", "body": "Run `r1`, branch `agent/r1/pr`"})])
def test_the_same_work_under_another_name_stops_it(target, search, existing):
    target.forge.search = search
    target.forge.add(**existing)
    one_line(target.open(), 1, "#1", "looks like the same work", "--not-duplicate")
    assert heads(target.bare) == {} and posted(target.forge) == []
    result = target.open("--not-duplicate", "that one is about another model")
    assert result.exit_code == 0, result.output
    assert "Why this is not a duplicate: that one is about another model" in target.forge.pulls[1]["body"]
    assert "#\u200b1 " in target.forge.pulls[1]["body"], "a number that is only listed links nothing"


@pytest.mark.parametrize(("key", "status", "message", "said"), [
    (f"GET /repos/{REPO}", 401, "Bad credentials", ["does not accept the token", "GITHUB_TOKEN"]),
    (f"GET /repos/{REPO}", 404, "Not Found", ["does not exist there, or the token does not see it", REPO]),
    (f"GET /repos/{REPO}", 403, "Resource not accessible by personal access token", ["may not do this", "Resource not accessible"]),
    (f"GET /repos/{REPO}", 301, "Moved Permanently", ["has moved"]),
    (f"GET /repos/{REPO}", 200, "[]", ["not GitHub's", "--base-url"]),
    (f"GET {PULLS}", 200, '{"values": []}', ["not GitHub's", "--base-url"]),
    ("GET /search/issues", 200, "[1]", ["not GitHub's", "--base-url"]),
    (f"GET /repos/{REPO}", 200, "<html>welcome</html>", ["not JSON", "--base-url"])])
def test_a_forge_that_cannot_be_used_is_said_before_anything_is_measured(target, key, status, message, said):
    target.forge.failures[key] = [(status, message if status == 200 else {"message": message}, {})]
    one_line(target.open(), 1, *said)
    assert not target.workspace.has_branch("agent/r1/pr") and heads(target.bare) == {}


@pytest.mark.parametrize(("status", "body", "said"), [
    (422, {"message": "Validation Failed", "errors": [{"message": "A pull request already exists for own:agent/r1/pr."}]}, "already exists"),
    (422, {"message": "Validation Failed", "errors": [{"message": "No commits between trunk and agent/r1/pr"}]}, "No commits between"),
    (422, {"message": "Validation Failed", "errors": [{"resource": "PullRequest", "field": "base", "code": "invalid"}]}, "PullRequest base invalid"),
    (422, {"message": "Draft pull requests are not supported in this repository."}, "Draft pull requests are not supported"),
    (403, {"message": "Resource not accessible by integration"}, "may not do this")])
def test_a_refused_pull_request_leaves_all_on_disk_and_goes_on_from_there(target, status, body, said):
    target.forge.failures[f"POST {PULLS}"] = [(status, body, {})]
    line = one_line(target.ready(), 1, said, "agent/r1/pr", "--prepared")
    out = target.workspace.private / "pr" / "r1"
    assert str(out) in line and (out / "PULL_REQUEST.md").exists() and len(list((out / "patches").iterdir())) == 3
    assert load_current(target.workspace).pull_request != "https://forge.example"
    head = heads(target.bare)["agent/r1/pr"]

    result = target.ready("--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["head"] == head == heads(target.bare)["agent/r1/pr"]


def test_prepared_is_only_what_was_prepared(target):
    one_line(target.open("--prepared"), 2, "nothing is prepared")
    assert agent("pr", target.workspace.path).exit_code == 0
    one_line(target.open("--prepared", "--human", HUMAN), 2, "another run, person or profile")
    document = target.workspace.private / "pr" / "r1" / "evidence" / "pull-request.json"
    document.write_text(document.read_text().replace('"ratio": 0.97', '"ratio": 1.97'))
    one_line(target.open("--prepared"), 2, "not the branch that was prepared")
    assert posted(target.forge) == []


def test_a_busy_forge_is_asked_again(target):
    spent = {"x-ratelimit-remaining": "0", "x-ratelimit-reset": str(int(time.time()) + 20)}
    target.forge.failures = {
        f"GET /repos/{REPO}": [(502, "bad gateway", {}), (429, {"message": "slow down"}, {"retry-after": "7"})],
        f"GET {PULLS}": [(403, {"message": "You have exceeded a secondary rate limit"}, {}),
                         (403, {"message": "API rate limit exceeded"}, spent)],
        f"POST {PULLS}": [(503, {"message": "unavailable"}, {"retry-after": "3"})]}
    assert target.ready().exit_code == 0
    first, second, third, fourth, fifth = target.waited
    assert (first, second, third, fifth) == (1.0, 7.0, 5.0, 3.0) and 15 < fourth <= 20
    assert len(target.forge.pulls) == 1


def test_a_wait_that_is_too_long_and_an_outage_end_it(target):
    target.forge.failures[f"GET /repos/{REPO}"] = [(429, {"message": "quota"}, {"retry-after": "3600"})]
    one_line(target.open(), 1, "quota", "wait 3600 s")
    target.forge.failures[f"GET /repos/{REPO}"] = [(500, {"message": "boom"}, {})] * 4
    one_line(target.open(), 1, "boom", "4 times")


def test_an_answer_that_gets_lost_does_not_open_twice(target):
    target.forge.lose_next_answer = True
    result = target.ready("--json")
    assert result.exit_code == 0, result.output
    assert len(target.forge.pulls) == 1 and json.loads(result.stdout)["pull_request"].endswith("/pull/1")


def test_no_network(target):
    target.forge.server.shutdown()
    target.forge.server.server_close()
    one_line(target.open(), 1, "cannot be reached")
    with FakeForge() as target.forge:
        one_line(target.ready("--remote-url", f"file://{target.bare}-gone"), 1, "could not be pushed", "--prepared")
        assert posted(target.forge) == []


@pytest.mark.parametrize(("options", "said"), [
    (["--repo", "target"], "OWNER/NAME"), (["--repo", "own/tar get"], "OWNER/NAME"),
    (["--base-url", "http://forge.example"], "does not go over http"),
    (["--base-url", "https://me:pw@forge.example"], "without a name or a password"),
    (["--base-url", "ftp://forge.example"], "expected https"),
    (["--remote-url", "https://me:secret@forge.example/x.git"], "leave names and passwords out"),
    (["--remote-url", "--upload-pack=touch"], "expected https"), (["--remote-url", "ext::sh -c id"], "expected https"),
    (["--remote-url", "http://forge.example/x.git"], "http:// is not used"), (["--human", "Ann"], "Name <address"),
    (["--human", "dependabot[bot] <x@y.org>"], "no person"), (["--profile", "linux"], "known: vllm, transformers")])
def test_input_that_cannot_be_used(target, options, said):
    assert "secret" not in one_line(target.open(*options), 2, said)
    assert target.forge.seen == [] or posted(target.forge) == []
    assert heads(target.bare) == {}


def test_no_token(target, monkeypatch):
    monkeypatch.delenv("GITHUB_TOKEN")
    monkeypatch.delenv("GH_TOKEN", raising=False)
    one_line(target.open(), 2, "GITHUB_TOKEN or GH_TOKEN")
    monkeypatch.setenv("GH_TOKEN", TOKEN)
    assert target.ready().exit_code == 0


def test_a_token_without_write_is_told_to_fork_and_a_fork_is_used(target):
    target.forge.push_allowed = False
    one_line(target.open(), 1, "--fork OWNER")
    result = target.ready("--fork", "ann")
    assert result.exit_code == 0, result.output
    assert target.forge.pulls[0]["head"]["label"] == "ann:agent/r1/pr"


def test_other_branches_of_the_remote_stay(target, tmp_path):
    other = tmp_path / "other"
    call_git(("clone", "--quiet", str(target.bare), str(other)), tmp_path)
    call_git(("commit", "--quiet", "--allow-empty", "--message=trunk"), other)
    call_git(("push", "--quiet", "origin", "HEAD:refs/heads/trunk"), other)
    trunk = heads(target.bare)["trunk"]
    assert target.ready().exit_code == 0
    assert heads(target.bare)["trunk"] == trunk and set(heads(target.bare)) == {"trunk", "agent/r1/pr"}


def test_hooks_of_the_workspace_do_not_run(target, tmp_path):
    hook = target.workspace.path / ".git" / "hooks" / "pre-push"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\nexit 1\n")
    hook.chmod(0o755)
    assert target.ready().exit_code == 0 and not (tmp_path / "ran").exists()


def test_nothing_of_the_forge_is_imported_by_the_command_line():
    code = "import sys, agent.cli, agent.commands, agent.pr.commands; print([m for m in ('httpx2', 'httpx', 'torch', 'vllm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agent.config import Config
from agent.errors import UserError
from agent.workspace import Workspace, call_git, write_evidence

SETTINGS = Config(model="nemotron-3.5", scale="tiny")


def hook(repository: Path, name: str, marker: Path) -> None:
    path = repository / ".git" / "hooks" / name
    path.write_text(f"#!/bin/sh\ntouch '{marker}'\nexit 1\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_create_makes_a_clean_repository_that_opens(tmp_path):
    workspace = Workspace.create(tmp_path / "a" / "ws", SETTINGS)
    workspace.check_ready()
    assert workspace.settings == SETTINGS
    assert workspace.base() == "main"
    assert sorted(p.name for p in workspace.path.iterdir()) == [".agent", ".git", "consistency.toml", "contract.toml", "kernels"]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["ws"]


def test_create_takes_an_empty_folder_and_refuses_one_with_files(tmp_path):
    (tmp_path / "empty").mkdir()
    Workspace.create(tmp_path / "empty", SETTINGS)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="not a git repository"):
        Workspace.create(tmp_path / "full", SETTINGS)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_open_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="not a folder"):
        Workspace.open(tmp_path / "absent")
    (tmp_path / "plain").mkdir()
    with pytest.raises(UserError, match="not a git repository"):
        Workspace.open(tmp_path / "plain")
    call_git(("init", "--quiet"), tmp_path / "plain")
    with pytest.raises(UserError, match=r"no consistency\.toml"):
        Workspace.open(tmp_path / "plain")


def test_a_folder_inside_another_repository_is_not_a_workspace(workspace):
    (workspace.path / "kernels" / "consistency.toml").write_text("")
    with pytest.raises(UserError, match="not a git repository"):
        Workspace.open(workspace.path / "kernels")


def test_dirty_checkout_is_named(workspace):
    (workspace.path / "contract.toml").write_text("[operators]\n")
    (workspace.path / "new.py").write_text("")
    with pytest.raises(UserError, match=r"uncommitted changes \(contract\.toml, new\.py\)"):
        workspace.check_ready()


def test_no_identity(tmp_path, git_identity, monkeypatch):
    (git_identity / ".gitconfig").write_text("")
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL", "EMAIL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="no identity"):
        Workspace.create(tmp_path / "ws", SETTINGS)
    assert not (tmp_path / "ws").exists()


HOLDER = """
import sys, time
from pathlib import Path
from agent.workspace import Workspace
with Workspace.open(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_lock_names_the_holder_and_a_dead_holder_is_taken_over(workspace):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(workspace.path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=rf"in use by another run \(pid {holder.pid}\)"), workspace.lock():
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (workspace.private / "lock").read_text() == f"{holder.pid}\n"
    with workspace.lock():
        assert (workspace.private / "lock").read_text() == f"{os.getpid()}\n"


def test_hooks_do_not_run(workspace, tmp_path):
    marker = tmp_path / "ran"
    for name in ("pre-commit", "post-commit", "post-checkout", "commit-msg", "prepare-commit-msg", "post-merge", "reference-transaction"):
        hook(workspace.path, name, marker)
    head = workspace.head(workspace.path)
    main = workspace.add_tree("r", "main", head)
    tree = workspace.add_tree("r", "attempt-1", head)
    (tree / "kernels" / "k.py").write_text("x = 1\n")
    workspace.fast_forward(main, workspace.commit(tree, "try"))
    workspace.publish("r")
    assert (workspace.path / "kernels" / "k.py").exists() and not marker.exists()


def test_messages_and_trailers_are_data(workspace):
    message = "--amend --author=evil <e@e>\n\nEvidence: sha256:forged\n\nbody with 'quotes' and $(touch x) and \x1b[31m"
    commit = workspace.commit(workspace.path, message, {"Evidence": "sha256:" + "0" * 64})
    assert workspace.repo.commit(commit).author.name == "Tester"
    assert workspace.repo.commit(commit).message.startswith("--amend --author=evil")
    assert workspace.evidence_trailers(commit) == ["0" * 64]
    assert len(list(workspace.repo.iter_commits())) == 2


def test_evidence_hash_is_the_hash_of_the_committed_file(workspace):
    sha = write_evidence(workspace.path, "final", {"b": 1, "a": [1.5, None]})
    commit = workspace.commit(workspace.path, "Record", {"Evidence": f"sha256:{sha}"})
    stored = workspace.show(commit, "evidence/final.json")
    assert hashlib.sha256(stored).hexdigest() == sha == workspace.evidence_trailers(commit)[0]
    assert json.loads(stored) == {"a": [1.5, None], "b": 1}


def test_attempt_trees_are_apart_and_can_be_made_again(workspace):
    head = workspace.head(workspace.path)
    one, two = workspace.add_tree("r", "attempt-1", head), workspace.add_tree("r", "attempt-2", head)
    (one / "kernels" / "one.py").write_text("")
    first = workspace.commit(one, "one")
    assert not (two / "kernels" / "one.py").exists()
    assert workspace.repo.heads["agent/r/attempt-1"].commit.hexsha == first
    again = workspace.add_tree("r", "attempt-1", head)
    assert not (again / "kernels" / "one.py").exists()
    workspace.drop_tree("r", "attempt-1")
    assert not again.exists() and workspace.repo.heads["agent/r/attempt-1"].commit.hexsha == head
    assert workspace.path.joinpath(".agent").exists() and workspace._git("status", "--porcelain") == ""


def test_repair_removes_locks_of_a_killed_git(workspace):
    head = workspace.head(workspace.path)
    tree = workspace.add_tree("r", "main", head)
    stale = [workspace.path / ".git" / "index.lock", workspace.path / ".git" / "worktrees" / "main" / "index.lock"]
    for lock in stale:
        lock.touch()
    with pytest.raises(UserError, match=r"index\.lock"):
        workspace.commit(tree, "blocked")
    workspace.repair(patience=0.1)
    (tree / "half.txt").write_text("half")
    workspace.reset(tree, head)
    assert not (tree / "half.txt").exists()
    workspace.commit(tree, "goes on")


def test_publish_leaves_the_users_changes_alone(workspace):
    tree = workspace.add_tree("r", "main", workspace.head(workspace.path))
    (tree / "PULL_REQUEST.md").write_text("claim")
    workspace.commit(tree, "pr")
    (workspace.path / "contract.toml").write_text("[training]\n")
    assert workspace.publish("r") == tree and (tree / "PULL_REQUEST.md").exists()
    assert (workspace.path / "contract.toml").read_text() == "[training]\n"
    workspace._git("checkout", "--quiet", "contract.toml")
    assert workspace.publish("r") == workspace.path and (workspace.path / "PULL_REQUEST.md").exists()
    assert workspace.base() == "main"


@pytest.mark.parametrize("path", ["file/ws", "file/deeper/ws"])
def test_unwritable_place(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Workspace.create(tmp_path / path, SETTINGS)

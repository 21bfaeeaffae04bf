"""One workspace: a git repository with a branch per run and a worktree per attempt, written so that a kill at any point can be repaired."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import git

from agent import config
from agent.config import Config
from agent.errors import UserError
from agent.files import write_atomic

PRIVATE = ".agent"
"""Folder of state, lock, job folders and worktrees; kept out of git by .git/info/exclude."""

# Set for every git call through the environment, so that neither the repository's own configuration nor candidate code decides what runs.
_SAFE = {"core.hooksPath": "/dev/null", "core.fsmonitor": "false", "commit.gpgSign": "false", "gc.auto": "0", "core.symlinks": "true"}
_EMPTY_CONTRACT = "# Which implementation each operator uses; empty is stock. Written by `agent`.\n"


class Workspace:
    """Git operations on one workspace. Callers pass run ids and numbers made by this project; free text reaches git only through stdin."""

    def __init__(self, path: Path):
        self.path = path
        self.repo = git.Repo(path, search_parent_directories=False)
        self.private = path / PRIVATE

    @classmethod
    def create(cls, path: Path, settings: Config) -> "Workspace":
        """Make a repository with one commit at `path`, which must be absent or an empty folder. Appears whole or not at all."""
        path = path.resolve()
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} exists and is not a git repository; name a new folder with --workspace")
        check_identity(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            git.Repo.init(draft, initial_branch="main").close()
            (draft / config.FILE).write_text(settings.dumps(), encoding="utf-8")
            (draft / "contract.toml").write_text(_EMPTY_CONTRACT, encoding="utf-8")
            (draft / "kernels").mkdir()
            (draft / "kernels" / ".gitkeep").touch()
            fresh = cls(draft)
            fresh.commit(draft, f"Make a workspace for {settings.model} at scale {settings.scale}")
            fresh.repo.close()
            draft.chmod(0o755)
            draft.replace(path)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> "Workspace":
        path = path.resolve()
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; `agent run --model MODEL --workspace {path}` makes a workspace there")
        try:
            workspace = cls(path)
        except (git.InvalidGitRepositoryError, git.NoSuchPathError):
            raise UserError(f"{path} is not a git repository; name a new folder and `agent run` makes one") from None
        if not (path / config.FILE).is_file():
            raise UserError(f"{path} is a repository but not a workspace: it has no {config.FILE}; name a new folder and `agent run` makes one")
        workspace._prepare()
        return workspace

    @classmethod
    def foreign(cls, path: Path) -> "Workspace":
        """A repository that is not a workspace, for patches that need branches and worktrees only."""
        try:
            repository = cls(path.resolve())
        except (git.InvalidGitRepositoryError, git.NoSuchPathError):
            raise UserError(f"{path} is not the top of a git repository") from None
        if not repository.repo.head.is_valid():
            raise UserError(f"{path} has no commit yet, so there is nothing to patch")
        repository._prepare()
        return repository

    @property
    def settings(self) -> Config:
        return Config.load(self.path / config.FILE)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the workspace for this process. The kernel drops the lock with the process, so a dead holder never blocks the next one."""
        with (self.private / "lock").open("a+", encoding="utf-8") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                raise UserError(f"{self.path} is in use by another run (pid {handle.read().strip() or 'unknown'}); wait for it or stop it") from None
            handle.truncate(0)
            handle.write(f"{os.getpid()}\n")
            handle.flush()
            try:
                yield
            finally:
                handle.truncate(0)

    def check_ready(self) -> None:
        """Raise unless commits can be made and the checkout holds no work of the user's that a run could mix up with its own."""
        check_identity(self.path)
        changed = [line[3:] for line in self._git("status", "--porcelain").splitlines()]
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise UserError(f"{self.path} has uncommitted changes ({', '.join(changed[:3])}{more}); commit or stash them first")

    def base(self) -> str:
        """Branch a new run starts from: the one checked out, or `main` when that one belongs to a run."""
        if self.repo.head.is_detached:
            raise UserError(f"{self.path} is on no branch; `git switch` to the branch that the run shall start from")
        name = self.repo.active_branch.name
        if not name.startswith("agent/"):
            return name
        if not self.has_branch("main"):
            raise UserError(f"{self.path} is on {name}, a run's own branch; `git switch` to the branch that the run shall start from")
        return "main"

    def tree(self, run: str, name: str) -> Path:
        """Worktree of the run branch (`main`) or of one attempt (`attempt-N`)."""
        return self.private / "worktrees" / run / name

    def add_tree(self, run: str, name: str, start: str) -> Path:
        """Branch `agent/RUN/NAME` at commit `start` in a fresh worktree; what an interrupted call left is replaced."""
        tree = self.tree(run, name)
        self.drop_tree(run, name)
        tree.parent.mkdir(parents=True, exist_ok=True)
        # Forced twice: a worktree whose creation was killed stays registered and locked.
        self._git("worktree", "add", "--quiet", "--force", "--force", "-B", branch(run, name), str(tree), start)
        return tree

    def drop_tree(self, run: str, name: str) -> None:
        """Remove the worktree; its branch stays."""
        tree = self.tree(run, name)
        with contextlib.suppress(UserError):
            self._git("worktree", "remove", "--force", "--force", str(tree))
        shutil.rmtree(tree, ignore_errors=True)
        self._git("worktree", "prune")

    def forget(self, run: str, name: str) -> None:
        """Remove worktree and branch of something that came to nothing."""
        self.drop_tree(run, name)
        self._git("branch", "--quiet", "-D", branch(run, name))

    def has_branch(self, name: str) -> bool:
        return name in [head.name for head in self.repo.heads]

    def reset(self, tree: Path, commit: str) -> None:
        """Bring a worktree and its branch back to a recorded commit, after a kill in the middle of git's own work."""
        self._git("reset", "--quiet", "--hard", commit, cwd=tree)
        self._git("clean", "--quiet", "-ffd", cwd=tree)

    def repair(self, patience: float = 2.0) -> None:
        """Remove git's lock files that a killed process left. Call only while holding `lock`."""
        deadline = time.monotonic() + patience
        while stale := [lock for lock in Path(self.repo.common_dir).rglob("*.lock") if "objects" not in lock.parts]:
            if time.monotonic() > deadline:
                for lock in stale:
                    lock.unlink(missing_ok=True)
                return
            time.sleep(0.05)

    def commit(self, tree: Path, message: str, trailers: dict[str, str] | None = None, *, amend: bool = False,
               author: tuple[str, str] | None = None) -> str:
        """Commit everything in `tree`; returns the commit's id. Message and trailers go through stdin. `author`: name and address."""
        text = message.strip() + "\n"
        if trailers:
            text += "\n" + "".join(f"{key}: {value}\n" for key, value in trailers.items())
        self._git("add", "--all", cwd=tree)
        call_git(("commit", "--quiet", "--allow-empty", "--cleanup=whitespace", "--file=-", *(["--amend"] if amend else [])), tree, text,
                 authorship(author))
        return self.head(tree)

    def head(self, tree: Path) -> str:
        return self._git("rev-parse", "HEAD", cwd=tree)

    def fast_forward(self, tree: Path, commit: str) -> str:
        self._git("merge", "--quiet", "--ff-only", commit, cwd=tree)
        return self.head(tree)

    def publish(self, run: str) -> Path:
        """Check the run branch out in the workspace itself; with the user's changes in the way, leave it in its worktree. Returns where it is."""
        tree = self.tree(run, "main")
        if self._git("status", "--porcelain"):
            return tree
        self.drop_tree(run, "main")
        self._git("switch", "--quiet", branch(run, "main"))
        return self.path

    def fork_point(self, base: str, head: str) -> str:
        """Commit that a run's branch left its base at. Raises UserError if the base branch is gone."""
        if not self.has_branch(base):
            raise UserError(f"the branch {base!r} that the run started from is gone from {self.path}; make it again at the commit it stood at")
        return self._git("merge-base", base, head)

    def show(self, commit: str, name: str) -> bytes:
        """A committed file's bytes."""
        return self.repo.commit(commit).tree.join(name).data_stream.read()

    def files(self, commit: str, under: str) -> list[str]:
        """Committed paths below a folder."""
        return [name for name in self._git("ls-tree", "-r", "-z", "--name-only", commit, "--", f"{under}/").split("\0") if name]

    def is_file(self, commit: str, name: str) -> bool:
        return " blob " in self._git("ls-tree", commit, "--", name).partition("\t")[0]

    def evidence_trailers(self, commit: str, path: str | None = None) -> list[str]:
        """Hashes in the Evidence trailers of a commit, or of the newest commit up to it that touched `path`."""
        values = self._git("log", "-1", "--format=%(trailers:key=Evidence,valueonly)", commit, "--", *([path] if path else []))
        return [line.removeprefix("sha256:") for line in values.splitlines() if line]

    def _prepare(self) -> None:
        """The private folder, and git told to look past it."""
        self.private.mkdir(exist_ok=True)
        exclude = Path(self.repo.common_dir) / "info" / "exclude"
        wanted = [f"/{PRIVATE}/", "/report.html"]
        lines = exclude.read_text(encoding="utf-8").splitlines() if exclude.exists() else []
        if missing := [line for line in wanted if line not in lines]:
            exclude.parent.mkdir(exist_ok=True)
            exclude.write_text("\n".join(lines + missing) + "\n", encoding="utf-8")

    def _git(self, *arguments: str, cwd: Path | None = None, stdin: str | None = None) -> str:
        return call_git(arguments, cwd or self.path, stdin)


def branch(run: str, name: str) -> str:
    return f"agent/{run}/{name}"


def authorship(author: tuple[str, str] | None) -> dict[str, str]:
    """Environment that makes git name somebody as the author."""
    return {"GIT_AUTHOR_NAME": author[0], "GIT_AUTHOR_EMAIL": author[1]} if author else {}


def call_git(arguments: tuple[str, ...], cwd: Path, stdin: str | None = None, environment: Mapping[str, str] | None = None,
             settings: Mapping[str, str] | None = None) -> str:
    """Run git with hooks, fsmonitor and signing off. `environment` and `settings` (configuration) are added, and stay out of the command line.

    Raises UserError with git's own words.
    """
    runner = git.Git(str(cwd))
    runner.update_environment(**_environment(settings or {}), **(environment or {}))
    with tempfile.TemporaryFile() as source:
        source.write((stdin or "").encode())
        source.seek(0)
        try:
            return str(runner.execute(["git", *arguments], istream=source))
        except git.GitCommandError as error:
            words = [line for line in str(error.stderr).replace("stderr:", "").strip(" '\n").splitlines() if line.strip()]
            raise UserError(f"git {arguments[0]} failed in {cwd}: {words[0].strip() if words else f'exit code {error.status}'}") from error


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Settings that the caller's environment already carries (an identity, say) stay in force, before ours."""
    first, ours = int(os.environ.get("GIT_CONFIG_COUNT") or 0), {**_SAFE, **more}
    variables = {"GIT_CONFIG_COUNT": str(first + len(ours)), "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    for number, (key, value) in enumerate(ours.items(), start=first):
        variables[f"GIT_CONFIG_KEY_{number}"] = key
        variables[f"GIT_CONFIG_VALUE_{number}"] = value
    return variables


def check_identity(folder: Path) -> None:
    """Raise unless git knows who commits; a guess from the host name does not count."""
    while not folder.is_dir():
        folder = folder.parent
    try:
        call_git(("-c", "user.useConfigOnly=true", "var", "GIT_COMMITTER_IDENT"), folder)
        call_git(("-c", "user.useConfigOnly=true", "var", "GIT_AUTHOR_IDENT"), folder)
    except UserError:
        raise UserError("git has no identity for commits; set one with `git config --global user.name NAME` and `user.email ADDRESS`") from None


def write_evidence(tree: Path, name: str, payload: dict[str, Any]) -> str:
    """Write evidence/NAME.json; returns its sha256."""
    data = encode_evidence(payload)
    write_atomic(tree / "evidence" / f"{name}.json", data)
    return hashlib.sha256(data).hexdigest()


def encode_evidence(payload: dict[str, Any]) -> bytes:
    return (json.dumps(payload, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()

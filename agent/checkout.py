"""A git checkout of an engine that a run patches: trees, commits and branches are made in its object store, its files stay as they are."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent import config
from agent.errors import UserError
from agent.tools.diffs import MAX_BYTES, check_kinds, check_name, explain
from agent.workspace import Workspace, authorship, call_git

PATCH = "engine.patch"
"""File of a workspace: the whole change of the checkout, as one diff against its base commit."""
PACKAGES = {"vllm": "vllm", "transformers": "src/transformers"}
"""Package -> its folder in the repository that it is developed in."""
_PLAIN = ("100644", "100755")


@dataclass(frozen=True)
class Applied:
    """A checkout after one more diff."""

    tree: str
    """git's tree id"""
    changed: list[str]
    """paths that this diff changed"""
    patch: str
    """everything since the base"""


@dataclass(frozen=True)
class Checkout:
    path: Path
    base: str
    """commit that patches are made against"""
    allow: tuple[str, ...]
    """globs that every changed path must match"""

    @classmethod
    def begin(cls, path: Path, allow: list[str]) -> "Checkout":
        """A checkout as it stands. Raises UserError unless it is a clean repository of an engine and something may be changed in it."""
        if not allow:
            raise UserError("--repo needs at least one --allow GLOB: the paths that a patch may touch, for example 'vllm/**'")
        repository = Workspace.foreign(path)
        repository.check_ready()
        made = cls(repository.path, repository.head(repository.path), tuple(allow))
        made.package()
        return made

    @classmethod
    def of(cls, tree: Path) -> "Checkout | None":
        """The one that a worktree of a workspace names in its consistency.toml. Raises UserError if it is gone."""
        if not (tree / config.FILE).is_file() or (settings := config.Config.load(tree / config.FILE).checkout) is None:
            return None
        made = cls(Path(settings.path), settings.base, tuple(settings.allow))
        try:
            made._git("cat-file", "-e", f"{made.base}^{{commit}}")
        except (UserError, OSError):
            raise UserError(f"{made.path} does not hold commit {made.base[:12]}, which this workspace patches; restore the checkout or correct "
                            f"[checkout] in {config.FILE}") from None
        return made

    def package(self) -> tuple[str, str]:
        """(package, its folder in the repository). Raises UserError for a repository of something else."""
        found = [(name, root) for name, root in PACKAGES.items() if self._git("ls-tree", self.base, "--", f"{root}/__init__.py")]
        if not found:
            wanted = " or ".join(f"{root}/__init__.py" for root in PACKAGES.values())
            raise UserError(f"{self.path} is not a checkout of an engine: {wanted} is not in its commit {self.base[:12]}")
        return found[0]

    @staticmethod
    def patch_of(tree: Path) -> str:
        """The change so far, as a worktree of the workspace keeps it."""
        path = tree / PATCH
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def apply(self, patch: str, diff: str) -> Applied:
        """Put `diff` on top of `patch`, in memory. Raises UserError, in one line, on anything but plain edits inside the allowed paths."""
        check_kinds(diff)
        with self._index(patch) as index:
            before = self._git("write-tree", index=index)
            try:
                self._git("apply", "--cached", "--whitespace=nowarn", "-", stdin=diff, index=index)
            except UserError as error:
                raise UserError(f"patch refused: {explain(str(error), diff)}") from None
            after = self._git("write-tree", index=index)
        changed = self._check_changes(before, after)
        whole = self.diff(self.base, after)
        try:
            size = len(whole.encode())
        except UnicodeEncodeError:
            raise UserError(f"patch refused: {', '.join(changed)} is not UTF-8 text") from None
        if size > MAX_BYTES:
            raise UserError(f"patch refused: the change of the checkout has {size} bytes, the limit is {MAX_BYTES}")
        return Applied(after, changed, whole)

    def tree(self, patch: str) -> str:
        """Tree id of the base with a patch that was made by `apply`."""
        with self._index(patch) as index:
            return self._git("write-tree", index=index)

    def diff(self, before: str, after: str) -> str:
        text = self._git("-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false", "diff", "--no-ext-diff", "--no-textconv", "--no-color",
                         "--no-renames", "--full-index", before, after)
        return f"{text}\n" if text else ""

    def commit(self, tree: str, parent: str, message: str, author: tuple[str, str] | None = None) -> str:
        return call_git(("commit-tree", "-p", parent, "-F", "-", tree), self.path, message, authorship(author))

    def point(self, branch: str, commit: str) -> None:
        """Make or move a branch of this project's. Raises UserError if that branch is checked out."""
        assert branch.startswith("agent/")
        if f"branch refs/heads/{branch}" in self._git("worktree", "list", "--porcelain").splitlines():
            raise UserError(f"{branch} is checked out in {self.path}; `git switch` to another branch first")
        self._git("update-ref", f"refs/heads/{branch}", commit)

    def mark(self, worktree: Path, branch: str, message: str) -> str:
        """Point a branch of the checkout at what a worktree of the workspace asks for; returns the commit, the base's own id if that is nothing."""
        tree = self.tree(self.patch_of(worktree))
        commit = self.base if tree == self.tree("") else self.commit(tree, self.base, message)
        self.point(branch, commit)
        return commit

    def _check_changes(self, before: str, after: str) -> list[str]:
        """Paths that differ between two trees, each allowed, plain and of the mode it had."""
        fields = self._git("diff-tree", "-r", "-z", "--no-renames", before, after).split("\0")
        changed = fields[1::2]
        if not changed:
            raise UserError("patch refused: the diff changes no file")
        for modes, name in zip(fields[::2], changed, strict=False):
            old, new = modes.removeprefix(":").split()[:2]
            check_name(name, list(self.allow))
            if any(mode not in (*_PLAIN, "000000") for mode in (old, new)):
                raise UserError(f"patch refused: {name} is or becomes a symbolic link or a submodule")
            if old in _PLAIN and new in _PLAIN and old != new:
                raise UserError(f"patch refused: {name} changes its mode from {old} to {new}")
        return changed

    @contextmanager
    def _index(self, patch: str) -> Iterator[Path]:
        """A private index that holds the base with a patch."""
        with tempfile.TemporaryDirectory(prefix="index-") as folder:
            index = Path(folder) / "index"
            self._git("read-tree", self.base, index=index)
            if patch:
                try:
                    self._git("apply", "--cached", "--whitespace=nowarn", "-", stdin=patch, index=index)
                except UserError as error:
                    raise UserError(f"{PATCH} does not apply to {self.base[:12]} of {self.path}: {explain(str(error), patch)}") from None
            yield index

    def _git(self, *arguments: str, stdin: str | None = None, index: Path | None = None) -> str:
        return call_git(arguments, self.path, stdin, {"GIT_INDEX_FILE": str(index)} if index else None)


"""A patched engine as a package folder: the installed package's files, compiled ones too, with those of a checkout's tree in their place.

Unchanged folders and files are symbolic links into the installed package, so a folder is quickly made and reuses its bytecode.
"""

import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import git

from agent.checkout import Checkout
from agent.errors import UserError
from agent.workspace import PRIVATE, call_git
from sandboxes import Capabilities, Handle, Limits, Sandbox, choose
from sandboxes.local import ROOT

WITHOUT_CANDIDATE = ("stock-rollout", "reference")
"""Job folders of processes that get the base commit, not the patch."""


@dataclass(frozen=True)
class EngineSandbox:
    """Starts jobs that import the engine from a folder made by `build`."""

    inner: Sandbox
    patched: Path
    stock: Path | None
    """the same for the base commit; None: the installed package is it"""

    def start(self, argv: Sequence[str], directory: Path, environment: Mapping[str, str], limits: Limits) -> Handle:
        folder = self.stock if directory.name in WITHOUT_CANDIDATE else self.patched
        if folder is None:
            return self.inner.start(argv, directory, environment, limits)
        path = os.pathsep.join([str(folder), environment.get("PYTHONPATH", str(ROOT))])
        return self.inner.start(argv, directory, {**environment, "PYTHONPATH": path}, replace(limits, readable=(*limits.readable, folder)))

    def capabilities(self) -> Capabilities:
        return self.inner.capabilities()


@dataclass(frozen=True)
class Patched:
    """The engine that a worktree of a workspace asks for."""

    checkout: Checkout
    tree: str
    """git's tree id of base and patch"""

    @classmethod
    def of(cls, worktree: Path) -> "Patched | None":
        """None: the installed engine is what runs. Raises UserError if checkout or patch cannot be used."""
        checkout = Checkout.of(worktree)
        if checkout is None:
            return None
        patch = checkout.patch_of(worktree)
        return cls(checkout, checkout.tree(patch)) if patch or drift(checkout) else None

    def sandbox(self, folder: Path, inner: Sandbox | None = None) -> EngineSandbox:
        """Folders of packages go below `folder`, named by their trees."""
        checkout, base = self.checkout, self.checkout.tree("")
        stock = build(checkout, base, folder) if drift(checkout) else None
        return EngineSandbox(inner or choose(), build(checkout, self.tree, folder), stock)

    def facts(self) -> dict[str, object]:
        """What evidence says about it."""
        checkout = self.checkout
        changed = call_git(("diff", "--name-only", "--no-renames", checkout.base, self.tree), checkout.path).splitlines()
        return {"package": checkout.package()[0], "base": checkout.base, "tree": self.tree, "changed": ", ".join(changed), "drift": drift(checkout)}


def folder_of(worktree: Path) -> Path:
    """Where a workspace keeps packages; `worktree` is the workspace itself or one of its worktrees."""
    inside = next((parent for parent in worktree.parents if parent.name == PRIVATE), worktree / PRIVATE)
    return inside / "engines"


@functools.cache
def drift(checkout: Checkout) -> int:
    """Python files of the base commit that are not those of the installed package. Raises UserError if it is not installed."""
    package, root = checkout.package()
    installed = _installed(package)
    return sum(not same_blob(installed / name, blob) for name, (_, blob) in _entries(checkout, checkout.base, root).items() if name.endswith(".py"))


def build(checkout: Checkout, tree: str, folder: Path) -> Path:
    """A folder for PYTHONPATH that holds the package of a tree. Made once and kept; appears whole or not at all."""
    package, root = checkout.package()
    made = folder / f"{package}-{tree}"
    if made.is_dir():
        return made
    installed, base, wanted = _installed(package), _entries(checkout, checkout.base, root), _entries(checkout, tree, root)
    changed = {name for name, (_, blob) in wanted.items() if not same_blob(installed / name, blob)}
    gone = {name for name in base if name not in wanted and (installed / name).exists()}
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".engine-", dir=folder))
    try:
        draft.chmod(0o755)
        _link(installed, draft / package, {str(Path(name)) for name in changed | gone})
        blobs = git.Repo(checkout.path).odb
        for name in changed:
            (draft / package / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / package / name).write_bytes(blobs.stream(bytes.fromhex(wanted[name][1])).read())
        if not made.exists():
            draft.replace(made)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return made


def _link(source: Path, target: Path, special: set[str]) -> None:
    """`target` like `source`, with links, and without the `special` files."""
    target.mkdir()
    below = {name.partition("/")[0] for name in special if "/" in name}
    for entry in source.iterdir():
        if entry.name == "__pycache__" or entry.name in special:
            continue
        if entry.name in below and entry.is_dir():
            _link(entry, target / entry.name, {name.partition("/")[2] for name in special if name.startswith(f"{entry.name}/")})
        else:
            (target / entry.name).symlink_to(entry)


def _installed(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{package} is not installed; a patched checkout needs its compiled parts: pip install "
                        "'train-inference-consistency[cpu]' or [gpu]")
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def _entries(checkout: Checkout, tree: str, root: str) -> dict[str, tuple[str, str]]:
    """Path below the package -> (mode, blob) of plain files."""
    listed = call_git(("ls-tree", "-r", "-z", tree, "--", f"{root}/"), checkout.path)
    found = {}
    for entry in filter(None, listed.split("\0")):
        facts, _, name = entry.partition("\t")
        mode, kind, blob = facts.split()
        if kind == "blob" and mode in ("100644", "100755"):
            found[name.removeprefix(f"{root}/")] = (mode, blob)
    return found


def same_blob(path: Path, blob: str) -> bool:
    """Whether a file has the bytes of one of git's blobs, given by its SHA-1 id."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == blob



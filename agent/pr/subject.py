"""What `verify-pr` was pointed at: text, evidence, patches, and the repository and commit that the code is taken from."""

import json
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent import state
from agent.checkout import PATCH
from agent.config import FILE as SETTINGS
from agent.config import Config, EngineCheckout
from agent.errors import UserError
from agent.files import write_atomic
from agent.overlay import same_blob
from agent.pr import claims as documents
from agent.pr import series
from agent.pr.claims import Claims
from agent.pull_request import FILE
from agent.tools.patch_kernel import KERNELS
from agent.workspace import PRIVATE, Workspace, call_git
from consistency.contract import Contract

DOCUMENT = f"{documents.FILE}.json"


@dataclass(frozen=True)
class Subject:
    """Everything a check reads. Nothing of it is trusted."""

    name: str
    text: str | None
    files: dict[str, bytes]
    """evidence, name without folder and suffix -> bytes"""
    patches: list[Path]
    root: Path | None
    """folder that text and evidence lie in; None: they come from a commit"""
    repository: Path | None
    head: str | None = None
    """commit that carries text and evidence"""
    claims: Claims = field(init=False)

    def __post_init__(self) -> None:
        if documents.FILE not in self.files:
            raise UserError(f"{self.name}: there is no evidence/{DOCUMENT} with it; give the folder that `agent pr` wrote, or a branch that holds "
                            "one")
        object.__setattr__(self, "claims", documents.read(self.files[documents.FILE], f"{self.name}, evidence/{DOCUMENT}"))

    def document(self, name: str) -> Any:
        """Parsed evidence, or None if it is missing or no JSON."""
        try:
            return json.loads(self.files[name])
        except (KeyError, ValueError):
            return None


def find(argument: str, repository: Path | None) -> Subject:
    """Raises UserError if the argument is neither a file, a folder nor a branch, or nothing is with it."""
    path = Path(argument)
    if repository is not None and not repository.is_dir():
        raise UserError(f"--repo {repository} is not a folder")
    if not path.exists():
        return _of_branch(argument, _top(repository or Path.cwd()))
    path = path.resolve()
    root, patches = path, path / "patches"
    if path.is_file():
        root, patches = path.parent, path.parent / "patches"
    elif (prepared := _prepared(path)) is not None:
        root, patches = prepared, prepared / "patches"
    elif not (path / "evidence" / DOCUMENT).is_file() and (any(path.glob("*.patch")) or (path / DOCUMENT).is_file()):
        root, patches = path.parent, path if any(path.glob("*.patch")) else path.parent / "patches"
    text = path if path.is_file() else root / FILE
    top = _top(repository) if repository else _top(root, required=False)
    committed = top == root and top is not None
    return Subject(
        name=argument, text=_read(text) if text.is_file() else None,
        files={p.stem: p.read_bytes() for p in sorted((root / "evidence").glob("*.json"))}, patches=sorted(patches.glob("*.patch")), root=root,
        repository=top, head=call_git(("rev-parse", "HEAD"), root) if committed else None)


def _of_branch(name: str, top: Path | None) -> Subject:
    if top is None:
        raise UserError(f"{name}: no such file, and this is no repository; name a file, a folder, or a branch with --repo")
    if name.startswith("-"):
        raise UserError(f"{name}: not a branch")
    try:
        head = call_git(("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"), top)
    except UserError:
        raise UserError(f"{name}: no such file, and no such branch in {top}; --repo names another repository") from None
    repository = Workspace(top)
    if not repository.is_file(head, FILE):
        raise UserError(f"{name}: the branch holds no {FILE}; for a change of an engine give the folder that `agent pr` wrote, and --repo {top}")
    names = [path for path in repository.files(head, "evidence") if path.endswith(".json")]
    return Subject(name=name, text=repository.show(head, FILE).decode(errors="replace"),
                   files={Path(path).stem: repository.show(head, path) for path in names}, patches=[], root=None, repository=top, head=head)


def _prepared(path: Path) -> Path | None:
    """A workspace stands for what its last run prepared."""
    if not (path / PRIVATE).is_dir() or (path / "evidence" / DOCUMENT).is_file():
        return None
    prepared = path / PRIVATE / "pr" / state.load_current(Workspace.open(path)).run
    if not (prepared / FILE).is_file():
        raise UserError(f"{path}: its last run has no pull request yet; `agent pr {path}` makes one")
    return prepared


def _top(folder: Path, required: bool = True) -> Path | None:
    try:
        return Path(call_git(("rev-parse", "--show-toplevel"), folder))
    except (UserError, OSError):
        if required:
            raise UserError(f"{folder} is not in a git repository") from None
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text") from None


def has_commit(repository: Path, commit: str) -> bool:
    try:
        call_git(("cat-file", "-e", "--end-of-options", f"{commit}^{{commit}}"), repository)
    except UserError:
        return False
    return True


def patched_tree(subject: Subject) -> str:
    """Tree id of the base commit with the patch series. Raises UserError if that does not apply."""
    claims, repository = subject.claims, subject.repository
    assert repository is not None
    with tempfile.TemporaryDirectory(prefix="index-") as scratch:
        index = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
        call_git(("read-tree", "--end-of-options", claims.base_commit), repository, environment=index)
        for patch in subject.patches:
            call_git(("apply", "--cached", "--whitespace=nowarn", str(patch)), repository, environment=index)
        return call_git(("write-tree",), repository, environment=index)


def code_blobs(subject: Subject, tree: str) -> dict[str, str]:
    """What a commit or tree holds at the places that the claims name, and what of a workspace it runs besides."""
    claims = subject.claims
    assert subject.repository is not None
    paths = series.RUNS if claims.engine is None else tuple(claims.files)
    return series.blobs(subject.repository, tree, paths)


def export(subject: Subject, tree: str, folder: Path) -> Path:
    """Write what is to run into `folder`, a worktree of a workspace in its shape; returns it. Raises UserError if it cannot be had."""
    claims, repository = subject.claims, subject.repository
    assert repository is not None
    folder.mkdir(parents=True)
    if claims.engine is None:
        _unpack(repository, tree, folder)
        # These would choose an engine to run; the claims name none.
        for name in (SETTINGS, PATCH):
            (folder / name).unlink(missing_ok=True)
        if other := sorted(name for name, blob in claims.files.items() if (folder / name).is_symlink() or not same_blob(folder / name, blob)):
            raise UserError(f"{subject.name}: git writes {', '.join(other[:3])} otherwise than it is committed (see its .gitattributes); not run")
        return folder
    if subject.root is None:
        raise UserError(f"{subject.name}: the repros and the contract are not with it; give the folder that `agent pr` wrote")
    for name in (KERNELS, "repros"):
        if (subject.root / name).is_dir():
            (folder / name).symlink_to(subject.root / name)
    (folder / KERNELS).mkdir(exist_ok=True)
    write_atomic(folder / "contract.toml", Contract.from_dict(claims.contract).dumps().encode())
    changed = call_git(("diff", "--no-ext-diff", "--no-textconv", "--no-renames", "--full-index", claims.base_commit, tree), repository)
    write_atomic(folder / PATCH, f"{changed}\n".encode())
    return engine_settings(subject, folder)


def engine_settings(subject: Subject, folder: Path) -> Path:
    """A consistency.toml that names the reviewer's own checkout."""
    claims = subject.claims
    folder.mkdir(parents=True, exist_ok=True)
    settings = Config(model=claims.model, scale=claims.scale,
                      checkout=EngineCheckout(path=str(subject.repository), base=claims.base_commit, allow=["**"]))
    write_atomic(folder / SETTINGS, settings.dumps().encode())
    return folder


def _unpack(repository: Path, tree: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="archive-") as scratch:
        archive = Path(scratch) / "tree.tar"
        call_git(("archive", "--format=tar", f"--output={archive}", tree), repository)
        try:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
        except (tarfile.TarError, OSError) as error:
            raise UserError(f"the files of {tree[:12]} cannot be written safely: {error}") from None

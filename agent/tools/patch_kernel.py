"""Change a contract and `kernels/` in a worktree, or apply a unified diff inside allowed paths; anything else is refused before a byte is written."""

import re
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, Field

from agent.errors import UserError
from agent.workspace import call_git, write_atomic
from consistency.contract import Contract, ContractError
from consistency.operators import catalog

KERNELS = "kernels"
MAX_BYTES = 200_000
"""Largest file or diff accepted; generated data has no place in a patch."""


Side = Literal["rollout", "training"]


class Binding(BaseModel):
    """One line of a contract change."""

    operator: str
    implementation: str
    """A name from the catalogue, `stock`, or `kernels:FILE.NAME`."""
    side: Side | None = None
    """None: both."""

    def __str__(self) -> str:
        return f"{self.side + ':' if self.side else ''}{self.operator}={self.implementation}"


class PatchRequest(BaseModel):
    worktree: Path
    """Top of a git worktree; the only folder that is written."""
    bindings: list[Binding] = []
    files: dict[str, str] = Field(default_factory=dict)
    """`kernels/NAME.py` -> whole new text."""
    diff: str | None = None
    """Unified diff against the worktree, in git's form (`a/`, `b/`)."""
    allow: list[str] = [f"{KERNELS}/*.py"]
    """Globs that every path in `diff` must match; `*` stays within one folder, `**` does not."""


class PatchReport(BaseModel):
    changed: list[str]
    """Paths relative to the worktree."""
    contract: dict[str, dict[str, str]] | None = None
    """The whole contract afterwards; None where there is none (`--repo`)."""


def patch_kernel(request: PatchRequest) -> PatchReport:
    """Check everything, then write. Raises UserError on a path outside the allowed ones, a bad contract or a diff that does not apply."""
    tree = request.worktree
    diffed, contract = check(request)
    if request.diff is not None:
        call_git(("apply", "--index", "--whitespace=nowarn", "-"), tree, request.diff)
    for name, text in request.files.items():
        write_atomic(tree / name, text.encode())
    changed = [*diffed, *request.files]
    if contract is not None:
        write_atomic(tree / "contract.toml", contract.dumps().encode())
        changed.append("contract.toml")
    elif (tree / "contract.toml").exists():
        contract = Contract.load(tree / "contract.toml")
    return PatchReport(changed=sorted(set(changed)), contract=contract.as_dict() if contract is not None else None)


def check(request: PatchRequest) -> tuple[list[str], Contract | None]:
    """What `patch_kernel` refuses, without writing. Returns the paths that the diff changes and, with bindings, the contract afterwards."""
    tree = request.worktree
    if not (request.bindings or request.files or request.diff):
        raise UserError("the patch is empty: give a contract change, a kernel file or a diff")
    for name, text in request.files.items():
        check_path(tree, name, [f"{KERNELS}/*.py"])
        _check_text(name, text)
    diffed = _check_diff(tree, request.diff, request.allow) if request.diff is not None else []
    return diffed, _contract(tree, request) if request.bindings else None


def check_path(tree: Path, name: str, allow: list[str]) -> None:
    """Raise UserError unless `name` stays inside `tree`, passes through no symlink and matches a glob of `allow`."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or "\\" in name or any(ord(c) < 32 for c in name) or ".." in path.parts or str(path) != name:
        raise UserError(f"patch refused: {name!r} is not a plain relative path")
    if any(part.lower().rstrip(". ") == ".git" or part.lower().startswith(".gitmodules") for part in path.parts):
        raise UserError(f"patch refused: {name} is git's own")
    if not any(_matches(name, pattern) for pattern in allow):
        raise UserError(f"patch refused: {name} is outside the allowed paths ({', '.join(allow) or 'none'})")
    place = tree
    for part in path.parts:
        place = place / part
        if place.is_symlink():
            raise UserError(f"patch refused: {place.relative_to(tree)} is a symbolic link")
    if place.is_dir():
        raise UserError(f"patch refused: {name} is a folder")


def _matches(name: str, pattern: str) -> bool:
    """Glob where `*` and `?` stay within one path component and a component `**` spans any number of them, or none."""
    parts = ["(?:.*/)?" if part == "**" else re.escape(part).replace(r"\*", "[^/]*").replace(r"\?", "[^/]") + "/" for part in pattern.split("/")]
    return re.fullmatch("".join(parts), name + "/", re.DOTALL) is not None


def _check_text(name: str, text: str) -> None:
    if "\0" in text:
        raise UserError(f"patch refused: {name} is not text")
    if len(text.encode()) > MAX_BYTES:
        raise UserError(f"patch refused: {name} has {len(text.encode())} bytes, the limit is {MAX_BYTES}")


def _check_diff(tree: Path, diff: str, allow: list[str]) -> list[str]:
    """Paths that git itself reads out of the diff, each allowed."""
    _check_text("the diff", diff)
    if re.search(r"^(new|old|deleted)( file)? mode (120000|160000)", diff, re.MULTILINE):
        raise UserError("patch refused: the diff makes or removes a symbolic link or a submodule")
    if re.search(r"^(GIT binary patch|Binary files )", diff, re.MULTILINE):
        raise UserError("patch refused: the diff carries binary data")
    try:
        listed = call_git(("apply", "--numstat", "-z", "-"), tree, diff)
    except UserError as error:
        raise UserError(f"patch refused: git cannot read the diff ({error})") from None
    names = _numstat_paths(listed) + re.findall(r"^(?:rename|copy) (?:from|to) (.+)$", diff, re.MULTILINE)
    if not names:
        raise UserError("patch refused: the diff changes no file")
    for name in names:
        check_path(tree, name, allow)
    try:
        call_git(("apply", "--check", "--index", "-"), tree, diff)
    except UserError as error:
        raise UserError(f"patch refused: the diff does not apply ({error})") from None
    return names


def _numstat_paths(listed: str) -> list[str]:
    """Parse `git apply --numstat -z`: `added<TAB>deleted<TAB>path NUL`; a rename has an empty path and then both names."""
    paths = []
    for field in listed.split("\0"):
        name = field.split("\t", 2)[2] if field.count("\t") >= 2 else field
        if name:
            paths.append(name)
    return paths


def _contract(tree: Path, request: PatchRequest) -> Contract:
    try:
        contract = Contract.load(tree / "contract.toml")
        for binding in request.bindings:
            contract = contract.with_(binding.operator, binding.implementation, binding.side)
        validate(contract, tree, new_files=set(request.files))
    except ContractError as error:
        raise UserError(str(error)) from None
    return contract


def validate(contract: Contract, tree: Path, new_files: frozenset[str] | set[str] = frozenset()) -> None:
    """Check names against the catalogue and `kernels:FILE.NAME` against the files there are. Raises ContractError."""
    contract.validate(catalog.known())
    for side in (contract.rollout, contract.training):
        for operator, name in side.items():
            if not name.startswith("kernels:"):
                continue
            stem, _, attribute = name.removeprefix("kernels:").partition(".")
            file = f"{KERNELS}/{stem}.py"
            if not (stem.isidentifier() and attribute.isidentifier()):
                raise ContractError(f"contract: {operator} = {name!r}; a workspace kernel is written kernels:FILE.NAME")
            if file not in new_files and not (tree / file).is_file():
                raise ContractError(f"contract: {operator} = {name!r}, but {file} does not exist")

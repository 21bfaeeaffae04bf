"""Change a contract and `kernels/` in a worktree, or apply a unified diff inside allowed paths; anything else is refused before a byte is written."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from agent.checkout import PATCH, Applied, Checkout
from agent.errors import UserError
from agent.kernel_source import inspect_source
from agent.tools.diffs import check_kinds, check_path, check_text, explain, numstat_paths
from agent.workspace import call_git, write_atomic
from consistency.contract import Contract, ContractError
from consistency.operators import catalog

KERNELS = "kernels"

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
    """Unified diff in git's form (`a/`, `b/`): against the worktree or, in a workspace that has an engine's checkout, against that."""
    allow: list[str] = [f"{KERNELS}/*.py"]
    """Globs that every path in `diff` must match; `*` stays within one folder, `**` does not. A checkout has its own."""


class PatchReport(BaseModel):
    changed: list[str]
    """Paths relative to the worktree."""
    contract: dict[str, dict[str, str]] | None = None
    """The whole contract afterwards; None where there is none (`--repo`)."""
    engine: list[str] = []
    """Paths changed in the engine's checkout, by this patch."""


@dataclass(frozen=True)
class Checked:
    """A patch that may be made."""

    diffed: list[str]
    """paths of the worktree that the diff changes"""
    contract: Contract | None
    """afterwards, if the patch binds anything"""
    engine: Applied | None
    """the engine's checkout afterwards"""


def patch_kernel(request: PatchRequest) -> PatchReport:
    """Check everything, then write. Raises UserError on a path outside the allowed ones, a bad contract or a diff that does not apply."""
    tree, checked = request.worktree, check(request)
    contract = checked.contract
    if checked.engine is not None:
        write_atomic(tree / PATCH, checked.engine.patch.encode())
    elif request.diff is not None:
        call_git(("apply", "--index", "--whitespace=nowarn", "-"), tree, request.diff)
    for name, text in request.files.items():
        write_atomic(tree / name, text.encode())
    changed = [*checked.diffed, *request.files]
    if contract is not None:
        write_atomic(tree / "contract.toml", contract.dumps().encode())
        changed.append("contract.toml")
    elif (tree / "contract.toml").exists():
        contract = Contract.load(tree / "contract.toml")
    return PatchReport(changed=sorted(set(changed)), contract=contract.as_dict() if contract is not None else None,
                       engine=checked.engine.changed if checked.engine else [])


def check(request: PatchRequest) -> Checked:
    """What `patch_kernel` refuses, without writing to the worktree."""
    tree = request.worktree
    if not (request.bindings or request.files or request.diff):
        raise UserError("the patch is empty: give a contract change, a kernel file or a diff")
    for name, text in request.files.items():
        check_path(tree, name, [f"{KERNELS}/*.py"])
        check_text(name, text)
        if found := inspect_source(name.removeprefix(f"{KERNELS}/"), text):
            raise UserError(f"patch refused: {found[0]} [{found[0].rule}]; a kernel computes tensors from tensors and has no use for that")
    diffed, engine = [], None
    if request.diff is not None:
        if checkout := Checkout.of(tree):
            diffed, engine = [PATCH], checkout.apply(checkout.patch_of(tree), request.diff)
        else:
            diffed = _check_diff(tree, request.diff, request.allow)
    return Checked(diffed, _contract(tree, request) if request.bindings else None, engine)


def _check_diff(tree: Path, diff: str, allow: list[str]) -> list[str]:
    """Paths that git itself reads out of the diff, each allowed."""
    check_kinds(diff)
    try:
        listed = call_git(("apply", "--numstat", "-z", "-"), tree, diff)
    except UserError as error:
        raise UserError(f"patch refused: git cannot read the diff: {explain(str(error), diff)}") from None
    names = numstat_paths(listed) + re.findall(r"^(?:rename|copy) (?:from|to) (.+)$", diff, re.MULTILINE)
    if not names:
        raise UserError("patch refused: the diff changes no file")
    for name in names:
        check_path(tree, name, allow)
    try:
        call_git(("apply", "--check", "--index", "-"), tree, diff)
    except UserError as error:
        raise UserError(f"patch refused: the diff does not apply: {explain(str(error), diff)}") from None
    return names


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

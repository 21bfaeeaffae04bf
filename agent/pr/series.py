"""The commits of a pull request: what the run ended with, one commit per operator, in place of the run's own history."""

import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent import pull_request
from agent.checkout import PATCH, Checkout
from agent.files import write_atomic
from agent.pr.claims import Cause, Change, Claims, Repro, verdict_id, word
from agent.pull_request import Evidence, Json
from agent.state import RunState
from agent.tools.patch_kernel import KERNELS
from agent.workspace import Workspace, branch, call_git
from consistency.contract import SIDES, Contract
from consistency.operators import catalog

NAME = "pr"
"""Last part of the branch's name."""
RUNS = ("contract.toml", KERNELS)
"""Paths of a workspace that decide what a job runs."""
WIDTH = 76


@dataclass(frozen=True)
class Trailers:
    """What stands at the end of every commit's message."""

    run: str
    attribution: str
    """key of the trailer that names the agent: `Assisted-by`, `Co-authored-by`, ..."""
    agent: str
    signed_off: str = ""
    """`Name <address>`; empty: no sign-off"""

    def of(self, evidence: str, verdict: str) -> dict[str, str]:
        lines = {"Run": self.run, **({"Evidence": f"sha256:{evidence}"} if evidence else {}), **({"Verdict": verdict} if verdict else {})}
        return lines | {self.attribution: self.agent} | ({"Signed-off-by": self.signed_off} if self.signed_off else {})


@dataclass(frozen=True)
class Story:
    """Why the change is what it is."""

    causes: list[Cause]
    repros: list[Repro]
    made: dict[str, Path]
    """repro folder -> where it was made, for those that the run's head does not hold"""


def of_workspace(workspace: Workspace, state: RunState, evidence: Evidence, story: Story, base: str, trailers: Trailers,
                 author: tuple[str, str] | None) -> list[Change]:
    """Build `agent/RUN/pr` from the base, in its worktree: contract, kernels and repros as at the run's head. Evidence comes later."""
    tree = workspace.add_tree(state.run, NAME, base)
    final, contract = Contract.from_dict(state.contract), Contract.load(tree / "contract.toml")
    causes, repros = story.causes, story.repros
    changes, order = [], operators(contract, final, causes)
    for number, operator in enumerate(order, 1):
        bound = {side: getattr(final, side).get(operator, "stock") for side in SIDES}
        for side, name in bound.items():
            contract = contract.with_(operator, name, side)
        wanted = [r.folder for r in repros if r.operator == operator and r.folder not in story.made]
        wanted += [_kernel(name) for name in bound.values() if name.startswith("kernels:")]
        _take(workspace, tree, state.head, list(dict.fromkeys(wanted)) + ([KERNELS] if number == len(order) else []))
        for repro in repros:
            if repro.operator == operator and repro.folder in story.made:
                shutil.copytree(story.made[repro.folder], tree / repro.folder, dirs_exist_ok=True)
        write_atomic(tree / "contract.toml", contract.dumps().encode())
        made = last_attempt(evidence, operator)
        mine = [c for c in causes if c.operator == operator]
        subject = f"{operator}: {_bound(bound)}"
        message = _message(subject, _why(mine, made, [r for r in repros if r.operator == operator]))
        trailer = trailers.of(evidence.hashes.get(f"attempt-{made['number']}", ""), verdict_id(made["verify"])) if made else trailers.of("", "")
        change = _commit(workspace, tree, subject, operator, message, trailer, author)
        changes.append(change.model_copy(update={"code": _code(operator, bound, state.device), "why": _own_words(made)}))
    if not order:  # kernels alone, or nothing that a contract names
        _take(workspace, tree, state.head, [KERNELS])
        changes.append(_commit(workspace, tree, "Kernels", "", "Kernels", trailers.of("", ""), author))
    return changes


def of_checkout(checkout: Checkout, workspace: Workspace, state: RunState, evidence: Evidence, story: Story, trailers: Trailers,
                author: tuple[str, str] | None) -> tuple[str, list[Change]]:
    """One commit per kept attempt that changed the engine; points `agent/RUN/pr` of the checkout at the last. Returns (its id, changes)."""
    parent, changes = checkout.base, []
    for attempt in (a for a in state.attempts if a.outcome == "kept" and a.patch.engine):
        document = next(d for d in evidence.attempts("kept") if d["number"] == attempt.number)
        mine = [c for c in story.causes if c.attempt == attempt.number]
        named = list(dict.fromkeys(c.operator for c in mine)) or ["engine"]
        subject = f"{', '.join(named)}: same bits as in training" if mine else f"Change {', '.join(Path(name).name for name in attempt.patch.engine)}"
        message = _message(subject, _why(mine, document, [r for r in story.repros if r.operator in named]))
        tail = trailers.of(evidence.hashes[f"attempt-{attempt.number}"], verdict_id(document["verify"]))
        text = message + "\n\n" + "".join(f"{key}: {value}\n" for key, value in tail.items())
        patch = workspace.show(attempt.commit, PATCH).decode()
        commit = checkout.commit(checkout.tree(patch), parent, text, author)
        changes.append(_change(checkout.path, commit, subject, named[0] if mine else "").model_copy(update={"why": _own_words(document)}))
        parent = commit
    checkout.point(branch(state.run, NAME), parent)
    return parent, changes


def seal(workspace: Workspace, state: RunState, claims: Claims, evidence: Mapping[str, bytes], text: str, trailers: Trailers,
         author: tuple[str, str] | None) -> str:
    """Add the last commit, which holds evidence and text and nothing that runs."""
    tree = workspace.tree(state.run, NAME)
    for name, data in evidence.items():
        write_atomic(tree / "evidence" / f"{name}.json", data)
    write_atomic(tree / pull_request.FILE, text.encode())
    verdict = claims.final.verdict
    message = _message("Evidence and the text of the pull request", [
        f"{claims.final.level} verdict at {claims.commit}: {word(claims.final)}, {verdict.mismatches} mismatches in "
        f"{sum(c.ran for c in verdict.conditions)} conditions. Check it with `agent verify-pr {pull_request.FILE}`."])
    return workspace.commit(tree, message, trailers.of(pull_request.sha256(claims.encode()), verdict_id(claims.final)), author=author)


def operators(before: Contract, after: Contract, causes: list[Cause]) -> list[str]:
    """Those that the two contracts bind differently: first differences first, the rest by name."""
    changed = [operator for operator in sorted({*before.rollout, *before.training, *after.rollout, *after.training})
               if any(getattr(before, side).get(operator) != getattr(after, side).get(operator) for side in SIDES)]
    first = list(dict.fromkeys(cause.operator for cause in causes))
    return [o for o in first if o in changed] + [o for o in changed if o not in first]


def last_attempt(evidence: Evidence, operator: str) -> Json | None:
    """The kept attempt that bound an operator as it is now."""
    return next((a for a in reversed(evidence.attempts("kept")) if any(b["operator"] == operator for b in a["bindings"])), None)


def blobs(repository: Path, commit: str, paths: tuple[str, ...]) -> dict[str, str]:
    """Path -> git's blob id of the committed files below `paths`."""
    if not paths:
        return {}
    listed = call_git(("ls-tree", "-r", "-z", commit, "--", *paths), repository)
    return {entry.partition("\t")[2]: entry.split()[2] for entry in listed.split("\0") if entry}


def changed_files(repository: Path, before: str, after: str) -> list[str]:
    return [name for name in call_git(("diff", "--name-only", "--no-renames", "-z", before, after), repository).split("\0") if name]


def quoted(text: str) -> str:
    """Somebody else's words as one line of a message: no line of it can pass for a trailer."""
    return re.sub(r"(?i)([\w-]+-by)\s*:", r"\1", " ".join(text.split()))


def _take(workspace: Workspace, tree: Path, commit: str, paths: list[str]) -> None:
    there = [path for path in paths if workspace.files(commit, path) or workspace.is_file(commit, path)]
    if there:
        call_git(("checkout", "--quiet", commit, "--", *there), tree)


def _commit(workspace: Workspace, tree: Path, subject: str, operator: str, message: str, trailers: dict[str, str],
            author: tuple[str, str] | None) -> Change:
    return _change(workspace.path, workspace.commit(tree, message, trailers, author=author), subject, operator)


def _change(repository: Path, commit: str, subject: str, operator: str) -> Change:
    rows = [row.split("\t") for row in call_git(("show", "--numstat", "--format=", "--no-renames", commit), repository).splitlines() if row]
    folders = dict.fromkeys(re.sub(r"^(repros/[^/]+)/.*", r"\1/", name) for _, _, name in rows)
    code = [row for row in rows if not row[2].startswith("repros/") and row[0] != "-"]
    return Change(subject=subject, operator=operator, files=list(folders), added=sum(int(r[0]) for r in code), removed=sum(int(r[1]) for r in code))


def _message(subject: str, paragraphs: list[str]) -> str:
    return "\n\n".join([subject, *(textwrap.fill(p, WIDTH, break_long_words=False, break_on_hyphens=False) for p in paragraphs if p)])


def _why(causes: list[Cause], made: Json | None, repros: list[Repro]) -> list[str]:
    lines = []
    for c in causes:
        moved = f" With {c.substituted_with} in its place the first difference moves on." if c.confirmed else ""
        largest = "" if c.max_abs is None else f", at most by {c.max_abs:.3g} ({c.max_ulps} ulps)"
        lines.append(quoted(f"In the dimension {c.dimension}, {c.operator} at {c.site} is the first operator whose output differs although its input "
                            f"does not: {c.cause} ({c.detail}); {c.differing} of {c.elements} elements{largest}.{moved}"))
    lines += [f"`python repro.py` in {r.folder} exits with {r.before} on stock" + ("." if r.after is None else f" and with {r.after} now.")
              for r in repros]
    if made:
        words = _own_words(made) or ("" if causes else made["why"])
        lines += [quoted(words)] if words else []
        lines.append(quoted(f"Attempt {made['number']}, {made['outcome']}: {made['reason']}."))
    return lines


def _own_words(made: Json | None) -> str:
    """Why, if the attempt brought code of its own; a choice from the catalogue says no more than the difference itself."""
    wrote = made and (made["patch"].get("engine") or any(name.startswith(f"{KERNELS}/") for name in made["patch"]["changed"]))
    return quoted(made["why"]) if made and wrote else ""


def _code(operator: str, bound: Mapping[str, str], device: str) -> list[str]:
    """Where implementations are, for a reader who wants to see them."""
    found = [f"consistency/operators/{row.where.partition(':')[0].replace('.', '/')}.py:{row.where.partition(':')[2]}"
             for side, name in bound.items() for row in catalog.implementations(operator, side=side, device=device) if row.name == name]
    return list(dict.fromkeys(found + [_kernel(name) for name in bound.values() if name.startswith("kernels:")]))


def _bound(bound: Mapping[str, str]) -> str:
    names = set(bound.values())
    if len(names) == 1:
        return f"use `{names.pop()}` on both sides"
    return "use " + ", ".join(f"`{name}` in the {side}" for side, name in bound.items())


def _kernel(name: str) -> str:
    return f"{KERNELS}/{name.removeprefix('kernels:').partition('.')[0]}.py"



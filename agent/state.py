"""Everything a run knows, as one typed object that is saved after every step and that a policy reads."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from agent.errors import UserError
from agent.recipes import Recipe
from agent.tools.divergence import Divergence, LocalizeReport
from agent.tools.patch_kernel import Binding, PatchReport, validate
from agent.tools.repro import ReproReport
from agent.verdict import VerifyReport
from agent.workspace import Workspace, branch, write_atomic
from consistency.contract import Contract, ContractError

Outcome = Literal["exact", "slow", "inexact"]
Phase = Literal["baseline", "localize", "repro", "patch", "check repros", "verify", "full verify", "pull request", "done"]


class ReproCheck(BaseModel):
    """One repro before and after an attempt."""

    divergence: str
    """Its `key`."""
    before: int
    after: int | None = None
    """Exit code under the attempt's contract: 0 once the operator no longer differs; None for a repro that did not fail before."""
    expected_line: str = ""
    command: str = ""


class Attempt(BaseModel):
    """One patch in its own branch, with what was measured about it."""

    number: int
    branch: str
    commit: str
    why: str
    bindings: list[Binding]
    addresses: list[str]
    patch: PatchReport
    repros: list[ReproCheck] = []
    recipe: str = ""
    """Name of the recipe that this attempt binds, if it does."""
    verify: VerifyReport | None = None
    localize: LocalizeReport | None = None
    crashes: int = 0
    failure: str = ""
    """How a job ended, if the candidate took one down more than once."""
    last_words: str = ""
    """Tail of that job's log, for whoever writes the next patch."""
    outcome: Literal["open", "kept", "rejected"] = "open"
    reason: str = ""
    seconds: float = 0.0
    evidence: str = ""
    """sha256 of evidence/attempt-N.json, also in the commit's trailer."""

    @property
    def title(self) -> str:
        change = ", ".join(str(binding) for binding in self.bindings) or ", ".join(self.patch.engine or self.patch.changed)
        return f"recipe {self.recipe}: {change}" if self.recipe else change


class RunState(BaseModel):
    """A run, from baseline to pull request."""

    run: str
    model: str
    scale: str
    checkpoint: str
    policy: str
    device: str
    """cpu or cuda: which implementations apply."""
    target: float
    base: str
    started: str
    phase: Phase = "baseline"
    seconds: float = 0.0
    """Wall clock spent, over every call that worked on this run."""
    head: str = ""
    """Commit of the run branch."""
    contract: dict[str, dict[str, str]]
    """The contract at `head`."""
    recipe: Recipe | None = None
    """What is tried before anything is searched for; None: nothing fits, or it was not wanted."""
    baseline: VerifyReport | None = None
    """Quick verify of the empty contract."""
    verify: VerifyReport | None = None
    """What `head` was kept for: the verify of its attempt, or of the starting contract."""
    localize: LocalizeReport | None = None
    """First divergences of `head`."""
    first_localize: LocalizeReport | None = None
    """First divergences of the starting contract, for the report's before and after."""
    repros: dict[str, ReproReport] = {}
    """By divergence key; every repro the run branch holds."""
    attempts: list[Attempt] = []
    final: VerifyReport | None = None
    """Full verify of `head`; absent again once `head` moves."""
    outcome: Outcome | None = None
    why: str = ""
    """Why the run ended."""
    pull_request: str | None = None
    steps: list[str] = []
    """One line per finished step."""

    @property
    def open_attempt(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts and self.attempts[-1].outcome == "open" else None

    @property
    def branch(self) -> str:
        return branch(self.run, "main")

    @property
    def best(self) -> VerifyReport | None:
        """The strongest measurement of `head`."""
        return self.final or self.verify

    @property
    def recipe_attempt(self) -> Attempt | None:
        return next((attempt for attempt in self.attempts if attempt.recipe), None)

    def repro_folder(self, key: str) -> str:
        """Folder of a repro, relative to the top of any worktree of this run."""
        return f"repros/{Path(self.repros[key].directory).name}"

    def divergences(self) -> list[Divergence]:
        return self.localize.divergences if self.localize else []

    def save(self, workspace: Workspace) -> None:
        write_atomic(folder(workspace, self.run) / "state.json", self.model_dump_json(indent=1).encode())

    def log(self, line: str) -> None:
        self.steps.append(f"{datetime.now(UTC):%H:%M:%S} {line}")


def key(divergence: Divergence) -> str:
    """One site can differ in several dimensions, for different reasons."""
    return f"{divergence.dimension}:{divergence.site}"


def begin(workspace: Workspace, *, run: str, checkpoint: str, device: str, policy: str, target: float, recipe: Recipe | None = None) -> RunState:
    """Start a run: its branch at the base, its state on disk, and the workspace pointing to it. Raises UserError on an unusable contract.

    A `recipe` is for a workspace that is stock; one with a contract of its own goes on from that.
    """
    settings, base = workspace.settings, workspace.base()
    tree = workspace.add_tree(run, "main", base)
    try:
        contract = Contract.load(tree / "contract.toml")
        validate(contract, tree)
    except ContractError as error:
        workspace.forget(run, "main")
        raise UserError(str(error)) from None
    state = RunState(
        run=run, model=settings.model, scale=settings.scale, checkpoint=checkpoint, policy=policy, device=device, target=target, base=base,
        started=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC", contract=contract.as_dict(), head=workspace.head(tree),
        recipe=recipe if contract == Contract() else None)
    state.save(workspace)
    write_atomic(workspace.private / "current", f"{run}\n".encode())
    return state


def folder(workspace: Workspace, run: str) -> Path:
    return workspace.private / "runs" / run


def new_run_id(workspace: Workspace) -> str:
    while folder(workspace, run := datetime.now(UTC).strftime("%Y%m%d-%H%M%S")).exists():
        time.sleep(0.2)
    return run


def load_current(workspace: Workspace) -> RunState:
    """Raises UserError if the workspace has no run, or one whose state cannot be read."""
    pointer = workspace.private / "current"
    if not pointer.exists():
        raise UserError(f"{workspace.path} has no run yet; start one with `agent run --workspace {workspace.path}`")
    path = folder(workspace, pointer.read_text(encoding="utf-8").strip()) / "state.json"
    try:
        return RunState.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}); start a new run with `agent run`") from None


def jsonable(model: BaseModel) -> dict[str, Any]:
    """Plain data in which a number that is not finite is null, so that it is valid JSON."""
    return json.loads(model.model_dump_json())

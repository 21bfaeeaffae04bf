"""Who picks the next step of a run: a policy sees the run's state and returns one action; the loop carries it out and decides what is kept."""

from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from pydantic import BaseModel, Field

from agent.tools.patch_kernel import Binding

if TYPE_CHECKING:
    from agent.state import RunState


class Verify(BaseModel):
    """Compare the engines: the open attempt if there is one, else the run branch. A run can end as exact only on a full one."""

    kind: Literal["verify"] = "verify"
    level: Literal["quick", "full"] = "quick"


class Localize(BaseModel):
    """Find the first diverging operator per dimension: of the open attempt if there is one, else of the run branch."""

    kind: Literal["localize"] = "localize"


class Repro(BaseModel):
    """Cut the run branch's divergences down to folders that run alone."""

    kind: Literal["repro"] = "repro"
    divergences: list[str]
    """`state.key` of each."""


class Patch(BaseModel):
    """Open the next attempt: a contract change and new kernel files in a worktree of their own."""

    kind: Literal["patch"] = "patch"
    bindings: list[Binding] = []
    files: dict[str, str] = Field(default_factory=dict)
    diff: str | None = None
    """Unified diff: of the engine's checkout where the workspace has one, else of `kernels/`."""
    addresses: list[str]
    """Keys of the divergences that this shall remove; their repros must turn to 0."""
    why: str
    recipe: str = ""
    """Name of the recipe that this binds, if it is one."""


class Stop(BaseModel):
    """End the run with what the run branch holds."""

    kind: Literal["stop"] = "stop"
    why: str


Action = Annotated[Verify | Localize | Repro | Patch | Stop, Field(discriminator="kind")]


class Policy(Protocol):
    name: str
    """What commits name as the author of the choice."""

    def decide(self, state: "RunState") -> Action: ...

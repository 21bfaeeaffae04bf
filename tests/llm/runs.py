"""A run with a model in it, on fake tools."""

from typing import Any

from agent.fakes import FakeTools, SilentObserver
from agent.llm.conversation import Model
from agent.llm.prices import Price
from agent.llm.settings import Limits, LlmSettings
from agent.llm.trajectory import Trajectory
from agent.loop import Run
from agent.policies import Policy
from agent.policies.llm import LlmPolicy
from agent.state import RunState, folder, load_current
from agent.workspace import Workspace

PRICE = Price(input=10, output=50, cache_read=1, cache_write=20)

# The catalogue's only exact linear fixes nothing here, so the playbook has nothing left to try.
HARD = {"engine": ["linear"], "batch": ["rms_norm"]}
USELESS = ("linear=exact",)
LINEAR = "engine:000.linear"
NORM = "batch:000.rms_norm"

KERNEL = '''"""Sums over K in one fixed order, in fp32, and rounds once."""

import torch


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.float() @ weight.float().T).to(x.dtype)
'''


def hard_tools(**more: Any) -> FakeTools:
    return FakeTools(HARD, useless=USELESS, **more)


def patch(addresses: list[str], bindings: dict[str, str], files: dict[str, str] | None = None,
          why: str = "fixed order") -> tuple[str, dict[str, Any]]:
    """A call of patch_kernel."""
    return "patch_kernel", {
        "why": why, "addresses": addresses, "bindings": [{"operator": o, "implementation": i, "side": "both"} for o, i in bindings.items()],
        "files": [{"path": path, "text": text} for path, text in (files or {}).items()]}


def make(workspace: Workspace, model: Model, **options: Any) -> LlmPolicy:
    limits = Limits(**{name: options.pop(name) for name in list(options) if name in Limits.model_fields})
    return LlmPolicy("scripted", model, workspace, load_current(workspace).run, LlmSettings(limits=limits), PRICE, **options)


def carry_on(workspace: Workspace, policy: Policy, tools: FakeTools, *, minutes: float = 5, attempts: int = 20) -> RunState:
    return Run(workspace, load_current(workspace), policy, tools, SilentObserver(), minutes=minutes, attempts=attempts).go()


def trajectory(workspace: Workspace, run: str = "r1") -> Trajectory:
    return Trajectory.load(folder(workspace, run))


def told(workspace: Workspace, run: str = "r1") -> list[str]:
    return [record.body.text for record in trajectory(workspace, run).records if record.body.kind == "told"]

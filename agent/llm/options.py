"""What the command line says about the model, on top of consistency.toml; and the one question about it."""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields

from rich.console import Console

from agent.llm.prices import known_models
from agent.llm.settings import LlmSettings
from agent.llm.spec import KEYS, check_policy, policy_from_spec
from agent.policies import Policy
from agent.workspace import Workspace

LIMITS = ("steps", "usd", "tokens", "gpu_seconds")


@dataclass(frozen=True)
class LlmOptions:
    """None leaves a limit to the workspace's settings."""

    price: str | None = None
    approve: bool = False
    steps: int | None = None
    usd: float | None = None
    tokens: int | None = None
    gpu_seconds: float | None = None

    def over(self, configured: LlmSettings, minutes: float | None) -> LlmSettings:
        """The settings of this call. `minutes` is the wall clock of the whole call, which a request must not outlast either."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name in LIMITS}
        limits = configured.limits.model_copy(update={name: value for name, value in given.items() if value is not None})
        if limits.minutes is None:
            limits = limits.model_copy(update={"minutes": minutes})
        return configured.model_copy(update={"limits": limits})

    def policy(self, name: str, workspace: Workspace, run: str, minutes: float | None, console: Console,
               aside: Callable[[], AbstractContextManager[object]] = nullcontext, tell: Callable[[str], None] = lambda text: None) -> Policy:
        """The policy of a run that has begun, asking a person before each patch if that was wanted.

        `aside` puts a live display out of the way for the question, `tell` shows what the run waits for.
        """
        from agent.llm.approval import Approved, Asker
        from agent.policies.hybrid import Hybrid
        from agent.policies.llm import LlmPolicy
        from agent.policies.recipe import RecipeFirst

        asker = Asker(console, workspace.tree(run, "main"), aside=aside) if self.approve else None
        settings = self.over(workspace.settings.llm, minutes)
        made = policy_from_spec(name, workspace=workspace, run=run, settings=settings, price=self.price, approve=asker)
        asked = made.model if isinstance(made, Hybrid) else made
        if isinstance(asked, LlmPolicy):
            asked.tell = tell
        if asker and isinstance(made, Hybrid):
            made.first = Approved(made.first, asker)
        return RecipeFirst(Approved(made, asker) if asker and not isinstance(asked, LlmPolicy) else made, asker)


def choose_policy(settings: LlmSettings, console: Console, quiet: bool, environment: Mapping[str, str] = os.environ,
                  ask: Callable[[str], str] = input) -> tuple[str, bool]:
    """Who picks the steps where nothing says so, and whether a person chose: without a provider's key the playbook.

    With a key a person at the terminal is asked, and the default is that the playbook leads and a model takes over where it is stuck. `quiet` or
    no terminal: the playbook, with one line on how to choose. Raises UserError on an answer that is no usable policy.
    """
    providers = [kind for kind, variable in KEYS.items() if environment.get(variable, "").strip()]
    if not providers:
        return "playbook", False
    known = [model for model in known_models() if model.partition(":")[0] in providers]
    offers = [*(f"hybrid:{model}" for model in dict.fromkeys([*([settings.model] if settings.model else []), *known])), "playbook"]
    found = " and ".join(KEYS[kind] for kind in providers)
    if quiet or (ask is input and not sys.stdin.isatty()):
        console.print(f"{found} set, but nobody to ask: the playbook picks the steps; choose with --policy {offers[0]} or in consistency.toml",
                      highlight=False, soft_wrap=True)
        return "playbook", False
    console.print(f"{found} set. Who picks the steps of this workspace's runs? (hybrid: the playbook first, the model where it is stuck, "
                  f"at most {settings.limits.usd:g} USD a run)", soft_wrap=True)
    for number, offer in enumerate(offers):
        console.print(f"  {number}  {offer}", highlight=False)
    answer = ask("number, or any --policy [0] ").strip() or "0"
    return check_policy(offers[int(answer)] if answer.isdecimal() and int(answer) < len(offers) else answer, settings, environment=environment), True

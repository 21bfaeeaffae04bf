"""`--approve`: a person sees each patch before it is made."""

import difflib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from agent.errors import UserError
from agent.llm.reading import plain
from agent.policies import Action, Patch, Policy, Stop
from agent.state import RunState

WHOLE = 1_000_000
"""Characters shown of a file: all, since a person answers for it."""


class Asker:
    """Shows a patch and asks on the terminal, with whatever lives on it put `aside` meanwhile."""

    def __init__(self, console: Console, tree: Path, ask: Callable[[str], str] = input,
                 aside: Callable[[], AbstractContextManager[object]] = nullcontext):
        """Raises UserError where nobody can answer."""
        if ask is input and not sys.stdin.isatty():
            raise UserError("--approve asks on a terminal, and standard input is none; leave it out or start the run in a terminal")
        self.console, self.tree, self.ask, self.aside = console, tree, ask, aside

    def __call__(self, patch: Patch) -> str | None:
        """None if the patch may be made, else the reason given."""
        with self.aside():
            self.console.print(Text(plain(f"patch: {', '.join(map(str, patch.bindings)) or 'no binding'}\nwhy: {patch.why}")))
            for name, text in patch.files.items():
                self.console.print(Syntax(plain(self._diff(name, text), WHOLE), "diff", word_wrap=True))
            if patch.diff:
                self.console.print(Syntax(plain(patch.diff, WHOLE), "diff", word_wrap=True))
            answer = self.ask("make this patch? [y/N, or why not] ").strip()
        return None if answer.lower() in ("y", "yes") else "" if answer.lower() in ("", "n", "no") else answer

    def _diff(self, name: str, text: str) -> str:
        old = (self.tree / name).read_text(encoding="utf-8").splitlines() if (self.tree / name).is_file() else []
        return "\n".join(difflib.unified_diff(old, text.splitlines(), f"a/{name}", f"b/{name}", lineterm="")) or f"{name} unchanged"


class Approved:
    """A policy that cannot take no for an answer, such as the playbook: its first refused patch is where it stops."""

    def __init__(self, policy: Policy, ask: Callable[[Patch], str | None]):
        self.name, self.policy, self.ask = policy.name, policy, ask
        self.refused: dict[str, str] = {}

    def decide(self, state: RunState) -> Action:
        action = self.policy.decide(state)
        if not isinstance(action, Patch):
            return action
        patch = f"{state.head} {action.model_dump_json()}"
        if patch not in self.refused:
            reason = self.ask(action)
            if reason is None:
                return action
            self.refused[patch] = reason
        said = self.refused[patch]
        return Stop(why=f"a person refused the patch {', '.join(map(str, action.bindings))}{f' ({said})' if said else ''}")

"""The policy that needs no LLM: fix each first divergence with the implementation that the catalogue offers for its operator."""

from collections.abc import Iterator

from agent.policies import Action, Localize, Patch, Repro, Stop, Verify
from agent.state import Attempt, RunState, key
from agent.tools.divergence import Divergence
from agent.tools.patch_kernel import Binding, Side
from consistency.operators import catalog


class Playbook:
    """Deterministic: the same state always gives the same action."""

    name = "playbook"

    def decide(self, state: RunState) -> Action:
        if state.verify is None or state.best is None:
            return Verify()
        if attempt := state.open_attempt:
            return Verify(level="full" if hopeful(state, attempt) else "quick") if attempt.verify is None else Localize()
        if state.best.verdict.void or (not state.best.verdict.exact and state.best.verdict.mismatches == 0):
            return Stop(why="; ".join(state.best.verdict.reasons))
        if state.best.verdict.exact:
            return Verify(level="full") if state.final is None else Stop(why="exact in every required condition")
        if state.localize is None:
            return Localize()
        if not state.localize.divergences:
            return Stop(why="verify counts mismatches, but no operator differs in the traced schedules")
        if missing := [key(d) for d in state.localize.divergences if key(d) not in state.repros]:
            return Repro(divergences=missing)
        for patch in candidates(state):
            if patch.bindings not in tried(state):
                return patch
        operators = dict.fromkeys(d.operator for d in state.localize.divergences)
        return Stop(why=f"the catalogue has nothing left to try for {', '.join(operators)}")


def hopeful(state: RunState, attempt: Attempt) -> bool:
    """Whether the attempt leaves nothing that localize saw: then the full matrix is asked at once, which saves the quick one."""
    last = {d.dimension: d for d in state.divergences()}
    return all(d.next_site is None for d in last.values()) and {key(d) for d in state.divergences()} <= set(attempt.addresses)


def candidates(state: RunState) -> Iterator[Patch]:
    """All first divergences at once, then each operator alone: one bad fix among good ones must not hide them."""
    offers: dict[str, list[Binding]] = {}
    for divergence in state.divergences():
        offers.setdefault(divergence.operator, offered(divergence.operator, state))
    together = [bindings[0] for bindings in offers.values() if bindings]
    if together:
        yield _patch(together, list(state.divergences()))
    for operator, bindings in offers.items():
        for binding in bindings:
            yield _patch([binding], [d for d in state.divergences() if d.operator == operator])


def offered(operator: str, state: RunState) -> list[Binding]:
    """Exact implementations of an operator that the contract does not use yet, in catalogue order."""
    sides: dict[str, list[Side]] = {}
    for info in catalog.implementations(operator, device=state.device):
        if info.exact and state.contract[info.side].get(operator) != info.name:
            sides.setdefault(info.name, []).append("rollout" if info.side == "rollout" else "training")
    return [Binding(operator=operator, implementation=name, side=None if len(where) == 2 else where[0]) for name, where in sides.items()]


def tried(state: RunState) -> list[list[Binding]]:
    """What was rejected since the run branch last moved; before that, the same patch would be another experiment."""
    since: list[list[Binding]] = []
    for attempt in state.attempts:
        since = [] if attempt.outcome == "kept" else [*since, attempt.bindings]
    return since


def _patch(bindings: list[Binding], fixes: list[Divergence]) -> Patch:
    changed = {binding.operator for binding in bindings}
    reasons = [f"{d.operator} differs first in {d.dimension} ({d.cause})" for d in fixes if d.operator in changed]
    return Patch(bindings=bindings, addresses=[key(d) for d in fixes if d.operator in changed], why="; ".join(reasons))

"""Whether an attempt is kept: the rule that no policy can bend."""

from typing import Literal

from agent.state import Attempt, RunState
from agent.tools.divergence import Divergence, LocalizeReport
from agent.verdict import ConditionResult, Verdict, VerifyReport
from consistency.models.catalog import EMBEDDING_LAYER, HEAD_LAYER, SITE_RANK

NOISE = 3.0
"""Standard errors by which a share of unequal tokens may rise; every verify draws fresh prompts, so the count itself moves."""

Ruling = tuple[Literal["kept", "rejected"], str]


def judge(state: RunState, attempt: Attempt) -> Ruling | None:
    """Decide on what was measured so far; None while that is not enough.

    Kept: the repros turned to 0, the verdict is not void, no condition got worse, and the first divergence vanished or moved later.
    """
    if attempt.failure:
        return "rejected", f"twice: {attempt.failure}"
    if still := [check.divergence for check in attempt.repros if check.after]:
        return "rejected", f"the repro of {', '.join(still)} does not pass"
    if attempt.verify is None:
        return None
    after = attempt.verify.verdict
    if after.void:
        return "rejected", f"its verdict is void: {'; '.join(after.reasons)}" + (f" [{', '.join(after.rules)}]" if after.rules else "")
    if state.verify and (worse := worse_conditions(state.verify.verdict, after)):
        return "rejected", "worse in " + "; ".join(worse)
    if after.exact and (slower := not_faster(state.final, attempt.verify)):
        return "rejected", slower
    if after.exact:
        return "kept", f"exact: 0 mismatches in {sum(c.ran for c in after.conditions)} conditions"
    if after.mismatches == 0:
        return "rejected", "; ".join(after.reasons)
    if attempt.recipe and state.verify:
        return _starting_point(state.verify.verdict, after)
    if attempt.localize is None:
        return None
    return _compare(state.localize, attempt.localize)


def not_faster(before: VerifyReport | None, after: VerifyReport) -> str:
    """Of two exact contracts the faster one stays; why the later one does not, if so."""
    if before is None or not before.verdict.exact or before.throughput is None or after.throughput is None:
        return ""
    old, new = before.throughput.ratio, after.throughput.ratio
    return "" if new > old else f"exact, but not faster: {new:.3f} of stock, {old:.3f} before"


def _starting_point(before: Verdict, after: Verdict) -> Ruling:
    """A recipe that is not exact here is still where the search begins if it leaves less to do than stock, in the conditions both were seen in."""
    old, new = _unequal(before, after), _unequal(after, before)
    if new < old:
        return "kept", f"not exact here, but {new:.1%} of the log-probabilities differ and not {old:.1%}; the search goes on from it"
    return "rejected", f"not exact here, and {new:.1%} of the log-probabilities differ, {old:.1%} without it"


def _unequal(verdict: Verdict, other: Verdict) -> float:
    """Share of unequal log-probabilities in the conditions that ran in both."""
    both = {c.name for c in other.conditions if c.ran}
    mine = [c for c in verdict.conditions if c.ran and c.name in both]
    return sum(c.mismatches for c in mine) / max(1, sum(c.tokens for c in mine))


def worse_conditions(before: Verdict, after: Verdict) -> list[str]:
    """Conditions that ran before and now do not run, are no longer exact, or whose share of unequal tokens rose beyond noise."""
    now = {condition.name: condition for condition in after.conditions}
    found = []
    for old in before.conditions:
        new = now.get(old.name)
        if not old.ran:
            continue
        if new is None or not new.ran:
            found.append(f"{old.name}: no longer runs")
        elif _rose(old, new):
            found.append(f"{old.name}: {old.mismatches} of {old.tokens} before, {new.mismatches} of {new.tokens} now")
    return found


def _rose(old: ConditionResult, new: ConditionResult) -> bool:
    if old.mismatches == 0 or not old.tokens or not new.tokens:
        return new.mismatches > 0
    share = (old.mismatches + new.mismatches) / (old.tokens + new.tokens)
    deviation = (share * (1 - share) * (1 / old.tokens + 1 / new.tokens)) ** 0.5
    return new.mismatches / new.tokens - old.mismatches / old.tokens > NOISE * deviation


def position(divergence: Divergence) -> tuple[int, int]:
    """Where in the forward pass a divergence sits."""
    role = divergence.site.partition(".")[2]
    fallback = {"embedding": EMBEDDING_LAYER, "log_softmax": HEAD_LAYER}.get(divergence.operator, HEAD_LAYER)
    return (fallback if divergence.layer is None else divergence.layer, SITE_RANK.get(role, 0))


def _compare(before: LocalizeReport | None, after: LocalizeReport) -> Ruling:
    """Per dimension, the first divergence must not have come earlier, and in one at least it must have gone or moved later."""
    old, new = _first(before), _first(after)
    earlier = [d for d in new if d not in old or position(new[d]) < position(old[d])]
    if earlier:
        return "rejected", f"in {', '.join(earlier)} the first divergence is now {new[earlier[0]].site}, earlier than before"
    moved = [f"{d}: {old[d].site} -> {new[d].site if d in new else 'exact'}" for d in old if d not in new or position(new[d]) > position(old[d])]
    if not moved:
        return "rejected", "the first divergence did not move"
    return "kept", "the first divergence moved later: " + "; ".join(moved)


def _first(report: LocalizeReport | None) -> dict[str, Divergence]:
    found: dict[str, Divergence] = {}
    for divergence in report.divergences if report else []:
        if divergence.dimension not in found or position(divergence) < position(found[divergence.dimension]):
            found[divergence.dimension] = divergence
    return found

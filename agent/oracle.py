"""The comparison and the decision: pure functions over raw arrays. Equality is equality of fp32 bit patterns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from agent.arrays import LogProbs
from agent.rules import Objection, named
from agent.verdict import AccuracyResult, ConditionResult, ControlResult, Difference, ThroughputResult, Verdict
from consistency.conditions import Condition

FLAT = 0.97
"""A mean log-probability below this share of -ln V is what a model without preferences gives; every comparison of it passes."""
MOST_EQUAL = 0.5
"""A larger share of log-probabilities with the same bits is a constant with a few exceptions."""
CLOCK_SECONDS, CLOCK_SHARE = 0.25, 0.25
"""How far a job's clock may be from the parent's: starting, polling and writing the answer lie between them."""
IDLE_SHARE, IDLE_SECONDS = 0.25, 0.5
"""Share of one core, and processor seconds in all, that waiting processes may use; polling for the next step takes some 1 %."""
ACCURACY_FACTOR = 2.0
"""The candidate's distance to the reference may be this many times stock's."""

Sampled = Mapping[int, Sequence[int]]
"""request -> its sampled tokens, as the parent knows them"""


@dataclass(frozen=True)
class Table:
    """Log-probabilities sorted by key, after `arrange` found nothing to object to."""

    key: np.ndarray
    """int64: request * 2**32 + position"""
    logprob: np.ndarray
    """float32"""

    def bits(self) -> np.ndarray:
        return self.logprob.view(np.int32)

    def of(self, requests: Iterable[int]) -> Table:
        """Only these requests."""
        keep = np.isin(self.key >> 32, list(requests))
        return Table(self.key[keep], self.logprob[keep])


    def renumber(self, requests: Sequence[int]) -> Table:
        """Request i becomes requests[i]."""
        key = (np.asarray(requests, np.int64)[self.key >> 32] << 32) + (self.key & 0xFFFFFFFF)
        order = np.argsort(key)
        return Table(key[order], self.logprob[order])


def keys(request: np.ndarray, position: np.ndarray) -> np.ndarray:
    return (request.astype(np.int64) << 32) + position.astype(np.int64)


def arrange(found: LogProbs, sampled: Sampled) -> tuple[Table | None, list[Objection]]:
    """Sorts an answer by key and checks it against the tokens that were sampled.

    Returns no table and the objections if keys are missing, duplicated or unknown, or if a log-probability is of another token.
    """
    wanted = np.array([(request << 32) + position for request in sorted(sampled) for position in range(len(sampled[request]))], np.int64)
    tokens = np.array([token for request in sorted(sampled) for token in sampled[request]], np.int64)
    key = keys(found.request, found.position)
    order = np.argsort(key, kind="stable")
    if not np.array_equal(key[order], wanted):
        counts = {"duplicated": len(key) - len(np.unique(key)), "missing": len(np.setdiff1d(wanted, key)),
                  "unknown": len(np.setdiff1d(key, wanted))}
        return None, [Objection("incomplete_answer", f"{count} {kind} tokens") for kind, count in counts.items() if count]
    if others := int((found.token[order] != tokens).sum()):
        return None, [Objection("other_tokens", f"{others} log-probabilities are of tokens that were not sampled")]
    return Table(wanted, found.logprob[order]), []


def flat(table: Table, vocabulary: int) -> list[Objection]:
    """Objection to log-probabilities that carry no information: mostly one value, or as a uniform distribution gives them."""
    values = table.logprob[np.isfinite(table.logprob)].astype(np.float64)
    if not len(values):
        return []
    largest = int(np.unique(values, return_counts=True)[1].max())
    if len(values) > 1 and largest == len(values):
        return [Objection("void_flat_logits", "all log-probabilities are equal")]
    if largest > max(1, MOST_EQUAL * len(values)):
        return [Objection("void_flat_logits", f"{largest} of {len(values)} log-probabilities are equal")]
    if values.mean() < -FLAT * math.log(vocabulary):
        return [Objection("void_flat_logits",
                          f"the mean log-probability {values.mean():.3f} is that of a flat distribution over {vocabulary} tokens")]
    return []


def not_finite(table: Table) -> list[Objection]:
    count = int((~np.isfinite(table.logprob)).sum())
    return [Objection("not_finite", f"{count} of {len(table.key)} log-probabilities are not finite")] if count else []


def compare(left: Table, right: Table) -> tuple[int, int]:
    """(tokens, mismatches) over the keys that both tables have. Values that are not finite count as mismatches even if their bits agree."""
    left, right = overlap(left, right)
    equal = (left.bits() == right.bits()) & np.isfinite(left.logprob) & np.isfinite(right.logprob)
    return len(equal), int((~equal).sum())


def difference(rollout: Table, training: Table) -> Difference:
    """Mismatches, K3 and the largest difference, in nats; pairs that are not finite count as mismatches only."""
    rollout, training = overlap(rollout, training)
    _, mismatches = compare(rollout, training)
    r = training.logprob.astype(np.float64) - rollout.logprob.astype(np.float64)
    r = r[np.isfinite(r)]
    if not len(r):
        return Difference(mismatches=mismatches, k3=0.0, max_abs=0.0)
    return Difference(mismatches=mismatches, k3=float((np.expm1(r) - r).mean()), max_abs=float(np.abs(r).max()))


def overlap(left: Table, right: Table) -> tuple[Table, Table]:
    """Both tables cut to the keys that they share."""
    shared, of_left, of_right = np.intersect1d(left.key, right.key, assume_unique=True, return_indices=True)
    return Table(shared, left.logprob[of_left]), Table(shared, right.logprob[of_right])


def accuracy(reference: Table, stock: Table, candidate: Table) -> AccuracyResult:
    """Root-mean-square distance to the reference, over the tokens that each shares with it."""
    def distance(table: Table) -> tuple[int, float]:
        mine, exact = overlap(table, reference)
        error = mine.logprob.astype(np.float64) - exact.logprob.astype(np.float64)
        return len(error), float(np.sqrt((error**2).mean())) if len(error) else math.nan

    tokens, of_candidate = distance(candidate)
    _, of_stock = distance(stock)
    return AccuracyResult(tokens=tokens, stock=of_stock, candidate=of_candidate, allowed=ACCURACY_FACTOR * of_stock)


def took_place(condition: Condition, counters: Mapping[str, Any], requests: int) -> Objection | None:
    """Objection if the counters of the right probe say that the condition did not really happen."""
    if condition.happened is None:
        return None
    count, floor = counters.get(condition.happened), requests if condition.more_than == "requests" else 0
    if isinstance(count, int) and count > floor:
        return None
    return Objection("did_not_take_place", f"it did not take place: {condition.happened} is {count}, more than {floor} needed")


def settings_differ(condition: Condition, left: Mapping[str, Any] | None, right: Mapping[str, Any] | None) -> Objection | None:
    """Objection if two processes that a condition compares because they run with another setting report the same one."""
    values = [(engine or {}).get(condition.unlike or "") for engine in (left, right)]
    if condition.unlike is None or values[0] != values[1]:
        return None
    return Objection("did_not_take_place", f"it did not take place: {condition.unlike} is {values[0]} in both processes")


@dataclass(frozen=True)
class Timed:
    """One throughput run."""

    tokens: int
    """as the parent counted them in the answer"""
    seconds: float
    """wall clock of the parent: a job's own clock may be tampered with"""
    job_seconds: float | None = None
    """what the job's clock says"""
    others_busy: float = 0.0
    """processor seconds that processes with candidate code used meanwhile, the timed one left out"""


def throughput(pairs: Sequence[tuple[Timed, Timed]], tokens: int) -> tuple[ThroughputResult | None, list[Objection]]:
    """Ratio over neighbouring (stock, candidate) runs. Objects to runs that made another number of tokens than `tokens`."""
    objections = [Objection("timed_tokens", f"throughput: a {name} run made {run.tokens} tokens instead of {tokens}")
                  for pair in pairs for name, run in zip(("stock", "candidate"), pair, strict=True) if run.tokens != tokens]
    if objections or not pairs:
        return None, objections or [Objection("timed_tokens", "throughput: no pairs were timed")]
    stock, candidate = ([pair[arm].tokens / pair[arm].seconds for pair in pairs] for arm in (0, 1))
    ratios = [c / s for s, c in zip(stock, candidate, strict=True)]
    return ThroughputResult(stock=median(stock), candidate=median(candidate), ratio=median(ratios), spread=(min(ratios), max(ratios))), []


def timing_objections(pairs: Sequence[tuple[Timed, Timed]]) -> list[Objection]:
    """Objections to clocks that disagree and to a candidate that was at work while stock was timed."""
    found = []
    for pair in pairs:
        for name, run in zip(("stock", "candidate"), pair, strict=True):
            if run.job_seconds is not None and abs(run.seconds - run.job_seconds) > CLOCK_SECONDS + CLOCK_SHARE * run.seconds:
                found.append(Objection("clock_disagrees", f"throughput: a {name} run took {run.job_seconds:.2f} s by its own clock and "
                                                          f"{run.seconds:.2f} s by the parent's"))
    busy, seconds = sum(pair[0].others_busy for pair in pairs), sum(pair[0].seconds for pair in pairs)
    if busy > max(IDLE_SECONDS, IDLE_SHARE * seconds):
        found.append(Objection("busy_while_stock_ran", f"throughput: candidate code used {busy:.2f} processor seconds while stock was timed for "
                                                       f"{seconds:.2f} s"))
    return found


def configuration_objections(stock: Mapping[str, Any] | None, candidate: Mapping[str, Any] | None,
                             ignore: Iterable[str] = ()) -> list[Objection]:
    """Fields of two resolved engine configurations that differ, apart from some top-level ones: a feature that one arm runs without
    makes the comparison of speeds worthless."""
    if not stock or not candidate:
        return [Objection("config_changed", "an engine did not report its configuration")]
    left, right, skipped = _flatten(stock), _flatten(candidate), set(ignore)
    return [Objection("config_changed",
                      f"the engines are configured differently: {path}: {left.get(path, 'absent')} -> {right.get(path, 'absent')}")
            for path in sorted(left.keys() | right.keys())
            if path.split(".")[0] not in skipped and left.get(path, _ABSENT) != right.get(path, _ABSENT)]


_ABSENT = object()


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {key: leaf for name, inner in value.items() for key, leaf in _flatten(inner, f"{path}.{name}" if path else str(name)).items()}
    return {path: value}


def decide(conditions: Sequence[ConditionResult], controls: Sequence[ControlResult], *, tokens: int, least_tokens: int, void: Sequence[Objection],
           accuracy: AccuracyResult | None, inexact: Sequence[Objection] = ()) -> Verdict:
    """The verdict. `void` and `inexact` are the objections found so far; the rules that need the whole picture are added here."""
    reasons = list(dict.fromkeys(void))
    if tokens < least_tokens:
        reasons.append(Objection("too_few_tokens", f"{tokens} sampled tokens were compared, {least_tokens} are needed"))
    if not controls:
        reasons.append(Objection("negative_control", "no negative control"))
    for control in controls:
        if not control.ran:
            reasons.append(Objection("negative_control", f"negative control '{control.name}' did not run: {control.reason}"))
        elif control.mismatches == 0:
            reasons.append(Objection("negative_control",
                                     f"negative control '{control.name}': a weight was moved by one ulp and nothing was reported"))
    is_void = bool(reasons)
    reasons += dict.fromkeys(inexact)
    for condition in conditions:
        if not condition.ran and not condition.excused:
            reasons.append(Objection("condition_missing", f"'{condition.name}' did not run: {condition.reason}"))
        elif condition.ran and condition.tokens == 0:
            reasons.append(Objection("condition_missing", f"'{condition.name}' compared no token"))
    if not any(condition.ran for condition in conditions):
        reasons.append(Objection("condition_missing", "no condition ran"))
    if accuracy is not None and not accuracy.ok:
        reasons.append(Objection("accuracy", f"accuracy: the candidate is {accuracy.candidate:.2e} nats from the reference, stock "
                                             f"{accuracy.stock:.2e}, allowed {accuracy.allowed:.2e}"))
    mismatches = sum(condition.mismatches for condition in conditions)
    return Verdict(exact=not reasons and mismatches == 0, void=is_void, tokens=tokens, mismatches=mismatches, conditions=list(conditions),
                   reasons=[str(r) for r in reasons], rules=[*(["mismatch"] if mismatches else []), *named(reasons)])

"""`agent report`: one self-contained HTML page about a run."""

from pathlib import Path
from typing import Any

import jinja2

from agent.llm import reading
from agent.llm.trajectory import Trajectory
from agent.pr.body import environment_rows
from agent.screen import recipe_line
from agent.state import Attempt, RunState, key
from agent.tools.divergence import Divergence, LocalizeReport, SiteCount
from agent.verdict import ConditionResult, ThroughputResult
from consistency.models.catalog import EMBEDDING_LAYER, HEAD_LAYER

WORDS = {
    "exact": ("exact and fast enough", "good"), "slow": ("exact, but too slow", "warn"), "inexact": ("not exact", "bad"),
    None: ("not finished", "warn")}
"""Outcome -> what the page says and its tone."""


def render(state: RunState, trajectory: Trajectory | None = None) -> str:
    """The page; with the trajectory of a model, what that did. All text is escaped: reasons and kernel names come from candidates."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    word, tone = WORDS[state.outcome]
    best = state.best
    return environment.get_template("report.html").render(
        s=state, recipe=recipe_line(state), word=word, tone=tone, best=best, figures=_figures(state), strips=_strips(state), causes=_causes(state),
        groups=_groups(state), steps=reading.steps(trajectory) if trajectory else [], spent=f"Spent: {trajectory.spent}." if trajectory else "",
        speed=_speed(best.throughput, state.target) if best and best.throughput else None,
        environment=environment_rows(best.environment) if best else [])


def _figures(state: RunState) -> list[dict[str, str]]:
    def figure(name: str, value: str, unit: str = "", note: str = "", tone: str = "") -> dict[str, str]:
        return {"name": name, "value": value, "unit": unit, "note": note, "tone": tone}

    figures = []
    if state.baseline and state.best:
        now, ran = state.best.verdict, [c for c in state.best.verdict.conditions if c.ran]
        figures.append(figure("unequal log-probabilities", f"{state.baseline.verdict.mismatches:,} → {now.mismatches:,}", "",
                              f"{sum(c.tokens for c in ran):,} compared, {now.tokens:,} sampled tokens", "" if now.mismatches else "good"))
        figures.append(figure("conditions", f"{len(ran)}", f"of {len(now.conditions)} ran", f"{state.best.level} matrix"))
    if state.best and state.best.throughput:
        ratio = state.best.throughput.ratio
        figures.append(figure("throughput", f"{ratio:.3f}", "of stock", f"target {state.target:.3f}", "good" if ratio >= state.target else "bad"))
    if state.baseline and state.baseline.baseline:
        figures.append(figure("stock K3", f"{state.baseline.baseline.k3:.2g}", "", f"largest difference {state.baseline.baseline.max_abs:.2g} nats"))
    kept = sum(attempt.outcome == "kept" for attempt in state.attempts)
    figures.append(figure("attempts", f"{len(state.attempts)}", f"{kept} kept", f"{state.seconds / 60:.1f} minutes in all"))
    return figures


def _strips(state: RunState) -> list[dict[str, Any]]:
    """Per dimension, every traced site in order of execution, before and now."""
    before, now = state.first_localize, state.localize
    strips = []
    for dimension, sites in (before.sites if before else {}).items():
        rows = [{"name": "before", "layers": _row(sites, before)}]
        if now and now != before and dimension in now.sites:
            rows.append({"name": "now", "layers": _row(now.sites[dimension], now)})
        elif state.best and state.best.verdict.exact:
            # Equal log-probabilities in every condition end a run without one more trace.
            rows.append({"name": "now, by verdict", "layers": _row([site.model_copy(update={"differing": 0}) for site in sites], None)})
        strips.append({"dimension": dimension, "rows": rows})
    return strips


def _row(sites: list[SiteCount], report: LocalizeReport | None) -> list[dict[str, Any]]:
    own = {d.site for d in report.divergences} if report else set()
    layers: dict[int, list[dict[str, Any]]] = {}
    for site in sites:
        kind = "equal" if not site.differing else "first" if site.site in own else "later"
        layers.setdefault(site.layer, []).append({
            "kind": kind, "strength": round(0.25 + 0.75 * site.differing / max(site.rows, 1), 2) if kind == "later" else 1,
            "title": f"{site.site} ({site.operator}): {site.differing} of {site.rows} rows differ"})
    return [{"label": {EMBEDDING_LAYER: "in", HEAD_LAYER: "head"}.get(layer, str(layer)), "cells": cells} for layer, cells in layers.items()]


def _causes(state: RunState) -> list[dict[str, Any]]:
    reports = [report for report in [state.first_localize, *(a.localize for a in state.attempts), state.localize] if report]
    known: dict[str, Divergence] = {}
    for report in reports:
        for divergence in report.divergences:
            known.setdefault(key(divergence), divergence)
    fixed = [(name, attempt) for attempt in state.attempts if attempt.outcome == "kept" for name in attempt.addresses]
    return [{"d": known[name], "fix": _fix(known[name], attempt)} for name, attempt in fixed if name in known]


def _fix(divergence: Divergence, attempt: Attempt) -> str:
    mine = [str(binding) for binding in attempt.bindings if binding.operator == divergence.operator]
    return f"{', '.join(mine) or attempt.title} (attempt {attempt.number})"


def _groups(state: RunState) -> list[dict[str, Any]]:
    if state.best is None:
        return []
    before = {c.name: c for c in state.baseline.verdict.conditions} if state.baseline else {}
    groups: dict[str, list[dict[str, Any]]] = {}
    for c in state.best.verdict.conditions:
        old = before.get(c.name)
        groups.setdefault(c.dimension, []).append({
            "name": c.name, "reason": c.reason, "before": _count(old), "before_share": _share(old), "after": _count(c), "after_share": _share(c),
            "tone": "soft" if not c.ran else "bad" if c.mismatches else "good"})
    return [{"dimension": dimension, "rows": rows} for dimension, rows in groups.items()]


def _count(condition: ConditionResult | None) -> str:
    return "–" if condition is None or not condition.ran else f"{condition.mismatches:,} of {condition.tokens:,}"


def _share(condition: ConditionResult | None) -> float | None:
    return round(100 * condition.mismatches / condition.tokens, 1) if condition and condition.ran and condition.tokens else None


def _speed(timing: ThroughputResult, target: float) -> dict[str, Any]:
    """Widths in per cent of the longest bar."""
    full = max(1.0, timing.spread[1]) * 1.02
    return {"t": timing, "stock_width": 100 / full, "width": 100 * timing.ratio / full, "target": 100 * target / full,
            "low": 100 * timing.spread[0] / full, "high": 100 * timing.spread[1] / full}

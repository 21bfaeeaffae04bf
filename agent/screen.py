"""What a person sees: a live panel on a terminal, plain lines elsewhere, and one screen at the end."""

import contextlib
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agent.state import RunState
from agent.verdict import ConditionResult, VerifyReport

PLAIN_EVERY = 15.0
"""Seconds between lines about one long step where there is no terminal."""


class Observer(Protocol):
    """Where a run shows itself."""

    def step(self, state: RunState, seconds_left: float) -> None:
        """A step begins."""
        ...

    def tick(self, event: Any) -> None:
        """Something a tool said about itself; called often."""
        ...


class Screen:
    """Live on a terminal, lines elsewhere. A context manager, so that the terminal is given back on every way out."""

    def __init__(self, console: Console):
        self.console = console
        # Rendered anew at each refresh, so that the time left runs on through a long step.
        self.live = Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._panel) if console.is_terminal else None
        self.state: RunState | None = None
        self.deadline = 0.0
        self.event: Any = None
        self.printed = ("", 0.0)
        self.logged = 0

    def __enter__(self) -> "Screen":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live:
            self.live.stop()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """The terminal without the panel, for a question to the person in front of it."""
        if self.live:
            self.live.stop()
        try:
            yield
        finally:
            if self.live:
                self.live.start()

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=not self.console.is_terminal)

    def step(self, state: RunState, seconds_left: float) -> None:
        self.state, self.deadline, self.event = state, time.monotonic() + seconds_left, None
        for line in state.steps[self.logged:]:
            self.say(line)
        self.logged = len(state.steps)
        self._show()

    def tick(self, event: Any) -> None:
        self.event = event
        self._show()

    def _show(self) -> None:
        if self.state is None or self.live:
            return
        phase, now = self.state.phase, time.monotonic()
        if phase != self.printed[0] or now - self.printed[1] > PLAIN_EVERY:
            # The longer facts change only with the phase.
            left_out = ("attempt", "first divergence") if phase == self.printed[0] else ()
            facts = ", ".join(value if name == "phase" else f"{name} {value}" for name, value in self._facts(self.state)
                              if value and name not in left_out)
            self.printed = (phase, now)
            self.say(f"{datetime.now(UTC):%H:%M:%S} {facts}")

    def _panel(self) -> Panel | Text:
        if (state := self.state) is None:
            return Text()
        grid = facts_grid()
        for name, value in self._facts(state):
            grid.add_row(Text(name, style="dim"), Text(value or "–"))
        return Panel(grid, title=f"{state.model} · {state.scale} · run {state.run}", title_align="left", border_style="cyan")

    def _facts(self, state: RunState) -> list[tuple[str, str]]:
        """Name and value of everything worth showing now."""
        known = state.attempts[-1].verify if state.attempts and state.attempts[-1].verify else state.best
        tokens = getattr(self.event, "tokens", None)
        mismatches = getattr(self.event, "mismatches", None)
        ratio = getattr(self.event, "ratio", None)
        if tokens is None and known:
            tokens, mismatches = sum(c.tokens for c in known.verdict.conditions), known.verdict.mismatches
        if ratio is None and known and known.throughput:
            ratio = known.throughput.ratio
        attempt = f"{len(state.attempts)}: {state.attempts[-1].title} ({state.attempts[-1].outcome})" if state.attempts else ""
        first = ", ".join(f"{d.operator} at {d.site} ({d.dimension})" for d in state.divergences()[:2])
        return [
            ("phase", " · ".join(filter(None, [state.phase, doing(self.event)]))),
            ("attempt", attempt),
            ("first divergence", first),
            ("tokens compared", "" if tokens is None else f"{tokens}"),
            ("mismatches", "" if mismatches is None else f"{mismatches}"),
            ("throughput ratio", "" if ratio is None else f"{ratio:.3f}"),
            ("time left", _duration(max(0.0, self.deadline - time.monotonic()))),
        ]


def doing(event: Any) -> str:
    """What a tool is at, in its own words."""
    if event is None or isinstance(event, str):
        return event or ""
    parts = [str(getattr(event, name, "")) for name in ("phase", "condition", "step", "text")]
    done, of = getattr(event, "done", None), getattr(event, "conditions", None)
    return " ".join(filter(None, parts)) + (f" ({done} of {of})" if of else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def summary(state: RunState, workspace: str) -> Group:
    """The last screen of a run."""
    words = {
        "exact": Text("exact and fast enough", style="bold green"), "slow": Text("exact, but too slow", style="bold yellow"),
        "inexact": Text("not exact", style="bold red")}
    head = Text.assemble(f"{state.model} at scale {state.scale}: ", words[state.outcome or "inexact"], f" – {state.why}")
    lines: list[Any] = [head]
    if state.best:
        lines += [by_dimension(state.baseline, state.best), verdict_lines(state.best)]
    kept = sum(a.outcome == "kept" for a in state.attempts)
    facts = facts_grid()
    for name, value in [
        *([("recipe", recipe_line(state))] if state.recipe else []), ("attempts", f"{len(state.attempts)} ({kept} kept)"), ("branch", state.branch),
        ("pull request", state.pull_request or "none: nothing to propose"), ("report", f"agent report {workspace}"),
        ("time", _duration(state.seconds)),
    ]:
        facts.add_row(Text(name, style="dim"), Text(value))
    return Group(*lines, facts)


def recipe_line(state: RunState) -> str:
    """What became of the recipe that was tried first."""
    if state.recipe is None:
        return ""
    tried = state.recipe_attempt
    return f"{state.recipe.name}: " + (f"{tried.outcome}, {tried.reason}" if tried and tried.outcome != "open" else "not measured" if tried is None
                                       else "being measured")


def facts_grid() -> Table:
    """Name and value; a long path wraps, it is never cut."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def by_dimension(before: VerifyReport | None, after: VerifyReport) -> Table:
    table = Table("dimension", "conditions", "compared", "stock", "now", box=None, pad_edge=False, header_style="dim")
    old = before.verdict.conditions if before else []
    for dimension in dict.fromkeys(c.dimension for c in after.verdict.conditions):
        mine = [c for c in after.verdict.conditions if c.dimension == dimension]
        ran = [c for c in mine if c.ran]
        mismatches = sum(c.mismatches for c in ran)
        stock = _share([c for c in old if c.dimension == dimension and c.ran])
        table.add_row(
            dimension, f"{len(ran)} of {len(mine)} ran", str(sum(c.tokens for c in ran)), stock,
            Text(_share(ran), style="green" if ran and not mismatches else "red"))
    return table


def _share(conditions: list[ConditionResult]) -> str:
    tokens = sum(c.tokens for c in conditions)
    mismatches = sum(c.mismatches for c in conditions)
    return f"{mismatches} unequal" + (f" ({mismatches / tokens:.1%})" if tokens and mismatches else "") if conditions else "–"


def by_condition(report: VerifyReport) -> Group:
    table = Table("condition", "dimension", "unequal", box=None, pad_edge=False, header_style="dim")
    table.columns[0].no_wrap = True
    table.columns[2].no_wrap = True
    for c in report.verdict.conditions:
        colour = "green" if c.ran and not c.mismatches else "yellow" if not c.ran else "red"
        table.add_row(c.name, c.dimension, Text(f"{c.mismatches} of {c.tokens}" if c.ran else "not run", style=colour))
    reasons = [Text(f"{c.name}: {c.reason}", style="yellow") for c in report.verdict.conditions if c.reason]
    return Group(table, *reasons)


def verdict_lines(report: VerifyReport) -> Text:
    verdict = report.verdict
    word = "void" if verdict.void else "exact" if verdict.exact else "not exact"
    text = Text(f"{report.level} verdict: {word}, {verdict.mismatches} mismatches, {verdict.tokens} sampled tokens")
    if report.throughput:
        low, high = report.throughput.spread
        text.append(f"\nthroughput: {report.throughput.candidate:.0f} of {report.throughput.stock:.0f} tokens/s, "
                    f"ratio {report.throughput.ratio:.3f} (pairs {low:.3f} to {high:.3f}, target {report.target_throughput:.3f})")
    for control in report.controls:
        text.append(f"\ncontrol, {control.name}: " + (f"{control.mismatches} of {control.tokens} reported" if control.ran else control.reason))
    for reason in verdict.reasons:
        text.append(f"\n{reason}", style="yellow")
    if verdict.rules:
        text.append(f"\nrules: {', '.join(verdict.rules)}")
    if (box := report.environment.get("sandbox")) and "not_guarded" in box:
        text.append(f"\nsandbox: {box['name']}; not guarded against: {'; '.join(box['not_guarded'])}", style="dim")
    return text

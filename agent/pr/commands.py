"""What `agent pr` and `agent verify-pr` do, once their imports are worth it."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent import checkpoint, models, screen, state
from agent.cli import print_json
from agent.errors import UserError
from agent.llm.redact import redact, secrets
from agent.pr import subject
from agent.pr.check import Check, Checked
from agent.pr.claims import Claims
from agent.pr.publish import Options, Published, PullRequest
from agent.toolset import EngineTools, Tools
from agent.workspace import Workspace
from consistency.models.catalog import FAMILIES

EVERY = 10.0
"""Seconds between lines about one measurement."""
STYLES = {"same": "green", "reproduces": "green", "differs": "bold red", "note": "yellow"}


def publish(path: Path, options: Options, as_json: bool, tools: Tools | None) -> None:
    console = Console(stderr=as_json)
    workspace = Workspace.open(path)
    with workspace.lock():
        current = state.load_current(workspace)
        if tools is None:
            if not options.prepared:
                models.require_engines(current.device)
            jobs = state.folder(workspace, current.run) / "jobs"
            target = current.target if options.target is None else options.target
            weights = Path(current.checkpoint)
            if not weights.is_dir() and not options.prepared:
                weights = _weights(current.model, current.scale, workspace.settings.weights and Path(workspace.settings.weights))
            tools = EngineTools(current.model, current.scale, weights, target, jobs, sandbox=workspace.settings.sandbox)
        made = PullRequest(workspace, current, tools, options, _Steps(console), lambda text: _say(console, text)).publish()
    if as_json:
        print_json(json.loads(made.model_dump_json()))
    else:
        _show(console, made, options)


def _show(console: Console, made: Published, options: Options) -> None:
    rows = [("branch", f"{made.branch} at {made.head[:12]}"), ("verified", f"{made.verified[:12]}, verdict {made.verdict}"), ("title", made.title),
            ("text", made.body), ("patches", f"{len(made.patches)} in {Path(made.out) / 'patches'}")]
    if made.pull_request:
        rows.append(("updated" if made.updated else "draft", made.pull_request))
    elif options.repo:
        rows.append(("dry run", "nothing was pushed or opened"))
    else:
        rows.append(("to open it", "push the branch and use text and title, or give --repo OWNER/NAME"))
    for name, value in rows:
        console.print(Text.assemble((f"{name:<10} ", "dim"), value), soft_wrap=True)


def verify(argument: str, repository: Path | None, weights: Path | None, static: bool, as_json: bool, tools: Tools | None) -> None:
    console = Console(stderr=as_json)
    found = subject.find(argument, repository)
    with tempfile.TemporaryDirectory(prefix="verify-pr-") as scratch:
        def make(made: Claims) -> Tools:
            if tools is not None:
                return tools
            if made.model not in FAMILIES or made.scale not in FAMILIES[made.model].scales:
                raise UserError(f"the pull request is about {made.model} at scale {made.scale}, which this version does not know")
            models.require_engines(FAMILIES[made.model].scales[made.scale].device)
            if made.weights == "given" and weights is None:
                raise UserError("the figures were measured on weights that are not part of the pull request; name their folder with --weights")
            return EngineTools(made.model, made.scale, _weights(made.model, made.scale, weights), made.required, Path(scratch) / "jobs")

        checked = Check(found, make, _Steps(console), static, lambda text: _say(console, text)).run(Path(scratch) / "code")
    if as_json:
        print_json({**json.loads(checked.model_dump_json()), "holds": checked.holds})
    else:
        _table(console, checked)
    if not checked.holds:
        raise typer.Exit(1)


def _table(console: Console, checked: Checked) -> None:
    table = Table("claim", "stated", "found", "", box=None, pad_edge=False, header_style="dim")
    for row in checked.rows:
        table.add_row(*(Text(_plain(text)) for text in (row.claim, row.stated, row.found)), Text(row.result, style=STYLES[row.result]))
    console.print(table)
    wrong = sum(row.result == "differs" for row in checked.rows)
    if wrong:
        console.print(Text(f"does not hold: {wrong} of {len(checked.rows)} rows differ", style="bold red"))
    elif checked.ran:
        console.print(Text(f"reproduces, at {checked.commit[:12]}", style="bold green"))
    else:
        console.print(Text("text, evidence and code belong together; nothing was measured again", style="bold"))


def _plain(text: str) -> str:
    """Somebody else's words, without control characters of a terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def _say(console: Console, text: str) -> None:
    console.print(Text(redact(text, secrets()), style="dim"), soft_wrap=True)


def _weights(model: str, scale: str, given: Path | str | None) -> Path:
    return checkpoint.check(Path(given), FAMILIES[model]) if given else checkpoint.seeded(model, scale)


class _Steps:
    """Shows what a long measurement is at, now and then."""

    def __init__(self, console: Console):
        self.console, self.said = console, ("", time.monotonic())

    def __call__(self, event: Any) -> None:
        text, now = screen.doing(event), time.monotonic()
        if text and text != self.said[0] and now - self.said[1] > EVERY:
            self.said = (text, now)
            _say(self.console, f"  {text}")



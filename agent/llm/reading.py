"""A trajectory for people: typed steps for the report page, and the same as Markdown."""

import json
from typing import Any

from pydantic import BaseModel

from agent.llm.conversation import Call
from agent.llm.trajectory import FOLDER, Answering, Resulting, Told, Trajectory
from agent.state import folder
from agent.workspace import Workspace

SHORT = 4000
"""Characters of one text; the files have the whole."""


class CallView(BaseModel):
    """A call and what it came to."""

    name: str
    arguments: str
    """Short ones on one line."""
    files: dict[str, str] = {}
    """Text of the files that a patch brings."""
    result: str = ""
    error: bool = False


class StepView(BaseModel):
    """One answer, with what was said to the model before it."""

    number: int
    at: str
    inherited: bool
    told: list[str] = []
    thinking: str = ""
    text: str = ""
    end: str
    detail: str = ""
    calls: list[CallView] = []
    usd: float
    tokens: int
    seconds: float


def steps(trajectory: Trajectory) -> list[StepView]:
    """In order. Texts that were said after the last answer are left out."""
    views: list[StepView] = []
    told: list[str] = []
    results: dict[str, CallView] = {}
    for number, record in enumerate(trajectory.records):
        body = record.body
        if isinstance(body, Told):
            told.append(plain(body.text))
        elif isinstance(body, Answering):
            answer = body.answer
            results = {call.id: _call(call) for call in answer.calls}
            views.append(StepView(
                number=body.step, at=record.at, inherited=number < trajectory.header.inherited, told=told, thinking=plain(answer.thinking),
                text=plain(answer.text), end=answer.end, detail=plain(answer.detail), calls=list(results.values()), usd=body.usd,
                tokens=answer.usage.total, seconds=answer.seconds))
            told = []
        elif isinstance(body, Resulting) and body.result.call in results:
            view = results[body.result.call]
            view.result, view.error = plain(body.result.text), body.result.error
    for call in views[-1].calls if views else []:
        if not call.result:
            call.result = "the run ended here" if call.name == "stop" else "not carried out yet"
    return views


def of_run(workspace: Workspace, run: str) -> Trajectory | None:
    """None if no model had a part in the run."""
    place = folder(workspace, run)
    return Trajectory.load(place) if (place / FOLDER / "header.json").exists() else None


def markdown(trajectory: Trajectory) -> str:
    """The whole trajectory as one text."""
    parts = [f"# {trajectory.folder.parent.name}: {trajectory.header.policy}", f"Spent: {trajectory.spent}."]
    if trajectory.header.forked_from:
        parts.append(f"Forked from {trajectory.header.forked_from}; steps marked * were answered there.")
    for step in steps(trajectory):
        parts += [_quoted(text) for text in step.told]
        cost = f"{step.tokens} tokens, {step.usd:.4f} USD, {step.seconds:.1f} s"
        ended = step.end if step.end in ("calls", "end") else f"{step.end}, {step.detail}"
        parts.append(f"## Step {step.number}{'*' if step.inherited else ''} ({cost}; {ended})")
        parts += [_quoted(step.thinking)] if step.thinking else []
        parts += [step.text] if step.text else []
        for call in step.calls:
            parts.append(f"**{call.name}** `{call.arguments}`")
            parts += [f"{name}:\n\n{_fenced(text)}" for name, text in call.files.items()]
            parts.append(_fenced(("error: " if call.error else "") + call.result))
    return "\n\n".join(parts) + "\n"


def plain(text: str, limit: int = SHORT) -> str:
    """Shortened, and without control characters, which could rewrite a terminal."""
    shown = "".join(c if c in "\n\t" or (c.isprintable()) else "\N{REPLACEMENT CHARACTER}" for c in text)
    return shown if len(shown) <= limit else f"{shown[:limit]} ... ({len(shown) - limit} more characters)"


def _call(call: Call) -> CallView:
    if call.arguments is None:
        return CallView(name=plain(call.name), arguments=plain(call.raw, 400))
    files = call.arguments.get("files") if call.name == "patch_kernel" else None
    texts = {plain(str(f.get("path"))): plain(str(f.get("text"))) for f in files if isinstance(f, dict)} if isinstance(files, list) else {}
    short: dict[str, Any] = {name: value for name, value in call.arguments.items() if not (texts and name == "files")}
    return CallView(name=plain(call.name), arguments=plain(json.dumps(short, ensure_ascii=False), 400), files=texts)


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines())


def _fenced(text: str) -> str:
    """In a fence longer than any in the text."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"

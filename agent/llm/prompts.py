"""The texts in agent/prompts/, read once."""

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "prompts"


@functools.cache
def text(name: str) -> str:
    """A whole file."""
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8").strip()


@functools.cache
def sections(name: str) -> dict[str, str]:
    """A file's `## heading` parts, by heading."""
    parts = text(name).split("\n## ")[1:]
    return {heading.strip(): body.strip() for heading, _, body in (part.partition("\n") for part in parts)}


def filled(template: str, **values: object) -> str:
    """Replace `{name}`. Values are put in as they are: braces in them have no meaning."""
    return re.sub(r"\{(\w+)\}", lambda match: str(values[match[1]]), template)

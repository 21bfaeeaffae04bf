"""Which sandbox jobs run in: the command line or CONSISTENCY_SANDBOX, else consistency.toml, else the strongest that works here."""

import os
from typing import get_args

from agent.errors import UserError
from sandboxes import Choice, Sandbox, SandboxUnavailable, choose

VARIABLE = "CONSISTENCY_SANDBOX"
"""Set by `--sandbox`, so that the processes which the MCP server starts follow it too."""


def prefer(name: str | None) -> str | None:
    """Remembers the command line's choice for this process and those it starts. Raises UserError for an unknown name."""
    if name is not None:
        _check(name, "--sandbox")
        os.environ[VARIABLE] = name
    return name


def sandbox(configured: Choice = "auto") -> Sandbox:
    """`configured` is the workspace's. Raises UserError if the one that was asked for cannot be used."""
    wanted = os.environ.get(VARIABLE) or configured
    _check(wanted, VARIABLE)
    try:
        return choose(wanted)  # type: ignore[arg-type]
    except SandboxUnavailable as error:
        raise UserError(str(error)) from None


def _check(name: str, where: str) -> None:
    if name not in get_args(Choice):
        raise UserError(f"{where}: unknown sandbox {name!r}; known: {', '.join(get_args(Choice))}")

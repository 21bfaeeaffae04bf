"""Rules of the projects that pull requests go to: upstream.toml, and what follows from it for a person and a text."""

import sys
import tomllib
from collections.abc import Callable
from email.utils import parseaddr
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from agent.errors import UserError

FILE = Path(__file__).resolve().parents[1] / "upstream.toml"
DEVICES = {"cpu": "[CPU]"}
YES = "I have read every changed line"


class Profile(BaseModel):
    """One table of upstream.toml; the fields are explained there."""

    model_config = ConfigDict(extra="forbid")

    name: str = ""
    match: list[str] = []
    package: str = ""
    read_on: str = ""
    sources: list[str] = []
    human: bool = False
    sign_off: bool = False
    attribution: str = "Assisted-by"
    coordination: bool = False
    duplicates: bool = True
    area: list[str] = []
    tags: str = ""
    largest: int | None = None
    """changed lines above which the project wants a design discussion first"""
    note: str = ""
    template: dict[str, list[str]] = {}

    def title(self, text: str, device: str) -> str:
        tags = self.tags.format(device=DEVICES.get(device, ""))
        return f"{tags} {text}" if tags else text


PLAIN = Profile()
"""For repositories that nothing is known about."""


def profiles() -> dict[str, Profile]:
    return {name: Profile(name=name, **table) for name, table in tomllib.loads(FILE.read_text(encoding="utf-8")).items()}


def choose(name: str | None, repository: str | None, package: str | None) -> Profile:
    """The profile asked for, else that of the repository, else that of the package whose checkout is changed, else none.

    Raises UserError for an unknown name, and for one that would put aside the rules of the repository that the pull request goes to.
    """
    known = profiles()
    own = next((p for p in known.values() if repository and any(fnmatchcase(repository.lower(), pattern.lower()) for pattern in p.match)), None)
    if name is not None and name not in known:
        raise UserError(f"unknown profile {name!r}; known: {', '.join(known)}")
    if own and name not in (None, own.name):
        raise UserError(f"{repository} has rules of its own, the profile {own.name!r}; leave --profile out")
    if own or name:
        return own or known[name or ""]
    return next((p for p in known.values() if package and p.package == package), PLAIN)


def person(text: str) -> tuple[str, str]:
    """(name, address). Raises UserError unless it reads as one person's."""
    if "[bot]" in text.lower():
        raise UserError(f"--human {text!r} is no person")
    name, address = parseaddr(text)
    user, at, domain = address.partition("@")
    if not (name and user and at and "." in domain and text.count("<") == 1) or any(ord(c) < 32 for c in text):
        raise UserError(f"--human {text!r}: expected \"Name <address@example.org>\" of the person who answers for the change")
    if address.lower().startswith(("noreply@", "no-reply@")):
        raise UserError(f"--human {text!r} is no person")
    return name, address


def check_rules(profile: Profile, human: str, coordination: str, lines: int) -> None:
    """What can be refused before anything is measured, for a pull request that shall be opened. Raises UserError."""
    where = f"{profile.name}'s rules ({profile.sources[0]})" if profile.sources else "this project"
    if profile.human and not human:
        raise UserError(f"{where} want a named person who answers for the change: give --human \"Name <address>\". {profile.note.capitalize()}")
    if profile.coordination and not coordination.startswith("https://"):
        raise UserError(f"{where} want the change agreed in an issue first: give its address with --coordination https://...")
    if profile.largest is not None and lines > profile.largest:
        raise UserError(f"the change has {lines} lines and {where} want a design discussion above {profile.largest}; make it smaller, or open that "
                        "first")


def confirm(profile: Profile, human: str, confirmed: bool, summary: str, ask: Callable[[str], str] = input) -> bool:
    """Whether the named person has said to have read every line: by the option, or here on a terminal.

    Raises UserError where the profile needs it and nobody can say so.
    """
    if confirmed or not human:
        return confirmed
    if ask is input and not sys.stdin.isatty():
        if profile.human:
            raise UserError(f"{profile.name} takes no pull request from an unattended program, and there is no terminal to ask {human} on; "
                            "that person can run this in one, or pass --i-have-read-every-line")
        return False
    answer = ask(f"{summary}\n{human}: type '{YES}' if you have, and stand for it: ").strip()
    if answer.rstrip(".").lower() != YES.lower():
        if profile.human:
            raise UserError(f"not opened: {human} has not confirmed having read every changed line")
        return False
    return True

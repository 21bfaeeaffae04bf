"""Keys kept out of everything that is written or sent as text."""

import os
import re
from collections.abc import Iterable

_SECRET = re.compile(r"(_KEY|_TOKEN|_SECRET|_PASSWORD|_HEADERS)$")
MIN_LENGTH = 12
"""A shorter value would also hit ordinary words."""
MARK = "[removed: a secret]"


def secrets(environment: dict[str, str] | None = None) -> list[str]:
    """Values of all environment variables that look like credentials, longest first."""
    found = {value for name, value in (os.environ if environment is None else environment).items() if _SECRET.search(name.upper())}
    return sorted((value for value in found if len(value) >= MIN_LENGTH), key=len, reverse=True)


def redact(text: str, values: Iterable[str]) -> str:
    for value in values:
        text = text.replace(value, MARK)
    return text

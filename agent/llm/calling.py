"""One request to a provider: the SDK retries, this retries the SDK a few times more, and what is left becomes one line."""

import re
import time
from collections.abc import Callable
from typing import Any

from agent.errors import BudgetEnded, UserError
from agent.llm.redact import redact, secrets

PAUSES = (5.0, 20.0, 60.0)
"""Seconds between outer attempts. Each of them is already a series of the SDK's own."""
SDK_RETRIES = 2
CONNECT_SECONDS = 10.0

_FULL = re.compile(r"context[ _](length|window)|prompt is too long|maximum context|too many tokens|input is too long|max_model_len", re.IGNORECASE)
_TRANSIENT = {408, 409, 429}
HINTS = {401: "check the key", 402: "check the account", 403: "check what the key may do", 404: "check the model's name and the address"}


class Unavailable(BudgetEnded):
    """The provider gives no answer now; everything is saved and the run can go on later."""


class ContextFull(Exception):
    """The conversation no longer fits into the model's context window."""


class Transient(Exception):
    """An answer that another attempt may mend."""


def expect(answer: Any, kind: type) -> None:
    """Raise Transient unless the SDK could make an answer of what came; a proxy's error page arrives as a plain string."""
    if not isinstance(answer, kind):
        raise Transient(f"what came back is not a {kind.__name__}: {' '.join(str(answer).split())[:100]!r}")


def call(send: Callable[[], Any], provider: str, *, sleep: Callable[[float], None] = time.sleep) -> Any:
    """Send once and again. `send` raises what the anthropic or the openai SDK raises.

    Raises ContextFull, UserError for a request that no repetition mends (key, model name, parameters), and Unavailable when patience ends.
    """
    for pause in (*PAUSES, None):
        try:
            return send()
        except Exception as error:
            reason = _transient(error, provider)
            if pause is None:
                raise Unavailable(f"{provider} does not answer ({reason}); `agent resume` asks again") from None
            sleep(pause)


def _transient(error: Exception, provider: str) -> str:
    """Why it is worth another attempt. Raises what it means if it is not; any other exception passes through as the bug it is."""
    status = getattr(error, "status_code", None)
    name = type(error).__name__
    if name == "APITimeoutError":  # the SDK has waited several times the longest wait already
        raise Unavailable(f"{provider} did not answer in time; `agent resume` asks again") from None
    if isinstance(error, Transient) or name == "APIConnectionError":
        return _line(error)
    if not isinstance(status, int):
        raise error
    if status == 413 or (status in (400, 422) and (getattr(error, "code", None) == "context_length_exceeded" or _FULL.search(str(error)))):
        raise ContextFull(_line(error)) from None
    if status in _TRANSIENT or status >= 500:
        return f"{status} {_line(error)}"
    hint = HINTS.get(status)
    request = getattr(error, "request_id", None)
    raise UserError(f"{provider} refused the request with {status}: {_line(error)}{f' (request {request})' if request else ''}"
                    f"{f'; {hint}' if hint else ''}") from None


def _line(error: Exception) -> str:
    """The server's own message, or the exception's, on one line; some servers quote the key that they do not like."""
    body = getattr(error, "body", None)
    inner = body.get("error", body) if isinstance(body, dict) else None
    message = inner.get("message") if isinstance(inner, dict) else None
    return redact(" ".join(str(message or error).split()), secrets())[:300]

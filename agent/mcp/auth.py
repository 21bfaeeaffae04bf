"""Bearer token of the HTTP server: where it comes from, and the gate that asks for it."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agent.errors import UserError
from agent.mcp.jobs import TOKEN

SHORTEST = 16
"""Characters of a token that cannot be guessed by trying."""


def load_token(file: Path | None, state: Path) -> tuple[str, str]:
    """The token and where it came from: AGENT_MCP_TOKEN, `file`, or a file in `state` that is made if it is not there.

    Raises UserError if the token is short or its file can be read by others.
    """
    if file is None and (given := os.environ.get(TOKEN)):
        return _checked(given, f"the environment variable {TOKEN}")
    path = file or state / "token"
    if file is None and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as handle:
            handle.write(secrets.token_urlsafe(32) + "\n")
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise UserError(f"{path} can be read by others (mode {mode:o}); `chmod 600 {path}`")
        return _checked(path.read_text(encoding="utf-8").strip(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a token ({error}); write one with `openssl rand -hex 32`") from None


def _checked(token: str, source: str) -> tuple[str, str]:
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(f"the token in {source} is not usable: it needs at least {SHORTEST} printable ASCII characters and no space")
    return token, source


class BearerGate:
    """Lets a request through only with `Authorization: Bearer TOKEN`; compared in constant time."""

    def __init__(self, app: ASGIApp, token: str):
        self.app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._allowed(scope):
            await self.app(scope, receive, send)
            return
        answer = JSONResponse({"error": "invalid_token", "error_description": "send the header `Authorization: Bearer TOKEN`"}, 401,
                              {"WWW-Authenticate": 'Bearer realm="train-inference-consistency", error="invalid_token"'})
        await answer(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token, self._token)

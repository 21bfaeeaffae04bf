"""A forge with GitHub's REST API: finds open pull requests, opens or updates a draft. Every failure is one line; the token is in none."""

import json
import os
import re
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from agent import __version__
from agent.errors import AgentError, UserError
from agent.llm.redact import redact
from agent.workspace import call_git

TOKENS = ("GITHUB_TOKEN", "GH_TOKEN")
PUBLIC = "https://api.github.com"
TRIES = 4
LONGEST_WAIT = 60.0
"""Seconds; who is told to wait longer comes back later."""
TIMEOUT = 30.0
PAGES = 3
"""Pages of 100 open pull requests that are looked through where there is no search."""
_LOCAL = ("127.0.0.1", "localhost", "::1")


class ForgeError(AgentError):
    """The forge or the way to it; nothing was opened."""


@dataclass(frozen=True)
class Pull:
    number: int
    title: str
    url: str


def pause(seconds: float) -> None:
    time.sleep(seconds)


def token_from(environment: Mapping[str, str] = os.environ) -> str:
    """Raises UserError if there is none, or one that cannot travel in a header."""
    token = next((environment[name].strip() for name in TOKENS if environment.get(name, "").strip()), "")
    if not token:
        raise UserError(f"no token: set {' or '.join(TOKENS)} to one that may write pull requests and contents, or leave --repo out")
    if not token.isascii() or any(c.isspace() or ord(c) < 32 for c in token):
        raise UserError(f"the token in {' or '.join(TOKENS)} holds characters that no token has")
    return token


def check_repository(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+", name):
        raise UserError(f"--repo {name!r}: expected OWNER/NAME")
    return name


def check_base_url(url: str) -> str:
    """Raises UserError unless a token may be sent there: https, or this machine."""
    parts = urlsplit(url)
    if parts.scheme not in ("https", "http") or not parts.hostname or parts.username or parts.password or parts.query:
        raise UserError("--base-url: expected https://HOST or https://HOST/PATH of the REST API, without a name or a password in it")
    if parts.scheme == "http" and parts.hostname not in _LOCAL:
        raise UserError(f"--base-url: a token does not go over http to {parts.hostname}; use https")
    return url.rstrip("/")


def check_remote(url: str) -> str:
    """Raises UserError unless git may be given this address."""
    parts = urlsplit(url)
    if url.startswith("-") or "::" in url.partition("/")[0] or any(ord(c) < 33 for c in url):
        raise UserError("--remote-url: expected https://, ssh://, git@HOST:PATH, file:// or a folder")
    if parts.password or (parts.scheme in ("https", "http") and parts.username):
        raise UserError("--remote-url: leave names and passwords out of it; the token comes from the environment")
    if parts.scheme not in ("https", "ssh", "file", "") and not (parts.scheme == "http" and parts.hostname in _LOCAL) and "@" not in url:
        raise UserError(f"--remote-url: {parts.scheme}:// is not used here; expected https://, ssh://, git@HOST:PATH, file:// or a folder")
    return url


def web_host(base_url: str) -> str:
    return (urlsplit(base_url).hostname or "").removeprefix("api.")


def push(repository: Path, commit: str, branch: str, remote: str, base_url: str, token: str) -> None:
    """Make a remote branch stand at a commit. What stands there already may be replaced only if it came from this repository.

    The token goes to git in its environment, and only to the forge's own host. Raises ForgeError.
    """
    parts = urlsplit(remote)
    settings = {"credential.helper": "", "http.followRedirects": "false", "protocol.ext.allow": "never", "push.followTags": "false",
                "push.recurseSubmodules": "no"}
    secret = b64encode(f"x-access-token:{token}".encode()).decode()
    if parts.scheme in ("https", "http") and parts.hostname == web_host(base_url):
        settings[f"http.{parts.scheme}://{parts.netloc}/.extraHeader"] = f"Authorization: Basic {secret}"
    quiet = {name: "" for name in os.environ if name.startswith("GIT_TRACE")} | {"GIT_CURL_VERBOSE": ""} | dict.fromkeys(TOKENS, "")

    def git(*arguments: str) -> str:
        try:
            return call_git(arguments, repository, environment=quiet, settings=settings)
        except UserError as error:
            raise ForgeError(f"the branch could not be pushed to {remote}: {redact(_pushing(str(error)), [token, secret])}") from None

    name = f"refs/heads/{branch}"
    there = git("ls-remote", "--", remote, name).partition("\t")[0]
    if there == commit:
        return
    if there:
        try:
            call_git(("cat-file", "-e", f"{there}^{{commit}}"), repository)
        except UserError:
            raise ForgeError(f"{branch} at {remote} stands at {there[:12]}, which was not made here; somebody worked on it, so it is left "
                             "alone") from None
    git("push", "--quiet", f"--force-with-lease={name}:{there}", "--", remote, f"{commit}:{name}")


def _pushing(error: str) -> str:
    text = error.partition(": ")[2] or error
    if re.search(r"Authentication failed|could not read Username|403|401|Permission.*denied", text):
        return f"it was refused ({text}); check that the token may write contents there"
    if re.search(r"rejected|non-fast-forward|stale info|fetch first", text):
        return f"it was rejected there ({text})"
    return text


@dataclass
class Forge:
    """One repository of a forge."""

    repository: str
    base_url: str
    token: str = field(repr=False)

    def describe(self) -> dict[str, Any]:
        """The repository. Raises ForgeError where the token does not reach it."""
        found = self._ask("GET", f"/repos/{self.repository}")
        return found if isinstance(found, dict) else _odd(found)

    def open_with_head(self, head: str) -> list[Pull]:
        """`head` is OWNER:BRANCH."""
        owner, _, branch = head.partition(":")
        found = self._ask("GET", f"/repos/{self.repository}/pulls", params={"state": "open", "head": head, "per_page": "100"})
        try:  # some forges do not know the filter and answer with all
            return [_pull(p) for p in found if p["head"]["ref"] == branch and p["head"].get("label", head) == head and owner]
        except (KeyError, TypeError, AttributeError):
            return _odd(found)

    def open_like(self, words: str, where: str) -> list[Pull]:
        """Open pull requests with these words in their `title` or `body`, by search or, where there is none, by looking through the newest."""
        query = f'repo:{self.repository} is:pr is:open in:{where} "{words}"'
        try:
            found = self._ask("GET", "/search/issues", params={"q": query, "per_page": "20"})
            return [_pull(p) for p in (found["items"] if isinstance(found, dict) and "items" in found else _odd(found))]
        except _Absent:
            return [_pull(p) for p in self._newest() if words.lower() in str(p.get(where) or "").lower()]

    def create(self, title: str, head: str, base: str, body: str) -> Pull:
        """Open a draft. After an answer that got lost it is looked for before it is tried again."""
        sent = {"title": title, "head": head, "base": base, "body": body, "draft": True, "maintainer_can_modify": True}

        def made() -> Pull | None:
            owner = self.repository.partition("/")[0]
            return next(iter(self.open_with_head(head if ":" in head else f"{owner}:{head}")), None)

        found = self._ask("POST", f"/repos/{self.repository}/pulls", body=sent, made=made)
        return found if isinstance(found, Pull) else _pull(found)

    def update(self, number: int, title: str, body: str) -> Pull:
        return _pull(self._ask("PATCH", f"/repos/{self.repository}/pulls/{number}", body={"title": title, "body": body}))

    def _newest(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for page in range(1, PAGES + 1):
            some = self._ask("GET", f"/repos/{self.repository}/pulls", params={"state": "open", "per_page": "100", "page": str(page)})
            found += some
            if len(some) < 100:
                break
        return found

    def _ask(self, method: str, path: str, *, params: dict[str, str] | None = None, body: dict[str, Any] | None = None,
             made: Callable[[], Any] | None = None) -> Any:
        """One answer's JSON; again after a pause where the forge is busy or out of order. Raises ForgeError."""
        import httpx2

        headers = {"Authorization": f"Bearer {self.token}", "Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28",
                   "User-Agent": f"train-inference-consistency/{__version__}"}
        problem = ""
        for number in range(TRIES):
            if number and made and (there := made()):
                return there
            wait = 2.0**number
            try:
                # A redirect is not followed: the token is for this host.
                answer = httpx2.request(method, self.base_url + path, params=params, json=body, headers=headers, timeout=TIMEOUT,
                                        follow_redirects=False)
            except httpx2.TransportError as error:
                problem = f"{urlsplit(self.base_url).netloc} cannot be reached ({type(error).__name__}: {str(error) or 'no detail'})"
            except httpx2.InvalidURL as error:
                raise UserError(f"--base-url: {error}") from None
            else:
                if answer.is_success:
                    try:
                        return answer.json()
                    except ValueError:
                        raise ForgeError(f"{urlsplit(self.base_url).netloc} answered {method} {path} with something that is not JSON; is --base-url "
                                         "the address of the REST API?") from None
                said = redact(_message(answer), [self.token])
                asked = _pause(answer)
                if asked is None and answer.status_code < 500:
                    raise self._refused(answer.status_code, said, method, path)
                wait = wait if asked is None else asked
                problem = f"{urlsplit(self.base_url).netloc} answers {answer.status_code} ({said})"
            if wait > LONGEST_WAIT:
                raise ForgeError(f"{problem}; it asks to wait {wait:.0f} s, try again then")
            if number < TRIES - 1:
                pause(wait)
        raise ForgeError(f"{redact(problem, [self.token])}, {TRIES} times; try again later")

    def _refused(self, status: int, said: str, method: str, path: str) -> AgentError:
        if status == 401:
            return ForgeError(f"the forge does not accept the token ({said}); make a new one and set {' or '.join(TOKENS)}")
        if status == 403:
            return ForgeError(f"the token may not do this in {self.repository} ({said}); it needs to read and write pull requests, and contents "
                              "for the push")
        if path.startswith("/search") and status in (404, 405, 410, 422):
            return _Absent(said)
        if status == 404:
            return ForgeError(f"{self.repository} does not exist there, or the token does not see it ({said}); check --repo and what the token may "
                              "read")
        if status == 422:
            return ForgeError(f"the forge refuses the pull request: {said}")
        if status in (301, 302, 307, 308):
            return ForgeError(f"{self.repository} has moved ({said}); give its present OWNER/NAME with --repo")
        return ForgeError(f"{method} {path}: {status} ({said})")


class _Absent(ForgeError):
    """This forge has no search."""


def _pull(found: dict[str, Any]) -> Pull:
    try:
        return Pull(int(found["number"]), str(found.get("title") or ""), str(found.get("html_url") or ""))
    except (KeyError, TypeError, ValueError, AttributeError):
        return _odd(found)


def _odd(found: Any) -> NoReturn:
    raise ForgeError(f"the forge answers in a form that is not GitHub's ({json.dumps(found)[:120]}); is --base-url the address of the REST API?")


def _message(answer: Any) -> str:
    """The forge's own words, with the reasons that a 422 lists."""
    try:
        found = answer.json()
        errors = [str(e.get("message") or " ".join(str(e[k]) for k in ("resource", "field", "code") if k in e)) if isinstance(e, dict) else str(e)
                  for e in found.get("errors") or []]
        text = ": ".join(filter(None, [str(found.get("message") or ""), "; ".join(errors)]))
    except (ValueError, AttributeError, TypeError):
        text = answer.reason_phrase
    return " ".join(text.split())[:300] or answer.reason_phrase or "no reason given"


def _pause(answer: Any) -> float | None:
    """Seconds that a rate limit asks for; None: it is no rate limit."""
    if answer.status_code not in (403, 429):
        return float(after) if answer.status_code >= 500 and (after := answer.headers.get("retry-after", "")).isdecimal() else None
    if (after := answer.headers.get("retry-after", "")).isdecimal():
        return float(after)
    if answer.headers.get("x-ratelimit-remaining") == "0" and (reset := answer.headers.get("x-ratelimit-reset", "")).isdecimal():
        return max(1.0, float(reset) - time.time())
    return 5.0 if answer.status_code == 429 or "secondary rate limit" in answer.text.lower() else None

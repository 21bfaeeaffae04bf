"""A forge with GitHub's REST API on a local port: pull requests of one repository in memory, and failures on demand."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "ghp_0123456789abcdefSECRET"
REPO = "own/target"


class FakeForge:
    """`failures`: per "METHOD /path" a list of (status, body, headers), used up one by one; a status of 0 closes the connection without an answer.

    `search`: whether there is /search/issues. `after`: called with each request once it was carried out, before it is answered.
    """

    def __init__(self, search: bool = True):
        self.pulls: list[dict[str, Any]] = []
        self.failures: dict[str, list[tuple[int, Any, dict[str, str]]]] = {}
        self.seen: list[tuple[str, str]] = []
        self.search, self.push_allowed, self.lose_next_answer = search, True, False

    def add(self, title: str, *, head: str = "someone:else", body: str = "", sha: str = "0" * 40) -> dict[str, Any]:
        number = len(self.pulls) + 1
        self.pulls.append({"number": number, "title": title, "body": body, "html_url": f"https://forge.example/{REPO}/pull/{number}", "draft": True,
                           "head": {"label": head, "ref": head.partition(":")[2], "sha": sha}, "state": "open"})
        return self.pulls[-1]

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        if method == "GET" and path == f"/repos/{REPO}":
            return 200, {"full_name": REPO, "default_branch": "trunk", "permissions": {"push": self.push_allowed}}
        if method == "GET" and path == f"/repos/{REPO}/pulls":
            head = query.get("head", [""])[0]
            return 200, [p for p in self.pulls if not head or p["head"]["label"] == head]
        if method == "GET" and path == "/search/issues" and self.search:
            words = query["q"][0].rpartition(' "')[2].strip('"').lower()
            where = "body" if "in:body" in query["q"][0] else "title"
            return 200, {"items": [{k: p[k] for k in ("number", "title", "html_url")} for p in self.pulls if words in (p[where] or "").lower()]}
        if method == "POST" and path == f"/repos/{REPO}/pulls":
            owner = REPO.partition("/")[0]
            head = body["head"] if ":" in body["head"] else f"{owner}:{body['head']}"
            if any(p["head"]["label"] == head for p in self.pulls):
                return 422, {"message": "Validation Failed", "errors": [{"message": f"A pull request already exists for {head}."}]}
            return 201, self.add(body["title"], head=head, body=body["body"]) | {"draft": body["draft"], "base": body["base"]}
        if method == "PATCH" and path.startswith(f"/repos/{REPO}/pulls/"):
            pull = self.pulls[int(path.rpartition("/")[2]) - 1]
            pull.update(body)
            return 200, pull
        return 404, {"message": "Not Found"}

    def __enter__(self) -> "FakeForge":
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                return

            def handle_one(self) -> None:
                parts = urlsplit(self.path)
                sent = self.rfile.read(int(self.headers.get("content-length") or 0))
                fake.seen.append((f"{self.command} {parts.path}", sent.decode()))
                if self.headers.get("authorization") != f"Bearer {TOKEN}":
                    return self.say(401, {"message": "Bad credentials"}, {})
                if planned := fake.failures.get(f"{self.command} {parts.path}"):
                    status, answer, headers = planned.pop(0)
                    return self.say(status, answer, headers)
                status, answer = fake.answer(self.command, parts.path, parse_qs(parts.query), json.loads(sent or b"null"))
                if fake.lose_next_answer and self.command == "POST":
                    fake.lose_next_answer, status = False, 0
                self.say(status, answer, {})

            do_GET = do_POST = do_PATCH = handle_one

            def say(self, status: int, answer: Any, headers: dict[str, str]) -> None:
                if not status:
                    self.close_connection = True
                    self.connection.close()
                    return
                raw = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {"content-type": "application/json", "content-length": str(len(raw)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.server.shutdown()
        self.server.server_close()

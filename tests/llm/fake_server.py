"""A local HTTP server in the place of a provider, so that the real SDKs are what is tested."""

import json
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

AT_ONCE = {"retry-after-ms": "1"}


class FakeServer:
    """Answers from a script: a body, `(status, body)`, `(status, body, seconds)` to let the client wait, or a function of the request that makes
    one of these. Remembers what it was sent."""

    def __init__(self, *script: Any):
        self.script, self.seen = list(script), []

    def __enter__(self) -> "FakeServer":
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                return

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
                fake.seen.append({"path": self.path, "headers": {k.lower(): v for k, v in self.headers.items()}, "body": body})
                item = fake.script.pop(0) if fake.script else (500, {"error": {"type": "x", "message": "the script is empty"}})
                item = item(body) if callable(item) else item
                status, answer, wait = (*item, 0)[:3] if isinstance(item, tuple) else (200, item, 0)
                time.sleep(wait)
                raw = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("content-type", "text/html" if isinstance(answer, str) else "application/json")
                    self.send_header("content-length", str(len(raw)))
                    for name, value in AT_ONCE.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(raw)
                except (BrokenPipeError, ConnectionResetError):
                    return  # a client that stopped waiting

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [request["body"] for request in self.seen]


class Anthropic:
    """Bodies of the Messages API."""

    kind = "anthropic"

    @staticmethod
    def answer(*content: dict[str, Any], stop: str | None = None, **more: Any) -> dict[str, Any]:
        calls = any(block["type"] == "tool_use" for block in content)
        return {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": list(content),
                "stop_reason": stop or ("tool_use" if calls else "end_turn"), "stop_sequence": None,
                "usage": {"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 7, "cache_creation_input_tokens": 3}, **more}

    @staticmethod
    def text(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words}

    @staticmethod
    def call(identity: str, name: str, arguments: Any) -> dict[str, Any]:
        return {"type": "tool_use", "id": identity, "name": name, "input": arguments}

    @staticmethod
    def thinking(words: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": words, "signature": "sig"}

    truncated: Mapping[str, Any] = {"stop": "max_tokens"}
    refused: Mapping[str, Any] = {"stop": "refusal", "stop_details": {"type": "refusal", "category": "cyber", "explanation": "looks like an exploit"}}
    context_full = (400, {"type": "error", "error": {"type": "invalid_request_error",
                                                      "message": "prompt is too long: 210000 tokens > 200000 maximum"}})

    @staticmethod
    def error(status: int, message: str) -> tuple[int, dict[str, Any]]:
        return status, {"type": "error", "error": {"type": "x", "message": message}}


class Responses:
    """Bodies of the Responses API."""

    kind = "openai"

    @staticmethod
    def answer(*output: dict[str, Any], status: str = "completed", **more: Any) -> dict[str, Any]:
        return {"id": "resp_1", "object": "response", "created_at": 1, "status": status, "model": "m", "output": list(output),
                "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None, "incomplete_details": None, "instructions": None,
                "metadata": {}, "usage": {"input_tokens": 20, "input_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 3},
                                          "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 25}, **more}

    @staticmethod
    def text(words: str) -> dict[str, Any]:
        return {"type": "message", "id": "m1", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": words, "annotations": []}]}

    @staticmethod
    def call(identity: str, name: str, arguments: Any) -> dict[str, Any]:
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return {"type": "function_call", "id": f"fc_{identity}", "call_id": identity, "name": name, "arguments": written, "status": "completed"}

    @staticmethod
    def thinking(words: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": words}], "encrypted_content": "sealed"}

    truncated: Mapping[str, Any] = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    refused: Mapping[str, Any] = {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}
    context_full = (400, {"error": {"message": "Your input exceeds the context window of this model.", "type": "invalid_request_error",
                                    "code": "context_length_exceeded"}})

    @staticmethod
    def error(status: int, message: str) -> tuple[int, dict[str, Any]]:
        return status, {"error": {"message": message, "type": "x", "code": "c"}}


class Chat:
    """Bodies of chat.completions."""

    kind = "chat"

    @staticmethod
    def answer(*parts: dict[str, Any], finish: str | None = None, refusal: str | None = None, **more: Any) -> dict[str, Any]:
        calls = [part for part in parts if part["type"] == "function"]
        words = "\n".join(part["text"] for part in parts if part["type"] == "text") or None
        message = {"role": "assistant", "content": words, "refusal": refusal, **({"tool_calls": calls} if calls else {})}
        return {"id": "x", "object": "chat.completion", "created": 1, "model": "m",
                "choices": [{"index": 0, "finish_reason": finish or ("tool_calls" if calls else "stop"), "message": message}],
                "usage": {"prompt_tokens": 17, "completion_tokens": 5, "total_tokens": 22, "prompt_tokens_details": {"cached_tokens": 7}}, **more}

    @staticmethod
    def text(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words}

    @staticmethod
    def call(identity: str, name: str, arguments: Any) -> dict[str, Any]:
        written = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return {"type": "function", "id": identity, "function": {"name": name, "arguments": written}}

    @staticmethod
    def thinking(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words}

    truncated: Mapping[str, Any] = {"finish": "length"}
    refused: Mapping[str, Any] = {"finish": "content_filter"}
    context_full = (400, {"object": "error", "message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
                          "type": "BadRequestError", "code": 400})

    @staticmethod
    def error(status: int, message: str) -> tuple[int, dict[str, Any]]:
        return status, {"error": {"message": message, "type": "x", "code": "c"}}


PROVIDERS = [Anthropic, Responses, Chat]

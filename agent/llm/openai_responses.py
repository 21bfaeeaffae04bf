"""OpenAI's Responses API, stateless: nothing is stored there, reasoning comes back encrypted and is sent again."""

import json
from typing import Any

import openai
from openai.types.responses import Response

from agent.llm.calling import CONNECT_SECONDS, SDK_RETRIES, ContextFull, Transient, call, expect
from agent.llm.conversation import KEPT, Answer, Call, End, Request, Said, Timer, Tool, Turn, Usage
from agent.llm.settings import LlmSettings

TRANSIENT = {"server_error", "rate_limit_exceeded"}
"""Errors of a failed response that another attempt may mend."""


class OpenAIResponses:
    """`openai:MODEL`."""

    def __init__(self, model: str, key: str, settings: LlmSettings, base_url: str | None = None):
        self.name = f"openai:{model}"
        self.model, self.settings = model, settings
        self.client = openai.OpenAI(api_key=key, base_url=base_url, max_retries=SDK_RETRIES)

    def ask(self, request: Request) -> Answer:
        timer = Timer()
        options: dict[str, Any] = {}
        if self.settings.effort:
            options["reasoning"] = {"effort": self.settings.effort}

        def send() -> Response:
            response = self.client.responses.create(
                model=self.model, instructions=request.system, input=items(request.turns), tools=[_tool(tool) for tool in request.tools],
                store=False, include=["reasoning.encrypted_content"], parallel_tool_calls=True, prompt_cache_key=request.cache_key,
                max_output_tokens=self.settings.max_output_tokens, timeout=openai.Timeout(request.timeout, connect=CONNECT_SECONDS), **options)
            expect(response, Response)
            if response.status == "failed" and response.error and response.error.code in TRANSIENT:
                raise Transient(response.error.message)
            return response

        try:
            return answer(call(send, self.name), timer.seconds)
        except ContextFull as error:
            return Answer(end="context", detail=str(error), seconds=timer.seconds)


def _tool(tool: Tool) -> Any:
    return {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": True}


def items(turns: list[Turn]) -> list[Any]:
    """The history in wire form."""
    wire: list[dict[str, Any]] = []
    for turn in turns:
        if isinstance(turn, Said):
            wire.append({"role": "user", "content": turn.text})
        elif turn.kind == "answered":
            wire += turn.answer.items
        else:
            # Responses has no error flag on an output, so the text has to carry it.
            wire += [{"type": "function_call_output", "call_id": r.call, "output": f"error: {r.text}" if r.error else r.text} for r in turn.results]
    return wire


def answer(response: Response, seconds: float) -> Answer:
    """Read a response."""
    calls, text, refusals, thinking = [], [], [], []
    for item in response.output:
        if item.type == "function_call":
            calls.append(parsed(item.call_id, item.name, item.arguments))
        elif item.type == "message":
            text += [part.text for part in item.content if part.type == "output_text"]
            refusals += [part.refusal for part in item.content if part.type == "refusal"]
        elif item.type == "reasoning":
            thinking += [part.text for part in item.summary]
    end, detail = _end(response, bool(calls), refusals)
    return Answer(
        text="\n".join(text), thinking="\n".join(thinking), calls=calls, end=end, detail=detail,
        # Reasoning that nothing follows is refused when it is sent back.
        items=[item.model_dump(mode="json", exclude_none=True) for item in response.output] if end in KEPT and (calls or text) else [],
        usage=_usage(response), seconds=seconds, request=response.id)


def parsed(identity: str, name: str, arguments: str) -> Call:
    """A call whose arguments are JSON text; no arguments at all count as an empty object."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return Call(id=identity, name=name, arguments=value if isinstance(value, dict) else None, raw="" if isinstance(value, dict) else arguments)


def _end(response: Response, calls: bool, refusals: list[str]) -> tuple[End, str]:
    if response.status == "incomplete":
        reason = (response.incomplete_details.reason if response.incomplete_details else None) or "unknown reason"
        return ("refusal" if reason == "content_filter" else "length"), reason
    if response.status in ("failed", "cancelled"):
        return "refusal", f"{response.error.code}: {response.error.message}" if response.error else response.status
    if refusals:
        return "refusal", " ".join(refusals)
    return ("calls" if calls else "end"), response.status or ""


def _usage(response: Response) -> Usage:
    usage = response.usage
    if usage is None:
        return Usage()
    details = usage.input_tokens_details
    read, write = (details.cached_tokens or 0, getattr(details, "cache_write_tokens", 0) or 0) if details else (0, 0)
    return Usage(input=max(usage.input_tokens - read - write, 0), output=usage.output_tokens, cache_read=read, cache_write=write)

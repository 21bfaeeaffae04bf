"""Anthropic's Messages API, with the history kept here and sent whole."""

from typing import Any

import anthropic

from agent.llm.calling import CONNECT_SECONDS, SDK_RETRIES, ContextFull, call, expect
from agent.llm.conversation import KEPT, Answer, Call, End, Request, Said, Timer, Tool, Turn, Usage
from agent.llm.settings import LlmSettings

# Steps of a run take minutes, so the five-minute cache would be cold at each of them.
CACHE: anthropic.types.CacheControlEphemeralParam = {"type": "ephemeral", "ttl": "1h"}
ENDS: dict[str, End] = {
    "end_turn": "end", "stop_sequence": "end", "tool_use": "calls", "pause_turn": "pause", "max_tokens": "length", "refusal": "refusal",
    "model_context_window_exceeded": "context"}


class AnthropicMessages:
    """`anthropic:MODEL`."""

    def __init__(self, model: str, key: str, settings: LlmSettings, base_url: str | None = None):
        self.name = f"anthropic:{model}"
        self.model, self.settings = model, settings
        self.client = anthropic.Anthropic(api_key=key, base_url=base_url, max_retries=SDK_RETRIES)

    def ask(self, request: Request) -> Answer:
        timer = Timer()
        options: dict[str, Any] = {}
        if self.settings.thinking:
            options["thinking"] = {"type": "adaptive", "display": "summarized"}
        if self.settings.effort:
            options["output_config"] = {"effort": self.settings.effort}

        def send() -> anthropic.types.Message:
            message = self.client.messages.create(
                model=self.model, max_tokens=self.settings.max_output_tokens,
                system=[{"type": "text", "text": request.system, "cache_control": CACHE}], tools=[_tool(tool) for tool in request.tools],
                messages=messages(request.turns), cache_control=CACHE,
                timeout=anthropic.Timeout(request.timeout, connect=CONNECT_SECONDS), **options)
            expect(message, anthropic.types.Message)
            return message

        try:
            return answer(call(send, self.name), timer.seconds)
        except ContextFull as error:
            return Answer(end="context", detail=str(error), seconds=timer.seconds)


def _tool(tool: Tool) -> Any:
    return {"name": tool.name, "description": tool.description, "input_schema": tool.parameters, "strict": True}


def messages(turns: list[Turn]) -> list[Any]:
    """The history in wire form. A paused answer is followed by nothing: sent back as it is, it is continued."""
    wire: list[dict[str, Any]] = []
    for turn in turns:
        if isinstance(turn, Said):
            wire.append({"role": "user", "content": [{"type": "text", "text": turn.text}]})
        elif turn.kind == "answered":
            if turn.answer.items:
                wire.append({"role": "assistant", "content": turn.answer.items})
        else:
            wire.append({"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": r.call, "content": r.text, "is_error": r.error} for r in turn.results]})
    return wire


def answer(message: anthropic.types.Message, seconds: float) -> Answer:
    """Read a message. An unknown stop reason counts as an end by itself, with or without calls."""
    calls = [Call(id=b.id, name=b.name, arguments=dict(b.input) if isinstance(b.input, dict) else None,
                  raw="" if isinstance(b.input, dict) else str(b.input)) for b in message.content if b.type == "tool_use"]
    end = ENDS.get(message.stop_reason or "", "calls" if calls else "end")
    details = message.stop_details
    usage = message.usage
    return Answer(
        text="\n".join(b.text for b in message.content if b.type == "text"),
        thinking="\n".join(b.thinking for b in message.content if b.type == "thinking"),
        calls=calls, end="calls" if end == "end" and calls else end,
        detail=(details.explanation or details.category or "") if details else message.stop_reason or "",
        items=[b.model_dump(mode="json", exclude_none=True) for b in message.content] if end in KEPT else [],
        usage=Usage(input=usage.input_tokens, output=usage.output_tokens, cache_read=usage.cache_read_input_tokens or 0,
                    cache_write=usage.cache_creation_input_tokens or 0),
        seconds=seconds, request=message.id)

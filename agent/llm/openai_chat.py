"""chat.completions, which every compatible server speaks (a local vLLM, for example): only fields that all of them know."""

import json
from typing import Any

import openai
from openai.types.chat import ChatCompletion

from agent.llm.calling import CONNECT_SECONDS, SDK_RETRIES, ContextFull, Transient, call, expect
from agent.llm.conversation import KEPT, Answer, Call, End, Request, Said, Timer, Tool, Usage
from agent.llm.openai_responses import parsed
from agent.llm.settings import LlmSettings

CHARACTERS_PER_TOKEN = 3
"""On the low side, so that a guess does not undercut what was used."""
NO_KEY = "none"
"""The SDK insists on a key and a local server ignores it."""


class OpenAIChat:
    """`chat:MODEL@URL`."""

    def __init__(self, model: str, url: str, key: str | None, settings: LlmSettings):
        self.name = f"chat:{model}@{url}"
        self.model, self.settings = model, settings
        self.client = openai.OpenAI(api_key=key or NO_KEY, base_url=url, max_retries=SDK_RETRIES)

    def ask(self, request: Request) -> Answer:
        timer = Timer()
        wire, offered = messages(request), [_tool(tool) for tool in request.tools]

        def send() -> ChatCompletion:
            completion = self.client.chat.completions.create(
                model=self.model, messages=wire, tools=offered, max_tokens=self.settings.max_output_tokens,
                timeout=openai.Timeout(request.timeout, connect=CONNECT_SECONDS))
            expect(completion, ChatCompletion)
            if not completion.choices:
                raise Transient("the server sent no choice")
            return completion

        try:
            return answer(call(send, self.name), timer.seconds, [*wire, *offered])
        except ContextFull as error:
            return Answer(end="context", detail=str(error), seconds=timer.seconds)


def _tool(tool: Tool) -> Any:
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}}


def messages(request: Request) -> list[Any]:
    """The history in wire form."""
    wire: list[dict[str, Any]] = [{"role": "system", "content": request.system}]
    for turn in request.turns:
        if isinstance(turn, Said):
            wire.append({"role": "user", "content": turn.text})
        elif turn.kind == "answered":
            wire += turn.answer.items
        else:
            wire += [{"role": "tool", "tool_call_id": r.call, "content": f"error: {r.text}" if r.error else r.text} for r in turn.results]
    return wire


def answer(completion: ChatCompletion, seconds: float, sent: list[Any]) -> Answer:
    """Read a completion. Calls count by their presence: servers disagree about the finish reason that goes with them."""
    choice = completion.choices[0]
    message = choice.message
    calls = [parsed(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or [] if c.type == "function"]
    if len({c.id for c in calls if c.id}) < len(calls):  # some servers send empty or equal ids
        calls = [c.model_copy(update={"id": f"call_{n}"}) for n, c in enumerate(calls)]
    end: End = "calls" if calls else "end"
    if choice.finish_reason == "length":
        end = "length"
    elif choice.finish_reason == "content_filter" or message.refusal:
        end = "refusal"
    return Answer(text=message.content or "", thinking=getattr(message, "reasoning", None) or "", calls=calls, end=end,
                  detail=message.refusal or choice.finish_reason or "", items=[_item(message.content, calls)] if end in KEPT else [],
                  usage=_usage(completion, sent), seconds=seconds, request=completion.id or "")


def _item(content: str | None, calls: list[Call]) -> dict[str, Any]:
    """The answer as it is sent back. Servers parse old arguments again, so ones that are no JSON object become an empty one."""
    item: dict[str, Any] = {"role": "assistant", "content": content or ("" if calls else "(no text)")}
    if calls:
        item["tool_calls"] = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments or {})}}
                              for c in calls]
    return item


def _usage(completion: ChatCompletion, sent: list[Any]) -> Usage:
    usage = completion.usage
    if usage is None:
        received = completion.choices[0].model_dump_json()
        return Usage(input=len(json.dumps(sent)) // CHARACTERS_PER_TOKEN, output=len(received) // CHARACTERS_PER_TOKEN, estimated=True)
    read = (usage.prompt_tokens_details.cached_tokens or 0) if usage.prompt_tokens_details else 0
    return Usage(input=max(usage.prompt_tokens - read, 0), output=usage.completion_tokens, cache_read=read)

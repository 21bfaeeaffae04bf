"""A real adapter in front of a fake server."""

from typing import Any

from agent.llm.conversation import Answered, Model, Request, Result, Results, Said, Turn
from agent.llm.requests import tools
from agent.llm.settings import LlmSettings
from agent.llm.spec import Spec, make_model

KEY = "sk-test-0123456789abcdef"


def spec_of(provider: Any, url: str) -> Spec:
    return Spec(provider.kind, "m", f"{url}/v1" if provider.kind == "chat" else "")


def model_for(provider: Any, url: str, **settings: Any) -> Model:
    environment = {"ANTHROPIC_API_KEY": KEY, "OPENAI_API_KEY": KEY, "CHAT_API_KEY": KEY, "ANTHROPIC_BASE_URL": url, "OPENAI_BASE_URL": f"{url}/v1"}
    return make_model(spec_of(provider, url), LlmSettings(**settings), environment)


def request(*turns: Turn, timeout: float = 10) -> Request:
    return Request(system="the system prompt", tools=tools(), turns=list(turns), cache_key="run-7", timeout=timeout)


def said(text: str) -> Said:
    return Said(text=text)


def answered(answer: Any) -> Answered:
    return Answered(answer=answer)


def results(*pairs: tuple[str, str], error: bool = False) -> Results:
    return Results(results=[Result(call=identity, name="read", text=text, error=error) for identity, text in pairs])

"""Stand-ins for a model, for tests and demonstrations."""

from collections.abc import Callable
from typing import Any

from agent.llm.conversation import Answer, Call, Request, Results, Usage

Reply = Answer | Callable[[Request], Answer]


class ScriptedModel:
    """Answers from a list; a function in it sees the request. Beyond the end it repeats the last one."""

    name = "scripted"

    def __init__(self, *replies: Reply, usage: Usage | None = None):
        self.replies, self.requests = list(replies), list[Request]()
        self.usage = usage or Usage(input=1000, output=100)

    def ask(self, request: Request) -> Answer:
        reply = self.replies[min(len(self.requests), len(self.replies) - 1)]
        self.requests.append(request)
        answer = reply(request) if callable(reply) else reply
        return answer.model_copy(update={"usage": self.usage if answer.usage == Usage() else answer.usage})


def calling(*calls: tuple[str, dict[str, Any]], text: str = "") -> Answer:
    """An answer that calls tools; ids are unique within it."""
    made = [Call(id=f"call_{n}", name=name, arguments=arguments) for n, (name, arguments) in enumerate(calls)]
    return Answer(text=text, calls=made, end="calls", items=[{"text": text, "calls": [call.model_dump() for call in made]}])


def saying(text: str) -> Answer:
    """An answer that calls nothing."""
    return Answer(text=text, end="end", items=[{"text": text}])


def last_results(request: Request) -> list[str]:
    """Texts of the newest results in a request."""
    found = [turn for turn in request.turns if isinstance(turn, Results)]
    return [result.text for result in found[-1].results] if found else []

"""Stand-ins for a model, for tests and demonstrations."""

import re
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


def kernel_writer(bindings: dict[str, str], files: dict[str, str], then: Answer | None = None) -> ScriptedModel:
    """A model that localizes, makes repros of the divergences of the operators in `bindings`, and binds them to its own kernels, on both sides.

    It reads the keys out of what `localize` answers, so it works with any tools, engines included. `then` is what it does if that was not enough;
    default: give up.
    """
    def found(request: Request) -> list[str]:
        lines = re.findall(r"^- (\S+): (\w+),", last_results(request)[0], re.MULTILINE)
        return [name for name, operator in lines if operator in bindings]

    keys: list[str] = []

    def repro(request: Request) -> Answer:
        keys.extend(found(request))
        return calling(("repro", {"divergences": keys}))

    def patch(request: Request) -> Answer:
        return calling(("patch_kernel", {
            "why": "one order of summation on both sides", "addresses": keys,
            "bindings": [{"operator": operator, "implementation": name, "side": "both"} for operator, name in bindings.items()],
            "files": [{"path": path, "text": text} for path, text in files.items()]}))

    return ScriptedModel(calling(("localize", {})), repro, patch, then or calling(("stop", {"claim": "give_up", "why": "the kernel was not enough"})))


def last_results(request: Request) -> list[str]:
    """Texts of the newest results in a request."""
    found = [turn for turn in request.turns if isinstance(turn, Results)]
    return [result.text for result in found[-1].results] if found else []

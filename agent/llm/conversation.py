"""What is said between the agent and a model, in a form that belongs to no provider."""

import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, Field

End = Literal["end", "calls", "pause", "length", "refusal", "context"]
"""Why an answer ended: by itself, to call tools, to be continued, at the output limit, withheld by the provider, or with the context full."""

KEPT: frozenset[End] = frozenset({"end", "calls", "pause"})
"""Answers that stay in the history. A half answer is left out: no provider takes a call without its end, and what is left in would be imitated."""


class Usage(BaseModel):
    """Tokens of one answer; the three kinds of input do not overlap."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    estimated: bool = False
    """The server reported none, so the figures are guessed from the number of characters."""

    @property
    def total(self) -> int:
        return self.input + self.output + self.cache_read + self.cache_write


class Call(BaseModel):
    """A tool call as the model wrote it."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    """None: what was written is not a JSON object."""
    raw: str = ""
    """What was written, if it is not a JSON object."""


class Answer(BaseModel):
    """One answer of a model."""

    text: str = ""
    thinking: str = ""
    """What the provider shows of it; for people, never sent back from here."""
    calls: list[Call] = []
    end: End
    detail: str = ""
    """The provider's own words on how it ended."""
    items: list[dict[str, Any]] = []
    """The answer in the provider's form, sent back unchanged: it carries signatures and encrypted reasoning."""
    usage: Usage = Usage()
    seconds: float = 0.0
    request: str = ""
    """The provider's id of the request."""


def scrubbed(answer: Answer) -> Answer:
    """Without halves of surrogate pairs, which JSON can carry and no file can."""
    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if isinstance(value, dict):
            return {clean(name): clean(inner) for name, inner in value.items()}
        return [clean(inner) for inner in value] if isinstance(value, list) else value

    return Answer.model_validate(clean(answer.model_dump()))


class Said(BaseModel):
    """Text from the agent to the model."""

    kind: Literal["said"] = "said"
    text: str


class Answered(BaseModel):
    kind: Literal["answered"] = "answered"
    answer: Answer


class Result(BaseModel):
    """What a call came to."""

    call: str
    """Its id."""
    name: str
    text: str
    error: bool = False


class Results(BaseModel):
    """Results of all calls of the answer before, in their order."""

    kind: Literal["results"] = "results"
    results: list[Result]


Turn = Annotated[Said | Answered | Results, Field(discriminator="kind")]


class Tool(BaseModel):
    """A tool as it is offered to the model."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema in which every field is required and nothing else is allowed, as strict providers want it."""


@dataclass(frozen=True)
class Request:
    """Everything one answer depends on. `system` and `tools` stay the same over a run and `turns` only grow, so that prompt caches hold."""

    system: str
    tools: list[Tool]
    turns: list[Turn]
    cache_key: str
    """The same for all requests of one run."""
    timeout: float
    """Seconds one attempt may take."""


class Model(Protocol):
    """Something that answers."""

    name: str

    def ask(self, request: Request) -> Answer:
        """Raises `calling.Unavailable` if there is no answer to be had now, UserError if there never will be."""
        ...


class Timer:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.start, 3)

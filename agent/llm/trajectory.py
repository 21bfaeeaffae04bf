"""Everything a model was told and answered, on disk after every step, so that a run can be resumed, forked, replayed and read.

`trajectory/header.json`, then one numbered file per record, each written to a temporary name first. `states/NNNN.json` is the run's state as it
was before answer NNNN, written when it changed; `attempts/N/` has the files of attempt N.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from agent.errors import UserError
from agent.llm.conversation import KEPT, Answer, Answered, Call, Result, Results, Said, Turn
from agent.llm.limits import Spent
from agent.llm.prices import Price
from agent.llm.redact import redact, secrets
from agent.policies import Action
from agent.state import RunState
from agent.workspace import write_atomic

FORMAT = "trajectory-1"
FOLDER = "trajectory"


class Header(BaseModel):
    """Written once."""

    format: Literal["trajectory-1"] = FORMAT
    policy: str
    price: Price
    forked_from: str | None = None
    """Run whose first records these are."""
    inherited: int = 0
    """How many records were copied; what they cost was paid there."""


class Told(BaseModel):
    """Text to the model."""

    kind: Literal["told"] = "told"
    text: str
    fresh: bool = False
    """A conversation begins here; what was said before is not sent again."""
    seen: int = 0
    """Lines of the run's log that the model knows by now."""


class Answering(BaseModel):
    """An answer of the model."""

    kind: Literal["answer"] = "answer"
    step: int
    """From 1."""
    answer: Answer
    usd: float


class Acting(BaseModel):
    """An action handed to the loop, written before it is carried out."""

    kind: Literal["action"] = "action"
    call: str
    action: Action
    log_length: int
    """Lines of the run's log before it."""


class Resulting(BaseModel):
    """What a call came to."""

    kind: Literal["result"] = "result"
    result: Result
    seen: int = 0
    """Lines of the run's log that the model knows by now."""
    gpu_seconds: float = 0.0
    halts: bool = False
    """Actions that the same answer asked for after this one are not carried out: they were planned for another state."""


class Record(BaseModel):
    """One file."""

    at: str
    body: Annotated[Told | Answering | Acting | Resulting, Field(discriminator="kind")]


class Trajectory:
    """The records of one run, in memory and on disk."""

    def __init__(self, folder: Path, header: Header, records: list[Record]):
        self.folder, self.header, self.records = folder, header, records
        self._secrets = secrets()

    @classmethod
    def open(cls, run_folder: Path, header: Header) -> "Trajectory":
        """The one that is there, or a new one."""
        folder = run_folder / FOLDER
        if (folder / "header.json").exists():
            return cls.load(run_folder)
        trajectory = cls(folder, header, [])
        trajectory.attempts.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "header.json", trajectory._clean(header.model_dump_json(indent=1)))
        return trajectory

    @classmethod
    def load(cls, run_folder: Path) -> "Trajectory":
        """Raises UserError if there is none or it cannot be read."""
        folder = run_folder / FOLDER
        if not (folder / "header.json").exists():
            raise UserError(f"run {run_folder.name} has no trajectory; only a run with an LLM policy has one")
        try:
            header = Header.model_validate_json((folder / "header.json").read_bytes())
            paths = sorted(folder.glob("[0-9]*.json"))
            return cls(folder, header, [Record.model_validate_json(path.read_bytes()) for path in paths])
        except (OSError, ValidationError) as error:
            raise UserError(f"{folder} cannot be read ({str(error).splitlines()[0]})") from None

    def add(self, body: Told | Answering | Acting | Resulting) -> None:
        """Append and save."""
        record = Record(at=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}", body=body)
        write_atomic(self.folder / f"{len(self.records):04d}.json", self._clean(record.model_dump_json(indent=1)))
        self.records.append(record)

    def keep_files(self, attempt: int, files: dict[str, str]) -> None:
        """What an attempt brought, where the model can look it up after a rejection."""
        for name, text in files.items():
            write_atomic(self.attempts / str(attempt) / name, self._clean(text))

    def keep_state(self, state: RunState) -> None:
        """Remember the state before the next answer, if it differs from the last one kept."""
        data = self._clean(state.model_dump_json())
        kept = sorted((self.folder / "states").glob("*.json"))
        if not kept or kept[-1].read_bytes() != data:
            write_atomic(self.folder / "states" / f"{self.steps + 1:04d}.json", data)

    @property
    def attempts(self) -> Path:
        """A folder per attempt that brought files."""
        return self.folder / "attempts"

    @property
    def steps(self) -> int:
        """Answers so far, inherited ones included."""
        return sum(isinstance(r.body, Answering) for r in self.records)

    @property
    def cache_key(self) -> str:
        """The same for every request of this run and of its forks, which share their first tokens."""
        return self.header.forked_from or self.folder.parent.name

    @property
    def spent(self) -> Spent:
        """Of this run; what a fork inherited was paid before."""
        own = [r.body for r in self.records[self.header.inherited:]]
        answers = [body for body in own if isinstance(body, Answering)]
        return Spent(steps=len(answers), usd=sum(a.usd for a in answers), tokens=sum(a.answer.usage.total for a in answers),
                     gpu_seconds=sum(body.gpu_seconds for body in own if isinstance(body, Resulting)))

    def turns(self) -> list[Turn]:
        """The conversation as it is sent: since the last fresh start, without the answers that are not kept, results of one answer together."""
        turns: list[Turn] = []
        for body in self._current():
            if isinstance(body, Told):
                turns.append(Said(text=body.text))
            elif isinstance(body, Answering) and body.answer.end in KEPT:
                turns.append(Answered(answer=body.answer))
            elif isinstance(body, Resulting):
                if turns and isinstance(turns[-1], Results):
                    turns[-1].results.append(body.result)
                else:
                    turns.append(Results(results=[body.result]))
        return turns

    def unanswered(self) -> list[Call]:
        """Calls of the last answer that have no result yet, in order."""
        calls: list[Call] = []
        for body in self._current():
            if isinstance(body, Answering):
                calls = list(body.answer.calls) if body.answer.end in KEPT else []
            elif isinstance(body, Resulting):
                calls = [call for call in calls if call.id != body.result.call]
        return calls

    def pending(self) -> Acting | None:
        """The action that was handed to the loop and has no result yet."""
        return body if isinstance(body := self.last, Acting) else None

    @property
    def last(self) -> Told | Answering | Acting | Resulting | None:
        return self.records[-1].body if self.records else None

    @property
    def seen(self) -> int:
        """Lines of the run's log that the model knows."""
        return max((r.body.seen for r in self.records if isinstance(r.body, Told | Resulting)), default=0)

    def results(self) -> list[Resulting]:
        """Of the last answer, so far."""
        found: list[Resulting] = []
        for record in reversed(self.records):
            if isinstance(record.body, Answering):
                break
            if isinstance(record.body, Resulting):
                found.insert(0, record.body)
        return found

    def last_answer(self) -> Answer | None:
        return next((r.body.answer for r in reversed(self.records) if isinstance(r.body, Answering)), None)

    def _current(self) -> list[Told | Answering | Acting | Resulting]:
        bodies = [record.body for record in self.records]
        starts = [n for n, body in enumerate(bodies) if isinstance(body, Told) and body.fresh]
        return bodies[starts[-1]:] if starts else bodies

    def _clean(self, text: str) -> bytes:
        """Secrets are looked for in the form that JSON gives them."""
        return redact(text, [json.dumps(value, ensure_ascii=False)[1:-1] for value in self._secrets]).encode()

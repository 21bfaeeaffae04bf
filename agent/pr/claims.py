"""What a pull request claims, as one typed document: the text is written from it, and `verify-pr` checks both against a new run."""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from agent.errors import UserError
from agent.verdict import VerifyReport
from agent.workspace import encode_evidence

FILE = "pull-request"
"""Name of the document in `evidence/`."""


def readable(report: Any) -> Any:
    """JSON has no infinity: a figure that was not finite was written as null."""
    if isinstance(report, dict) and isinstance(report.get("baseline"), dict):
        report = {**report, "baseline": {name: float("nan") if value is None else value for name, value in report["baseline"].items()}}
    return report


Report = Annotated[VerifyReport, BeforeValidator(readable)]


Commit = Annotated[str, Field(pattern=r"^([0-9a-f]{40}([0-9a-f]{24})?)?$")]
"""Goes to git as an argument, so it is nothing else."""
Folder = Annotated[str, Field(pattern=r"^repros/\w[\w.-]*$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Cause(Strict):
    """A first divergence and what removed it."""

    operator: str
    dimension: str
    site: str
    cause: str
    detail: str
    elements: int
    differing: int
    max_abs: float | None
    max_ulps: int
    confirmed: bool
    substituted_with: str
    attempt: int
    fix: str


class Change(Strict):
    """One commit of the series."""

    subject: str
    operator: str
    """empty: the commit is not about one operator"""
    files: list[str]
    added: int
    removed: int
    code: list[str] = []
    """where the implementations are that a contract names, as file:attribute"""
    why: str = ""
    """of whoever wrote code: what it does about the difference"""


class Repro(Strict):
    """A folder under `repros/` and what it says."""

    folder: Folder
    operator: str
    line: str
    """what it prints while the two sides differ"""
    before: int
    """exit code on the untouched stack"""
    after: int | None
    """exit code with the change; None: not run"""


class Dropped(Strict):
    number: int
    change: str
    branch: str
    reason: str


class Searched(Strict):
    """One search for work that exists already."""

    query: str
    found: list[str]
    """`#number title` of each open pull request"""


class Engine(Strict):
    """The checkout of an engine that the change is made in."""

    package: str
    base: Commit
    drift: int
    """files of the base commit that are not those of the installed package; 0 means that stock is exactly the base"""
    contract: bool
    """the figures also need the workspace's contract, which is not part of this change"""


class Claims(Strict):
    """Everything the text says. Figures are copies of committed evidence; `evidence` names the files and their sha256."""

    format: Literal[1] = 1
    tool: str
    renderer: str = ""
    """which version of the code wrote the text from this, see `body.RENDERER`"""
    title: str
    model: str
    scale: str
    weights: Literal["seeded", "given"]
    device: str
    run: str
    policy: str
    required: float
    """least throughput, as a share of stock"""
    branch: str
    base: str
    base_commit: Commit = ""
    commit: Commit = ""
    """that was verified; this and `base_commit` are empty in the draft that ends a run"""
    files: dict[str, str] = {}
    """path -> git's blob id of everything that the verified commit runs"""
    contract: dict[str, dict[str, str]]
    stock: Report
    final: Report
    causes: list[Cause] = []
    changes: list[Change] = []
    repros: list[Repro] = []
    dropped: list[Dropped] = []
    engine: Engine | None = None
    upstream: str = ""
    """profile of the target's rules; empty: none"""
    human: str = ""
    """`Name <address>` of the person who answers for it"""
    reviewed: bool = False
    """that person confirmed having read every changed line"""
    coordination: str = ""
    """where the target's maintainers agreed to the change"""
    not_duplicate: str = ""
    searched: list[Searched] = []
    evidence: dict[str, str] = {}

    def encode(self) -> bytes:
        return encode_evidence(json.loads(self.model_dump_json()))


def read(data: bytes, origin: str) -> Claims:
    """Raises UserError that names the first field which is wrong."""
    try:
        return Claims.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{origin}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}; it is not the evidence of a pull request, "
                        "or one of another version") from None


def verdict_id(report: dict[str, Any] | VerifyReport) -> str:
    """Short name of one verdict: 16 hex digits over the report's JSON as it is kept in evidence."""
    plain = json.loads(report.model_dump_json()) if isinstance(report, VerifyReport) else report
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def word(report: VerifyReport) -> str:
    return "void" if report.verdict.void else "exact" if report.verdict.exact else "not exact"

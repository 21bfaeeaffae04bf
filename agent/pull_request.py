"""PULL_REQUEST.md: the claim and everything a reviewer needs to check it. Every figure is read back from committed evidence."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import __version__, config
from agent.errors import UserError
from agent.pr import body
from agent.pr.claims import Cause, Claims, Dropped, Repro
from agent.state import RunState
from agent.workspace import Workspace

FILE = "PULL_REQUEST.md"
Json = dict[str, Any]


@dataclass(frozen=True)
class Evidence:
    """The run's evidence as committed: file name (without folder) -> content, its bytes, and its sha256."""

    documents: dict[str, Json]
    files: dict[str, bytes]
    hashes: dict[str, str]

    @classmethod
    def load(cls, workspace: Workspace, state: RunState) -> "Evidence":
        """Raises UserError if a file is not the one that a commit's Evidence trailer names."""
        documents, files, hashes = {}, {}, {}
        sources = [(path, state.head) for path in workspace.files(state.head, "evidence")]
        sources += [(f"evidence/attempt-{a.number}.json", a.commit) for a in state.attempts if a.outcome == "rejected"]
        for path, commit in sources:
            data = workspace.show(commit, path)
            name, sha = path.removeprefix("evidence/").removesuffix(".json"), sha256(data)
            if sha not in workspace.evidence_trailers(commit, path):
                raise UserError(f"{path} at {commit[:12]} is not the file that its commit's Evidence trailer names; do not trust this run "
                                "[evidence_changed]")
            documents[name], files[name], hashes[name] = json.loads(data), data, sha
        return cls(documents, files, hashes)

    def attempts(self, outcome: str) -> list[Json]:
        found = [document for name, document in self.documents.items() if name.startswith("attempt-") and document["outcome"] == outcome]
        return sorted(found, key=lambda attempt: attempt["number"])

    def divergence(self, key: str) -> Json | None:
        """What localize said about a divergence, at the time it was fixed."""
        reports = [document for name, document in self.documents.items() if name.startswith("localize-")]
        reports += [attempt["localize"] for attempt in self.attempts("kept") if attempt["localize"]]
        found = [d for report in reports for d in report["divergences"] if f"{d['dimension']}:{d['site']}" == key]
        return found[0] if found else None


def write(workspace: Workspace, state: RunState) -> str:
    """The text that ends a run; `agent pr` writes a stronger one, after verifying once more."""
    return body.render(draft(workspace, state, Evidence.load(workspace, state)))


def draft(workspace: Workspace, state: RunState, evidence: Evidence) -> Claims:
    """What the run itself can claim: nothing is verified at a commit yet."""
    kept = evidence.attempts("kept")
    # A final.json that an older head left behind is not about this one.
    final = evidence.documents["final"] if state.final else kept[-1]["verify"]
    return Claims.model_validate(dict(
        tool=f"agent {__version__}", title=title(state.model, final), model=state.model, scale=state.scale,
        weights="given" if weights_given(workspace) else "seeded", device=state.device, run=state.run, policy=state.policy, required=state.target,
        branch=state.branch, base=state.base, contract=state.contract, stock=evidence.documents["baseline"], final=final,
        causes=causes(evidence), repros=repros(state, evidence), dropped=dropped(evidence), evidence=evidence.hashes))


def title(model: str, final: Json) -> str:
    if final["verdict"]["exact"]:
        return f"{model}: rollout and training log-probabilities equal, bit for bit"
    return f"{model}: fewer unequal log-probabilities between rollout and training (not exact yet)"


def weights_given(workspace: Workspace) -> bool:
    return bool(workspace.settings.weights) if (workspace.path / config.FILE).is_file() else False


def causes(evidence: Evidence) -> list[Cause]:
    """What the kept attempts addressed, as localize saw it at that time."""
    found = [(evidence.divergence(key), attempt) for attempt in evidence.attempts("kept") for key in attempt["addresses"]]
    return [cause(divergence, attempt) for divergence, attempt in found if divergence]


def cause(d: Json, attempt: Json) -> Cause:
    """A divergence and the attempt that removed it."""
    mine = [binding(b) for b in attempt["bindings"] if b["operator"] == d["operator"]]
    changed = attempt["patch"].get("engine") or attempt["patch"]["changed"]
    return Cause(
        operator=d["operator"], dimension=d["dimension"], site=d["site"], cause=d["cause"], detail=d["cause_detail"], elements=d["elements"],
        differing=d["differing"], max_abs=d["max_abs"], max_ulps=d["max_ulps"], confirmed=d["confirmed"],
        substituted_with=d["substituted_with"] or "", attempt=attempt["number"], fix=", ".join(f"`{name}`" for name in mine or changed))


def repros(state: RunState, evidence: Evidence) -> list[Repro]:
    return [Repro(folder=state.repro_folder(check["divergence"]), operator=Path(state.repro_folder(check["divergence"])).name.split("-")[-1],
                  line=check["expected_line"], before=check["before"], after=check["after"])
            for attempt in evidence.attempts("kept") for check in attempt["repros"]]


def dropped(evidence: Evidence) -> list[Dropped]:
    return [Dropped(number=a["number"], change=", ".join(f"`{binding(b)}`" for b in a["bindings"]) or ", ".join(a["patch"]["changed"]),
                    branch=a["branch"], reason=a["reason"]) for a in evidence.attempts("rejected")]


def binding(b: Mapping[str, str | None]) -> str:
    return f"{b['side'] + ':' if b['side'] else ''}{b['operator']}={b['implementation']}"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

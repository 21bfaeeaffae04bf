"""PULL_REQUEST.md: the claim and everything a reviewer needs to check it. Every figure is read back from committed evidence."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from agent.errors import UserError
from agent.state import RunState
from agent.workspace import Workspace

FILE = "PULL_REQUEST.md"
Json = dict[str, Any]


@dataclass(frozen=True)
class Evidence:
    """The run's evidence as committed: file name (without folder) -> content, and its sha256."""

    documents: dict[str, Json]
    hashes: dict[str, str]

    @classmethod
    def load(cls, workspace: Workspace, state: RunState) -> "Evidence":
        """Raises UserError if a file is not the one that a commit's Evidence trailer names."""
        documents, hashes = {}, {}
        sources = [(path, state.head) for path in workspace.files(state.head, "evidence")]
        sources += [(f"evidence/attempt-{a.number}.json", a.commit) for a in state.attempts if a.outcome == "rejected"]
        for path, commit in sources:
            data = workspace.show(commit, path)
            name, sha = path.removeprefix("evidence/").removesuffix(".json"), hashlib.sha256(data).hexdigest()
            if sha not in workspace.evidence_trailers(commit, path):
                raise UserError(f"{path} at {commit[:12]} is not the file that its commit's Evidence trailer names; do not trust this run")
            documents[name], hashes[name] = json.loads(data), sha
        return cls(documents, hashes)

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
    """The whole text."""
    evidence = Evidence.load(workspace, state)
    # A final.json that an older head left behind is not about this one.
    stock = evidence.documents["baseline"]
    final = evidence.documents["final"] if state.final else evidence.attempts("kept")[-1]["verify"]
    sections = [
        _title(state, final), _claim(state, stock, final), _causes(evidence), _numbers(stock, final), _conditions(stock, final),
        _commands(state, final, evidence), _environment(final), _dropped(evidence), _controls(final), _limits(state, final),
        _provenance(state, evidence)]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _title(state: RunState, final: Json) -> str:
    if final["verdict"]["exact"]:
        return f"# {state.model}: rollout and training log-probabilities equal, bit for bit"
    return f"# {state.model}: fewer unequal log-probabilities between rollout and training (not exact yet)"


def _claim(state: RunState, stock: Json, final: Json) -> str:
    verdict, timing = final["verdict"], final["throughput"]
    ran = [c for c in verdict["conditions"] if c["ran"]]
    speed = "Throughput was not measured." if timing is None else (
        f"Rollout throughput is {timing['ratio']:.3f} of stock (required: {state.target:.3f}).")
    kind = "required" if final["level"] == "full" else "quickly checked"
    compared = sum(c["tokens"] for c in ran)
    return (f"**Claim.** {verdict['mismatches']} mismatches in {len(ran)} {kind} conditions that compare {compared} log-probabilities "
            f"({verdict['tokens']} sampled tokens, fp32 bits, scale `{state.scale}`); the untouched stack has {stock['verdict']['mismatches']} in "
            f"{sum(c['ran'] for c in stock['verdict']['conditions'])}. {speed}\n\n"
            f"The change is `contract.toml` and, where it names them, files in `kernels/`; the engines themselves are not edited.")


def _causes(evidence: Evidence) -> str:
    rows = []
    for attempt in evidence.attempts("kept"):
        for key in attempt["addresses"]:
            if d := evidence.divergence(key):
                mine = [_binding(b) for b in attempt["bindings"] if b["operator"] == d["operator"]]
                fix = ", ".join(f"`{name}`" for name in mine or attempt["patch"]["changed"])
                proof = f"substituting `{d['substituted_with']}` moves it" if d["confirmed"] else "not confirmed by substitution"
                rows.append([f"`{d['operator']}`", d["dimension"], f"`{d['site']}`", f"{d['cause']}: {d['cause_detail']}",
                             f"{d['differing']} of {d['elements']}", f"{_number(d['max_abs'])}, {d['max_ulps']} ulps", proof,
                             f"attempt {attempt['number']}: {fix}"])
    return "## What differed first, and why\n\n" + _table(
        ["operator", "dimension", "site", "cause", "elements", "largest", "confirmed", "fixed by"], rows)


def _numbers(stock: Json, final: Json) -> str:
    before, after = stock["baseline"] or {}, final["baseline"] or {}
    timing = final["throughput"] or {}
    accuracy = final["accuracy"] or {}
    rows = [
        ["unequal log-probabilities, all conditions", stock["verdict"]["mismatches"], final["verdict"]["mismatches"]],
        ["rollout against the loss: unequal tokens", before.get("mismatches"), after.get("mismatches")],
        ["rollout against the loss: K3", _number(before.get("k3")), _number(after.get("k3"))],
        ["rollout against the loss: largest difference (nats)", _number(before.get("max_abs")), _number(after.get("max_abs"))],
        ["tokens/s, interleaved", _number(timing.get("stock")), _number(timing.get("candidate"))],
        ["distance to the reference forward (nats, rms)", _number(accuracy.get("stock")), _number(accuracy.get("candidate"))]]
    spread = f"\n\nThroughput ratio {timing['ratio']:.3f}, pairs between {timing['spread'][0]:.3f} and {timing['spread'][1]:.3f}." if timing else ""
    return "## Before and after\n\n" + _table(["", "stock", "this branch"], rows) + spread


def _conditions(stock: Json, final: Json) -> str:
    before = {c["name"]: c for c in stock["verdict"]["conditions"]}
    rows = [[c["name"], c["dimension"], _count(before.get(c["name"])), _count(c)] for c in final["verdict"]["conditions"]]
    return ("## Conditions\n\nUnequal log-probabilities of those compared. Stock was measured with the quick matrix, this branch with the "
            f"{final['level']} one.\n\n" + _table(["condition", "dimension", "stock", "this branch"], rows))


def _commands(state: RunState, final: Json, evidence: Evidence) -> str:
    verdict = final["verdict"]
    word = "void" if verdict["void"] else "exact" if verdict["exact"] else "not exact"
    lines = [
        f"agent verify --model {state.model} --scale {state.scale} --workspace . --level {final['level']}",
        f"# {final['level']} verdict: {word}, {verdict['mismatches']} mismatches, {verdict['tokens']} sampled tokens"]
    kernels = " --kernels ../../kernels" if any(name.startswith("kernels:") for side in state.contract.values() for name in side.values()) else ""
    for attempt in evidence.attempts("kept"):
        for check in attempt["repros"]:
            folder = state.repro_folder(check["divergence"])
            lines += [f"(cd {folder} && python repro.py)", f"# stock: {check['expected_line']} (exit code {check['before']})",
                      f"(cd {folder} && python repro.py --contract ../../contract.toml{kernels})", f"# this branch: exit code {check['after']}"]
    return "## Check it\n\n```\n" + "\n".join(lines) + "\n```"


def _environment(final: Json) -> str:
    return "## Environment\n\n" + _table(["process", "versions and settings"], [list(row) for row in environment_rows(final["environment"])])


def environment_rows(environment: dict[str, Json]) -> list[tuple[str, str]]:
    """(processes, what they reported), one row for those that reported the same."""
    rows: dict[str, list[str]] = {}
    for process, facts in sorted(environment.items()):
        facts = facts.get("environment") or facts
        rows.setdefault(", ".join(f"{key} {value}" for key, value in sorted(flatten(facts).items())), []).append(process)
    return [(", ".join(processes), text) for text, processes in rows.items()]


def _dropped(evidence: Evidence) -> str:
    rows = [[a["number"], ", ".join(f"`{_binding(b)}`" for b in a["bindings"]) or ", ".join(a["patch"]["changed"]), f"`{a['branch']}`", a["reason"]]
            for a in evidence.attempts("rejected")]
    return "## Tried and dropped\n\n" + (_table(["attempt", "change", "branch", "why"], rows) if rows else "Nothing: the first patch held.")


def _controls(final: Json) -> str:
    rows = [[c["name"], f"{c['mismatches']} of {c['tokens']} reported" if c["ran"] else f"did not run: {c['reason']}"] for c in final["controls"]]
    rule = "One weight moved by one ulp on one side must be reported, or the verdict is void."
    return f"## Negative control\n\n{rule}\n\n{_table(['control', 'result'], rows)}"


def _limits(state: RunState, final: Json) -> str:
    lines = [f"- not run: {c['name']} ({c['dimension']}): {c['reason']}" for c in final["verdict"]["conditions"] if not c["ran"]]
    lines += [f"- {reason}" for reason in final["verdict"]["reasons"]]
    lines.append(f"- measured at scale `{state.scale}` in the environment above only; other devices, versions and thread counts are not covered")
    return "## Limits\n\n" + "\n".join(lines)


def _provenance(state: RunState, evidence: Evidence) -> str:
    hashes = "\n".join(f"- `evidence/{name}.json` sha256:{sha}" for name, sha in sorted(evidence.hashes.items()))
    return (f"## Provenance\n\nRun `{state.run}`, policy `{state.policy}`, branch `{state.branch}`. Written by a program; a person has to review it "
            f"before it is merged. Each hash below is also the `Evidence` trailer of the commit that added the file.\n\n{hashes}")


def _binding(binding: Json) -> str:
    return f"{binding['side'] + ':' if binding['side'] else ''}{binding['operator']}={binding['implementation']}"


def _count(condition: Json | None) -> str:
    if condition is None:
        return "not in the quick matrix"
    return f"{condition['mismatches']} of {condition['tokens']}" if condition["ran"] else "not run"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def flatten(value: Json, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flatten(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return flat


def _table(header: list[str], rows: list[list[Any]]) -> str:
    def line(cells: list[Any]) -> str:
        return "| " + " | ".join(str("–" if cell is None else cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])

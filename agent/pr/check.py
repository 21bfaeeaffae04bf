"""`agent verify-pr`: what of a pull request holds up, claim by claim: text against evidence, evidence against its hashes, code, and a new run."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from agent import pull_request
from agent.errors import AgentError, JobFailed, UserError
from agent.pr import body, claims, series, subject
from agent.pr.body import flatten
from agent.pr.claims import Claims, word
from agent.pr.subject import Subject
from agent.pr.upstream import profiles
from agent.toolset import Progress, Tools
from agent.verdict import VerifyReport
from agent.workspace import Workspace
from consistency.contract import Contract, ContractError

Result = Literal["same", "reproduces", "differs", "note"]
SHOWN = 3
"""Differing lines of the text that are shown."""


class Row(BaseModel):
    """One claim."""

    claim: str
    stated: str
    found: str
    result: Result
    """`same`: read and compared; `reproduces`: measured again; `differs`: does not hold; `note`: said, but decides nothing"""


class Checked(BaseModel):
    subject: str
    commit: str
    model: str
    scale: str
    ran: bool
    """engines were started; without, only text, evidence and code were compared"""
    rows: list[Row]

    @property
    def holds(self) -> bool:
        return all(row.result != "differs" for row in self.rows)


@dataclass
class Check:
    """One call. `tools` makes the tools for the claimed model and scale once the code is there."""

    subject: Subject
    tools: Callable[[Claims], Tools]
    progress: Progress
    static: bool = False
    say: Callable[[str], None] = lambda text: None
    rows: list[Row] = field(default_factory=list)

    def run(self, scratch: Path) -> Checked:
        """Raises UserError if the code is nowhere to be found."""
        made = self.subject.claims
        self._text()
        self._evidence()
        self._figures()
        tree = self._code()
        ran = tree is not None and not self.static
        if tree is not None and not self.static:
            self._again(tree, scratch)
        return Checked(subject=self.subject.name, commit=made.commit, model=made.model, scale=made.scale, ran=ran, rows=self.rows)

    # ---- what can be read ---------------------------------------------------------------------------------------

    def _text(self) -> None:
        """The text has to be the one that the evidence gives."""
        made, text = self.subject.claims, self.subject.text
        if text is None:
            self._add("text", pull_request.FILE, "missing", False)
            return
        profile = profiles().get(made.upstream)
        wanted = _lines(body.render(made, profile.template if profile else None))
        found = _lines(text.partition(body.END)[0] + body.END)
        if found and wanted and found[0] != wanted[0] and not found[0].startswith("# "):
            wanted = _lines("\n".join(wanted[1:]))  # a forge keeps the title elsewhere
        added = sum(bool(line.strip()) for line in text.partition(body.END)[2].splitlines())
        wrong = _differences(wanted, found)
        if wrong and made.renderer != body.RENDERER:
            self._figures_of_text(wanted, found)
            return
        for stated, evidence in wrong[:SHOWN]:
            self._add("text", stated or "(line left out)", evidence or "(no such line)", False)
        if len(wrong) > SHOWN:
            self._add("text", f"{len(wrong) - SHOWN} more lines", "other lines in the evidence", False)
        if not wrong:
            self._add("text", f"{len(found)} lines", "as the evidence gives them", True)
        if added:
            self._note("text", f"{added} lines below the generated part", "written by people, not checked")

    def _figures_of_text(self, wanted: list[str], found: list[str]) -> None:
        """Another version words the text otherwise; the figures in it have to be those of the evidence all the same."""
        known, stated = (set(re.findall(r"\d[\d.]*\d|\d", "\n".join(lines))) for lines in (wanted, found))
        if unknown := sorted(stated - known - {"0", "1"}):
            self._add("text", f"{len(unknown)} figures, among them {', '.join(unknown[:5])}", "not in the evidence", False)
        else:
            self._note("text", "written by another version of the tool", "its figures are all in the evidence; the wording was not compared")

    def _evidence(self) -> None:
        """Every file has the hash that the claims give it; the claims have the one in the commit's trailer."""
        made, files = self.subject.claims, self.subject.files
        wrong = 0
        for name, sha in sorted(made.evidence.items()):
            if name not in files:
                wrong += 1
                self._add(f"evidence/{name}.json", f"sha256:{sha[:16]}", "missing", False)
            elif (now := pull_request.sha256(files[name])) != sha:
                wrong += 1
                self._add(f"evidence/{name}.json", f"sha256:{sha[:16]}", f"sha256:{now[:16]}, changed", False)
        if not wrong:
            self._add("evidence", f"{len(made.evidence)} files", "with the hashes stated", True)
        if extra := sorted(set(files) - set(made.evidence) - {claims.FILE}):
            self._note("evidence", "not named", ", ".join(extra))

    def _figures(self) -> None:
        """The claims' copies are those of the evidence."""
        made = self.subject.claims
        for name, mine in (("final", made.final), ("baseline", made.stock)):
            document = self.subject.document(name)
            if document is not None and _report(document) != _report(mine.model_dump(mode="json")):
                self._add(f"figures of evidence/{name}.json", claims.verdict_id(mine), claims.verdict_id(document), False)
        if (t := made.final.throughput) and not t.spread[0] <= t.ratio <= t.spread[1]:
            self._add("throughput", f"{t.ratio:.3f}", f"outside its own interval, {t.spread[0]:.3f} to {t.spread[1]:.3f}", False)
        reports = [self.subject.document(name) for name in made.evidence if name.startswith(("localize-", "attempt-"))]
        known = [d for r in reports if r for d in (r.get("localize") or r).get("divergences", [])]
        for c in made.causes:
            same = [d for d in known if (d["dimension"], d["site"], d["operator"]) == (c.dimension, c.site, c.operator)]
            figures = (c.differing, c.elements, c.max_abs, c.max_ulps)
            if not any((d["differing"], d["elements"], d["max_abs"], d["max_ulps"]) == figures for d in same):
                self._add(f"first difference {c.site}", f"{c.differing} of {c.elements}", "not in the evidence", False)

    def _code(self) -> str | None:
        """Commit or tree to run, once it is the one that was verified; None if it is not."""
        sub, made = self.subject, self.subject.claims
        if sub.repository is None:
            raise UserError(f"{sub.name}: it lies in no repository; --repo names one that holds {made.commit[:12]} or its base "
                            f"{made.base_commit[:12]}")
        tree, how = None, ""
        if made.commit and subject.has_commit(sub.repository, made.commit):
            tree, how = made.commit, "there"
        if sub.patches and subject.has_commit(sub.repository, made.base_commit):
            try:
                patched = subject.patched_tree(sub)
            except UserError as error:
                self._add("patch series", f"{len(sub.patches)} patches", f"do not apply to {made.base_commit[:12]} ({error})", False)
            else:
                same = subject.code_blobs(sub, patched) == made.files
                self._add("patch series", f"{len(sub.patches)} patches", "give the code that was verified" if same else self._other(patched), same)
                if tree is None and same:
                    tree, how = patched, "not here; the patches on its base are"
        head = sub.head or self._branch_head(sub.repository)
        if tree is None and head and subject.code_blobs(sub, head) == made.files:
            tree, how = head, f"not here; {head[:12]} holds the same code"
        if tree is None:
            raise UserError(f"{sub.name}: {sub.repository} holds neither commit {made.commit[:12]} nor its base {made.base_commit[:12]} with patches "
                            "that give the same code; --repo names another repository")
        blobs = subject.code_blobs(sub, tree)
        if blobs != made.files:
            self._add("commit", made.commit[:12], self._other(tree), False)
            return None
        self._add("commit", made.commit[:12], f"{how}, {len(made.files)} files as verified", True)
        if head:
            self._check_head(head)
        return tree

    def _branch_head(self, repository: Path) -> str | None:
        found = [h.commit.hexsha for h in Workspace(repository).repo.heads if h.name == self.subject.claims.branch]
        return found[0] if found else None

    def _check_head(self, head: str) -> None:
        """Above the verified commit there may be evidence, nothing that runs."""
        sub, made = self.subject, self.subject.claims
        assert sub.repository is not None
        if made.engine is not None:
            if head != made.commit and sub.head is None:
                self._add("branch", made.commit[:12], f"{made.branch} stands at {head[:12]}", False)
            return
        if other := _other_blobs(made.files, subject.code_blobs(sub, head)):
            self._add("branch", f"the code of {made.commit[:12]}", f"{head[:12]} has other code: {other}", False)
            return
        sha = pull_request.sha256(sub.files[claims.FILE])
        trailers = Workspace(sub.repository).evidence_trailers(head)
        if sha in trailers:
            self._add("trailer", f"sha256:{sha[:16]}", f"in {head[:12]}", True)
        elif trailers and any(f.startswith("evidence/") for f in series.changed_files(sub.repository, f"{head}^", head)):
            self._add("trailer", f"sha256:{trailers[0][:16]} in {head[:12]}", f"evidence/{subject.DOCUMENT} has sha256:{sha[:16]}", False)
        else:
            self._note("trailer", f"sha256:{sha[:16]}", f"{head[:12]} names no evidence (squashed?)")

    def _other(self, tree: str) -> str:
        return f"other code: {_other_blobs(self.subject.claims.files, subject.code_blobs(self.subject, tree)) or 'none of the files'}"

    # ---- what has to be measured --------------------------------------------------------------------------------

    def _again(self, tree: str, scratch: Path) -> None:
        made = self.subject.claims
        folder = subject.export(self.subject, tree, scratch / "change")
        stock = scratch / "stock"
        (stock / "kernels").mkdir(parents=True)
        if made.engine:
            subject.engine_settings(self.subject, stock)
        try:
            contract = Contract.load(folder / "contract.toml")
        except ContractError as error:
            raise UserError(str(error)) from None
        tools = self.tools(made)
        self.say("full verify of the change, on new prompts")
        report = self._measured("verdict", f"{word(made.final)}", lambda: tools.verify(contract, folder / "kernels", "full", self.progress))
        if report:
            self._verdict(report)
            self._speed(report)
            self._surroundings(report)
        self.say("quick verify of the untouched stack")
        before = self._measured("untouched stack", "differs", lambda: tools.verify(Contract(), stock / "kernels", "quick", self.progress))
        if before:
            then, now = made.stock.verdict.mismatches, before.verdict.mismatches
            conditions = sum(c.ran for c in before.verdict.conditions)
            self._add("untouched stack", f"{then} unequal", f"{now} unequal in {conditions} conditions", bool(then) == bool(now), again=True)
        self.say("repros, before and after")
        self._repros(tools, contract, folder, stock if made.engine else folder)

    def _measured(self, claim: str, stated: str, measure: Callable[[], VerifyReport]) -> VerifyReport | None:
        try:
            return measure()
        except JobFailed as error:
            self._add(claim, stated, f"could not be measured: {error.reason}", False)
            return None

    def _verdict(self, report: VerifyReport) -> None:
        then, now = self.subject.claims.final.verdict, report.verdict
        why = f" ({'; '.join(now.reasons)})" if now.reasons else ""
        self._add("verdict", f"{word(self.subject.claims.final)}, {then.mismatches} mismatches", f"{word(report)}, {now.mismatches} mismatches{why}",
                  now.exact == then.exact and now.void == then.void, again=True)
        found = {c.name: c for c in now.conditions}
        ran = [c for c in then.conditions if c.ran]
        held = 0
        for old in ran:
            new = found.get(old.name)
            if new is None or not new.ran:
                self._add(old.name, f"{old.mismatches} unequal", f"did not run ({new.reason if new else 'not in this matrix'})", False)
            elif bool(new.mismatches) != bool(old.mismatches):
                self._add(old.name, f"{old.mismatches} of {old.tokens} unequal", f"{new.mismatches} of {new.tokens} unequal", False)
            else:
                held += 1
        compared = sum(c.tokens for c in now.conditions)
        self._add("conditions", f"{len(ran)} ran", f"{held} as stated, {compared} compared", held == len(ran), again=True)
        if (then_error := self.subject.claims.final.accuracy) and (error := report.accuracy):
            self._add("distance to the reference", f"{then_error.candidate:.3g}, allowed {then_error.allowed:.3g}",
                      f"{error.candidate:.3g}, allowed {error.allowed:.3g}", error.ok, again=True)

    def _speed(self, report: VerifyReport) -> None:
        then, now, required = self.subject.claims.final.throughput, report.throughput, self.subject.claims.required
        if then is None or now is None:
            self._add("throughput", "not measured" if then is None else f"{then.ratio:.3f}", "not measured", then is None)
            return
        low, high = then.spread
        place = "within the stated interval" if low <= now.ratio <= high else "outside the stated interval"
        enough = "" if now.ratio >= required else f", less than the required {required:.3f}"
        row = Row(claim="throughput, share of stock", stated=f"{then.ratio:.3f} ({low:.3f} to {high:.3f})",
                  found=f"{now.ratio:.3f} ({now.spread[0]:.3f} to {now.spread[1]:.3f}), {place}{enough}",
                  result="differs" if enough else "reproduces" if low <= now.ratio <= high else "note")
        self.rows.append(row)

    def _surroundings(self, report: VerifyReport) -> None:
        made = self.subject.claims.final
        then, now = (_environment(r.environment) for r in (made, report))
        other = sorted({key.rpartition(".")[2] for key in then.keys() | now.keys() if then.get(key) != now.get(key)})
        self._note("environment", "as in the text", f"other here: {', '.join(other[:8])}" if other else "the same here")
        if made.harness != report.harness:
            self._note("harness", made.harness[:16] or "unknown", f"{report.harness[:16] or 'unknown'}, another version")

    def _repros(self, tools: Tools, contract: Contract, folder: Path, before_in: Path) -> None:
        """`before_in`: the worktree whose engine the repros fail on."""
        stated = self.subject.claims.repros
        there = [repro for repro in stated if (folder / repro.folder / "repro.py").is_file()]
        for repro in stated:
            if repro not in there:
                self._add(repro.folder, f"exit code {repro.before}, then {repro.after}", "missing", False)
        if not there:
            return
        folders = [folder / repro.folder for repro in there]
        try:
            before = tools.check_repros(folders, None, before_in / "kernels")
            after = tools.check_repros(folders, contract, folder / "kernels")
        except AgentError as error:
            self._add("repros", f"{len(there)} folders", f"could not be run: {str(error).splitlines()[0]}", False)
            return
        for repro, b, a in zip(there, before, after, strict=True):
            same = (b, a) == (repro.before, repro.after)
            self._add(repro.folder, f"exit code {repro.before}, then {repro.after}", f"{b}, then {a}", same, again=True)

    def _note(self, claim: str, stated: str, found: str) -> None:
        self.rows.append(Row(claim=claim, stated=stated, found=found, result="note"))

    def _add(self, claim: str, stated: str, found: str, holds: bool, again: bool = False) -> None:
        result: Result = "differs" if not holds else "reproduces" if again else "same"
        self.rows.append(Row(claim=claim, stated=stated, found=found, result=result))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().replace("\r\n", "\n").split("\n")]


def _differences(wanted: list[str], found: list[str]) -> list[tuple[str, str]]:
    """(line of the text, line that the evidence gives) wherever they differ; empty where one side has none. Blank lines count for nothing."""
    wanted, found = [line for line in wanted if line], [line for line in found if line]
    pairs: list[tuple[str, str]] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, wanted, found, autojunk=False).get_opcodes():
        if kind != "equal":
            rows = max(b - a, d - c)
            pairs += [(found[c + n] if c + n < d else "", wanted[a + n] if a + n < b else "") for n in range(rows)]
    return [(_around(stated, evidence), _around(evidence, stated)) for stated, evidence in pairs]


def _around(line: str, other: str, width: int = 70) -> str:
    """The part of a long line where it leaves another one."""
    start = next((n for n, (a, b) in enumerate(zip(line, other, strict=False)) if a != b), min(len(line), len(other)))
    first = max(0, start - width // 2)
    return ("…" if first else "") + line[first:first + width] + ("…" if len(line) > first + width else "")


def _report(document: dict[str, Any]) -> str:
    return claims.verdict_id(VerifyReport.model_validate(claims.readable(document)))


def _environment(environment: dict[str, dict]) -> dict[str, Any]:
    """What machine and versions say; load and seconds change from run to run."""
    flat = flatten(environment)
    return {key: value for key, value in flat.items() if key.rpartition(".")[2] not in ("seconds", "load")}


def _other_blobs(stated: dict[str, str], found: dict[str, str]) -> str:
    names = sorted(name for name in stated.keys() | found.keys() if stated.get(name) != found.get(name))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

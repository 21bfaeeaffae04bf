"""The text of a pull request, written from its claims and nothing else, so that a changed figure in it can be found."""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.pr.claims import Cause, Claims, verdict_id, word
from agent.verdict import ConditionResult, VerifyReport

Json = dict[str, Any]
RENDERER = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
"""Changes with this file: a text written by another version may be worded otherwise."""
END = "<!-- generated text ends here; what people add below is theirs -->"
LIMIT = 65_000
"""Characters that a forge takes as a body; GitHub's limit is 65536."""


def render(claims: Claims, layout: Mapping[str, list[str]] | None = None) -> str:
    """The whole text. `layout`: heading that the target asks for -> the sections under it; None: each section has its own heading."""
    parts = [f"# {plain(claims.title)}", _claim(claims)]
    placed = [name for names in (layout or {}).values() for name in names]
    for heading, names in (layout or {}).items():
        parts += [f"## {heading}", *(_section(name, claims, "###") for name in names)]
    parts += [_section(name, claims, "##") for name in SECTIONS if name not in placed]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + f"\n\n{END}\n"


def without_title(text: str) -> str:
    """What a forge gets as the body: it has a field of its own for the title. Long tables go first if the text is too long."""
    body = text.partition("\n")[2].lstrip("\n")
    if len(body) > LIMIT:
        body = re.sub(r"<details>.*?</details>", "(left out here for its length; it is in PULL_REQUEST.md)", body, flags=re.DOTALL)
    return body


def _section(name: str, claims: Claims, level: str) -> str:
    text = SECTIONS[name](claims)
    return f"{level} {name}\n\n{text.strip()}" if text.strip() else ""


def _claim(claims: Claims) -> str:
    final, stock = claims.final, claims.stock
    verdict, timing = final.verdict, final.throughput
    ran = [c for c in verdict.conditions if c.ran]
    speed = "Throughput was not measured." if timing is None else (
        f"Rollout throughput is {timing.ratio:.3f} of stock, between {timing.spread[0]:.3f} and {timing.spread[1]:.3f} over pairs of runs "
        f"(required: {claims.required:.3f}).")
    kind = "required" if final.level == "full" else "quickly checked"
    text = (f"**Claim.** {verdict.mismatches} mismatches in {len(ran)} {kind} conditions that compare {sum(c.tokens for c in ran)} log-probabilities "
            f"({verdict.tokens} sampled tokens, fp32 bits, scale `{claims.scale}`); the untouched stack has {stock.verdict.mismatches} in "
            f"{sum(c.ran for c in stock.verdict.conditions)} conditions. {speed}")
    if claims.commit:
        text += (f"\n\nVerified at commit `{claims.commit}`, on prompts drawn after it was fixed. To check everything said here: "
                 "`agent verify-pr PULL_REQUEST.md`.")
    if claims.engine is None:
        return text + "\n\nThe change is `contract.toml` and, where it names them, files in `kernels/`; the engines themselves are not edited."
    rest = " The figures also need the workspace's contract, which is not part of this change." if claims.engine.contract else ""
    return text + f"\n\nThe change is to `{claims.engine.package}`, on top of `{claims.engine.base[:12]}`.{rest}"


def _causes(claims: Claims) -> str:
    def proof(c: Cause) -> str:
        return f"substituting `{c.substituted_with}` moves it" if c.confirmed else "not confirmed by substitution"

    rows = [[f"`{c.operator}`", c.dimension, f"`{c.site}`", f"{c.cause}: {c.detail}", f"{c.differing} of {c.elements}",
             f"{_number(c.max_abs)}, {c.max_ulps} ulps", proof(c), f"attempt {c.attempt}: {c.fix}"] for c in claims.causes]
    if not rows:
        return "Nothing was localized: the contract was known before the run, which measured stock and then it."
    return _table(["operator", "dimension", "site", "cause", "elements", "largest", "confirmed", "fixed by"], rows)


def _changes(claims: Claims) -> str:
    if not claims.changes:
        return ""
    rows = [[number, c.subject, ", ".join(f"`{name}`" for name in c.files), f"+{c.added} -{c.removed}", ", ".join(f"`{name}`" for name in c.code)]
            for number, c in enumerate(claims.changes, 1)]
    named = any(c.code for c in claims.changes)
    text = _table(["commit", "what", "files", "lines", *(["what runs then"] if named else [])], [row if named else row[:-1] for row in rows])
    text += "".join(f"\n\n{number}: {plain(c.why)}" for number, c in enumerate(claims.changes, 1) if c.why)
    behind = [f"`{c.operator}`" for c in claims.changes if c.operator and c.operator not in {cause.operator for cause in claims.causes}]
    if behind:
        text += (f"\n\n{', '.join(behind)}: no first difference of their own is known. Behind a first difference another one cannot be told from its "
                 "consequence; they belong to the set that was measured as a whole.")
    return text


def _numbers(claims: Claims) -> str:
    stock, final = claims.stock, claims.final
    before, after, timing, accuracy = stock.baseline, final.baseline, final.throughput, final.accuracy
    rows = [
        ["unequal log-probabilities, all conditions", stock.verdict.mismatches, final.verdict.mismatches],
        ["rollout against the loss: unequal tokens", before and before.mismatches, after and after.mismatches],
        ["rollout against the loss: K3", _number(before and before.k3), _number(after and after.k3)],
        ["rollout against the loss: largest difference (nats)", _number(before and before.max_abs), _number(after and after.max_abs)],
        ["tokens/s, interleaved, median", _number(timing and timing.stock), _number(timing and timing.candidate)],
        ["distance to the reference forward (nats, rms)", _number(accuracy and accuracy.stock), _number(accuracy and accuracy.candidate)]]
    text = _table(["", "stock", "this branch"], rows)
    if timing:
        text += (f"\n\nThroughput ratio {timing.ratio:.3f}, the median over pairs of neighbouring runs, stock and this branch in turns; pairs "
                 f"between {timing.spread[0]:.3f} and {timing.spread[1]:.3f}.")
    if accuracy:
        text += f" Equal is not right by itself: the distance to the reference forward may be at most {_number(accuracy.allowed)}."
    return text


def _conditions(claims: Claims) -> str:
    before = {c.name: c for c in claims.stock.verdict.conditions}
    rows = [[c.name, c.dimension, _count(before.get(c.name)), _count(c)] for c in claims.final.verdict.conditions]
    dimensions = dict.fromkeys(c.dimension for c in claims.final.verdict.conditions)
    short = [[d, *(_total(report, d) for report in (claims.stock, claims.final))] for d in dimensions]
    return ("Unequal log-probabilities of those compared. Stock was measured with the quick matrix, this branch with the "
            f"{claims.final.level} one.\n\n" + _table(["dimension", "stock", "this branch"], short) + "\n\n"
            + _folded(f"all {len(rows)} conditions", _table(["condition", "dimension", "stock", "this branch"], rows)))


def _commands(claims: Claims) -> str:
    verdict = claims.final.verdict
    lines = []
    if claims.commit:
        checkout = " --repo CHECKOUT" if claims.engine else ""
        extra = "gpu" if claims.device == "cuda" else "cpu"
        lines += [f"pip install 'train-inference-consistency[{extra}]'   # version {claims.tool.partition(' ')[2]} gave these figures",
                  f"agent verify-pr PULL_REQUEST.md{checkout}", "# everything below and all figures above: what reproduces, and what does not", ""]
    if claims.engine is None:
        lines += [f"agent verify --model {claims.model} --scale {claims.scale} --workspace . --level {claims.final.level}",
                  f"# {claims.final.level} verdict: {word(claims.final)}, {verdict.mismatches} mismatches, {verdict.tokens} sampled tokens"]
    kernels = " --kernels ../../kernels" if any(name.startswith("kernels:") for side in claims.contract.values() for name in side.values()) else ""
    for r in claims.repros if claims.engine is None else []:
        lines += [f"(cd {r.folder} && python repro.py)", f"# stock: {r.line} (exit code {r.before})",
                  f"(cd {r.folder} && python repro.py --contract ../../contract.toml{kernels})", f"# this branch: exit code {r.after}"]
    text = "```\n" + "\n".join(lines).strip() + "\n```"
    if claims.engine and claims.repros:
        text += "\n\nRepros, run under both:\n\n" + "\n".join(
            f"- `{r.operator}`: exit code {r.before} on stock ({plain(r.line)}), {r.after} with the change" for r in claims.repros)
    return text


def _untested(claims: Claims) -> str:
    lines = [f"- not run: {c.name} ({c.dimension}): {plain(c.reason)}" for c in claims.final.verdict.conditions if not c.ran]
    lines += [f"- {plain(reason)}" for reason in claims.final.verdict.reasons]
    if claims.weights == "seeded":
        lines.append(f"- seeded weights at scale `{claims.scale}`, not a trained checkpoint; no evaluation on tasks was made")
    if claims.engine:
        lines.append("- the target's own test suite was not run by the tool that wrote this; its other backends and models were not run")
        if claims.engine.drift:
            lines.append(f"- {claims.engine.drift} files of the base commit differ from the installed package whose compiled parts were used; stock "
                         "is the base commit's Python on those parts")
    if (timing := claims.final.throughput) and timing.spread[0] < claims.required:
        machine = claims.final.environment.get("machine", {})
        busy = f"; the load was {machine['load']:.1f} on {machine['cores']} cores" if {"load", "cores"} <= machine.keys() else ""
        lines.append(f"- throughput: single pairs fell to {timing.spread[0]:.3f} of stock, below what is required of the median{busy}")
    lines.append(f"- measured at scale `{claims.scale}` in the environment below only; other devices, versions and thread counts are not covered")
    return "\n".join(lines)


def _environment(claims: Claims) -> str:
    rows = [list(row) for row in environment_rows(claims.final.environment)]
    return _folded("processes, versions and settings", _table(["process", "versions and settings"], rows)) if rows else ""


def _dropped(claims: Claims) -> str:
    rows = [[d.number, d.change, f"`{d.branch}`", d.reason] for d in claims.dropped]
    return _table(["attempt", "change", "branch", "why"], rows) if rows else "Nothing: the first patch held."


def _controls(claims: Claims) -> str:
    rows = [[c.name, f"{c.mismatches} of {c.tokens} reported" if c.ran else f"did not run: {c.reason}"] for c in claims.final.controls]
    rule = "One weight moved by one ulp on one side must be reported, or the verdict is void."
    return f"{rule}\n\n{_table(['control', 'result'], rows)}"


def _duplicates(claims: Claims) -> str:
    """Only where a forge was asked or a person said something."""
    lines = []
    if claims.coordination:
        lines.append(f"Agreed with the maintainers in {plain(claims.coordination)}.")
    if claims.not_duplicate:
        lines.append(f"Why this is not a duplicate: {plain(claims.not_duplicate)}")
    lines += [f"- open pull requests for `{_code(s.query)}`: {'; '.join(map(plain, s.found)) or 'none'}" for s in claims.searched]
    return "\n".join(lines)


def _authorship(claims: Claims) -> str:
    text = f"AI assistance was used: an agent (`{claims.tool}`, policy `{_code(claims.policy)}`) measured, chose and wrote this change and this text."
    if claims.human and claims.reviewed:
        return f"{text} {plain(claims.human)} has confirmed having read every changed line and answers for it."
    return f"{text} A person has to review every line before it is merged; nobody has said so yet."


def _provenance(claims: Claims) -> str:
    at = f"`{claims.base_commit[:12]}`" if claims.engine else f"`{claims.base}`" + (f" at `{claims.base_commit[:12]}`" if claims.base_commit else "")
    lines = [f"Run `{claims.run}`, branch `{claims.branch}`, base {at}, verdict `{verdict_id(claims.final)}`, measured by harness "
             f"`{claims.final.harness[:16] or 'unknown'}`. The hash of an attempt is also the `Evidence` trailer of the commits that it led to.", ""]
    hashes = [f"- `evidence/{name}.json` sha256:{sha}" for name, sha in sorted(claims.evidence.items())]
    if claims.commit:
        hashes.append(f"- `evidence/pull-request.json` sha256:{hashlib.sha256(claims.encode()).hexdigest()}")
    return "\n".join(lines + hashes)


SECTIONS: dict[str, Callable[[Claims], str]] = {
    "What differed first, and why": _causes, "What changes": _changes, "Before and after": _numbers, "Conditions": _conditions, "Check it": _commands,
    "Not tested": _untested, "Negative control": _controls, "Tried and dropped": _dropped, "Duplicates and coordination": _duplicates,
    "Who made this": _authorship, "Environment": _environment, "Provenance": _provenance}


def environment_rows(environment: dict[str, Json]) -> list[tuple[str, str]]:
    """(processes, what they reported), one row for those that reported the same."""
    rows: dict[str, list[str]] = {}
    for process, facts in sorted(environment.items()):
        facts = facts.get("environment") or facts
        said = {key: "; ".join(map(str, value)) if isinstance(value, list) else value for key, value in flatten(facts).items()}
        rows.setdefault(", ".join(f"{key} {value}" for key, value in sorted(said.items())), []).append(process)
    return [(", ".join(processes), text) for text, processes in rows.items()]


def flatten(value: Json, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= flatten(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": inner}
    return flat


def plain(text: str) -> str:
    """One line of Markdown in which somebody else's words notify nobody, close no issue and load nothing."""
    text = " ".join(text.split()).replace("<", "&lt;")
    text = re.sub(r"(?<!`)@(?=\w)", "@\u200b", text)
    text = re.sub(r"(?<=#)(?=\d)", "\u200b", text)
    return re.sub(r"!?\[(?=[^\]]*\]\()", lambda found: found.group().replace("[", "\\["), text)


def _code(text: str) -> str:
    return " ".join(text.replace("`", "'").split())


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _count(condition: ConditionResult | None) -> str:
    if condition is None:
        return "not in the quick matrix"
    return f"{condition.mismatches} of {condition.tokens}" if condition.ran else "not run"


def _total(report: VerifyReport, dimension: str) -> str:
    conditions = [c for c in report.verdict.conditions if c.dimension == dimension]
    ran = [c for c in conditions if c.ran]
    if not ran:
        return "not run" if conditions else f"not in the {report.level} matrix"
    missing = f", {len(conditions) - len(ran)} not run" if len(ran) < len(conditions) else ""
    return f"{sum(c.mismatches for c in ran)} of {sum(c.tokens for c in ran)} in {len(ran)} condition{'s' if len(ran) > 1 else ''}{missing}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _table(header: list[str], rows: list[list[Any]]) -> str:
    def line(cells: list[Any]) -> str:
        return "| " + " | ".join("–" if cell is None else plain(str(cell)).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(header), line(["---"] * len(header)), *map(line, rows)])

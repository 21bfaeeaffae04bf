"""What was measured, as text for the model: complete where it decides, counted where it would flood."""

from agent.state import Attempt, RunState, key
from agent.tools.divergence import Divergence, LocalizeReport
from agent.verdict import VerifyReport
from consistency.operators import catalog

FAILURE = 3000
"""Characters of a failed job's last words."""
OLD_ATTEMPTS = 30


def verdict(report: VerifyReport) -> str:
    """A verify, condition by condition where something is wrong."""
    v = report.verdict
    ran = [c for c in v.conditions if c.ran]
    word = "void" if v.void else "exact" if v.exact else "not exact"
    lines = [f"verify ({report.level}): {word}; {sum(1 for c in ran if not c.mismatches)} of {len(ran)} conditions without a mismatch"]
    lines += [f"- {c.name} ({c.dimension}): {c.mismatches} of {c.tokens} log-probabilities differ"
              + (f", at most by {c.max_abs:.3g} nats" if c.max_abs else "") for c in ran if c.mismatches]
    lines += [f"- {c.name}: did not run ({c.reason}{', excused' if c.excused else ''})" for c in v.conditions if not c.ran]
    lines += [f"- {reason}" for reason in v.reasons]
    if t := report.throughput:
        lines.append(f"throughput: {t.ratio:.3f} of stock ({t.spread[0]:.3f} to {t.spread[1]:.3f}), target {report.target_throughput:.3f}")
    if a := report.accuracy:
        lines.append(f"error against the reference: {a.candidate:.3g} nats, stock {a.stock:.3g}, "
                     f"allowed {a.allowed:.3g}{'' if a.ok else ' (too large)'}")
    return "\n".join(lines)


def divergences(report: LocalizeReport, repros: dict[str, str]) -> str:
    """A localize. `repros` maps a divergence's key to its repro's folder."""
    lines = [_divergence(d, repros) for d in report.divergences]
    lines += [f"note: {note}" for note in report.notes]
    lines.append(f"equal at every site: {', '.join(report.exact_dimensions) or 'no dimension'}")
    return "\n".join(lines)


def _divergence(d: Divergence, repros: dict[str, str]) -> str:
    name = key(d)
    moved = f"with {d.substituted_with} in its place (on {', '.join(d.deviating) or 'both sides'}) the first difference is {d.next_site or 'gone'}"
    probes = "; ".join(f"{p.name}: {'not asked' if p.equal is None else 'equal' if p.equal else 'differs'}" for p in d.probes)
    return "\n".join(filter(None, [
        f"- {name}: {d.operator}, {' against '.join(d.sides)}, {d.cause} ({d.cause_detail})",
        f"  {d.differing} of {d.elements} elements differ, at most by {d.max_abs:.3g} ({d.max_ulps} ulps)",
        f"  {moved if d.confirmed else 'not confirmed by substitution'}",
        f"  probes: {probes}" if probes else "",
        f"  repro: {repros[name]}" if name in repros else "  no repro yet"]))


def attempt(a: Attempt, repros: dict[str, str]) -> str:
    """One attempt and what it came to."""
    lines = [f"attempt {a.number} ({a.title}) {a.outcome}" + (f": {a.reason}" if a.reason else "")]
    lines += [f"- repro of {c.divergence}: exit code {c.before} before, {'not run' if c.after is None else c.after} now" for c in a.repros]
    if a.failure and a.last_words:
        lines.append(f"the job's last words:\n{a.last_words[-FAILURE:]}")
    if a.verify:
        lines.append(verdict(a.verify))
    if a.localize:
        lines.append(divergences(a.localize, repros))
    return "\n".join(lines)


def repro_folders(state: RunState) -> dict[str, str]:
    return {name: state.repro_folder(name) for name in state.repros}


def standing(state: RunState) -> str:
    """Everything a model needs to take a run over."""
    lines = [f"model {state.model}, scale {state.scale}, device {state.device}; target throughput {state.target:.3f} of stock",
             f"contract of the run branch: {_bound(state)}"]
    if state.best:
        lines.append(verdict(state.best))
    if state.localize:
        lines.append("first divergences:\n" + divergences(state.localize, repro_folders(state)))
        named = dict.fromkeys(d.operator for d in state.localize.divergences)
        lines += [_offer(operator, state) for operator in named]
    if state.attempts:
        lines.append("attempts so far:\n" + "\n".join(f"{a.number}. {a.title}: {a.outcome}, {a.reason}" for a in state.attempts[-OLD_ATTEMPTS:]))
    return "\n".join(lines)


def _bound(state: RunState) -> str:
    pairs = [f"{operator}={name} ({side})" for side, table in state.contract.items() for operator, name in table.items()]
    return ", ".join(pairs) or "empty, everything is stock"


def _offer(operator: str, state: RunState) -> str:
    """Implementations of an operator in the catalogue, and where their code is."""
    rows = catalog.implementations(operator, device=state.device)
    if not rows:
        return f"the catalogue has no implementation of {operator} on {state.device}"
    listed = "; ".join(f"{r.name} ({r.side}, operators/{r.where.partition(':')[0].replace('.', '/')}.py:{r.where.partition(':')[2]}"
                       f"{', exact' if r.exact else ''})" for r in rows)
    return f"implementations of {operator}: {listed}"

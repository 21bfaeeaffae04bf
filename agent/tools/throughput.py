"""Stock and candidate rollout, timed in turns (ABAB...) so that a machine that drifts cannot favour one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agent.arrays import BadArrays, LogProbs
from agent.draw import Draw
from agent.errors import JobFailed
from agent.oracle import Timed, throughput, timing_objections
from agent.rules import Objection
from agent.session import Session
from agent.verdict import ThroughputResult
from consistency.conditions import Timing


@dataclass
class Timings:
    """What the measurement gave."""

    result: ThroughputResult | None
    objections: list[Objection]
    answers: list[tuple[list[list[int]], LogProbs]] = field(default_factory=list)
    """per timed run of the candidate: its prompts, and what it answered"""


def measure_throughput(stock: Session, candidate: Session, others: Sequence[Session], timing: Timing, draw: Draw,
                       on_pair: Callable[[ThroughputResult | None], None] = lambda _: None) -> Timings:
    """One warm-up run of each, then `timing.pairs` pairs on new prompts; nothing else of ours may be busy meanwhile.

    The step is `generate`, as it is everywhere else: nothing tells the job that it is timed, and its answers can be compared afterwards.
    `others` are processes with candidate code that only wait. Raises JobFailed if an engine dies or does not answer with log-probabilities.
    """
    tokens = timing.requests * timing.new_tokens
    pairs: list[tuple[Timed, Timed]] = []
    answers = []
    for number in range(-1, timing.pairs):
        prompts, step = _step(number, timing, draw)
        first, _ = _timed(stock, step, [candidate, *others])
        second, found = _timed(candidate, step, others)
        if number >= 0:
            pairs.append((first, second))
            answers.append((prompts, found))
        on_pair(throughput(pairs, tokens)[0] if pairs else None)
    result, objections = throughput(pairs, tokens)
    return Timings(result, [*objections, *timing_objections(pairs)], answers)


Run = tuple[Timed, list[list[int]], LogProbs]
"""One timed run, its prompts, and what was answered."""


def timed_alone(session: Session, timing: Timing, draw: Draw, on_run: Callable[[], None] = lambda: None) -> list[Run]:
    """The runs of one arm, on the same prompts as the other's, for engines that do not fit the device together. Raises as above."""
    runs = []
    for number in range(-1, timing.pairs):
        prompts, step = _step(number, timing, draw)
        timed, found = _timed(session, step, [])
        if number >= 0:
            runs.append((timed, prompts, found))
        on_run()
    return runs


def paired(stock: Sequence[Run], candidate: Sequence[Run], timing: Timing) -> Timings:
    """Runs of two arms that were timed one after the other, the n-th with the n-th."""
    pairs = [(a[0], b[0]) for a, b in zip(stock, candidate, strict=True)]
    result, objections = throughput(pairs, timing.requests * timing.new_tokens)
    return Timings(result, [*objections, *timing_objections(pairs)], [(prompts, found) for _, prompts, found in candidate])


def _step(number: int, timing: Timing, draw: Draw) -> tuple[list[list[int]], dict]:
    """Prompts and step of a run; -1 is the warm-up."""
    name = f"throughput {number}"
    prompts = draw.equal_length(name, timing.requests, timing.prompt_tokens)
    return prompts, {"kind": "generate", "requests": [{"prompt": prompt} for prompt in prompts], "max_tokens": timing.new_tokens,
                     "seed": draw.sampling_seed(name), "temperature": 1.0}


def _timed(session: Session, step: dict, waiting: Sequence[Session]) -> tuple[Timed, LogProbs]:
    before = sum(other.cpu_seconds() for other in waiting)
    answer = session.run(step)
    busy = sum(other.cpu_seconds() for other in waiting) - before
    try:
        found = LogProbs.from_arrays(answer.arrays)
    except BadArrays as error:
        raise JobFailed(f"the answer to a timed 'generate' cannot be used: {error}", session.directory) from error
    return Timed(len(found), answer.wall_seconds, answer.seconds, busy), found

"""Traces of one set of requests under different schedules, brought to common rows and compared site by site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent.session import Answer, Engine
from agent.tools.divergence import SiteCount
from consistency.models.catalog import HEAD_LAYER, SITE_RANK

LOGPROB = "logprob"
"""pseudo-site behind the last one: the log-probability of each sampled token, as the engine hands it out"""
ABSENT = -1


@dataclass(frozen=True)
class Site:
    key: str
    layer: int
    operator: str
    role: str

    @property
    def order(self) -> tuple[int, int]:
        return self.layer, SITE_RANK.get(self.role, len(SITE_RANK))


@dataclass(frozen=True)
class Run:
    """One way to put requests through one engine."""

    engine: Engine
    label: str
    requests: tuple[int, ...]
    """which of the requests, in the order of the step"""
    options: tuple[tuple[str, Any], ...] = ()
    """further fields of the `trace` step"""
    weights: str = "loaded"
    """`loaded`: as the engine holds them; `updated`: another checkpoint written in place; `reloaded`: the first one written back"""
    turn: int = 0
    """tells repetitions of the same run apart"""

    def step(self, requests: Sequence[dict], dump: Sequence[str]) -> dict[str, Any]:
        return {"kind": "trace", "requests": [requests[i] for i in self.requests], "dump": list(dump),
                **{name: list(map(list, value)) if name == "groups" else value for name, value in self.options}}


class Trace:
    """What a run recorded, with rows numbered over all requests of the set."""

    def __init__(self, run: Run, answer: Answer, lengths: Sequence[int]) -> None:
        self.run, self.counters = run, answer.data
        self.sites = [Site(**site) for site in answer.data["sites"]]
        self.total = sum(lengths)
        starts = np.cumsum([0, *lengths])[:-1]
        arrays = answer.arrays
        self.rows = starts[np.asarray(run.requests)[arrays["row_request"]]] + arrays["row_position"]
        self.prints = {site.key: self._spread(arrays[f"fp/{site.key}"]) for site in self.sites}
        self.places = {name: tuple(self._spread(arrays[f"{name}_{what}"]) for what in ("step", "slot"))
                       for name in ("row", "head") if f"{name}_step" in arrays}
        self.dumps = {key.removeprefix("dump/"): array for key, array in arrays.items() if key.startswith("dump/")}
        if "logprob" in arrays:
            self._place_logprobs(arrays, starts, lengths)

    def _place_logprobs(self, arrays: dict[str, np.ndarray], starts: np.ndarray, lengths: Sequence[int]) -> None:
        """A log-probability belongs to the row that predicts its token, the one before it."""
        requests = np.asarray(self.run.requests)
        prompts = np.asarray([lengths[i] for i in requests]) - np.bincount(arrays["request"], minlength=len(requests))
        at = starts[requests[arrays["request"]]] + prompts[arrays["request"]] + arrays["position"] - 1
        bits = np.full(self.total, ABSENT, np.int64)
        bits[at] = arrays["logprob"].view(np.int32).astype(np.int64) & 0xFFFFFFFF
        self.prints[LOGPROB] = bits
        self.sites.append(Site(LOGPROB, HEAD_LAYER, "log_softmax", LOGPROB))

    def _spread(self, values: np.ndarray) -> np.ndarray:
        out = np.full(self.total, ABSENT, np.int64)
        out[self.rows] = values
        return out

    def dump(self, key: str) -> np.ndarray | None:
        """[R, width] over all requests, zero where this run computed nothing."""
        if key not in self.dumps:
            return None
        values = self.dumps[key]
        out = np.zeros((self.total, values.shape[1]), values.dtype)
        out[self.rows] = values
        return out

    def logprobs(self) -> np.ndarray:
        """float32 [R], NaN where there is none."""
        bits = self.prints[LOGPROB]
        values = (bits & 0xFFFFFFFF).astype(np.uint32).view(np.float32).copy()
        values[bits == ABSENT] = np.nan
        return values


@dataclass
class Comparison:
    """Two traces, site by site in order of execution."""

    left: Trace
    right: Trace
    counts: list[SiteCount]
    first: Site | None
    """first site with an unequal row; everything that feeds it was equal"""
    unequal: np.ndarray
    """bool [R]: the rows that differ there"""
    only_one: list[str]
    """sites that one side alone has"""


def compare(left: Trace, right: Trace) -> Comparison:
    known = {site.key for site in right.sites}
    sites = sorted((site for site in left.sites if site.key in known), key=lambda site: site.order)
    counts, first, unequal = [], None, np.zeros(left.total, bool)
    for site in sites:
        a, b = left.prints[site.key], right.prints[site.key]
        both = (a != ABSENT) & (b != ABSENT)
        different = both & (a != b)
        counts.append(SiteCount(site=site.key, layer=site.layer, operator=site.operator, rows=int(both.sum()), differing=int(different.sum())))
        if first is None and different.any():
            first, unequal = site, different
    only = sorted({site.key for site in left.sites} ^ known)
    return Comparison(left, right, counts, first, unequal, only)

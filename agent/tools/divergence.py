"""The typed outcome of `localize`: what the CLI prints, the loop decides on, `repro` cuts down and the evidence keeps."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from consistency.conditions import Dimension

Cause = Literal["reduction order", "extra rounding", "other branch", "other input", "stale state", "semantics", "uninitialised", "unknown"]


class SiteCount(BaseModel):
    """How one operator output fared in one comparison."""

    site: str
    layer: int
    operator: str
    rows: int
    """rows that both sides computed"""
    differing: int


class Probe(BaseModel):
    """One question to the suspect operator, asked with its own traced inputs outside the model."""

    name: Literal["as traced", "same input twice", "row alone"]
    """`as traced`: run alone it gives the traced output bit for bit, so the evidence is complete"""
    side: str
    equal: bool | None
    """None: it could not be asked"""
    detail: str = ""


class Divergence(BaseModel):
    """An operator whose output differs between two executions although its input is equal."""

    dimension: Dimension
    operator: str
    layer: int | None
    site: str
    """key of the trace site, for example `003.attention`; `logprob` for the log-probabilities themselves"""
    sides: list[str]
    """the two executions, the one that is taken for right first"""
    cause: Cause
    cause_detail: str
    elements: int
    """elements of the rows that both computed; 0 if no tensor was dumped"""
    differing: int
    max_abs: float
    max_ulps: int
    """in the operator's output type"""
    confirmed: bool
    """with another implementation (or other weights) the divergence went away or moved later"""
    substituted_with: str | None
    next_site: str | None
    """first site that differs with the substitution in place; None if none does, or if nothing was substituted"""
    rows: int = 0
    differing_rows: int = 0
    first_row: tuple[int, int] | None = None
    """request and absolute position of the first differing row"""
    deviating: list[str] = []
    """engines on which the substitution is needed: rollout, training or both"""
    probes: list[Probe] = []
    order: int = 0
    """0: the first divergence of its dimension; n: the first that is left with the n before it substituted"""
    evidence: str = ""
    """folder with the operator's inputs and both outputs, which `repro` starts from"""


class LocalizeReport(BaseModel):
    """What one `localize` found. Divergences come by dimension, from same-input-twice to engine-against-engine, and in the order of execution."""

    divergences: list[Divergence]
    exact_dimensions: list[str]
    seconds: float
    sites: dict[str, list[SiteCount]] = {}
    """per dimension, every site of the comparison with the first divergence, in order of execution"""
    notes: list[str] = []
    """comparisons that could not be made, and why"""

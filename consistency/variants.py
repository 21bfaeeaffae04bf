"""Formulas that differ from an operator's contract in one known way, to explain a side's bits exactly."""

from __future__ import annotations

from consistency.repro.case import Case


def match(case: Case) -> dict | None:
    return None

"""Operators that carry state from token to token: one form for a span of one sequence, one for a batch of single tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stateful:
    """A rollout implementation of a stateful operator; either form may be None, which leaves the engine's own."""

    sequence: Callable | None
    """a span of one sequence, starting from its state; returns (rows, new state)"""
    decode: Callable | None
    """one token of each of several sequences, states updated in place; returns rows"""

"""Fresh prompts and seeds. They are drawn by the parent after the candidate is fixed, so that nothing can be prepared for them."""

from __future__ import annotations

import hashlib
import random
import secrets
from dataclasses import dataclass

from agent.model_facts import ModelFacts
from consistency.conditions import SCAN_CHUNK, RequestSet


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    boundary: bool
    """its length was chosen to lie at a boundary"""


class Draw:
    """A source of prompts and seeds; the same seed gives the same ones."""

    def __init__(self, model: ModelFacts, seed: str | None = None) -> None:
        self.seed = seed or secrets.token_hex(16)
        self._model = model
        self._ordinary = [token for token in range(model.vocabulary) if token not in model.special]

    def prompts(self, name: str, wanted: RequestSet) -> list[Prompt]:
        """The requests of a set, in random order: boundary lengths first, the rest filled up with random lengths."""
        source = self._source(f"prompts {name}")
        centres = [self._model.scan_chunk if n == SCAN_CHUNK else n for n in wanted.boundaries]
        lengths = dict.fromkeys(n + offset for n in centres if n for offset in (-1, 0, 1) if n + offset > 0)
        at_boundary = list(lengths)[: wanted.count]
        drawn = [Prompt(self._tokens(source, n), True) for n in at_boundary]
        drawn += [Prompt(self._tokens(source, source.randint(*wanted.fill)), False) for _ in range(wanted.count - len(drawn))]
        source.shuffle(drawn)
        return drawn

    def equal_length(self, name: str, count: int, tokens: int) -> list[list[int]]:
        """Prompts of one length, for timing."""
        source = self._source(f"prompts {name}")
        return [self._tokens(source, tokens) for _ in range(count)]

    def sampling_seed(self, name: str) -> int:
        """31 bits, for an engine's sampler."""
        return self._source(f"sampling {name}").getrandbits(31)

    def some(self, name: str, count: int, of: int) -> list[int]:
        """`count` different numbers below `of`, ascending."""
        return sorted(self._source(f"some {name}").sample(range(of), min(count, of)))

    def _source(self, purpose: str) -> random.Random:
        return random.Random(hashlib.sha256(f"{self.seed} {purpose}".encode()).digest())

    def _tokens(self, source: random.Random, count: int) -> list[int]:
        return source.choices(self._ordinary, k=count)

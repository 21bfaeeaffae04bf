"""What a run has spent on its model, and which limit that reaches."""

import time

from pydantic import BaseModel

from agent.llm.settings import Limits

RAISE = {"steps": "--max-steps", "usd": "--max-usd", "tokens": "--max-tokens", "gpu_seconds": "--max-gpu-seconds", "minutes": "--minutes"}
"""The option of `agent resume` that raises each limit."""


class Spent(BaseModel):
    """Over the whole run, from its trajectory."""

    steps: int = 0
    usd: float = 0.0
    tokens: int = 0
    gpu_seconds: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.usd:.2f} USD", f"{self.steps} answers", f"{self.tokens} tokens"]
        return ", ".join(parts + ([f"{self.gpu_seconds:.0f} GPU seconds"] if self.gpu_seconds else []))


class Meter:
    """The limits of one call of `agent run` or `agent resume`."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.started = time.monotonic()

    def reached(self, spent: Spent) -> str | None:
        """One line that names the first limit reached and how to raise it. Checked before each answer, so the last one may overshoot."""
        for name in ("steps", "usd", "tokens", "gpu_seconds"):
            limit, value = getattr(self.limits, name), getattr(spent, name)
            if limit is not None and value >= limit:
                return f"the limit of {limit:g} {_unit(name)} is reached (spent: {spent}); `agent resume` with a higher {RAISE[name]} goes on"
        if self.seconds_left() <= 0:
            return f"the limit of {self.limits.minutes:g} minutes is reached (spent: {spent}); `agent resume` goes on"
        return None

    def seconds_left(self) -> float:
        if self.limits.minutes is None:
            return float("inf")
        return self.limits.minutes * 60 - (time.monotonic() - self.started)


def _unit(name: str) -> str:
    return {"steps": "answers", "usd": "USD", "gpu_seconds": "GPU seconds"}.get(name, name)

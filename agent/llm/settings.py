"""The `[llm]` table of consistency.toml: how a model is asked and how much a run may spend on it."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Effort = Literal["low", "medium", "high", "xhigh", "max"]


class Limits(BaseModel):
    """What one run may spend on its model. All but `minutes` count over the whole run, so resuming does not refill them: it takes a higher limit."""

    model_config = ConfigDict(extra="forbid")

    steps: int = Field(default=150, ge=0)
    """Answers of the model."""
    usd: float = Field(default=10.0, ge=0)
    """Money by the price table."""
    tokens: int = Field(default=20_000_000, ge=0)
    """Input, cached or not, and output."""
    gpu_seconds: float | None = Field(default=None, ge=0)
    """Device time of the steps that the model asked for; None: no limit. A CPU run uses none."""
    minutes: float | None = Field(default=None, ge=0)
    """Wall clock of one call of `agent run` or `agent resume`; None: only the run's own."""


class LlmSettings(BaseModel):
    """How a model is asked."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    """What `--policy hybrid` hands over to, for example `anthropic:MODEL`."""
    limits: Limits = Limits()
    effort: Effort | None = None
    """None: the provider's default."""
    thinking: bool = True
    """Ask Anthropic for adaptive thinking; false for models that refuse it."""
    max_output_tokens: int = Field(default=20_000, ge=256)
    """Of one answer, thinking included."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds one request may take before it is sent again."""

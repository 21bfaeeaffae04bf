"""How a module's output in vLLM becomes the rows of a trace site."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from consistency.trace import Site


@dataclass(frozen=True)
class ModuleSite:
    """A site that a forward hook on one module can record."""

    path: str
    """module path in vLLM's model"""
    site: Site
    take: Callable
    """module output -> rows, or None if this call has no such output"""


def first(output) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def flat(output) -> torch.Tensor:
    return first(output).flatten(1)


def normed(output) -> torch.Tensor:
    return first(output)


def residual_of(output) -> torch.Tensor | None:
    return output[1] if isinstance(output, tuple) else None


def pair(output) -> torch.Tensor:
    return torch.cat([t.flatten(1) for t in output], dim=-1)

"""`repro`: a divergence cut down to a folder that runs alone: exit 1 while it differs, 0 once fixed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agent.tools.divergence import Divergence


class ReproRequest(BaseModel):
    divergence: Divergence
    directory: Path
    """new; gets repro.py, repro.json, inputs.safetensors and expected.txt"""


class ReproReport(BaseModel):
    directory: Path
    command: str
    expected_line: str
    """what the command prints while the two still differ"""
    exit_code: int
    """of the command, now"""
    reproduced: bool
    """run alone, the operator gives the traced outputs bit for bit, and they differ"""


def make_repro(request: ReproRequest, progress: Callable[[Any], None] = lambda _: None) -> ReproReport:
    raise NotImplementedError

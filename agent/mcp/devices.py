"""Which device a tool call needs, so that two calls never share one."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from agent import config, models
from agent.errors import UserError

HOST = "host"
"""For work that starts no engine."""


def needed(model: str | None, scale: str | None, workspace: Path | None) -> str:
    """`cpu` or `cuda`. Raises UserError on an unknown model or scale, or if there is nothing to tell from."""
    if workspace and (workspace / config.FILE).is_file():
        settings = config.Config.load(workspace / config.FILE)
        model, scale = settings.model, settings.scale
    if model is None:
        raise UserError("give a model (the tool `models` lists them), or the path of a workspace that exists")
    return models.resolve(model, scale, bool(gpus()))[1].device


@cache
def gpus() -> tuple[str, ...]:
    """Indices that CUDA_VISIBLE_DEVICES accepts, as visible to this process; asked once."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() and name.strip() != "-1")
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(str(number) for number, line in enumerate(line for line in listed.stdout.splitlines() if line.startswith("GPU ")))


def environment(device: str) -> dict[str, str]:
    """What makes a job see its device and no other."""
    kind, _, number = device.partition(":")
    return {"CUDA_VISIBLE_DEVICES": number} if kind == "cuda" else {}

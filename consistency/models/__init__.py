"""One file per family: scales, seeded weights, where each operator sits in vLLM and in transformers."""

from __future__ import annotations

import importlib

_MODULES = {"qwen3": "qwen3", "nemotron-3.5": "nemotron_h", "deepseek-v4": "deepseek_v4"}


def family(name: str):
    """The module of a family. Raises KeyError for an unknown name."""
    return importlib.import_module(f"consistency.models.{_MODULES[name]}")

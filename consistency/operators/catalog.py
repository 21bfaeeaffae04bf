"""The implementations that exist, without importing any of them.

Each row names a callable by `module:attribute`; `load` imports it when an engine binds it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from consistency.contract import STOCK


@dataclass(frozen=True)
class ImplementationInfo:
    """One implementation of an operator on one side."""

    operator: str
    name: str
    side: str
    """`rollout` or `training`"""
    device: str
    """`cpu` or `cuda`"""
    where: str
    """`module:attribute` below consistency.operators"""
    exact: bool
    """rows do not depend on batch, phase or run, and both sides give equal bits"""
    summary: str


def _rows(operator: str, module: str, exact: str, suffix: str = "") -> list[ImplementationInfo]:
    def row(name, side, function, is_exact, summary):
        return ImplementationInfo(operator, name, side, "cpu", f"{module}:{function}{suffix}", is_exact, summary)

    return [row(STOCK, "rollout", "stock_rollout", False, "what vLLM does untouched"),
            row(STOCK, "training", "stock_training", False, "what transformers does untouched"),
            row("exact", "rollout", "exact_rollout", True, exact),
            row("exact", "training", "exact_training", True, exact),
            row("reference", "training", "reference", False, "plain formula in the dtype of its input, for accuracy checks")]


IMPLEMENTATIONS: tuple[ImplementationInfo, ...] = (
    *_rows("embedding", "embedding", "row gather"),
    *_rows("rms_norm", "rms_norm", "residual added in fp32, variance in fp32, rounded before the weight multiply"),
    *_rows("linear", "linear", "one GEMM call for bf16 rows, tiles of 32 rows for fp32"),
    *_rows("rotary", "rotary", "vLLM's rotary kernel"),
    *_rows("attention", "attention", "vLLM's paged kernel with the key-value split off"),
    *_rows("silu_and_mul", "activations", "silu rounded to the input dtype, then multiplied", "_silu_and_mul"),
    *_rows("relu_squared", "activations", "relu, then square, rounded once", "_relu_squared"),
    *_rows("causal_conv1d", "causal_conv1d", "vLLM's decode kernel on one window per token, in every phase"),
    *_rows("mamba2_scan", "mamba2_scan", "vLLM's recurrent kernel from an fp32 state, in every phase"),
    *_rows("gated_rms_norm", "gated_rms_norm", "gate and group norm in fp32, rounded before the weight multiply"),
    *_rows("log_softmax", "log_softmax", "one fp32 log-softmax over the row"),
)

OPERATORS: tuple[str, ...] = tuple(dict.fromkeys(i.operator for i in IMPLEMENTATIONS))


def implementations(operator: str | None = None, *, side: str | None = None, device: str = "cpu") -> list[ImplementationInfo]:
    """The rows that match, in catalogue order."""
    return [i for i in IMPLEMENTATIONS
            if operator in (None, i.operator) and side in (None, i.side) and i.device == device]


def known() -> dict[str, set[str]]:
    """Operator -> implementation names, the form `Contract.validate` takes."""
    return {operator: {i.name for i in IMPLEMENTATIONS if i.operator == operator} for operator in OPERATORS}


def load(operator: str, name: str, side: str, device: str = "cpu"):
    """Imports and returns the implementation. Raises KeyError if the catalogue has no such row."""
    for info in implementations(operator, side=side, device=device):
        if info.name == name:
            module, attribute = info.where.split(":")
            return getattr(importlib.import_module(f"consistency.operators.{module}"), attribute)
    raise KeyError(f"no implementation '{name}' of '{operator}' for the {side} side on {device}")

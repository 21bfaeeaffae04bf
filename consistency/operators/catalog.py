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


def _cuda_rows(operator: str, exact: str, formula: str | None = None, suffix: str = "", own: str | None = None) -> list[ImplementationInfo]:
    """formula: the module of the plain torch functions, which run on any device; own: the module of the kernel."""
    formula, own = formula or operator, own or f"cuda.{operator}"

    def row(name, side, where, is_exact, summary):
        return ImplementationInfo(operator, name, side, "cuda", where, is_exact, summary)

    return [row(STOCK, "rollout", f"{own}:stock_rollout", False, "what vLLM does untouched"),
            row(STOCK, "training", f"{formula}:stock_training{suffix}", False, "what transformers does untouched"),
            row("exact", "rollout", f"{own}:exact_rollout", True, exact),
            row("exact", "training", f"{own}:exact_training", True, exact),
            row("reference", "training", f"{formula}:reference{suffix}", False, "plain formula in the dtype of its input, for accuracy checks")]


def _training_only(operator: str, module: str) -> list[ImplementationInfo]:
    """An operator that vLLM refuses on the CPU: its formulas are there for the training side."""
    return [ImplementationInfo(operator, STOCK, "training", "cpu", f"{module}:stock_training", False, "what transformers does untouched"),
            ImplementationInfo(operator, "reference", "training", "cpu", f"{module}:reference", False,
                               "plain formula in the dtype of its input, for accuracy checks")]


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
    *_training_only("router", "router"),
    *_training_only("moe_experts", "moe_experts"),
    *_rows("log_softmax", "log_softmax", "one fp32 log-softmax over the row"),
    *_cuda_rows("embedding", "row gather", own="embedding"),
    *_cuda_rows("rms_norm", "sum with the residual rounded once, fp32 variance by one program per row, rounded after the weight multiply"),
    *_cuda_rows("linear", "cuBLASLt without split-K: one fp32 accumulator over ascending K"),
    *_cuda_rows("rotary", "fp32 table by integer position, one fused multiply-add, rounded once"),
    *_cuda_rows("attention", "FlashAttention 3 with one split"),
    *_cuda_rows("silu_and_mul", "silu times up in fp32, rounded once", "activations", "_silu_and_mul"),
    *_cuda_rows("relu_squared", "relu, then square in fp32, rounded once", "activations", "_relu_squared"),
    *_cuda_rows("causal_conv1d", "taps in order from the bias, products rounded to bf16, fp32 sum; the engine's kernels agree"),
    *_cuda_rows("mamba2_scan", "chunks of an absolute grid of 128; decode computes the chunk's own row from the fp32 boundary state"),
    *_cuda_rows("gated_rms_norm", "gate and group norm in fp32, rounded after the weight multiply"),
    *_cuda_rows("router", "fp32 logits in segments of K at fixed places, ties to the smaller expert, scale inside the weights"),
    *_cuda_rows("moe_experts", "no split-K, weight applied in fp32, slots of a token added in slot order in fp32"),
    *_cuda_rows("log_softmax", "log-sum-exp over blocks of 8192 logits at fixed places, merged by one program"),
)

OPERATORS: tuple[str, ...] = tuple(dict.fromkeys(i.operator for i in IMPLEMENTATIONS))


def implementations(operator: str | None = None, *, side: str | None = None, device: str = "cpu") -> list[ImplementationInfo]:
    """The rows that match, in catalogue order."""
    return [i for i in IMPLEMENTATIONS
            if operator in (None, i.operator) and side in (None, i.side) and i.device == device]


def known(device: str | None = None) -> dict[str, set[str]]:
    """Operator -> implementation names, on one device or on any; the form `Contract.validate` takes."""
    return {operator: {i.name for i in IMPLEMENTATIONS if i.operator == operator and device in (None, i.device)} for operator in OPERATORS}


def load(operator: str, name: str, side: str, device: str = "cpu"):
    """Imports and returns the implementation. Raises KeyError if the catalogue has no such row."""
    for info in implementations(operator, side=side, device=device):
        if info.name == name:
            module, attribute = info.where.split(":")
            return getattr(importlib.import_module(f"consistency.operators.{module}"), attribute)
    raise KeyError(f"no implementation '{name}' of '{operator}' for the {side} side on {device}")

"""What may lie between equal log-softmax rows and unequal log-probabilities: which token, which position, which temperature."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent.tools.traces import Comparison


def explain_logprobs(found: Comparison) -> dict[str, Any]:
    """Cause and numbers for the pseudo-site `logprob`."""
    a, b = found.left.logprobs(), found.right.logprobs()
    both = ~(np.isnan(a) | np.isnan(b))
    x, y = a[both], b[both]
    gap = np.abs(x.astype(np.float64) - y)
    ulps = np.abs(_ordered(x) - _ordered(y))
    return {"cause": "semantics", "detail": _story(x, y), "elements": int(both.sum()), "differing": int((x.view(np.int32) != y.view(np.int32)).sum()),
            "max_abs": float(gap.max()) if len(gap) else 0.0, "max_ulps": int(ulps.max()) if len(ulps) else 0, "deviating": 1}


def _story(x: np.ndarray, y: np.ndarray) -> str:
    for shift in (1, -1):
        moved = np.roll(y, shift)
        if len(x) > 4 and (moved.view(np.int32) == x.view(np.int32)).mean() > 0.8:
            return f"the second side's values are those of the token {shift:+d} from it: an index is off by one"
    ratio = y[np.abs(x) > 1e-3].astype(np.float64) / x[np.abs(x) > 1e-3]
    if len(ratio) and np.ptp(ratio) < 1e-3 * abs(np.median(ratio)):
        return f"the second side's values are {np.median(ratio):.4g} times the first's"
    return "all log-softmax rows are equal, so the engines pick or scale them differently"


def _ordered(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(2**31) - bits, bits)

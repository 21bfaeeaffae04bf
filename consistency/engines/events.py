"""Where a trace listens to operators that are no modules of vLLM."""

from __future__ import annotations

MAMBA: list = []
"""observers `(operator, layer, rows, decode)` of conv1d and scan outputs"""
LOGITS: list = []
"""observers `(log-probabilities, name)` of the head"""
EXPERTS: list = []
"""observers `(role, layer, rows)` of the router's weights by expert and of the sum over a token's experts, both with the routed scale in them"""

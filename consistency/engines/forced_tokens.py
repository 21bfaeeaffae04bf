"""A logits processor that makes the sampler choose given tokens, so that any schedule can replay the same sequence.

Raw log-probabilities are taken before logits processors run, so forcing does not touch them.
"""

from __future__ import annotations

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality


class ForcedTokens(LogitsProcessor):
    """Requests whose `SamplingParams.extra_args` has `forced_tokens` sample exactly those, one after the other."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            forced = (params.extra_args or {}).get("forced_tokens")
            self.rows.pop(index, None)
            if forced is not None:
                self.rows[index] = (forced, output)
        for source, target, direction in batch_update.moved:
            a, b = self.rows.pop(source, None), self.rows.pop(target, None)
            if a is not None:
                self.rows[target] = a
            if b is not None and direction == MoveDirectionality.SWAP:
                self.rows[source] = b

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, (forced, output) in self.rows.items():
            if len(output) < len(forced):
                logits[index].fill_(-torch.inf)
                logits[index, forced[len(output)]] = 0.0
        return logits

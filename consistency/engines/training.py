"""The training forward: a transformers model with a contract bound, on padded or packed batches, with gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint as checkpoint_layer

from consistency.bindings import Bindings
from consistency.contract import Contract
from consistency.engines import seeded_weights
from consistency.engines.arrays import arrays
from consistency.layout import Layout
from consistency.models import family as family_module
from consistency.trace import Recorder, Site, ignore, plain

LAYOUTS = ("padded", "packed", "alone")


@dataclass
class Forward:
    """How a set of requests is put through the training forward."""

    layout: str = "padded"
    micro_batch: int = 8
    """sequences per forward"""
    mode: str = "train"
    grad: bool = True
    temperature: float | None = None
    """None: raw log-probabilities"""


class Training:
    """A transformers causal language model on one device. With an empty contract its own forward runs untouched."""

    def __init__(self, family: str, checkpoint: Path, contract: Contract, kernels: Path | None = None, *, threads: int = 1, dtype: str = "bfloat16",
                 device: str = "cpu", checkpointing: bool = False):
        """device: `cpu` or `cuda`; checkpointing: layers are computed again in the backward pass instead of kept."""
        torch.set_num_threads(threads)
        self.family, self.checkpoint, self.module, self.device = family, checkpoint, family_module(family), torch.device(device)
        self.model = self._load(checkpoint, getattr(torch, dtype))
        self.checkpoint_layers(checkpointing)
        self.bindings = Bindings("training", kernels, self.device.type)
        self.bindings.bind(contract)

    def _load(self, checkpoint: Path, dtype: torch.dtype):
        """A family whose weights transformers cannot load as they must be used (DeepSeek-V4) has a `load_training` of its own, in bf16."""
        import transformers

        from consistency.models.catalog import FAMILIES

        if own := getattr(self.module, "load_training", None):
            model = own(checkpoint)
            return model if dtype == torch.bfloat16 else model.to(dtype)
        if seeded_weights.read(checkpoint):
            return seeded_weights.build(checkpoint, dtype, self.device)
        architecture = getattr(transformers, FAMILIES[self.family].architecture)
        return architecture.from_pretrained(checkpoint, dtype=dtype, attn_implementation="sdpa").to(self.device)

    def checkpoint_layers(self, on: bool) -> None:
        """Whether layers are computed again in the backward pass, in our forward and in transformers' own."""
        self.call = functools.partial(checkpoint_layer, use_reentrant=False, preserve_rng_state=False) if on else plain
        if on:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()

    def logits(self, ids: torch.Tensor, layout: Layout, record=None, rows: torch.Tensor | None = None) -> torch.Tensor:
        """ids int64 [rows] -> logits [rows, V], or those of some `rows`, which only our own forward can leave out."""
        if not self.bindings.active and record is None:
            if layout.width is None:
                positions = layout.positions(ids.device)[None]
                return self.model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0]
            mask = self._padding(layout)
            return self.model(input_ids=ids.view(-1, layout.width), attention_mask=mask, use_cache=False).logits.flatten(0, 1)
        more = ({} if self.call is plain else {"call": self.call}) | ({} if rows is None else {"rows": rows})
        return self.module.forward(self.model, ids, layout, self.bindings, record or ignore, self._mask(ids, layout), **more)

    def forward(self, requests: list[dict], how: Forward) -> tuple[dict, dict]:
        """The forward that the loss uses.

        Returns (log-probability arrays, {"grad_norm": float} when gradients are on). The loss is the mean negative log-probability of the
        sampled tokens; gradients are summed over micro-batches and cleared first.
        """
        if how.layout not in LAYOUTS:
            raise ValueError(f"unknown layout '{how.layout}'; known: {', '.join(LAYOUTS)}")
        self.model.train(how.mode == "train")
        self.model.zero_grad(set_to_none=True)
        rows: list[tuple] = []
        count = sum(len(r["tokens"]) for r in requests)
        size = 1 if how.layout == "alone" else how.micro_batch
        for batch in _batched(list(enumerate(requests)), size):
            with torch.set_grad_enabled(how.grad):
                chosen, keys = self._batch(batch, how)
                if how.grad:
                    (-chosen.sum() / count).backward()
            rows += [(*key, value) for key, value in zip(keys, chosen.detach().double().tolist(), strict=True)]
        answer = {}
        if how.grad:
            norms = [p.grad.double().norm() for p in self.model.parameters() if p.grad is not None]
            answer["grad_norm"] = float(torch.stack(norms).norm())
        return arrays(sorted(rows)), answer

    def trace(self, requests: list[dict], recorder: Recorder, how: Forward) -> None:
        """One pass in the given layout, every operator recorded. Gradients stay off: they do not change the forward."""
        self.model.train(how.mode == "train")
        size = 1 if how.layout == "alone" else how.micro_batch
        for batch in _batched(list(enumerate(requests)), size):
            ids, layout = self._rows([r for _, r in batch], how)
            request = torch.full((layout.rows,), -1)
            for (i, _), (a, b) in zip(batch, layout.spans(), strict=True):
                request[a:b] = i
            recorder.begin(request, layout.positions())
            with torch.no_grad():
                logits = self.logits(ids, layout, recorder.record)
                recorder.record(Site("log_softmax", 1_000_000, "log_softmax", "log_softmax"), self.bindings.function("log_softmax")(logits))

    def _rows(self, requests: list[dict], how: Forward) -> tuple[torch.Tensor, Layout]:
        sequences = [torch.tensor(r["prompt"] + r["tokens"]) for r in requests]
        lengths = [len(s) for s in sequences]
        if how.layout == "padded":
            return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).flatten().to(self.device), Layout.padded(lengths)
        return torch.cat(sequences).to(self.device), Layout.packed(lengths)

    def _batch(self, batch: list[tuple[int, dict]], how: Forward) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
        ids, layout = self._rows([r for _, r in batch], how)
        index, keys = [], []
        for (i, request), (start, _) in zip(batch, layout.spans(), strict=True):
            for j, token in enumerate(request["tokens"]):
                index.append(start + len(request["prompt"]) + j - 1)
                keys.append((i, j, token))
        rows = torch.tensor(index, device=self.device)
        if self.device.type == "cuda" and "linear" in self.bindings.active:  # a row of logits alone has the bits it has among the others
            logits = self.logits(ids, layout, rows=rows)
        else:
            logits = self.logits(ids, layout)[rows]
        if how.temperature is not None:
            # vLLM divides fp32 logits by an fp32 temperature on their device; by a scalar of the host, CUDA would multiply with its reciprocal.
            temperature = torch.tensor(how.temperature, dtype=torch.float32, device=logits.device)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        function, tokens = self.bindings.function("log_softmax"), torch.tensor([k[2] for k in keys], device=logits.device)
        if token := getattr(function, "token", None):  # no [rows, V] in fp32
            return token(logits, tokens), keys
        return function(logits).gather(-1, tokens[:, None])[:, 0], keys

    def _padding(self, layout: Layout) -> torch.Tensor:
        return (torch.arange(layout.width) < torch.tensor(layout.lengths)[:, None]).long().to(self.device)

    def _mask(self, ids: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        """The attention mask that transformers' own forward would build; only the stock attention reads it."""
        from transformers.masking_utils import create_causal_mask

        if "attention" in self.bindings.active:
            return None
        width = layout.width or max(layout.lengths)
        shape = torch.empty(layout.rows // width if layout.width else len(layout.lengths), width, 1, dtype=self.model.dtype, device=self.device)
        lengths, columns = torch.tensor(layout.lengths, device=self.device)[:, None], torch.arange(width, device=self.device)
        return create_causal_mask(config=self.model.config, inputs_embeds=shape, attention_mask=(columns < lengths).long(),
                                  past_key_values=None, position_ids=columns[None].expand(len(shape), -1))

    # ---- weights ----------------------------------------------------------------------------------------------------

    def reload(self, checkpoint: Path | None) -> None:
        """Writes a checkpoint's weights into the parameters in place."""
        checkpoint = checkpoint or self.checkpoint
        if seeded_weights.read(checkpoint):
            seeded_weights.refill(self.model, checkpoint)
            return
        fresh = self._load(checkpoint, self.model.dtype)
        with torch.no_grad():
            for target, source in zip(self.model.state_dict().values(), fresh.state_dict().values(), strict=True):
                target.copy_(source)

    def parameters(self):
        return self.model.named_parameters()


def _batched(items: list, size: int) -> list[list]:
    return [items[i:i + size] for i in range(0, len(items), size)]

"""Records every operator output of a rollout: hooks on modules, observers where vLLM has no module."""

from __future__ import annotations

import re
from contextlib import contextmanager

import torch
from vllm.forward_context import get_forward_context

from consistency.engines import events
from consistency.models import family as family_module
from consistency.models.catalog import HEAD_LAYER
from consistency.trace import Recorder, Site, fingerprint

_ROLES = {"causal_conv1d": "conv1d", "mamba2_scan": "scan"}


@contextmanager
def traced(rollout, recorder: Recorder):
    """While active, every step of `rollout` is recorded. Request ids must be `COUNT/INDEX` with the index of the request in the recorder."""
    tracer = HookTracer(rollout.runner, recorder)
    runner = rollout.runner
    if not hasattr(runner, "input_batch"):
        # the V2 runner keeps no batch: it is caught where it is made
        prepare_inputs = runner.prepare_inputs
        runner.prepare_inputs = lambda *a, **k: tracer.remember(prepare_inputs(*a, **k))
    handles = [rollout.model.register_forward_pre_hook(tracer.begin, with_kwargs=True)]
    for module, calls in by_module(rollout.model, family_module(rollout.family).vllm_sites(rollout.model)):
        handles.append(module.register_forward_hook(tracer.hook(calls)))
    events.MAMBA.append(tracer.mamba)
    events.EXPERTS.append(tracer.experts)
    try:
        with head_seen(rollout.model, tracer):
            yield
    finally:
        events.MAMBA.remove(tracer.mamba)
        events.EXPERTS.remove(tracer.experts)
        if not hasattr(runner, "input_batch"):
            del runner.prepare_inputs
        for handle in handles:
            handle.remove()


@contextmanager
def head_seen(model: torch.nn.Module, tracer: Tracer):
    """While active, `tracer` gets logits and log-probabilities; both are computed outside the model's forward and outside graphs."""
    compute_logits = model.compute_logits
    model.compute_logits = lambda hidden, *a, **k: tracer.head(hidden, compute_logits(hidden, *a, **k))
    events.LOGITS.append(tracer.log_softmax)
    try:
        yield
    finally:
        events.LOGITS.remove(tracer.log_softmax)
        del model.compute_logits


def by_module(model, module_sites) -> list[tuple[torch.nn.Module, list[list]]]:
    """(module, sites per call): vLLM shares one stateless module (rotary, activation) between layers, which then call it in turn."""
    modules: dict[torch.nn.Module, dict[str, list]] = {}
    for module_site in module_sites:
        modules.setdefault(model.get_submodule(module_site.path), {}).setdefault(module_site.path, []).append(module_site)
    return [(module, list(paths.values())) for module, paths in modules.items()]


class Tracer:
    """What a module hook, an observer and the head have in common; a subclass says what becomes of the rows (`keep`)."""

    recorder: Recorder | None = None

    def __init__(self) -> None:
        self.decode_rows = 0
        self.calls: dict[torch.nn.Module, int] = {}
        self.final: dict[int, int] = {}
        self.head_rows: torch.Tensor | None = None
        self.batch = None

    def keep(self, site: Site, rows: torch.Tensor, part: slice | None = None) -> None:
        raise NotImplementedError

    def listens(self) -> bool:
        """Whether the forward that runs now is recorded."""
        raise NotImplementedError

    def remember(self, batch):
        """The V2 runner's batch of the coming step."""
        self.batch = batch
        return batch

    def place_rows(self, names: list[str], counts: list[int], positions: torch.Tensor) -> None:
        """Tells the recorder which token of which request each row of the step is."""
        requests = [int(name.split("/")[1].split("-")[0]) for name in names]
        request = torch.repeat_interleave(torch.tensor(requests), torch.tensor(counts))
        padding = len(positions) - len(request)
        self.recorder.begin(torch.cat([request, torch.full((padding,), -1)]), positions.long().cpu())
        self.final = {}

    @staticmethod
    def decode_rows_of(metadata: dict) -> int:
        mamba = [m for m in metadata.values() if hasattr(m, "num_decode_tokens") and hasattr(m, "num_prefills")]
        return mamba[0].num_decode_tokens if mamba else 0

    def hook(self, calls: list[list]):
        """calls: the sites of the module's first call in a step, of its second, ..."""
        def record(module, args, output):
            if not self.listens():
                return
            turn = self.calls.get(module, 0)
            self.calls[module] = turn + 1
            for module_site in calls[turn % len(calls)]:
                rows = module_site.take(output)
                if rows is not None:
                    self.keep(module_site.site, rows)
        return record

    def mamba(self, operator: str, prefix: str, rows: torch.Tensor, decode: bool) -> None:
        if self.listens():
            part = slice(0, self.decode_rows) if decode else slice(self.decode_rows, None)
            self.keep(_layer_site(prefix, operator, _ROLES[operator]), rows, part)

    def experts(self, role: str, prefix: str, rows: torch.Tensor) -> None:
        if self.listens():
            self.keep(_layer_site(prefix, {"router": "router", "experts": "moe_experts"}[role], role), rows)

    def head(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The head sees a selection of rows; a row is recognised by the fingerprint of its final norm."""
        self.head_rows = torch.tensor([self.final.get(k, -1) for k in fingerprint(hidden).tolist()])
        self.recorder.place("head", self.head_rows)
        self._record_head("linear", "logits", logits)
        return logits

    def log_softmax(self, logprobs: torch.Tensor, name: str) -> None:
        if self.head_rows is not None and len(self.head_rows) == len(logprobs):
            self._record_head("log_softmax", "log_softmax", logprobs)

    def _record_head(self, operator: str, role: str, rows: torch.Tensor) -> None:
        step = self.recorder.index
        self.recorder.index = self.head_rows
        self.recorder.record(Site(role, HEAD_LAYER, operator, role), rows)
        self.recorder.index = step


class HookTracer(Tracer):
    """Records at once, in a forward that runs in Python."""

    def __init__(self, runner, recorder: Recorder):
        super().__init__()
        self.runner, self.recorder = runner, recorder

    def listens(self) -> bool:
        return self.recorder.index is not None

    def begin(self, module, args, kwargs) -> None:
        """Maps the rows of the coming step to (request, position)."""
        self.calls = {}
        positions = kwargs.get("positions", args[1] if len(args) > 1 else None)
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            self.recorder.begin(torch.full((len(positions),), -1), torch.zeros(len(positions), dtype=torch.int64))
            return
        if self.batch is not None:
            counts, names = self.batch.num_scheduled_tokens.tolist(), self.batch.req_ids
        else:
            starts = next(iter(m for m in metadata.values() if getattr(m, "query_start_loc", None) is not None), None)
            counts = self._counts(metadata, starts)
            names = self.runner.input_batch.req_ids[:len(counts)]
        self.place_rows(names, counts, positions)
        self.decode_rows = self.decode_rows_of(metadata)

    def _counts(self, metadata, attention) -> list[int]:
        if attention is not None:
            return attention.query_start_loc.diff().tolist()
        mamba = next(iter(metadata.values()))
        prefill = [] if mamba.query_start_loc_p is None else mamba.query_start_loc_p.diff().tolist()
        return [1] * mamba.num_decodes + prefill

    def keep(self, site: Site, rows: torch.Tensor, part: slice | None = None) -> None:
        self.recorder.record(site, rows, part)
        if site.role == "final_norm":
            self.final = dict(zip(fingerprint(rows).tolist(), self.recorder.index.tolist(), strict=False))


def _layer_site(prefix: str, operator: str, role: str) -> Site:
    layer = int(re.search(r"layers\.(\d+)\.", prefix).group(1))
    return Site(f"{layer:03d}.{role}", layer, operator, role)

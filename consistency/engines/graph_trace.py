"""Records operator outputs of a rollout that replays CUDA graphs.

Hooks do not run when a graph is replayed, kernels do. So the hooks are there before the graphs are captured, and what they do is a kernel:
they take the fingerprint of each row and write it to a buffer of that site. After every step the buffers hold the step's fingerprints,
whether it was replayed or run eagerly, and are copied into the recorder. Whole rows are not kept: `dump` finds only the head's here.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager

import torch
from vllm.forward_context import get_forward_context

from consistency.engines import events
from consistency.engines.rollout_trace import Tracer, by_module, head_seen
from consistency.models import family as family_module
from consistency.trace import Recorder, Site, fingerprint


class GraphTracer(Tracer):
    """Lives as long as the engine; `recorder` is set while a trace is taken."""

    def __init__(self, family: str, model: torch.nn.Module, rows: int):
        """rows: most rows of one step, `max_num_batched_tokens`."""
        super().__init__()
        self.rows = rows
        self.sites: dict[str, Site] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        """site -> fingerprints int64 [rows] of the last step"""
        model.register_forward_pre_hook(self.reset, with_kwargs=True)
        for module, calls in by_module(model, family_module(family).vllm_sites(model)):
            module.register_forward_hook(self.hook(calls))
        events.MAMBA.append(self.mamba)
        events.EXPERTS.append(self.experts)

    def reset(self, module, args, kwargs) -> None:
        """Before every forward that runs in Python, the captured ones included."""
        self.calls = {}
        metadata = get_forward_context().attn_metadata or {}
        self.decode_rows = self.decode_rows_of(metadata)

    def keep(self, site: Site, rows: torch.Tensor, part: slice | None = None) -> None:
        if site.key not in self.buffers:
            # the engine runs every shape eagerly before it captures it, so this allocation is never part of a graph
            self.sites[site.key] = site
            self.buffers[site.key] = torch.zeros(self.rows, dtype=torch.int64, device=rows.device)
        start = part.start if part is not None else 0
        self.buffers[site.key][start:start + len(rows)].copy_(fingerprint(rows))

    def listens(self) -> bool:
        return True

    def collect(self) -> None:
        """Moves the step's fingerprints into the recorder."""
        if self.recorder is None or self.batch is None:
            return
        counts = self.batch.num_scheduled_tokens.tolist()
        total = sum(counts)
        self.place_rows(self.batch.req_ids, counts, self.batch.positions[:total])
        for key, site in self.sites.items():
            prints = self.buffers[key][:total].cpu()
            self.recorder.record_prints(site, prints)
            if site.role == "final_norm":
                self.final = dict(zip(prints.tolist(), self.recorder.index.tolist(), strict=True))


@contextmanager
def traced(rollout, recorder: Recorder):
    """As `rollout_trace.traced`, for an engine that was started with `trace`."""
    tracer, runner = rollout.graph_tracer, rollout.runner
    prepare_inputs, execute_model = runner.prepare_inputs, runner.execute_model
    runner.prepare_inputs = lambda *a, **k: tracer.remember(prepare_inputs(*a, **k))

    @functools.wraps(execute_model)
    def execute(*args, **kwargs):
        tracer.batch = None
        output = execute_model(*args, **kwargs)
        tracer.collect()
        return output

    runner.execute_model = execute
    tracer.recorder = recorder
    try:
        with head_seen(rollout.model, tracer):
            yield
    finally:
        tracer.recorder = None
        del runner.prepare_inputs, runner.execute_model


def install(family: str, rows: int) -> list[GraphTracer]:
    """Hooks the next model that the V2 runner loads, before anything is captured. The tracer appears in the list returned."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    made: list[GraphTracer] = []
    load_model = GPUModelRunner.load_model

    @functools.wraps(load_model)
    def load(self, *args, **kwargs):
        load_model(self, *args, **kwargs)
        made.append(GraphTracer(family, self.model, rows))
        GPUModelRunner.load_model = load_model

    GPUModelRunner.load_model = load
    return made

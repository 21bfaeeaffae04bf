"""Runs one side of a case: the operator alone, called as often and on the same rows as the engine called it."""

from __future__ import annotations

import torch

from consistency.contract import STOCK
from consistency.layout import Layout
from consistency.operators import catalog
from consistency.operators.stateful import Stateful
from consistency.repro.calls import STATEFUL
from consistency.repro.case import Case, Execution, Span


class CannotRun(ValueError):
    """An implementation that has no life outside its engine; the message is one line."""


def run(case: Case, side: int, function, execution: Execution | None = None) -> torch.Tensor:
    """Output rows [R, width] of one side on the CPU, zero where nothing was computed; computed on the case's device.

    function: what the side binds, as `catalog.load` or `Bindings` give it. execution: another schedule than the traced one. Raises CannotRun.
    """
    execution = execution or case.executions[side]
    run_side = _Rollout if execution.engine == "rollout" else _Training
    with torch.no_grad():
        return run_side(case.placed(), side, function, execution).output().cpu()


def stock(operator: str, engine: str, device: str = "cpu"):
    return catalog.load(operator, STOCK, engine, device)


def one_by_one(case: Case, execution: Execution, request: int) -> Execution:
    """The schedule with one request alone; where rows do not depend on each other, also each row alone."""
    steps = [[span] for step in execution.steps for span in step if span[0] == request]
    if case.operator not in STATEFUL:
        steps = [[(request, p, p + 1)] for ((_, a, b),) in steps for p in range(a, b)]
    return Execution(execution.engine, execution.label, execution.implementation, steps, execution.layout)


class _Side:
    def __init__(self, case: Case, side: int, function, execution: Execution) -> None:
        self.case, self.side, self.function, self.execution = case, side, function, execution
        self.result: torch.Tensor | None = None
        self.constants = case.constants

    def output(self) -> torch.Tensor:
        for step in self.execution.steps:
            getattr(self, f"_{self.case.operator}")(step)
        assert self.result is not None, "a schedule without a single row"
        return self.result

    def _store(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        values = values.flatten(1)
        if self.result is None:
            self.result = values.new_zeros(sum(self.case.lengths), values.shape[1])
        self.result[rows] = values

    def _parameter(self, name: str) -> torch.Tensor | None:
        return self.case.parameter(name, self.side)

    def _positions(self) -> torch.Tensor:
        """Of every row in its sequence; a case that was cut to single rows keeps them as an input."""
        kept = self.case.tensors.get("input/positions")
        return torch.cat([torch.arange(n, device=self.case.device) for n in self.case.lengths]) if kept is None else kept


class _Rollout(_Side):
    """As vLLM calls it: one batch of rows per engine step, state and keys carried from step to step."""

    def __init__(self, case, side, function, execution):
        super().__init__(case, side, function, execution)
        self.states: dict[int, torch.Tensor] = {}

    def _take(self, name: str, rows: torch.Tensor) -> torch.Tensor | None:
        value = self.case.argument(name)
        return None if value is None else value[rows]

    def _embedding(self, step):
        rows = self.case.rows(step)
        self._store(rows, self.function(self._take("ids", rows), self._parameter("weight")))

    def _rms_norm(self, step):
        rows = self.case.rows(step)
        residual = self._take("residual", rows)
        out = self.function(self._take("x", rows).contiguous(), self._parameter("weight"), self.constants["eps"], residual)
        self._store(rows, out[self.case.output])

    def _linear(self, step):
        rows = self.case.rows(step)
        self._store(rows, self.function(self._take("x", rows), self._parameter("weight")))

    def _rotary(self, step):
        rows = self.case.rows(step)
        q, k = self.function(self._positions()[rows], self._take("q", rows), self._take("k", rows), theta=self.constants["theta"],
                             max_positions=self.constants["max_positions"])
        self._store(rows, torch.cat((q.flatten(1), k.flatten(1)), dim=-1))

    def _silu_and_mul(self, step):
        rows = self.case.rows(step)
        self._store(rows, self.function(self._take("x", rows)))

    _relu_squared = _silu_and_mul

    def _log_softmax(self, step):
        rows = self.case.rows(step)
        self._store(rows, self.function(self._take("logits", rows)))

    def _gated_rms_norm(self, step):
        rows = self.case.rows(step)
        self._store(rows, self.function(self._take("x", rows), self._take("gate", rows), self._parameter("weight"), self.constants["eps"],
                                        self.constants["groups"]))

    def _split(self, step: list[Span]) -> tuple[list[Span], list[Span]]:
        """vLLM takes a single token that has a history down its decode path."""
        single = [s for s in step if s[2] - s[1] == 1 and s[1] > 0]
        return single, [s for s in step if s not in single]

    def _stateful(self) -> Stateful:
        """The bound pair; a form that it leaves out is the engine's own."""
        own = stock(self.case.operator, "rollout", self.case.device)
        if not isinstance(self.function, Stateful) or not isinstance(own, Stateful):
            raise CannotRun(f"{self.case.operator} on the rollout side keeps its state in the engine's cache and has no life outside it")
        return Stateful(self.function.sequence or own.sequence, self.function.decode or own.decode)

    def _causal_conv1d(self, step):
        function = self._stateful()
        weight, bias = self._parameter("weight").flatten(1), self._parameter("bias")
        single, spans = self._split(step)
        if single:
            rows = self.case.rows(single)
            x = self._take("x", rows)
            states = x.new_zeros(len(single) + 1, x.shape[1], weight.shape[1] - 1)
            for i, (request, _, _) in enumerate(single):
                states[i + 1] = self.states.get(request, states[0])
            self._store(rows, function.decode(x.contiguous(), states, torch.arange(1, len(single) + 1, dtype=torch.int32), weight, bias))
            for i, (request, _, _) in enumerate(single):
                self.states[request] = states[i + 1].clone()
        for span in spans:
            rows = self.case.rows([span])
            y, self.states[span[0]] = function.sequence(self._take("x", rows), weight, bias, self.states.get(span[0]) if span[1] else None)
            self._store(rows, y)

    def _mamba2_scan(self, step):
        function = self._stateful()
        A, D, bias = (self._parameter(n) for n in ("A", "D", "dt_bias"))
        single, spans = self._split(step)
        if single:
            rows = self.case.rows(single)
            x, dt, B, C = (self._take(n, rows).contiguous() for n in ("x", "dt", "B", "C"))
            states = torch.zeros(len(single) + 1, *x.shape[1:], B.shape[-1])
            for i, (request, _, _) in enumerate(single):
                states[i + 1] = self.states.get(request, states[0])
            self._store(rows, function.decode(states, torch.arange(1, len(single) + 1, dtype=torch.int32), x, dt, A, B, C, D, bias))
            for i, (request, _, _) in enumerate(single):
                self.states[request] = states[i + 1].clone()
        for span in spans:
            rows = self.case.rows([span])
            x, dt, B, C = (self._take(n, rows) for n in ("x", "dt", "B", "C"))
            y, self.states[span[0]] = function.sequence(x, dt, A, B, C, D, bias, self.states.get(span[0]) if span[1] else None)
            self._store(rows, y)

    def _router(self, step):
        rows = self.case.rows(step)
        self._store(rows, _routed(self, self._take("x", rows)))

    def _attention(self, step):
        if self.case.device != "cpu":
            raise CannotRun("attention on the rollout side reads the engine's paged cache and has no life outside it")
        if self.function is not None and self.function != "single_split":
            raise CannotRun("an attention that replaces vLLM's backend needs the engine's cache and metadata")
        if not self.states:
            self.cache = PagedKeys(self.case.lengths, self.case.argument("k"), self.case.argument("v"))
            self.states = {0: self.cache.keys}
        rows = self.case.rows(step)
        self._store(rows, self.cache.attend(self._take("q", rows), step, self.constants["scale"], split=self.function is None))


class PagedKeys:
    """vLLM's paged key-value cache for a fixed set of sequences, with its CPU attention on top."""

    def __init__(self, lengths: list[int], k: torch.Tensor, v: torch.Tensor) -> None:
        from consistency.operators.attention import BLOCK, _instruction_set
        from consistency.operators.kernels_library import vllm_kernels

        self.kernels = vllm_kernels()
        self.kv_heads, self.dim = k.shape[1:]
        self.isa = _instruction_set(self.dim)
        pages = [-(-n // BLOCK) for n in lengths]
        cache = torch.zeros(sum(pages) + 1, self.kv_heads, BLOCK * 2, self.dim, dtype=k.dtype)
        self.keys, self.values = cache.chunk(2, dim=2)
        self.table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        self.first, first = [], 1
        for i, count in enumerate(pages):
            self.table[i, :count] = torch.arange(first, first + count, dtype=torch.int32)
            self.first.append(first)
            first += count
        # All at once: a query reads no further than its own token, and rows from a prefix cache belong to no step of this run.
        slots = torch.cat([torch.arange(n) + first * BLOCK for n, first in zip(lengths, self.first, strict=True)])
        self.kernels.cpu_attn_reshape_and_cache(k.contiguous(), v.contiguous(), self.keys, self.values, slots, self.isa, 1.0, 1.0, "auto")

    def attend(self, q: torch.Tensor, step: list[Span], scale: float, *, split: bool) -> torch.Tensor:
        """q [T, heads, D] of one engine step -> [T, heads, D]."""
        lengths = torch.tensor([b for _, _, b in step], dtype=torch.int32)
        starts = torch.tensor([0, *(b - a for _, a, b in step)], dtype=torch.int32).cumsum(0).to(torch.int32)
        plan = self.kernels.get_scheduler_metadata(len(step), q.shape[1], self.kv_heads, self.dim, lengths, q.dtype, starts, True, -1, self.isa,
                                                   split, None, "auto")
        out = torch.empty(q.shape, dtype=q.dtype)
        table = self.table[torch.tensor([r for r, _, _ in step])]
        self.kernels.cpu_attention_with_kv_cache(q.contiguous(), self.keys, self.values, out, starts, lengths, scale, True, None, -1, table, 0.0,
                                                 plan, None, None, 1.0, 1.0, "auto")
        return out


class _Training(_Side):
    """As the training forward calls it: whole sequences, padded or packed."""

    def _lay(self, step: list[Span]) -> tuple[Layout, torch.Tensor]:
        """(layout of a micro-batch, the batch row of each case row of the step)."""
        lengths = [b for _, _, b in step]
        layout = Layout.padded(lengths) if self.execution.layout == "padded" else Layout.packed(lengths)
        return layout, torch.cat([torch.arange(*span) for span in layout.spans()])

    def _batch(self, name: str, step: list[Span], layout: Layout, where: torch.Tensor) -> torch.Tensor | None:
        value = self.case.argument(name)
        if value is None:
            return None
        out = value.new_zeros(layout.rows, *value.shape[1:])
        out[where] = value[self.case.rows(step)]
        return out

    def _row_wise(self, step, call) -> None:
        if any(a for _, a, _ in step):  # single rows, for a probe
            layout, where = Layout.packed([b - a for _, a, b in step]), torch.arange(sum(b - a for _, a, b in step))
        else:
            layout, where = self._lay(step)
        self._store(self.case.rows(step), call(lambda name: self._batch(name, step, layout, where), layout)[where])

    def _embedding(self, step):
        self._row_wise(step, lambda take, _: self.function(take("ids"), self._parameter("weight")))

    def _rms_norm(self, step):
        own = {"weight_in_fp32": True} if self.constants.get("weight_in_fp32") and self.execution.implementation == STOCK else {}

        def call(take, _):
            return self.function(take("x"), self._parameter("weight"), self.constants["eps"], take("residual"), **own)[self.case.output]

        self._row_wise(step, call)

    def _linear(self, step):
        weight = self._parameter("weight")
        parts = weight.split(self.constants["parts"]) if "parts" in self.constants else [weight]
        self._row_wise(step, lambda take, _: torch.cat([self.function(take("x"), part) for part in parts], dim=-1))

    def _rotary(self, step):
        def call(take, layout):
            whole = "input/positions" not in self.case.tensors and not any(a for _, a, _ in step)
            positions = layout.positions(self.case.device) if whole else self._positions()[self.case.rows(step)]
            q, k = self.function(positions, take("q"), take("k"), theta=self.constants["theta"], max_positions=self.constants["max_positions"])
            return torch.cat((q.flatten(1), k.flatten(1)), dim=-1)

        self._row_wise(step, call)

    def _silu_and_mul(self, step):
        self._row_wise(step, lambda take, _: self.function(take("x")))

    _relu_squared = _silu_and_mul

    def _log_softmax(self, step):
        self._row_wise(step, lambda take, _: self.function(take("logits")))

    def _gated_rms_norm(self, step):
        self._row_wise(step, lambda take, _: self.function(take("x"), take("gate"), self._parameter("weight"), self.constants["eps"],
                                                           self.constants["groups"]))

    def _router(self, step):
        self._row_wise(step, lambda take, _: _routed(self, take("x")))

    def _attention(self, step):
        layout, where = self._lay(step)
        q, k, v = (self._batch(n, step, layout, where) for n in "qkv")
        mask = _mask(layout)
        out = self.function(q, k, v, layout, self.constants["scale"], mask=None if mask is None else mask.to(q.device), module=None)
        self._store(self.case.rows(step), out[where])

    def _causal_conv1d(self, step):
        layout, where = self._lay(step)
        weight = self._parameter("weight").flatten(1)
        self._store(self.case.rows(step), self.function(self._batch("x", step, layout, where), weight, self._parameter("bias"), layout)[where])

    def _mamba2_scan(self, step):
        layout, where = self._lay(step)
        x, dt, B, C = (self._batch(n, step, layout, where) for n in ("x", "dt", "B", "C"))
        y = self.function(x, dt, self._parameter("A"), B, C, self._parameter("D"), self._parameter("dt_bias"), layout,
                          chunk=self.constants["chunk"], dt_minimum=self.constants["dt_minimum"])
        self._store(self.case.rows(step), y.to(x.dtype)[where])


def _routed(side: _Side, x: torch.Tensor) -> torch.Tensor:
    """Rows as a trace records them: the weights, then the expert ids."""
    from consistency.operators.router import rows

    if side.function is None:
        raise CannotRun("vLLM's own router is part of its fused layer and has no life outside it")
    return rows(*side.function(x, side._parameter("gate"), side._parameter("bias"), side.constants["top_k"], side.constants["scale"]))


def _mask(layout: Layout) -> torch.Tensor | None:
    """What transformers' create_causal_mask gives: nothing without padding, else True where a key may be seen."""
    lengths = torch.tensor(layout.lengths)
    width = int(lengths.max())
    if bool((lengths == width).all()):
        return None
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return causal[None, None] & (torch.arange(width) < lengths[:, None])[:, None, None]

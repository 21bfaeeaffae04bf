"""Step kind `operator`: asks one operator, outside the model, about a case that the parent wrote into the job's folder.

| action | fields | answer |
|---|---|---|
| `parameters` | names | arrays `NAME`: this side's live parameters in their canonical form |
| `probe` | case, side | per probe `{"equal", "detail"}`: as traced, same input twice, row alone, and whether `exact` gives this side's bits |
| `build` | case, folder | fills a repro folder; answers `{"built": {"as_traced", "line", "differs", "size", ...}}` |
| `explain` | case | `{"cause", "detail", "elements", "differing", "max_abs", "max_ulps", "deviating"}` |
"""

from __future__ import annotations

from pathlib import Path

import torch

from consistency.bindings import Bindings
from consistency.contract import STOCK
from consistency.engines.weights import rollout_parameters, training_parameters
from consistency.operators import catalog
from consistency.repro.case import Case
from consistency.repro.run import CannotRun, one_by_one, run, stock


def handle(engine, step: dict) -> tuple[dict[str, torch.Tensor], dict]:
    """engine: the job's Rollout or Training. Raises ValueError for an unknown action or parameter."""
    action = step["action"]
    if action == "parameters":
        return _parameters(engine, step["names"]), {}
    if action == "build":
        from consistency.repro.build import build

        return {}, {"built": build(Path(step["case"]), Path(step["folder"]), engine.bindings.kernels)}
    case = Case.read(Path(step["case"]))
    if action == "probe":
        return {}, {"probes": probe(case, step["side"], function_of(case, step["side"], engine.bindings))}
    if action == "explain":
        from consistency.analysis import explain

        return {}, explain(case)
    raise ValueError(f"unknown operator action '{action}'; known: parameters, probe, explain, build")


def function_of(case: Case, side: int, bindings: Bindings):
    """The implementation that an execution names, freshly loaded, so that a probe does not touch the state of the running one."""
    execution = case.executions[side]
    if execution.implementation == STOCK:
        return stock(case.operator, execution.engine, bindings.device)
    return Bindings(execution.engine, bindings.kernels, bindings.device).load(case.operator, execution.implementation)


def probe(case: Case, side: int, function) -> dict[str, dict]:
    """Whether the operator gives its traced rows outside the model, the same rows twice, and the same rows without their neighbours."""
    execution = case.executions[side]
    computed = torch.zeros(sum(case.lengths), dtype=torch.bool)
    for step in execution.steps:
        computed[case.rows(step)] = True
    try:
        once = run(case, side, function)
        again = run(case, side, function)
        request = next(r for r, n in enumerate(case.lengths) if computed[case.offsets[r]:case.offsets[r] + n].any())
        # The longest request that is not too long: each of its rows is a call of its own.
        usable = [r for r, n in enumerate(case.lengths) if n <= 64 and computed[case.offsets[r]:case.offsets[r] + n].any()]
        request = max(usable, key=lambda r: case.lengths[r], default=request)
        alone = run(case, side, function, one_by_one(case, execution, request))
        exact = run(case, side, catalog.load(case.operator, "exact", execution.engine, case.device))
    except CannotRun as error:
        return {name: {"equal": None, "detail": str(error)} for name in ("as traced", "same input twice", "row alone")}
    mine = torch.zeros_like(computed)
    mine[case.offsets[request]:case.offsets[request] + case.lengths[request]] = True
    return {"exact": _compare(exact, case.tensors[f"output@{side}"], computed),
            "as traced": _compare(once, case.tensors[f"output@{side}"], computed),
            "same input twice": _compare(once, again, computed),
            "row alone": _compare(once, alone, computed & mine)}


def _compare(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> dict:
    if a.dtype != b.dtype:
        b = b.to(a.dtype)
    width = {2: torch.int16, 4: torch.int32}[a.element_size()]
    unequal = (a[rows].view(width) != b[rows].view(width)).any(-1)
    return {"equal": not bool(unequal.any()), "detail": f"{int(unequal.sum())} of {len(unequal)} rows differ" if unequal.any() else ""}


def _parameters(engine, names: list[str]) -> dict[str, torch.Tensor]:
    table = (rollout_parameters if engine.bindings.side == "rollout" else training_parameters)(engine.model)
    missing = [name for name in names if name not in table]
    if missing:
        raise ValueError(f"no parameter '{missing[0]}'; the model has {len(table)}, for example {next(iter(table))}")
    return {name: table[name].detach() for name in names}

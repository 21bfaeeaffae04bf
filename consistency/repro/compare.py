"""Both sides of a case, run and compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from consistency.bindings import Bindings
from consistency.contract import STOCK, Contract
from consistency.repro.case import Case
from consistency.repro.run import run, stock


class Functions:
    """The implementations of a case's sides; sides that name the same one share it, with whatever state it keeps."""

    def __init__(self, kernels: Path | None) -> None:
        self.kernels = kernels
        self.loaded: dict[tuple[str, str, str], object] = {}

    def of(self, case: Case, side: int):
        """Raises ContractError for a name that does not exist."""
        execution = case.executions[side]
        key = (case.operator, execution.engine, execution.implementation)
        if key not in self.loaded:
            named = execution.implementation != STOCK
            self.loaded[key] = Bindings(execution.engine, self.kernels, case.device).load(case.operator, execution.implementation) if named \
                else stock(case.operator, execution.engine, case.device)
        return self.loaded[key]


def outputs(case: Case, functions: Functions) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of both sides that both compute, in one dtype."""
    rows = case.compared()
    a, b = (run(case, side, functions.of(case, side))[rows] for side in (0, 1))
    wide = torch.promote_types(a.dtype, b.dtype)
    return a.to(wide), b.to(wide)


def differs(case: Case, functions: Functions) -> bool:
    a, b = outputs(case, functions)
    return a.numel() > 0 and not torch.equal(_bits(a), _bits(b))


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])


def under(case: Case, contract: Contract) -> Case:
    """The same case with the implementations of another contract."""
    return replace(case, executions=[replace(e, implementation=getattr(contract, e.engine).get(case.operator, STOCK)) for e in case.executions])


def verdict(case: Case, contract: Contract | None, kernels: Path | None) -> tuple[str, bool]:
    """(one line, whether the sides differ)."""
    from consistency.analysis import numbers

    case = case if contract is None else under(case, contract)
    a, b = outputs(case, Functions(kernels))
    found = numbers(a, b)
    sides = " against ".join(f"{e.label} ({e.implementation})" for e in case.executions)
    if not found["differing"]:
        return f"{case.operator} at {case.site}: {found['elements']} elements equal, {sides}", False
    return (f"{case.operator} at {case.site}: {found['differing']} of {found['elements']} elements differ, by at most {found['max_abs']:.6g} "
            f"({found['max_ulps']} ulps), {sides}"), True

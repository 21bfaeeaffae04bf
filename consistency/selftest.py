"""Whether the exact operators keep their bits on this device: a small sweep over their own cases, for a GPU on which nobody has measured them.

    python -m consistency.selftest --family qwen3 --out FILE

The facts that the operators rest on (only the order of K changes a product's bits, tiles and warps do not; one key split is exact in every
phase; a scan's launch settings form one class) were measured on sm_90. Here each case is computed at several numbers of rows, twice, and
phase against phase, and compared bit by bit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
from pathlib import Path

import torch

from consistency.operators import cuda
from consistency.operators.cuda.case import Case

ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128)
"""compared with the same rows of one batch of MOST"""
MOST = 160


def cases(family: str) -> list[Case]:
    """The cases of a family, in the order of the modules' names."""
    modules = [importlib.import_module(f"{cuda.__name__}.{found.name}") for found in pkgutil.iter_modules(cuda.__path__) if not found.ispkg]
    return [case for module in modules for case in getattr(module, "CASES", ()) if family in case.families]


def examine(case: Case, device: str = "cuda") -> dict[str, object]:
    """One case: the row counts at which rows differ, whether two runs do, and the phases that differ."""
    began = time.perf_counter()
    most = min(case.most_rows, MOST)
    inputs = case.inputs(most, torch.Generator(device).manual_seed(1))
    whole = case.exact(*inputs.take(most))
    differing = [rows for rows in ROWS if rows < most and not torch.equal(case.exact(*inputs.take(rows)), whole[:rows])]
    again = torch.equal(case.exact(*inputs.take(most)), whole)
    phases = case.phases() if case.phases else {}
    unequal = [name for name, (equal, total) in phases.items() if equal != total]
    return {"operator": case.operator, "shape": case.shape, "rows_that_differ": differing, "twice": again, "phases": len(phases),
            "phases_that_differ": unequal, "equal": not differing and again and not unequal, "seconds": round(time.perf_counter() - began, 2)}


def selftest(family: str, seconds: float, device: str = "cuda") -> dict[str, object]:
    """Every case of a family; those that the time does not suffice for are named, not counted as equal."""
    began, done, left_out = time.perf_counter(), [], []
    for case in cases(family):
        if time.perf_counter() - began > seconds:
            left_out.append(case.name)
            continue
        try:
            done.append(examine(case, device))
        except Exception as error:
            done.append({"operator": case.operator, "shape": case.shape, "equal": False, "error": f"{type(error).__name__}: {error}"[:300]})
        if device == "cuda":
            torch.cuda.empty_cache()
    return {"family": family, "device": torch.cuda.get_device_name() if device == "cuda" else device,
            "capability": ".".join(map(str, torch.cuda.get_device_capability())) if device == "cuda" else None, "torch": torch.__version__,
            "cases": done, "left_out": left_out, "equal": bool(done) and not left_out and all(case["equal"] for case in done),
            "seconds": round(time.perf_counter() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="after which no further case is begun")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if torch.cuda.is_available():
        result = selftest(options.family, options.seconds)
    else:
        result = {"family": options.family, "cases": [], "left_out": [], "equal": False, "error": "torch sees no CUDA device"}
    draft = options.out.with_suffix(".draft")
    draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draft.replace(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Makes a repro folder from the evidence of a divergence.

    python -m consistency.repro.build EVIDENCE FOLDER [KERNELS]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

SCRIPT = '''"""{title}

Run `python repro.py`: exit code 1 while the two sides differ, 0 once they do not. With `--contract FILE [--kernels DIR]` the implementations
of that contract take the place of the recorded ones. Expected as recorded: see expected.txt.
"""

from consistency.repro.main import main

raise SystemExit(main(__file__))
'''


def build(evidence: Path, folder: Path, kernels: Path | None = None) -> dict:
    """Fills `folder` and returns what repro.json says besides the case: `as_traced` (each side alone gives its traced bits), `line`, `size`.

    Raises ContractError or ValueError if a side cannot be run.
    """
    import torch

    from consistency.repro.case import Case
    from consistency.repro.compare import Functions, differs, verdict
    from consistency.repro.run import run
    from consistency.repro.shrink import shrink

    case = Case.read(evidence)
    functions = Functions(kernels)
    as_traced = []
    for side in (0, 1):
        rows = torch.cat([case.rows(step) for step in case.executions[side].steps])
        mine, traced = run(case, side, functions.of(case, side))[rows], case.tensors[f"output@{side}"][rows]
        as_traced.append(mine.dtype == traced.dtype and torch.equal(mine.view(torch.uint8), traced.view(torch.uint8)))
    whole = {"requests": len(case.lengths), "rows": sum(case.lengths), "elements": sum(t.numel() for t in case.tensors.values())}
    small = shrink(case, lambda c: differs(c, functions)) if differs(case, functions) else case
    for name in {e.implementation.partition(":")[2].partition(".")[0] for e in small.executions if e.implementation.startswith("kernels:")}:
        (folder / "kernels").mkdir(parents=True, exist_ok=True)
        shutil.copy(kernels / f"{name}.py", folder / "kernels")
    size = {"requests": len(small.lengths), "rows": sum(small.lengths), "elements": sum(t.numel() for t in small.tensors.values())}
    line, unequal = verdict(small, None, kernels)
    more = {"as_traced": as_traced, "line": line, "differs": unequal, "whole": whole, "size": size}
    small.write(folder, "repro.json", more)
    (folder / "repro.py").write_text(SCRIPT.format(title=line), encoding="utf-8")
    (folder / "expected.txt").write_text(line + "\n", encoding="utf-8")
    return more


def main() -> int:
    from consistency.engines.environment import prepare

    prepare(1)
    import torch

    torch.set_num_threads(1)
    kernels = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    print(json.dumps(build(Path(sys.argv[1]), Path(sys.argv[2]), kernels)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

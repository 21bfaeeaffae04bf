"""Host time of one eager linear call: torch as it is, torch with a starved workspace, and the kept plan.

`python -m bench.gpu.eager_linear --out FILE`. The starved variables must be set before the first product of a process, so each variant
runs in its own.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import torch

from bench.gpu.measure import write_results

STARVED = {"CUBLASLT_WORKSPACE_SIZE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
SHAPES = ((2688, 10304), (4096, 2688), (6144, 2048))
CALLS = 300


def measure(variant: str) -> list[dict]:
    """Microseconds of host time for each call, device work included where it is longer."""
    from consistency.operators.cuda.case import normal
    from consistency.operators.cuda.linear import linear, linear_ascending

    if variant == "starved":
        torch.backends.cuda.preferred_blas_library("cublaslt")
    function = linear if variant == "kept plan" else torch.nn.functional.linear
    rows = []
    for k, n in SHAPES:
        for count in (1, 8, 64):
            generator = torch.Generator("cuda").manual_seed(1)
            x, weight = normal((count, k), generator), normal((n, k), generator, k**-0.5)
            for _ in range(20):
                out = function(x, weight)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                function(x, weight)
            torch.cuda.synchronize()
            rows.append({"variant": variant, "shape": f"{k}x{n}", "rows": count, "us": round((time.perf_counter() - start) / CALLS * 1e6, 1),
                         "equals_ascending_k": torch.equal(out, linear_ascending(x, weight))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=("stock", "starved", "kept plan"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results/eager-linear.json"))
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measure(options.variant)))
        return
    rows = []
    for variant in ("stock", "starved", "kept plan"):
        command = [sys.executable, "-m", "bench.gpu.eager_linear", "--variant", variant]
        done = subprocess.run(command, env={**os.environ, **(STARVED if variant == "starved" else {})}, capture_output=True, text=True, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    for row in rows:
        print(row)
    write_results(options.out, rows)


if __name__ == "__main__":
    main()

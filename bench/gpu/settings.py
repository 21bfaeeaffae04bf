"""Time and bits of the kernels over launch settings: `python -m bench.gpu.settings --out FILE`.

Settings are free under the contracts, so the fastest may be kept; one whose bits differ from the default's would refute the contract.
"""

import argparse
import functools
import pathlib

import torch

from bench.gpu.measure import draw, load_cases, time_calls, write_results
from consistency.operators.cuda import causal_conv1d, mamba2_decode, mamba2_scan, moe_experts, router
from consistency.operators.cuda.case import with_settings

MMA = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
ROW = ("BLOCK_K", "num_warps")
SCAN = ("BLOCK_M", "BLOCK_P", "BLOCK_K", "num_warps", "num_stages")
STATE = ("BLOCK_P", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
DECODE = "mamba2_scan decode"
PREFILL = "mamba2_scan prefill 64x64, 8 groups, state 128"
CONV = "causal_conv1d decode 6144"
ROUTER = "router 2688x128 top 6"
MOE = "moe_experts training 128 x 2688x1856 top 6"
SWEEPS = (
    # case, settings to change, rows, keys, values
    (DECODE, mamba2_decode.DECODE_ROW, (8, 32, 256), ROW, ((128, 4), (64, 4), (32, 4), (128, 8), (64, 2), (32, 2))),
    (DECODE, mamba2_decode.DECODE_APPEND, (8, 32, 256), ROW, ((64, 4), (16, 2), (32, 2), (32, 4), (128, 4))),
    (PREFILL, mamba2_scan.CHUNK_SCAN, (2048, 8192), SCAN,
     ((64, 64, 32, 4, 1), (64, 32, 32, 4, 1), (64, 64, 16, 4, 1), (32, 64, 32, 2, 3), (64, 64, 32, 8, 1))),
    (PREFILL, mamba2_scan.CHUNK_STATE, (2048, 8192), STATE, ((64, 128, 32, 4, 3), (64, 64, 64, 4, 2), (64, 64, 64, 4, 3), (64, 128, 32, 8, 3))),
    (ROUTER, router.FEW, (8, 32), MMA, ((16, 32, 128, 4, 3), (16, 32, 128, 2, 3), (16, 16, 128, 2, 3), (16, 64, 128, 4, 3))),
    (ROUTER, router.SOME, (256, 2048), MMA, ((64, 64, 64, 4, 3), (64, 128, 64, 4, 3), (128, 128, 64, 8, 3), (64, 32, 128, 4, 3))),
    (ROUTER, router.MANY, (8192,), MMA, ((64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (64, 128, 64, 4, 3), (128, 128, 64, 8, 3), (64, 128, 64, 8, 4))),
    (CONV, causal_conv1d.UPDATE, (8, 32, 256), ("BLOCK_C", "num_warps"), ((512, 4), (256, 2), (256, 1), (1024, 4), (1024, 8), (128, 1))),
    (MOE, moe_experts.TILES[0][1], (8, 32), MMA, ((16, 64, 128, 4, 4), (16, 32, 256, 4, 4), (16, 128, 128, 8, 4), (16, 64, 256, 4, 3))),
    (MOE, moe_experts.TILES[1][1], (256,), MMA, ((16, 64, 128, 4, 4), (16, 32, 256, 4, 4), (32, 64, 128, 4, 4), (32, 128, 128, 8, 4))),
    (MOE, moe_experts.TILES[3][1], (2048,), MMA, ((128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (64, 128, 128, 8, 3))),
    (MOE, moe_experts.TILES[4][1], (8192,), MMA, ((128, 256, 64, 8, 4), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3))),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operator", action="append", help="only this operator; may be repeated")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results/settings.json"))
    options = parser.parse_args()
    cases = {c.name: c for c in load_cases(None, options.operator)}
    rows = []
    for name, settings, counts, keys, values in SWEEPS:
        if name not in cases:
            continue
        case = cases[name]
        # each count draws its own caches: one that is larger than the batch needs would stay in the L2
        inputs = {count: draw(case, count) for count in counts}
        expected = {count: case.exact(*drawn.take(count)) for count, drawn in inputs.items()}
        for value in values:
            row = {"operator": case.name, "settings": dict(zip(keys, value, strict=True)), "us": {}, "bits_equal": True}

            timed = functools.partial(with_settings, settings, row["settings"], case.exact_timed or case.exact)
            try:
                for count in counts:
                    arguments = tuple(t.clone() for t in inputs[count].take(count))
                    row["bits_equal"] &= torch.equal(with_settings(settings, row["settings"], case.exact, *arguments), expected[count])
                    row["us"][count] = round(time_calls({"exact": timed}, arguments)["exact"], 2)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:160]
            rows.append(row)
            bits = "" if row["bits_equal"] else "BITS DIFFER"
            print(f"{case.name[:34]:34} {'x'.join(map(str, value)):18} {row['us']} {bits} {row.get('error', '')}", flush=True)
        del inputs, expected
        torch.cuda.empty_cache()
        write_results(options.out, rows)


if __name__ == "__main__":
    main()

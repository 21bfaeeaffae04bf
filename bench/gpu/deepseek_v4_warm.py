"""Compiles in parallel what a first start of DeepSeek-V4 would compile one by one: `python -m bench.gpu.deepseek_v4_warm`.

TileLang (hyper-connections, one kernel per split of K), DeepGEMM (one per shape and tile) and FlashInfer's block-scaled GEMM. All three keep what
they compile on disk, where the engine finds it.
"""

import argparse
import subprocess
import sys
import time

import torch

from bench.gpu.measure import complete_pythonpath

STREAMS = ((1, 64, 192, 256, 320, 4288), (16, 384, 448, 512, 576, 640), (704, 768, 832, 896, 960, 2880), (1152, 1280, 1664, 2112, 2816, 4224))
"""one row count for each split of K that vLLM chooses up to its largest step, in four processes"""
SHAPES = ((4096, 1536), (1024, 32768), (1024, 8192), (8192, 4096), (4096, 4096), (2048, 4096))
"""K and N of the FP8 linear layers, a process each"""
ROWS = (32, 64, 128, 256, 704, 2048, 12288)
"""row counts at which DeepGEMM takes another tile"""


def compile_group(kind: str, numbers: list[int]) -> None:
    """What one process compiles."""
    from consistency.operators.cuda.deepseek_v4 import hyper_connection, linear, shapes

    if kind == "flashinfer":
        from flashinfer.jit.gemm import gen_fp8_blockscale_gemm_sm90_module

        gen_fp8_blockscale_gemm_sm90_module().build_and_load()
        return
    generator = torch.Generator("cuda").manual_seed(1)
    if kind == "streams":
        first, between = (case for case in hyper_connection.CASES[:2])
        for rows in numbers:
            hyper_connection.stock_pre(*first.inputs(rows, generator).take(rows))
            hyper_connection.stock_post_pre(*between.inputs(rows, generator).take(rows))
    else:
        k, n = numbers
        weight = shapes.fp8_weight(n, k, generator)
        for rows in ROWS:
            linear.deep_gemm(torch.ones(rows, k, dtype=torch.bfloat16, device="cuda"), *weight)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=170.0, help="when to stop what still compiles")
    parser.add_argument("--group", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the kernels are compiled for the one that is there")
    complete_pythonpath()
    if options.group:
        compile_group(options.group[0], [int(number) for number in options.group[1:]])
        return
    groups = [("flashinfer",), *(("streams", *map(str, rows)) for rows in STREAMS), *(("linear", *map(str, shape)) for shape in SHAPES)]
    started = time.monotonic()
    processes = [subprocess.Popen([sys.executable, "-m", "bench.gpu.deepseek_v4_warm", "--group", *group],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for group in groups]
    failed = []
    for group, process in zip(groups, processes, strict=True):
        try:
            _, errors = process.communicate(timeout=max(1.0, options.seconds - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            process.kill()
            errors = f"stopped after {options.seconds:.0f} s"
        if process.returncode != 0:
            failed.append(group[0])
        said = "compiled" if process.returncode == 0 else errors.strip()[-300:]
        print(f"{' '.join(group)}: {said}, {time.monotonic() - started:.0f} s", flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()

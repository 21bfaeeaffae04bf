"""What the survey and the operator benchmark share: which cases there are, how a call is timed, what a result file holds."""

import datetime
import importlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import shlex
import site
import statistics
import sys
from collections.abc import Callable

import torch

from consistency.operators.cuda.case import Case, Inputs

FAMILIES = ("nemotron-3.5", "qwen3", "deepseek-v4")
OPERATORS = ("linear", "rms_norm", "gated_rms_norm", "router", "relu_squared", "silu_and_mul", "causal_conv1d", "mamba2_scan", "moe_experts",
             "log_softmax", "rotary", "attention")
DEEPSEEK_V4 = ("linear", "hyper_connection", "normalisation", "compressor", "indexer", "attention", "router", "moe_experts", "log_softmax")
MODULES = {"": tuple("mamba2_cases" if name == "mamba2_scan" else name for name in OPERATORS),
           "deepseek-v4": tuple(f"deepseek_v4.{name}" for name in DEEPSEEK_V4)}
"""family that has cases of its own, or the empty name -> modules below consistency.operators.cuda"""
PACKAGES = ("torch", "triton", "vllm", "transformers")
COLD_BYTES = 192 << 20
"""Inputs are copied until they exceed this: three times the L2 cache, so that weights come from memory as they do in a model."""
GRAPH_US = 3000.0
SAMPLES = 9


def complete_pythonpath() -> None:
    """Read the .pth files in the folders of PYTHONPATH, for this process and its children.

    Python reads them in its own site folder only, and packages with a compiler of their own (CuTe DSL) put themselves on the path that way.
    """
    before = list(sys.path)
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        site.addsitedir(folder)
    added = [path for path in sys.path if path not in before]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*added, os.environ.get("PYTHONPATH"))))


def load_cases(family: str | None = None, operators: list[str] | None = None) -> list[Case]:
    """Cases of `family` (all families if None) and of the named operators (all if None or empty)."""
    modules = itertools.chain(*MODULES.values()) if family is None else MODULES.get(family, MODULES[""])
    cases = [c for name in modules for c in importlib.import_module(f"consistency.operators.cuda.{name}").CASES]
    return [c for c in cases if (family is None or family in c.families) and (not operators or c.operator in operators)]


def draw(case: Case, rows: int, seed: int = 1) -> Inputs:
    """Inputs of `rows` rows, the same values for the same seed on the same device type."""
    return case.inputs(rows, torch.Generator("cuda").manual_seed(seed))


def environment() -> dict[str, object]:
    """Hardware and versions, for a result file."""
    properties = torch.cuda.get_device_properties(0)
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    # the installed torch may not be the one that was imported
    versions["torch"] = torch.__version__
    hardware = {"name": properties.name, "capability": f"{properties.major}.{properties.minor}", "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory}
    return {"hardware": hardware, "versions": versions}


def write_results(path: pathlib.Path, rows: list[dict]) -> None:
    """Store rows with the command, the date, the hardware and the versions that gave them."""
    module = sys.modules["__main__"].__spec__
    command = f"python -m {module.name}" if module else f"python {pathlib.Path(sys.argv[0]).name}"
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = {"command": shlex.join([*shlex.split(command), *_without_out(sys.argv[1:])]), "date": date, **environment(), "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _without_out(arguments: list[str]) -> list[str]:
    """The arguments without `--out FILE`: where a result was first stored says nothing about it."""
    keep = [True] * len(arguments)
    for index, argument in enumerate(arguments):
        if argument == "--out":
            keep[index : index + 2] = [False] * len(keep[index : index + 2])
        elif argument.startswith("--out="):
            keep[index] = False
    return [a for a, k in zip(arguments, keep, strict=True) if k]


def cold_copies(arguments: tuple) -> list[tuple]:
    """The arguments, and as many copies as it takes to outgrow the cache (8 at most)."""
    size = sum(t.numel() * t.element_size() for t in arguments)
    return [arguments] + [tuple(t.clone() for t in arguments) for _ in range(min(7, int(COLD_BYTES // max(size, 1))))]


def _captured(function: Callable, copies: list[tuple]) -> tuple[torch.cuda.CUDAGraph, int]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for arguments in (*copies, copies[0]):
            function(*arguments)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function(*copies[0])
        end.record()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    calls = max(len(copies), min(100, int(GRAPH_US / max(start.elapsed_time(end) * 1e3, 1.0))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            function(*copies[call % len(copies)])
    return graph, calls


def time_calls(functions: dict[str, Callable], arguments: tuple) -> dict[str, float]:
    """Median microseconds of a call of each function inside a CUDA graph, replays interleaved, inputs out of cache."""
    copies = cold_copies(arguments)
    graphs = {name: _captured(f, copies) for name, f in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(SAMPLES + 2):
        for name, (graph, calls) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if repeat >= 2:
                samples[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def time_case(case: Case, rows: int) -> dict[str, float]:
    """Microseconds of the exact call and, where the engine is installed, of the stock call. Raises what stock raises if it is the only one."""
    functions = {} if case.exact is None else {"exact": case.exact_timed or case.exact}
    stock = case.stock_timed or case.stock
    inputs = draw(case, rows)
    arguments = inputs.take(rows)
    if stock is not None:
        try:
            stock(*(t.clone() for t in arguments))
            functions["stock"] = stock
        except (ImportError, AttributeError):
            if case.exact is None:
                raise
    if case.prepare:
        case.prepare(*arguments)
    times = time_calls(functions, arguments)
    del inputs, arguments
    return times

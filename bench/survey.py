"""Which operators keep their bits on this device, at the true shapes of a model: `python -m bench.survey --model nemotron-3.5`.

For each case: rows equal over a sweep of row counts; bit classes over launch settings and routes; prefill against decode; run to run; error
against fp64; time of a call in a CUDA graph. `--against FILE` compares the fingerprints with those of an earlier process.
"""

import argparse
import concurrent.futures
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback

import torch

from bench.gpu.measure import OPERATORS, draw, load_cases, time_case, write_results
from consistency.operators.cuda.case import SWEEP, Case, Function, Inputs, equal_elements, relative_error

ERROR_ROWS = 64
CLASS_ROWS = 256


def fingerprint(tensor: torch.Tensor) -> str:
    """Hash of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


def sweep(case: Case, function: Function, inputs: Inputs, rows: int) -> dict[str, object]:
    """Row counts at which a row differs from the same row in the largest batch, and the worst share of equal elements."""
    full = function(*inputs.take(rows))
    differing, worst = [], 1.0
    for count in (m for m in SWEEP if m <= rows):
        equal, total = equal_elements(function(*inputs.take(count)), full[:count])
        if equal != total:
            differing.append(count)
            worst = min(worst, equal / total)
    for index in () if case.causal else (rows // 3, rows - 1):
        equal, total = equal_elements(function(*inputs.row(index)), full[index : index + 1])
        if equal != total:
            differing.append(f"row {index} alone")
            worst = min(worst, equal / total)
    again = function(*inputs.take(rows))
    return {"equal": not differing, "differing": differing, "worst_share": worst, "run_to_run": torch.equal(full, again)}


def bit_classes(case: Case, inputs: Inputs, rows: int) -> dict[str, list[str]]:
    """Launch settings grouped by the bits they give."""
    classes: dict[str, list[str]] = {}
    for name, function in {"default": case.exact, **case.configurations}.items():
        try:
            key = fingerprint(function(*inputs.take(rows)))
        except Exception as error:
            key = f"{type(error).__name__}: {error}"[:120]
        classes.setdefault(key, []).append(name)
    return classes


def survey(case: Case, with_times: bool) -> dict[str, object]:
    """One row of the table."""
    rows, started = case.most_rows, time.perf_counter()
    inputs = draw(case, rows)
    row: dict[str, object] = {"operator": case.operator, "shape": case.shape, "exact": sweep(case, case.exact, inputs, rows)}
    few = min(ERROR_ROWS, rows)
    reference = case.reference(*inputs.take(few))
    row["error"] = {"exact": relative_error(case.exact(*inputs.take(few)), reference)}
    if case.stock is not None:
        try:
            row["stock"] = sweep(case, case.stock, inputs, rows)
            row["error"]["stock"] = relative_error(case.stock(*inputs.take(few)), reference)
        except (ImportError, AttributeError) as error:
            row["stock"] = {"unavailable": str(error)[:200]}
    row["fingerprint"] = fingerprint(case.exact(*inputs.take(few)))
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
    exact, stock, error = row["exact"], row.get("stock", {}), row["error"]
    line = f"{row['operator']} {row['shape'][:36]:36} M {'equal' if exact['equal'] else 'DIFFERS ' + str(exact['differing'][:6])}"
    line += f" | stock {'equal' if stock.get('equal') else str(stock.get('differing', stock.get('unavailable', '-')))[:60]}"
    line += f" | runs {'equal' if exact['run_to_run'] else 'DIFFER'} | classes {len(row['classes'])} of {sum(map(len, row['classes'].values()))}"
    line += f" | error {error['exact']:.2e} stock {error.get('stock', float('nan')):.2e} | {row['seconds']} s"
    for name, phase in row.get("phases", {}).items():
        line += f"\n    {'equal ' if phase['equal'] == phase['of'] else 'DIFFER'} {phase['equal']}/{phase['of']} {name}"
    if len(row["classes"]) > 1:
        line += "\n    classes " + "; ".join(f"{key}: {', '.join(names)}" for key, names in row["classes"].items())
    if "gradient_error" in row:
        line += "\n    gradients " + ", ".join(f"{name} {value:.1e}" for name, value in row["gradient_error"].items())
    for count, times in row.get("us", {}).items():
        line += f"\n    {count:>6} rows: " + ", ".join(f"{name} {value:.1f} us" for name, value in times.items())
    return line


def in_processes(options: argparse.Namespace) -> int:
    """Survey each operator in a process of its own, `jobs` at a time, and merge the rows."""
    names = options.operator or list(OPERATORS)
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        paths = {name: pathlib.Path(folder) / f"{name}.json" for name in names}

        def one(name: str) -> subprocess.CompletedProcess:
            model = ["--model", options.model] if options.model else []
            command = [sys.executable, "-m", "bench.survey", "--operator", name, "--no-times", "--out", str(paths[name]), *model]
            return subprocess.run(command, capture_output=True, text=True)

        done = dict(zip(names, pool.map(one, names), strict=True))
        rows = []
        for name, process in done.items():
            print(process.stdout, end="", flush=True)
            sys.stderr.write(process.stderr)
            rows += json.loads(paths[name].read_text())["rows"] if paths[name].exists() else []
    write_results(options.out, rows)
    return max(process.returncode for process in done.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("nemotron-3.5", "qwen3"), help="family; default all")
    parser.add_argument("--operator", action="append", help="only this operator; may be repeated")
    parser.add_argument("--no-times", action="store_true", help="bits only")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the device; only with --no-times")
    parser.add_argument("--against", type=pathlib.Path, help="results of another process on the same device")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results/survey.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: run the survey on the GPU whose operators you want to know")
    if options.jobs > 1:
        if not options.no_times:
            parser.error("--jobs disturbs times: add --no-times")
        raise SystemExit(in_processes(options))
    rows, failed = [], False
    for case in load_cases(options.model, options.operator):
        try:
            row = survey(case, not options.no_times)
        except Exception as error:
            traceback.print_exc()
            row = {"operator": case.operator, "shape": case.shape, "failed": f"{type(error).__name__}: {error}"[:600]}
            torch.cuda.empty_cache()
        failed |= "failed" in row or not row["exact"]["equal"]
        rows.append(row)
        print(describe(row), flush=True)
        write_results(options.out, rows)
    if options.against:
        before = {(r["operator"], r["shape"]): r.get("fingerprint") for r in json.loads(options.against.read_text())["rows"]}
        changed = [f"{r['operator']} {r['shape']}" for r in rows if before.get((r["operator"], r["shape"])) not in (None, r.get("fingerprint"))]
        print(f"other process: {len(rows) - len(changed)} of {len(rows)} fingerprints equal" + (f"; different: {changed}" if changed else ""))
        failed |= bool(changed)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()

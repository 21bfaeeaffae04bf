"""Speed of every exact operator as a percentage of what the engine calls untouched: `python -m bench.operators`."""

import argparse
import pathlib
import traceback

import torch

from bench.gpu.measure import FAMILIES, complete_pythonpath, load_cases, time_case, write_results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=FAMILIES, help="family; default all")
    parser.add_argument("--operator", action="append", help="only this operator; may be repeated")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results/operators.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: operator times mean something only on a GPU")
    complete_pythonpath()
    rows = []
    for case in load_cases(options.model, options.operator):
        for phase, counts in (("decode", case.decode), ("prefill", case.prefill)):
            for count in counts:
                row = {"operator": case.operator, "shape": case.shape, "phase": phase, "rows": count}
                try:
                    row["us"] = {name: round(value, 3) for name, value in time_case(case, count).items()}
                except Exception as error:
                    traceback.print_exc()
                    row["error"] = f"{type(error).__name__}: {error}"[:300]
                torch.cuda.empty_cache()
                times = row.get("us", {})
                if times.keys() >= {"exact", "stock"}:
                    row["percent_of_stock"] = round(100 * times["stock"] / times["exact"], 1)
                rows.append(row)
                print(f"{case.name[:48]:48} {phase:7} {count:6} " + (row.get("error") or f"exact {times.get('exact', float('nan')):10.2f}  stock "
                      f"{times.get('stock', float('nan')):10.2f} us  {row.get('percent_of_stock', float('nan')):6.1f} %"), flush=True)
        write_results(options.out, rows)


if __name__ == "__main__":
    main()

"""Markdown tables from result files.

    python -m bench.gpu.tables survey FILE       one table, printed; also operators, stock
    python -m bench.gpu.tables fill DOCUMENT     every table of a document, from docs/results/; with --check, only say whether they are up to date

A document names its tables: what stands between `<!-- results:KIND FILE -->` and `<!-- end -->` is replaced, FILE being relative to docs/results/.
"""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results"
MARKED = re.compile(r"(<!-- results:(\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def survey_table(rows: list[dict]) -> list[str]:
    """One line for each case: what keeps its bits, and the error of both implementations."""
    head = "| operator | exact: rows equal | stock: row counts that differ | settings and routes | phases | error, exact / stock |"
    lines = [head, "|---|---|---|---|---|---|"]
    for row in rows:
        exact, stock, error = row["exact"], row.get("stock", {}), row["error"]
        differing = [str(d) for d in stock.get("differing", [])]
        counts = [d for d in differing if d.isdigit()]
        if not stock or "unavailable" in stock:
            stock_text = "-"
        elif not differing:
            stock_text = "none"
        else:
            stock_text = f"{len(counts)} counts, {counts[0]} to {counts[-1]}" if counts else "only a row alone"
            stock_text += f"; worst share {stock['worst_share']:.1%}"
        phases = row.get("phases", {}).values()
        phase_text = f"{sum(p['equal'] == p['of'] for p in phases)} of {len(phases)} equal" if phases else "-"
        lines.append(f"| {row['operator']} {row['shape']} | {'all' if exact['equal'] else exact['differing']} | {stock_text} "
                     f"| {sum(map(len, row['classes'].values()))} in {len(row['classes'])} class{'es' * (len(row['classes']) > 1)} "
                     f"| {phase_text} | {error['exact']:.1e} / {format(error['stock'], '.1e') if 'stock' in error else '-'} |")
    return lines


def stock_table(rows: list[dict]) -> list[str]:
    """For a family whose subject is stock: where its bits change with the row count, and what a candidate for exactness does instead."""
    lines = ["| operator | stock: bits change between row counts | worst share | runs, restart | phases | routes | error of stock "
             "| candidate: rows equal |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        name, stock = f"{row['operator']} {row['shape']}", row.get("stock", {})
        if "failed" in row or "unavailable" in stock:
            reason = _cell(row.get("failed") or stock["unavailable"])
            lines.append(f"| {name} | did not run: {reason} | | | | | | |")
            continue
        borders = ", ".join(f"{a}/{b}" for a, b in stock["borders"]) or ("never" if stock["equal"] else "a row alone")
        borders = borders if stock["run_to_run"] else "from run to run"
        restart = {True: "equal", False: "differs", None: "-"}[row.get("restart_equal")]
        phases = row.get("phases", {})
        phase = "; ".join(f"{label} {'equal' if p['equal'] == p['of'] else format(p['equal'] / p['of'], '.1%')}" for label, p in phases.items())
        exact = row.get("exact")
        runs = "equal" if stock["run_to_run"] else "differ"
        lines.append(f"| {name} | {borders} | {stock['worst_share']:.1%} | {runs}, {restart} | {phase or '-'} "
                     f"| {_classes(row['classes'])} | {format(row['error']['stock'], '.1e') if 'stock' in row['error'] else '-'} "
                     f"| {'-' if exact is None else 'all' if exact['equal'] else 'no: ' + ', '.join(map(str, exact['differing'][:4]))} |")
    return lines


def _classes(classes: dict[str, list[str]]) -> str:
    """Routes that share their bits joined by `=`; what did not run is left out."""
    ran = [names for key, names in classes.items() if ":" not in key]
    return " / ".join(" = ".join(names) for names in ran) if sum(map(len, ran)) > 1 else "-"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:160]


def operators_table(rows: list[dict]) -> list[str]:
    """One line for each case: microseconds of the exact call and its percentage of stock, by number of rows; stock's where nothing else is."""
    lines, cases = ["| operator | decode: rows, us, % of stock | prefill: rows, us, % of stock |", "|---|---|---|"], {}
    for row in rows:
        cells = cases.setdefault(f"{row['operator']} {row['shape']}", {"decode": [], "prefill": []})
        if "us" not in row:
            cells[row["phase"]].append(f"{row['rows']}: did not run")
            continue
        us = row["us"]
        cells[row["phase"]].append(f"{row['rows']}: {us.get('exact', us.get('stock')):.1f}"
                                   + (f" ({row['percent_of_stock']:.0f} %)" if "percent_of_stock" in row else "" if "exact" in us else " stock"))
    return lines + [f"| {name} | {' · '.join(cells['decode']) or '-'} | {' · '.join(cells['prefill']) or '-'} |" for name, cells in cases.items()]


def compared_table(rows: list[dict]) -> list[str]:
    """Log-probabilities of two runs on the same tokens, and in text what else a step of the slice found."""
    lines = ["| compared | tokens equal | max | mean | K3 | same tokens |", "|---|---|---|---|---|---|"]
    lines += [f"| {row['measurement']} | {row['equal']} of {row['compared']} | {row['max']:.3g} | {row['mean']:.3g} | {row['k3']:.2g} "
              f"| {row['equal_tokens']} of {row['requests']} requests |" for row in rows if "compared" in row]
    lines = lines if len(lines) > 2 else []
    return lines + [""] + [f"- {row['measurement']}: {_values(row)}" for row in rows if "compared" not in row]


def _values(row: dict) -> str:
    rest = {k: v for k, v in row.items() if k not in ("step", "experts", "measurement", "folder", "new_tokens")}
    return ", ".join(f"{k} {_value(v)}" for k, v in rest.items())


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "[" + ", ".join(map(_value, value)) + "]" if isinstance(value, list) else _cell(str(value))


def cost_table(rows: list[dict]) -> list[str]:
    """What replacing an operator does to the log-probabilities, largest first."""
    measured = sorted((row for row in rows if "compared" in row), key=lambda row: -row["mean"])
    lines = ["| replaced | kind | mean | max | K3 | tokens equal |", "|---|---|---|---|---|---|"]
    lines += [f"| {row['measurement']} | {row['kind']} | {row['mean']:.2e} | {row['max']:.3g} | {row['k3']:.1e} "
              f"| {row['equal'] / row['compared']:.1%} |" for row in measured]
    return lines + [f"| {row['measurement']} | did not run: {_cell(row.get('failed') or row['skipped'])} | | | | |"
                    for row in rows if "failed" in row or "skipped" in row]


KINDS: dict[str, Callable[[list[dict]], list[str]]] = {
    "survey": survey_table, "stock": stock_table, "operators": operators_table, "compared": compared_table, "cost": cost_table}


def fill(text: str, results: pathlib.Path = RESULTS) -> str:
    """Every marked table of a document. Raises KeyError for a kind that does not exist."""
    def table(match: re.Match) -> str:
        kind, path = KINDS[match[2]], results / match[3]
        if not path.exists():
            return f"{match[1]}Not measured yet: there is no docs/results/{match[3]}.\n{match[4]}"
        result = json.loads(path.read_text(encoding="utf-8"))
        versions = result["versions"]
        packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "vllm", "transformers") if versions.get(name))
        made = f"{result['hardware']['name']}, {packages}; {result['date'][:10]}; `{result['command']}` → [{path.name}](results/{match[3]})"
        return match[1] + "\n".join([*kind(result["rows"]), "", made]) + "\n" + match[4]

    return MARKED.sub(table, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=(*KINDS, "fill"))
    parser.add_argument("file", type=pathlib.Path, help="a result file, or with fill a document")
    parser.add_argument("--check", action="store_true", help="with fill: change nothing, exit 1 if a table is out of date")
    options = parser.parse_args()
    before = options.file.read_text(encoding="utf-8")
    if options.kind != "fill":
        print("\n".join(KINDS[options.kind](json.loads(before)["rows"])))
        return
    after = fill(before)
    if options.check:
        wrong = f"{options.file} does not show what docs/results/ holds: run python -m bench.gpu.tables fill {options.file}"
        sys.exit(0 if before == after else wrong)
    options.file.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Markdown tables from result files: `python -m bench.gpu.tables survey FILE` or `python -m bench.gpu.tables operators FILE`."""

import argparse
import json
import pathlib


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


def operators_table(rows: list[dict]) -> list[str]:
    """One line for each case: microseconds of the exact call and its percentage of stock, by number of rows."""
    lines, cases = ["| operator | decode: rows, us, % of stock | prefill: rows, us, % of stock |", "|---|---|---|"], {}
    for row in rows:
        cell = f"{row['rows']}: {row['us']['exact']:.1f}" + (f" ({row['percent_of_stock']:.0f} %)" if "percent_of_stock" in row else "")
        cases.setdefault(f"{row['operator']} {row['shape']}", {"decode": [], "prefill": []})[row["phase"]].append(cell)
    return lines + [f"| {name} | {' · '.join(cells['decode']) or '-'} | {' · '.join(cells['prefill']) or '-'} |" for name, cells in cases.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("survey", "operators"))
    parser.add_argument("file", type=pathlib.Path)
    options = parser.parse_args()
    result = json.loads(options.file.read_text())
    print("\n".join((survey_table if options.kind == "survey" else operators_table)(result["rows"])))


if __name__ == "__main__":
    main()

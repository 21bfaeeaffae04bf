"""Fill the tables in README.md from docs/results/: `python -m bench.tables`; with --check, only say whether they are up to date."""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    readme = ROOT / "README.md"
    before = readme.read_text(encoding="utf-8")
    after = fill(before, ROOT / "docs" / "results")
    if options.check:
        sys.exit(0 if before == after else "README.md does not show what docs/results/ holds: run python -m bench.tables")
    readme.write_text(after, encoding="utf-8")


def fill(text: str, results: Path) -> str:
    """Replace what stands between `<!-- results:cpu -->` and `<!-- end -->`."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("cpu-*.json"))]
    faults = results / "faults-cpu.json"
    body = cpu_table(rows) + (fault_line(json.loads(faults.read_text(encoding="utf-8"))) if faults.exists() else "")
    return re.sub(r"(<!-- results:cpu -->\n).*?(<!-- end -->)", lambda match: match[1] + body + match[2], text, flags=re.DOTALL)


def fault_line(result: dict[str, Any]) -> str:
    return (f"\n`localize` named operator, dimension and deviating side of {result['right']} of {result['faults']} injected faults, and called "
            f"{result['silent']} of them equal; {result['date']}; `{result['command']}`.\n")


def cpu_table(results: list[dict[str, Any]]) -> str:
    if not results:
        return "Not measured yet.\n"
    lines = ["| model | stock: unequal tokens | now: mismatches in required conditions | throughput of stock | `agent run` | `agent localize` |",
             "|---|---|---|---|---|---|"]
    for result in results:
        run, verdict = result["run"], result["run"]["verdict"]
        ran = [c for c in verdict["conditions"] if c["ran"]]
        timing = run["throughput"]
        speed = "–" if timing is None else f"{timing['ratio']:.3f} (pairs {timing['spread'][0]:.3f} to {timing['spread'][1]:.3f})"
        lines.append(
            f"| {result['model']} ({result['scale']}) | {run['baseline']['mismatches']}, K3 {run['baseline']['k3']:.2g} | "
            f"{verdict['mismatches']} in {len(ran)} of {len(verdict['conditions'])} ({sum(c['tokens'] for c in ran)} compared) | {speed} | "
            f"{run['seconds']:.0f} s | {result['localize']['seconds']:.0f} s |")
    first = results[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    note = f"{first['hardware']['cpu']}, {first['hardware']['cores']} cores; {versions}; {first['date']}; `{first['command']}`."
    return "\n".join([*lines, "", note]) + "\n"


if __name__ == "__main__":
    main()

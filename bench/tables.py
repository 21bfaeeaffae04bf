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
    """Replace what stands between `<!-- results:cpu -->` or `<!-- results:h200 -->` and `<!-- end -->`."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("cpu-*.json"))]
    faults = results / "faults-cpu.json"
    cpu = cpu_table(rows) + (fault_line(json.loads(faults.read_text(encoding="utf-8"))) if faults.exists() else "")
    for name, body in {"cpu": cpu, "h200": h200_tables(results)}.items():
        text = re.sub(rf"(<!-- results:{name} -->\n).*?(<!-- end -->)", lambda match, body=body: match[1] + body + match[2], text, flags=re.DOTALL)
    return text


def h200_tables(results: Path) -> str:
    """What `bench.gpu.exact` and `bench.rollout` measured on a GPU."""
    exact = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("h200-exact-*.json"))]
    rollouts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("h200-rollout-*.json"))]
    if not exact and not rollouts:
        return "Not measured yet.\n"
    return exact_table(exact) + ("\n" if exact and rollouts else "") + rollout_table(rollouts)


def exact_table(results: list[dict[str, Any]]) -> str:
    if not results:
        return ""
    lines = ["| model | rollout | conditions | mismatches, exact | stock: rollout against packed training | stock: decode against prefill |",
             "|---|---|---|---|---|---|"]
    for result in results:
        settings = result["engines"]["rollout"]["settings"]
        mode = "eager" if settings["eager"] else "CUDA graphs, compile" if settings.get("compile", True) else "CUDA graphs"
        found = result["contracts"]["exact"].values()
        stock = result["contracts"].get("stock", {})
        lines.append(f"| {result['model']} ({result['scale']}) | {mode} | {len(found)} | {sum(c['mismatches'] for c in found)} of "
                     f"{sum(c['tokens'] for c in found)} | {_unequal(stock.get('engine: packed'))} | {_unequal(stock.get('phase: prefill'))} |")
    said = results[0]["engines"]["rollout"]["environment"]
    versions = ", ".join(f"{name} {said[name]}" for name in ("python", "torch", "vllm", "transformers"))
    return "\n".join([*lines, "", f"{results[0]['device']['name']}; {versions}; {results[0]['date']}; `{results[0]['command']}`."]) + "\n"


def _unequal(found: dict[str, Any] | None) -> str:
    return "–" if found is None else f"{found['mismatches']} of {found['tokens']}, max {found['max_abs']:.2g}, K3 {found['k3']:.2g}"


def rollout_table(results: list[dict[str, Any]]) -> str:
    if not results:
        return ""
    lines = ["| model | requests x new tokens, prompt | stock tokens/s | exact tokens/s | of stock (pairs) | step of stock | memory of stock |",
             "|---|---|---|---|---|---|---|"]
    for result in results:
        for point in result["summary"]:
            against = point.get("against_stock", {}).get("exact", {})
            if "ratio" not in against:
                continue
            arms = [point["arms"][arm]["tokens_per_second"] for arm in ("stock", "exact")]
            lines.append(f"| {result['question']['model']} ({result['question']['scale']}) | {point['requests']} x {point['new_tokens']}, "
                         f"{point['prompt_tokens']} | {arms[0]:.0f} | {arms[1]:.0f} | {against['ratio']:.3f} ({against['spread'][0]:.3f} to "
                         f"{against['spread'][1]:.3f}) | {1 / against['decode_ratio']:.3f} | {against.get('memory_ratio', float('nan')):.2f} |")
    return "\n".join([*lines, "", f"{results[0]['question']['device'][0]}; {results[0]['date']}; `{results[0]['command']}`."]) + "\n"


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

import json
import subprocess
import sys
from pathlib import Path

from bench.tables import fill

RESULT = {
    "model": "qwen3", "scale": "tiny", "date": "2026-01-02 03:04 UTC", "command": "python -m bench.cpu", "hardware": {"cpu": "A CPU", "cores": 2},
    "versions": {"torch": "2.13.0"}, "localize": {"seconds": 41.2},
    "run": {
        "seconds": 200.4, "baseline": {"mismatches": 408, "k3": 0.00012}, "throughput": {"ratio": 0.9512, "spread": [0.93, 0.97]},
        "verdict": {"mismatches": 0, "conditions": [{"ran": True, "tokens": 2112}, {"ran": True, "tokens": 100}, {"ran": False, "tokens": 0}]}}}
PAGE = "before\n<!-- results:cpu -->\nold\n<!-- end -->\nafter\n"


def test_every_figure_comes_from_the_file(tmp_path: Path):
    (tmp_path / "cpu-qwen3.json").write_text(json.dumps(RESULT))
    filled = fill(PAGE, tmp_path)
    assert "| qwen3 (tiny) | 408, K3 0.00012 | 0 in 2 of 3 (2212 compared) | 0.951 (pairs 0.930 to 0.970) | 200 s | 41 s |" in filled
    assert "A CPU, 2 cores; torch 2.13.0; 2026-01-02 03:04 UTC; `python -m bench.cpu`." in filled
    assert "old" not in filled and filled.startswith("before\n") and filled.endswith("after\n")
    assert fill(filled, tmp_path) == filled


def test_nothing_measured_is_said_so(tmp_path: Path):
    assert "Not measured yet." in fill(PAGE, tmp_path)


def test_readme_shows_what_the_results_hold():
    subprocess.run([sys.executable, "-m", "bench.tables", "--check"], check=True, cwd=Path(__file__).resolve().parents[2])

"""Tables of DeepSeek-V4's document, and the substitutions whose cost one of them shows."""

import contextlib
import inspect
import json
from pathlib import Path
from unittest import mock

import pytest

from bench.gpu import tables

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "deepseek-v4.md"
RESULT = {"command": "python -m bench.x", "date": "2026-11-29T00:00:00+00:00", "hardware": {"name": "H200"},
          "versions": {"torch": "2.13", "vllm": "0.32", "transformers": None}}


def test_document_shows_what_the_result_files_hold():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert tables.fill(text) == text, "run python -m bench.gpu.tables fill docs/deepseek-v4.md"
    assert {match[2] for match in tables.MARKED.finditer(text)} >= {"stock", "operators", "compared", "cost"}


def test_a_missing_file_is_said_and_a_new_one_fills_the_table(tmp_path):
    text = "before\n<!-- results:cost a/b.json -->\nold\n<!-- end -->\nafter"
    missing = tables.fill(text, tmp_path)
    assert missing == "before\n<!-- results:cost a/b.json -->\nNot measured yet: there is no docs/results/a/b.json.\n<!-- end -->\nafter"
    (tmp_path / "a").mkdir()
    row = {"measurement": "router: fp32", "kind": "contract", "mean": 1e-3, "max": 0.5, "k3": 1e-6, "equal": 1, "compared": 4}
    (tmp_path / "a" / "b.json").write_text(json.dumps(RESULT | {"rows": [row, row | {"measurement": "larger", "mean": 2.0},
                                                                         {"measurement": "broken", "failed": "no | kernel"}]}))
    lines = tables.fill(missing, tmp_path).splitlines()
    assert [line.split(" |")[0] for line in lines[4:7]] == ["| larger", "| router: fp32", "| broken"]
    assert "25.0%" in lines[5] and "no / kernel" in lines[6] and "H200, torch 2.13, vllm 0.32; 2026-11-29" in lines[8]
    assert tables.fill("\n".join(lines), tmp_path) == "\n".join(lines)


def test_stock_table_names_borders_candidates_and_what_did_not_run():
    stock = {"equal": False, "differing": [1, 2], "borders": [[16, 17], [32, 33]], "worst_share": 0.25, "run_to_run": False}
    rows = [
        {"operator": "linear", "shape": "a", "stock": stock, "exact": {"equal": True}, "error": {"stock": 0.01}, "restart_equal": True,
         "classes": {"x": ["default", "same"], "y": ["other"], "ImportError: z": ["gone"]}, "phases": {"decode": {"equal": 1, "of": 4}}},
        {"operator": "linear", "shape": "b", "failed": "stopped | late"},
        {"operator": "linear", "shape": "c", "stock": {"unavailable": "ImportError: no"}, "error": {}, "classes": {}}]
    lines = tables.stock_table(rows)
    assert lines[2] == "| linear a | from run to run | 25.0% | differ, equal | decode 25.0% | default = same / other | 1.0e-02 | all |"
    still = tables.stock_table([rows[0] | {"stock": stock | {"run_to_run": True}}])
    assert still[2].startswith("| linear a | 16/17, 32/33 | 25.0% | equal, equal |")
    assert lines[3].startswith("| linear b | did not run: stopped / late |") and "ImportError: no" in lines[4]
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_operators_table_without_an_exact_implementation():
    rows = [{"operator": "o", "shape": "s", "phase": "decode", "rows": 8, "us": {"stock": 2.0}},
            {"operator": "o", "shape": "s", "phase": "prefill", "rows": 9, "error": "x"}]
    assert tables.operators_table(rows)[2] == "| o s | 8: 2.0 stock | 9: did not run |"


@pytest.mark.engine
def test_every_substitution_replaces_something_that_the_engine_calls_with_these_arguments():
    """Each target exists, and its replacement accepts the real one's parameters. Kernel libraries that need a GPU are left out."""
    pytest.importorskip("vllm")
    pytest.importorskip("triton")
    from bench.gpu import deepseek_v4_candidates
    from bench.gpu import deepseek_v4_cost as cost

    seen = []

    def record(path, replacement):
        seen.append((path, replacement))
        return mock.patch(path, replacement)

    with mock.patch.object(cost, "_patch", record):
        for name, (_, kind, substitution) in cost.SUBSTITUTIONS.items():
            assert kind in ("route", "contract")
            if name.startswith("hyper-connections:") and "of K" in name:
                continue
            with substitution():
                pass
    with mock.patch.object(cost, "_patch", record), mock.patch.object(deepseek_v4_candidates, "_patch", record), \
            mock.patch.object(deepseek_v4_candidates.hyper_connection, "launches", lambda splits: contextlib.nullcontext()), \
            deepseek_v4_candidates.candidates():
        pass
    assert len({path for path, _ in seen}) > 15
    for path, replacement in seen:
        real = inspect.signature(_resolve(path))
        if any(p.kind == p.VAR_POSITIONAL for p in real.parameters.values()):
            continue
        keywords = [p for p in real.parameters.values() if p.kind == p.KEYWORD_ONLY]
        by_position = [p.name for p in real.parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
        try:
            inspect.signature(replacement).bind(*by_position, **{p.name: p.name for p in keywords})
        except TypeError:
            inspect.signature(replacement).bind(**{name: name for name in (*by_position, *(p.name for p in keywords))})


def _resolve(path: str):
    import pkgutil

    return pkgutil.resolve_name(path)

"""The benchmark of whole rollouts and the quick comparison, on real engines at scale tiny; their arithmetic on made-up runs."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.checkpoint import seeded
from bench import rollout
from bench.rollout import Bench
from consistency.engines.measuring import group_of, summarize

ROOT = Path(__file__).resolve().parents[2]


def options(tmp_path, **changed):
    return argparse.Namespace(**{
        "model": "qwen3", "scale": "tiny", "checkpoint": seeded("qwen3", "tiny"), "contract": None, "arms": ["stock", "exact"], "requests": [4],
        "context": 16, "new_tokens": 8, "pairs": 2, "rounds": 1, "by_process": False, "set": [], "profile": False, "time_limit": 600.0,
        "out": tmp_path / "out.json", **changed})


def timed(arm, seconds, turn=1, **more):
    return {"arm": arm, "turn": turn, "point": {"requests": 4, "prompt_tokens": 16, "new_tokens": 8}, "tokens": 32, "seconds": seconds,
            "prefill_seconds": 0.1, "decode_ms": seconds * 100, "steps": 9, "preemptions": 0, "blocks": 10, **more}


def test_ratios_come_from_neighbouring_runs(tmp_path):
    bench = Bench(options(tmp_path))
    pairs = ((1.0, 2.0), (4.0, 4.0), (1.0, 0.5))
    bench.result["runs"] = [timed(arm, seconds) for pair in pairs for arm, seconds in zip(("stock", "exact"), pair, strict=True)]
    memory = {"peak_allocated_gib": 30.0, "pool_gib": 20.0, "block_mib": 1024.0}
    bench.result["arms"] = {"stock": {"memory": memory, "engine": {"graphs": True, "block_size": 16}},
                            "exact": {"memory": memory | {"block_mib": 2048.0}, "engine": {"graphs": False, "block_size": 16}}}
    bench._write()
    said = json.loads((tmp_path / "out.json").read_text())
    point = said["summary"][0]
    assert point["against_stock"]["exact"] == {"pairs": 3, "objections": [], "ratio": 1.0, "spread": [0.5, 2.0], "decode_ratio": 1.0,
                                               "memory_ratio": 1.5}
    assert point["arms"]["stock"]["tokens_per_second"] == 32.0 and point["arms"]["stock"]["needed_gib"] == 20.0
    assert "graphs: True -> False" in said["configurations_differ"]["exact"][0]
    assert "| 4 x 8, 16 | exact | 16 | 200.00 ms | 0.10 s | 1.000 (0.500 to 2.000) | 1.50 |" in bench.table()


def test_the_same_question_goes_on_and_another_does_not(tmp_path):
    bench = Bench(options(tmp_path))
    bench.result["runs"] = [timed("stock", 1.0), timed("stock", 1.0), timed("exact", 1.0)]
    bench._write()
    again = Bench(options(tmp_path))
    assert [again._missing(arm, again.points[0], 1) for arm in ("stock", "exact")] == [0, 1]
    assert again._missing("stock", again.points[0], 2) == 2
    assert Bench(options(tmp_path, new_tokens=9)).result["runs"] == []


def test_a_start_that_the_time_does_not_suffice_for_is_left_out(tmp_path, capsys):
    assert Bench(options(tmp_path, time_limit=5.0)).run() == 1
    assert "the start of stock takes about 20 s; the same command goes on" in json.loads((tmp_path / "out.json").read_text())["stopped"]
    assert "stopped: " in capsys.readouterr().err


def test_bad_input_is_one_line():
    done = subprocess.run([sys.executable, "-m", "bench.rollout", "--model", "qwen3", "--scale", "full"], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=False)
    assert done.returncode == 2 and done.stderr == ("bench.rollout: scale full of qwen3 needs a GPU and this machine shows none; "
                                                    "scale tiny runs on a CPU\n")


@pytest.mark.parametrize(("kernel", "group"), [
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "linear"), ("_row_kernel", "mamba2_scan"), ("_append_kernel", "mamba2_scan"),
    ("fused_moe_kernel", "moe_experts"), ("_selective_scan_update_kernel", "mamba2_scan"), ("flash_fwd_kernel_sm90", "attention"),
    ("_rms_norm_kernel", "rms_norm"), ("_gated_rms_norm_kernel", "gated_rms_norm"), ("triton_poi_fused_add_3", "fused by Inductor"),
    ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"), ("_topk_log_softmax_kernel", "log_softmax and sampling"),
    ("void vllm::moe::single_group_topk_warp_kernel", "router"), ("made_up", "other")])
def test_groups_of_kernels(kernel, group):
    assert group_of(kernel) == group


def test_a_profile_adds_up():
    said = summarize({"_row_kernel": (30.0, 2.0), "_append_kernel": (10.0, 2.0), "nvjet_x": (60.0, 5.0)}, 150.0, top=2)
    assert said["device_us"] == 100.0 and said["wall_us"] == 150.0
    assert said["groups"] == {"linear": 60.0, "mamba2_scan": 40.0}
    assert [k["name"] for k in said["kernels"]] == ["nvjet_x", "_row_kernel"]


@pytest.mark.engine
def test_real_rollouts(tmp_path):
    """Both arms in turns, with a profile; no figure is made up, and nothing but the contract differs."""
    assert Bench(options(tmp_path, pairs=1, profile=True)).run() == 0
    said = json.loads((tmp_path / "out.json").read_text())
    assert said["stopped"] is None and len(said["runs"]) == 2 and {run["tokens"] for run in said["runs"]} == {32}
    assert 0.2 < said["summary"][0]["against_stock"]["exact"]["ratio"] < 5
    assert said["configurations_differ"] == {"exact": []}
    assert all(entry["memory"]["blocks"] > 0 and len(entry["starts"]) == 1 for entry in said["arms"].values())
    for found in said["profiles"]:
        assert 0 < found["groups"]["linear"] < found["device_us"] and found["groups"]["attention"] > 0


@pytest.mark.engine
def test_real_comparison(tmp_path):
    """One operator left at stock: training differs from the rollout, and the trace says at which site."""
    out = tmp_path / "exact.json"
    command = [sys.executable, "-m", "bench.gpu.exact", "--model", "qwen3", "--scale", "tiny", "--requests", "6", "--new-tokens", "8", "--contract",
               "without:rotary", "--also", "exact", "--prompts", "1", "40", "--time-limit", "200", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    said = json.loads(out.read_text())
    assert said["failures"] == [] and done.returncode == 1, done.stdout
    stock, exact = said["contracts"]["without:rotary"], said["contracts"]["exact"]
    assert stock["engine: packed"]["mismatches"] > 0 and stock["phase: prefill"]["mismatches"] == 0
    assert all(c["mismatches"] == 0 and c["tokens"] > 0 for c in exact.values())
    assert said["traces"]["without:rotary"]["engine"]["first"] == "000.rotary"
    assert all(moved["moved"] > 0 for moved in next(s["said"] for s in said["stages"] if s["stage"] == "controls").values())


def test_arms_and_contracts(tmp_path):
    bench = Bench(options(tmp_path))
    assert bench.contracts["stock"].rollout == {} and bench.contracts["exact"].rollout["attention"] == "exact"
    assert rollout.MEANT_TO_DIFFER == ("plugin", "contract", "kernels")

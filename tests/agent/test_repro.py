import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import UserError
from agent.tools.divergence import Divergence
from agent.tools.repro import ReproRequest, check_repros, make_repro
from consistency.contract import Contract
from consistency.repro.build import build
from consistency.repro.case import Case, Execution
from consistency.repro.compare import Functions, differs
from consistency.repro.run import run
from consistency.repro.shrink import ddmin, shrink

KERNEL = '''
import torch


def rounded_once(x, weight, eps, residual=None, **_):
    total = x.float()
    return (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype), None


def from_eight_rows(x, weight, eps, residual=None, **_):
    y, _ = rounded_once(x, weight, eps)
    return (y if x.shape[0] < 8 else y + y), None
'''
LENGTHS = [5, 9, 2, 12]


@pytest.fixture
def kernels(tmp_path):
    folder = tmp_path / "candidate"
    folder.mkdir()
    (folder / "norm.py").write_text(KERNEL)
    return folder


def norm_case(kernels, left, right, schedules=None):
    """RMSNorm of 28 rows of 64 columns, run by two implementations on the training side, with the rows each of them gives as traced."""
    torch.manual_seed(0)
    together = [[(i, 0, n) for i, n in enumerate(LENGTHS)]]
    steps = schedules or (together, together)
    executions = [Execution("training", f"side {i}", name, steps[i], "packed") for i, name in enumerate((left, right))]
    case = Case("qwen3", "rms_norm", "000.input_norm", 0, LENGTHS, {"x": []}, {"eps": 1e-6}, executions,
                {"input/x": torch.randn(28, 64).bfloat16(), "parameter/weight": torch.rand(64).bfloat16()})
    functions = Functions(kernels)
    for side in (0, 1):
        case.tensors[f"output@{side}"] = run(case, side, functions.of(case, side))
    return case


def divergence(evidence, **changes):
    return Divergence(**{
        "dimension": "engine", "operator": "rms_norm", "layer": 0, "site": "000.input_norm", "sides": ["side 0", "side 1"], "cause": "extra rounding",
        "cause_detail": "", "elements": 1792, "differing": 9, "max_abs": 0.01, "max_ulps": 1, "confirmed": True, "substituted_with": "exact",
        "next_site": None, "evidence": str(evidence), **changes})


def test_a_repro_runs_alone_exits_1_and_turns_to_0_under_a_contract_that_fixes_it(tmp_path, kernels):
    norm_case(kernels, "exact", "kernels:norm.rounded_once").write(tmp_path / "case")
    made = make_repro(ReproRequest(divergence=divergence(tmp_path / "case"), directory=tmp_path / "repro", kernels=kernels))
    assert (made.reproduced, made.exit_code, made.reason) == (True, 1, "")
    assert made.size["rows"] == 1 and made.size["elements"] <= 2 * 32
    assert {p.name for p in made.directory.iterdir()} == {"repro.py", "repro.json", "inputs.safetensors", "expected.txt", "kernels"}

    def plain(*arguments):
        return subprocess.run([sys.executable, "repro.py", *map(str, arguments)], cwd=made.directory, capture_output=True, text=True, check=False)

    first, second = plain(), plain()
    assert (first.returncode, first.stdout.splitlines()[-1]) == (1, made.expected_line)
    assert second.stdout == first.stdout
    fixed = tmp_path / "contract.toml"
    fixed.write_text(Contract(training={"rms_norm": "exact"}).dumps())
    assert plain("--contract", fixed).returncode == 0
    assert "elements equal" in plain("--contract", fixed).stdout
    fixed.write_text(Contract(training={"rms_norm": "no such"}).dumps())
    broken = plain("--contract", fixed)
    assert broken.returncode == 2 and "no such" in broken.stderr and "Traceback" not in broken.stderr


def test_candidate_kernels_take_effect_under_a_contract(tmp_path, kernels):
    norm_case(kernels, "exact", "kernels:norm.rounded_once").write(tmp_path / "case")
    build(tmp_path / "case", tmp_path / "repro", kernels)
    candidate = Contract(training={"rms_norm": "kernels:mine.norm"})
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.py").write_text("from consistency.operators.rms_norm import exact_training as norm\n")
    assert check_repros([tmp_path / "repro"] * 2, candidate, other)[1][0] == 0
    (other / "mine.py").write_text("def norm(x, weight, eps, residual=None, **_):\n    raise RuntimeError('no such shape')\n")
    assert check_repros([tmp_path / "repro"], candidate, other)[0][0] == 2


def test_a_fault_of_the_batch_is_cut_down_to_the_rows_it_needs(tmp_path, kernels):
    alone = [[(i, p, p + 1)] for i, n in enumerate(LENGTHS) for p in range(n)]
    together = [[(i, 0, n) for i, n in enumerate(LENGTHS)]]
    name = "kernels:norm.from_eight_rows"
    case = norm_case(kernels, name, name, (alone, together))
    functions = Functions(kernels)
    assert differs(case, functions)
    small = shrink(case, lambda c: differs(c, functions))
    assert sum(small.lengths) == 8
    assert differs(small, functions)
    assert len(small.executions[1].steps) == 1


def test_traced_rows_that_the_operator_alone_does_not_give_are_said_to_be_not_reproduced(tmp_path, kernels):
    case = norm_case(kernels, "exact", "kernels:norm.rounded_once")
    case.tensors["output@1"] = case.tensors["output@1"] + 1
    case.write(tmp_path / "case")
    made = make_repro(ReproRequest(divergence=divergence(tmp_path / "case"), directory=tmp_path / "repro", kernels=kernels, check=False))
    assert not made.reproduced and "does not give the traced rows" in made.reason and made.reason.startswith("side 1")


def test_sides_that_do_not_differ_alone_are_said_to_be_not_reproduced(tmp_path, kernels):
    norm_case(kernels, "exact", "exact").write(tmp_path / "case")
    made = make_repro(ReproRequest(divergence=divergence(tmp_path / "case"), directory=tmp_path / "repro", check=False))
    assert (made.reproduced, made.exit_code) == (False, 0)


def test_a_divergence_without_evidence_gets_a_folder_that_says_why(tmp_path):
    made = make_repro(ReproRequest(divergence=divergence("", site="logprob", cause_detail="an index is off by one"), directory=tmp_path / "repro"))
    assert (made.reproduced, made.exit_code) == (False, 2)
    done = subprocess.run([sys.executable, "repro.py"], cwd=made.directory, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "an index is off by one" in done.stdout


def test_a_used_folder_and_lost_evidence_are_refused(tmp_path):
    with pytest.raises(UserError, match="exists"):
        make_repro(ReproRequest(divergence=divergence(tmp_path), directory=tmp_path))
    with pytest.raises(UserError, match="run localize again"):
        make_repro(ReproRequest(divergence=divergence(tmp_path / "gone"), directory=tmp_path / "repro"))


def test_a_finished_folder_names_no_place_of_the_machine_it_was_made_on(tmp_path, kernels):
    norm_case(kernels, "exact", "kernels:norm.rounded_once").write(tmp_path / "case")
    build(tmp_path / "case", tmp_path / "repro", kernels)
    text = "".join((tmp_path / "repro" / name).read_text() for name in ("repro.py", "repro.json", "expected.txt"))
    assert str(tmp_path) not in text and str(Path.cwd()) not in text
    assert json.loads((tmp_path / "repro" / "repro.json").read_text())["whole"]["rows"] == 28


@given(st.sets(st.integers(0, 30), min_size=1, max_size=5), st.integers(31, 40))
def test_ddmin_keeps_what_is_needed_and_nothing_else(needed, count):
    assert set(ddmin(range(count), lambda kept: needed <= set(kept))) == needed


@given(st.integers(1, 12), st.integers(12, 30))
def test_ddmin_finds_the_least_number_where_only_the_number_counts(least, count):
    assert len(ddmin(range(count), lambda kept: len(kept) >= least)) == least


def test_a_case_survives_the_disk(tmp_path, kernels):
    case = norm_case(kernels, "exact", "exact")
    case.write(tmp_path / "case")
    again = Case.read(tmp_path / "case")
    assert again.described() == case.described()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in case.tensors.items())


def test_rows_of_requests_are_renumbered_when_some_are_left_out(kernels):
    case = norm_case(kernels, "exact", "exact")
    part = case.subset([3, 1])
    assert part.lengths == [9, 12] and part.executions[0].steps == [[(0, 0, 9), (1, 0, 12)]]
    assert torch.equal(part.tensors["input/x"], torch.cat((case.tensors["input/x"][5:14], case.tensors["input/x"][16:])))
    assert replace(part, lengths=LENGTHS).described().keys() == case.described().keys()

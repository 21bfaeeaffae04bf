"""With real engines: a fault that the playbook cannot remove, and a model behind a real SDK that writes the kernel which does."""

import ast
import dataclasses
import json
import re

import pytest
from fake_server import Chat, FakeServer
from runs import trajectory
from typer.testing import CliRunner

from agent import models
from agent.cli import app
from agent.config import Config
from agent.state import load_current
from agent.workspace import Workspace
from consistency.conditions import MATRICES, Accuracy, Timing
from consistency.contract import Contract
from consistency.operators import catalog
from tests.faults.table import FAULTS, KERNELS

FAULT = next(fault for fault in FAULTS if fault.name == "silu kept in fp32")
FILE, _, FUNCTION = FAULT.kernel.partition(".")
KERNEL = '''"""One contract for both sides: silu in fp32, rounded to the input's dtype, then multiplied."""

import torch


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    wide = gate.float()
    return (wide * torch.sigmoid(wide)).to(x.dtype) * up
'''


def faulty() -> str:
    """The fault's function alone, as a kernel file."""
    text = (KERNELS / f"{FILE}.py").read_text()
    function = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION)
    return f"import torch.nn.functional as F\n\n\n{ast.get_source_segment(text, function)}\n"


@pytest.fixture
def uncovered(monkeypatch):
    """A catalogue without an exact implementation of the operator, and matrices of a few conditions, which are enough to see what is kept and why."""
    rows = tuple(row for row in catalog.IMPLEMENTATIONS if not (row.operator == FAULT.operator and row.exact))
    monkeypatch.setattr(catalog, "IMPLEMENTATIONS", rows)
    monkeypatch.setattr(models, "gpu_present", lambda: False)
    quick, full = MATRICES["tiny", "quick"], MATRICES["tiny", "full"]
    few = tuple(c for c in quick.conditions if c.name in ("alone against a batch of 17", "decode against prefill", "rollout against the loss"))
    again = tuple(c for c in full.conditions if c.name == "new process")
    assert full.accuracy and len(few) == 3 and len(again) == 1
    measured = {"select": "first", "count": 6, "tokens": 16}
    accuracy = Accuracy(*(dataclasses.replace(probe, **measured) if probe.step != "generate" else probe
                          for probe in (full.accuracy.reference, full.accuracy.stock, full.accuracy.candidate)))
    monkeypatch.setitem(MATRICES, ("tiny", "quick"), dataclasses.replace(quick, conditions=few))
    monkeypatch.setitem(MATRICES, ("tiny", "full"), dataclasses.replace(
        quick, conditions=few + again, accuracy=accuracy, timing=Timing(pairs=1, requests=8, prompt_tokens=16, new_tokens=16)))


@pytest.mark.engine
def test_a_model_writes_the_kernel_that_the_catalogue_lacks(tmp_path, monkeypatch, uncovered):
    workspace = Workspace.create(tmp_path / "ws", Config(model=FAULT.family, scale="tiny"))
    (workspace.path / "kernels" / "fault.py").write_text(faulty())
    contract = Contract()
    for operator in models.FAMILIES[FAULT.family].operators:
        contract = contract if operator == FAULT.operator else contract.with_(operator, "exact")
    (workspace.path / "contract.toml").write_text(contract.with_(FAULT.operator, f"kernels:fault.{FUNCTION}", FAULT.side).dumps())
    workspace.commit(workspace.path, "A contract with a fault")

    def look(body):
        return Chat.answer(Chat.call("a", "read", {"root": "operators", "path": "operators/activations.py"}),
                           Chat.call("b", "read", {"root": "workspace", "path": "kernels/fault.py"}))

    def patch(body):
        told = json.dumps(body["messages"])
        keys = list(dict.fromkeys(re.findall(rf"- (\w+:[\w.]+): {FAULT.operator},", told)))
        return Chat.answer(Chat.call("c", "patch_kernel", {
            "why": "one place of rounding on both sides", "addresses": keys,
            "bindings": [{"operator": FAULT.operator, "implementation": "kernels:one_silu.silu_and_mul", "side": "both"}],
            "files": [{"path": "kernels/one_silu.py", "text": KERNEL}]}))

    with FakeServer(look, patch) as server:
        ran = CliRunner().invoke(app, ["run", "--workspace", str(workspace.path), "--policy", f"hybrid:chat:m@{server.url}/v1", "--price", "0,0",
                                       "--target-throughput", "0.3", "--json"])
        assert ran.exit_code == 0, ran.output
        sent = server.bodies
    state = load_current(workspace)
    print(*state.steps, sep="\n")
    assert state.outcome == "exact" and state.final and not state.final.verdict.mismatches and state.verify.verdict.mismatches == 0
    assert state.baseline.verdict.mismatches > 0 and [d.operator for d in state.first_localize.divergences] == [FAULT.operator]
    (attempt,) = state.attempts
    assert (attempt.outcome, attempt.title) == ("kept", "silu_and_mul=kernels:one_silu.silu_and_mul") and [c.after for c in attempt.repros] == [0]
    assert (workspace.path / "kernels" / "one_silu.py").read_text() == KERNEL
    opening = sent[0]["messages"][1]["content"]
    assert "The playbook stopped here: the catalogue has nothing left to try for silu_and_mul" in opening and "exit code" not in opening
    assert "def silu_kept_wide" in json.dumps(sent[1]["messages"]), "it read the faulty kernel"
    assert trajectory(workspace, state.run).steps == 2

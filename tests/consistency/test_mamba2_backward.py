"""The scan's backward kernels in Triton's interpreter, on fp32 tensors: the formulas against autograd in fp64, short last chunks included."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import json, torch
torch.set_num_threads(1)
from consistency.operators.cuda import mamba2_scan as scan
from consistency.operators.cuda.mamba2_backward import scan_gradients

scan.LOG2E = float(scan.LOG2E.value)  # the interpreter cannot multiply a global constexpr
draw, heads, groups, p, n, lengths = torch.Generator().manual_seed(0), 2, 1, 16, 16, [5, 140]
tokens = sum(lengths)

def normal(*shape, scale=1.0):
    return torch.randn(*shape, generator=draw) * scale

x, dt, B, C, grad = normal(tokens, heads, p), normal(tokens, heads), normal(tokens, groups, n), normal(tokens, groups, n), normal(tokens, heads, p)
A, D, bias = -(1 + 15 * torch.rand(heads, generator=draw)), normal(heads), normal(heads) - 4
table = scan.ChunkTable.build(lengths, "cpu")
count = len(table.starts)
step, entering, cb = torch.zeros(count, heads, 128), torch.zeros(count, heads, p, n), torch.zeros(count, groups, 128, 128)
state = torch.zeros(heads, p, n)
for i, (a, rows) in enumerate(zip(table.starts.tolist(), table.lengths.tolist())):
    if i in table.sequences.tolist():
        state = torch.zeros(heads, p, n)
    b, c = B[a:a + rows].repeat_interleave(heads // groups, 1), C[a:a + rows]
    step[i, :, :rows] = torch.nn.functional.softplus(dt[a:a + rows] + bias).t()
    cs = (step[i] * A[:, None]).cumsum(-1)
    entering[i], cb[i, :, :rows, :rows] = state, torch.einsum("mgn,kgn->gmk", c, B[a:a + rows])
    decay = ((cs[:, -1:] - cs).exp() * step[i])[:, :rows]
    state = cs[:, -1].exp()[:, None, None] * state + torch.einsum("khp,khn,hk->hpn", x[a:a + rows], b, decay)
chunks = scan.Chunks(step, (step * A[:, None]).cumsum(-1), entering, None, cb)
got = scan_gradients(grad, x, dt, A, B, C, D, bias, table, chunks)
leaves = [t.double().requires_grad_() for t in (x, dt, A, B, C, D, bias)]
y = scan.mamba2_scan_reference(*leaves, table.starts, table.lengths, table.sequences)
want = torch.autograd.grad(y, leaves, grad.double())
print("ERRORS" + json.dumps({k: float((a - b).norm() / b.norm()) for k, a, b in zip(("x", "dt", "A", "B", "C", "D", "dt_bias"), got, want)}))
"""


def test_gradients_of_the_scan_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout.partition("ERRORS")[2])
    assert len(errors) == 7 and max(errors.values()) < 2e-4, errors

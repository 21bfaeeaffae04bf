"""The contract of every CUDA operator at its true shapes: bits over row counts, settings, phases and runs; accuracy; gradients."""

import functools

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device: kernels, and bits that depend on the hardware", allow_module_level=True)

from bench.gpu.measure import draw, load_cases  # noqa: E402
from bench.survey import bit_classes, sweep  # noqa: E402
from consistency.operators.cuda.case import relative_error  # noqa: E402

pytestmark = pytest.mark.gpu
CASES = [case for case in load_cases() if "deepseek-v4" not in case.families]
"""DeepSeek-V4 is surveyed, not under contract."""
every_case = pytest.mark.parametrize("case", CASES, ids=[c.name for c in CASES])
SWEEP_ROWS = 513
"""Crosses every border of the sweep but the last, at half the memory."""


@functools.lru_cache(maxsize=1)
def _inputs(case_index: int, rows: int):
    return draw(CASES[case_index], rows)


def _drawn(case):
    rows = min(SWEEP_ROWS, case.most_rows)
    return _inputs(CASES.index(case), rows), rows


def _needs(function, *args):
    try:
        return function(*args)
    except ImportError as error:
        pytest.skip(f"needs the rollout engine: {error}")


@every_case
def test_row_does_not_depend_on_batch(case):
    inputs, rows = _drawn(case)
    found = _needs(sweep, case, case.exact, inputs, rows)
    assert found["equal"], f"rows differ at {found['differing']}"
    assert found["run_to_run"]


@every_case
def test_launch_settings_do_not_change_bits(case):
    if not case.configurations:
        pytest.skip("one launch setting")
    inputs, rows = _drawn(case)
    assert len(bit_classes(case, inputs, min(200, rows))) == 1


@every_case
def test_phases_are_equal(case):
    if not case.phases:
        pytest.skip("one phase")
    for name, (equal, total) in _needs(case.phases).items():
        if name != "engine scan with its own cumulative sum":
            assert equal == total, f"{name}: {total - equal} of {total} elements differ"


@every_case
def test_error_is_within_twice_stock(case):
    inputs, rows = _drawn(case)
    arguments = inputs.take(min(64, rows))
    reference = case.reference(*arguments)
    error = relative_error(_needs(case.exact, *arguments), reference)
    try:
        limit = 2 * relative_error(case.stock(*arguments), reference) if case.stock else 6e-3
    except (ImportError, AttributeError):
        limit = 6e-3
    assert error <= max(limit, 1e-6), f"error {error:.2e}, limit {limit:.2e}"


@every_case
def test_gradients(case):
    """Within a bf16 rounding of fp64; `check_gradients` also runs twice and compares bits."""
    if not case.gradients:
        pytest.skip("no gradient of its own")
    errors = _needs(case.gradients)
    assert max(errors.values()) < 8e-3, errors


def test_sweep_reports_a_row_that_depends_on_the_batch():
    """The instrument itself: an implementation whose bits move with M must be caught."""
    case = next(c for c in CASES if c.operator == "rms_norm")
    inputs, rows = _drawn(case)

    def leaky(*args):
        out = case.exact(*args)
        return out if out.shape[0] != 33 else torch.nextafter(out.float(), torch.full_like(out, 9, dtype=torch.float32)).to(out.dtype) + 1

    assert sweep(case, leaky, inputs, rows)["differing"] == [33]


def test_mamba_decode_in_a_graph_folds_and_goes_on():
    """One captured step replayed across two chunk borders gives the rows of the scan: lengths live on the device."""
    from consistency.operators.cuda import mamba2_cases as m

    generator = torch.Generator("cuda").manual_seed(3)
    A, D, dt_bias = m.parameters(generator)
    tokens = m.draw_tokens(270, generator)
    x, dt, B, C = tokens
    expected, state, _ = m.scan_with_state(x, dt, A, B, C, D, dt_bias, m.ChunkTable.build([270], "cuda"))
    cache = m.Mamba2Cache.allocate(3, m.HEADS, m.GROUPS, m.P, m.N, "cuda")
    static = [t[:1].clone() for t in tokens]
    reached, slot = torch.ones(1, dtype=torch.int64, device="cuda"), torch.full((1,), 2, dtype=torch.int64, device="cuda")

    def step():
        return m.mamba2_decode(static[0], static[1], A, static[2], static[3], D, dt_bias, reached, slot, *cache.tensors(), 0)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    rows = []
    for t in range(270):
        for target, source in zip(static, tokens, strict=True):
            target.copy_(source[t : t + 1])
        reached.fill_(t + 1)
        graph.replay()
        rows.append(y.clone())
    assert torch.equal(torch.cat(rows), expected)
    assert torch.equal(cache.state(slot), state)


def test_router_tie_goes_to_the_smaller_expert():
    from consistency.operators.cuda.router import router

    x = torch.ones(5, 2688, dtype=torch.bfloat16, device="cuda")
    gate = torch.zeros(128, 2688, dtype=torch.bfloat16, device="cuda")
    weights, ids = router(x, gate, torch.zeros(128, device="cuda"), 6, 1.0)
    assert ids.tolist() == [list(range(6))] * 5
    assert torch.equal(weights, weights[:1, :1].expand_as(weights))


@pytest.mark.parametrize("rows", [1, 8, 33, 64, 300])
def test_linear_algorithms_use_no_split_of_k(rows):
    from consistency.operators.cuda.linear import _split_k, plan_for

    x, weight = torch.empty(rows, 6144, dtype=torch.bfloat16, device="cuda"), torch.empty(2048, 6144, dtype=torch.bfloat16, device="cuda")
    algorithms = plan_for(x, weight, torch.bfloat16).algorithms
    assert algorithms and all(_split_k(a) <= 1 and a.workspace == 0 for a in algorithms)


def test_split_of_k_changes_bits():
    """The control: were a split of K harmless, the constraint on cuBLASLt would be idle."""
    from consistency.operators.cuda.linear import linear

    generator = torch.Generator("cuda").manual_seed(2)
    x, weight = (torch.randn(64, 6144, generator=generator, device="cuda").bfloat16() for _ in range(2))
    halves = torch.stack([linear(x[:, part].contiguous(), weight[:, part].contiguous(), True) for part in (slice(0, 3072), slice(3072, None))])
    assert not torch.equal(halves.sum(0), linear(x, weight, True))


def test_linear_under_compile_and_autograd():
    from consistency.operators.cuda.linear import linear

    generator = torch.Generator("cuda").manual_seed(2)
    x, weight = (torch.randn(40, 256, generator=generator, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    eager, compiled = linear(x, weight), torch.compile(linear, fullgraph=True)(x, weight)
    assert torch.equal(eager, compiled)
    for a, b in zip(torch.autograd.grad(eager.sum(), (x, weight)), torch.autograd.grad(compiled.sum(), (x, weight)), strict=True):
        assert torch.equal(a, b)

"""Each exact operator: equal rows for every number of rows, equal in every phase and layout, as accurate as stock, right gradients."""

import pytest
import torch

from consistency.layout import Layout
from consistency.operators import activations, attention, causal_conv1d, gated_rms_norm, linear, log_softmax, mamba2_scan, rms_norm, rotary

COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
"""numbers of rows that cross every blocking border met so far"""


def seeded(*shape, dtype=torch.bfloat16, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


W128, W384 = seeded(128, scale=0.2) + 1, seeded(256, 128, scale=0.1)
ROW_OPERATORS = {
    "rms_norm": (lambda x: rms_norm.exact_rollout(x, W128, 1e-6)[0], 128, torch.bfloat16),
    "rms_norm_residual": (lambda x: torch.cat(rms_norm.exact_rollout(x, W128, 1e-6, x.flip(-1)), -1), 128, torch.bfloat16),
    "linear_bf16": (lambda x: linear.exact_rollout(x, W384), 128, torch.bfloat16),
    "linear_fp32": (lambda x: linear.exact_rollout(x, W384.float()), 128, torch.float32),
    "silu_and_mul": (activations.exact_rollout_silu_and_mul, 256, torch.bfloat16),
    "relu_squared": (activations.exact_rollout_relu_squared, 256, torch.bfloat16),
    "gated_rms_norm": (lambda x: gated_rms_norm.exact_rollout(x, x.flip(-1), W128, 1e-5, 2), 128, torch.bfloat16),
    "log_softmax": (log_softmax.exact_rollout, 4096, torch.bfloat16),
    "rotary": (lambda x: torch.cat([t.flatten(1) for t in rotary.exact_rollout(
        torch.arange(len(x)), x.view(-1, 4, 32), x.view(-1, 4, 32), theta=1e4, max_positions=512)], -1), 128, torch.bfloat16),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ROW_OPERATORS)
def test_rows_do_not_depend_on_the_number_of_rows(name, threads):
    operator, width, dtype = ROW_OPERATORS[name]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = seeded(300, width, dtype=dtype, scale=2.0)
        whole = operator(x)
        for count in COUNTS:
            assert torch.equal(operator(x[:count].clone()), whole[:count]), f"{count} rows"
    finally:
        torch.set_num_threads(before)


def test_fp32_gemm_without_tiles_does_depend_on_the_number_of_rows():
    """The reason for the tiles; if this fails, they can go."""
    x, weight = seeded(64, 128, dtype=torch.float32), W384.float()
    assert not torch.equal(torch.nn.functional.linear(x[:1], weight), torch.nn.functional.linear(x, weight)[:1])


LENGTHS = [1, 15, 16, 17, 31, 32, 33, 64, 129, 200]


def scan_inputs(rows, dtype=torch.bfloat16):
    heads, dim, groups, size = 8, 32, 2, 16
    return (seeded(rows, heads, dim, dtype=dtype), seeded(rows, heads, dtype=dtype), -seeded(heads, dtype=torch.float32).abs() - 0.5,
            seeded(rows, groups, size, dtype=dtype), seeded(rows, groups, size, dtype=dtype).flip(0), seeded(heads, dtype=dtype),
            seeded(heads, dtype=dtype) - 2)


@pytest.mark.parametrize("cut", [1, 7, 16, 31, 32, 33, 100])
def test_scan_span_by_span_equals_one_span(cut):
    x, dt, A, B, C, D, bias = scan_inputs(130)
    whole, state = mamba2_scan.sequence_recurrent(x, dt, A, B, C, D, bias, None)
    parts, carried = [], None
    for i in range(0, 130, cut):
        y, carried = mamba2_scan.sequence_recurrent(x[i:i + cut], dt[i:i + cut], A, B[i:i + cut], C[i:i + cut], D, bias, carried)
        parts.append(y)
    assert torch.equal(torch.cat(parts), whole) and torch.equal(carried, state)


def test_scan_equals_vllms_decode_kernel_token_by_token():
    x, dt, A, B, C, D, bias = scan_inputs(60)
    whole, _ = mamba2_scan.sequence_recurrent(x, dt, A, B, C, D, bias, None)
    states, slots = torch.zeros(5, 8, 32, 16), torch.tensor([3, 1], dtype=torch.int32)
    for t in range(60):
        rows = torch.tensor([t, 59 - t])  # a neighbour in the batch that runs through other tokens
        y = mamba2_scan._stock_decode(states, slots, x[rows], dt[rows], A, B[rows], C[rows], D, bias)
        assert torch.equal(y[0], whole[t])


def test_scan_refuses_a_state_that_is_not_fp32():
    inputs = scan_inputs(4)
    with pytest.raises(AssertionError, match="fp32"):
        mamba2_scan.sequence_recurrent(*inputs, torch.zeros(8, 32, 16, dtype=torch.bfloat16))


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 16, 33])
def test_conv_span_by_span_equals_one_span(cut):
    x, weight, bias = seeded(90, 64), seeded(64, 4), seeded(64)
    whole, state = causal_conv1d.sequence_by_windows(x, weight, bias, None)
    parts, carried = [], None
    for i in range(0, 90, cut):
        y, carried = causal_conv1d.sequence_by_windows(x[i:i + cut], weight, bias, carried)
        parts.append(y)
    assert torch.equal(torch.cat(parts), whole) and torch.equal(carried, state)


def test_attention_rows_do_not_depend_on_what_follows_or_on_neighbours():
    q, k, v = seeded(200, 4, 32), seeded(200, 2, 32), seeded(200, 2, 32, scale=0.5)
    whole = attention.paged_forward(q, k, v, [(0, 200)], 32 ** -0.5)
    for length in LENGTHS:
        assert torch.equal(attention.paged_forward(q[:length], k[:length], v[:length], [(0, length)], 32 ** -0.5), whole[:length])
    packed = attention.paged_forward(torch.cat([q[:50], q]), torch.cat([k[:50], k]), torch.cat([v[:50], v]), [(0, 50), (50, 250)], 32 ** -0.5)
    assert torch.equal(packed[50:], whole)


SEQUENCE_OPERATORS = {
    "attention": (lambda t, layout, which: getattr(attention, which)(*t, layout, 32 ** -0.5),
                  lambda rows, dtype: [seeded(rows, 4, 32, dtype=dtype), seeded(rows, 2, 32, dtype=dtype),
                                       seeded(rows, 2, 33, dtype=dtype)[..., :32]]),
    "causal_conv1d": (lambda t, layout, which: getattr(causal_conv1d, which)(t[0], t[1], t[2], layout),
                      lambda rows, dtype: [seeded(rows, 64, dtype=dtype), seeded(64, 4, dtype=dtype), seeded(64, dtype=dtype)]),
    "mamba2_scan": (lambda t, layout, which: getattr(mamba2_scan, which)(*t, layout),
                    lambda rows, dtype: list(scan_inputs(rows, dtype))),
}


@pytest.mark.parametrize("name", SEQUENCE_OPERATORS)
def test_packed_equals_padded_equals_alone(name):
    call, make = SEQUENCE_OPERATORS[name]
    padded, packed = Layout.padded(LENGTHS), Layout.packed(LENGTHS)
    tensors = make(padded.rows, torch.bfloat16)
    per_row = [t.shape[0] == padded.rows for t in tensors]
    index = torch.cat([torch.arange(a, b) for a, b in padded.spans()])
    rows = [t[index] if is_row else t for t, is_row in zip(tensors, per_row, strict=True)]
    out_padded, out_packed = call(tensors, padded, "exact_training")[index], call(rows, packed, "exact_training")
    assert torch.equal(out_padded, out_packed)
    for a, b in packed.spans():
        alone = call([t[a:b] if is_row else t for t, is_row in zip(rows, per_row, strict=True)], Layout.packed([b - a]), "exact_training")
        assert torch.equal(alone, out_packed[a:b])


def relative(a, b):
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


@pytest.mark.parametrize("name", SEQUENCE_OPERATORS)
def test_sequence_operator_accuracy_and_gradients_against_fp64(name):
    call, make = SEQUENCE_OPERATORS[name]
    layout = Layout.packed([5, 70, 33])
    leaves = [t.requires_grad_() for t in make(layout.rows, torch.bfloat16)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out, truth = call(leaves, layout, "exact_training"), call(exact, layout, "reference")
    assert relative(out, truth) < 6e-3
    weight = seeded(*truth.shape, dtype=torch.float64)
    (out.double() * weight).sum().backward()
    (truth * weight).sum().backward()
    for got, want in zip(leaves, exact, strict=True):
        assert relative(got.grad, want.grad) < 2e-2


ROW_GRADIENTS = {
    "rms_norm": (lambda x, w, which: getattr(rms_norm, which)(x, w, 1e-6)[0], 128),
    "rms_norm_residual": (lambda x, w, which: sum(getattr(rms_norm, which)(x, w, 1e-6, x.flip(-1))), 128),
    "linear": (lambda x, w, which: getattr(linear, which)(x, w.expand(64, -1) * 0.1), 128),
    "silu_and_mul": (lambda x, w, which: getattr(activations, which + "_silu_and_mul")(x * w), 128),
    "relu_squared": (lambda x, w, which: getattr(activations, which + "_relu_squared")(x * w), 128),
    "gated_rms_norm": (lambda x, w, which: getattr(gated_rms_norm, which)(x, x.flip(-1), w, 1e-5, 2), 128),
    "log_softmax": (lambda x, w, which: getattr(log_softmax, which)(x * w)[:, :7], 128),
    "rotary": (lambda x, w, which: torch.cat(getattr(rotary, which)(
        torch.arange(len(x)), (x * w).view(-1, 4, 32), x.view(-1, 4, 32), theta=1e4, max_positions=512)), 128),
}


@pytest.mark.parametrize("name", ROW_GRADIENTS)
def test_row_operator_accuracy_and_gradients_against_fp64(name):
    call, width = ROW_GRADIENTS[name]
    x, w = seeded(40, width).requires_grad_(), (seeded(width, scale=0.2) + 1).requires_grad_()
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    out, truth = call(x, w, "exact_training"), call(x64, w64, "reference")
    stock_error = relative(call(x.detach(), w.detach(), "stock_training"), truth)
    assert relative(out, truth) <= 2 * stock_error + 1e-4
    weight = seeded(*truth.shape, dtype=torch.float64)
    (out.double() * weight).sum().backward()
    (truth * weight).sum().backward()
    assert relative(x.grad, x64.grad) < 2e-2 and relative(w.grad, w64.grad) < 2e-2


@pytest.mark.parametrize("name", SEQUENCE_OPERATORS)
def test_gradients_are_the_same_twice(name):
    call, make = SEQUENCE_OPERATORS[name]
    layout = Layout.packed([40, 9])

    def gradients():
        leaves = [t.requires_grad_() for t in make(layout.rows, torch.bfloat16)]
        call(leaves, layout, "exact_training").float().pow(2).sum().backward()
        return [t.grad for t in leaves]

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))

"""The exact CUDA contract put together without a device: shapes, dtypes and arguments of every call, by the operators' fake implementations."""

import pytest
import torch

pytest.importorskip("triton")

import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.initialization import no_init_weights

from consistency.bindings import Bindings
from consistency.contract import Contract
from consistency.layout import Layout
from consistency.models import family as family_module
from consistency.models.catalog import FAMILIES, SITE_RANK
from consistency.operators import catalog
from consistency.operators.cuda import eager, linear


def test_every_row_can_be_imported_and_both_sides_are_complete():
    for info in catalog.IMPLEMENTATIONS:
        if info.device == "cuda":
            assert catalog.load(info.operator, info.name, info.side, "cuda") is not None or info.name == "stock"
    for family in FAMILIES.values():
        for scale in family.scales.values():
            for side in ("rollout", "training"):
                exact = {i.operator for i in catalog.implementations(side=side, device=scale.device) if i.exact}
                assert set(family.operators_at(scale.name)) <= exact


@pytest.mark.parametrize("name", FAMILIES)
def test_exact_forward_fits_together_at_true_widths(name, monkeypatch):
    monkeypatch.setattr(linear, "linear", linear.linear_op)
    monkeypatch.setattr(eager, "REGISTERED", True)
    bindings = Bindings("training", device="cuda")
    bindings.bind(Contract(training=dict.fromkeys(FAMILIES[name].operators_at("slice"), "exact")))
    config = family_module(name).config("slice")
    with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights(), torch.no_grad():
        model = getattr(transformers, FAMILIES[name].architecture)._from_config(config, dtype=torch.bfloat16)
        for layout in (Layout.padded([5, 130, 64]), Layout.packed([5, 130, 64])):
            seen = {}
            ids = torch.zeros(layout.rows, dtype=torch.int64)
            logits = family_module(name).forward(model, ids, layout, bindings, seen.__setitem__, None)
            assert logits.shape == (layout.rows, config.vocab_size) and logits.dtype == torch.bfloat16
            assert bindings.function("log_softmax").token(logits, ids).shape == (layout.rows,)
            assert all(len(rows) == layout.rows and rows.is_contiguous() for rows in seen.values())
            assert {site.operator for site in seen} == set(FAMILIES[name].operators_at("slice")) - {"log_softmax"}
            assert {site.role for site in seen} <= set(SITE_RANK)


def test_tables_of_a_batch_are_built_once():
    layout, made = Layout.packed([3, 4]), []
    for _ in range(3):
        layout.kept("chunks", "cpu", lambda: made.append(1) or made)
    assert made == [1] and layout.cu_seqlens("cpu") is layout.cu_seqlens(torch.device("cpu"))
    assert layout.cu_seqlens("cpu").tolist() == [0, 3, 7] and layout == Layout.packed([3, 4])


def test_padding_is_dropped_and_put_back_as_zeros():
    layout = Layout.padded([3, 1])
    rows = torch.arange(6.0)[:, None].requires_grad_()
    packed = layout.pack(rows)
    assert packed[:, 0].tolist() == [0, 1, 2, 3] and layout.unpack(packed)[:, 0].tolist() == [0, 1, 2, 3, 0, 0]
    layout.unpack(packed * 2).sum().backward()
    assert rows.grad[:, 0].tolist() == [2, 2, 2, 2, 0, 0]


# ---- the eager route of registered operators, on an operator that has a CPU kernel -------------------------------------


@torch.library.custom_op("consistency_test::split_scaled", mutates_args=())
def split_scaled(x: torch.Tensor, weight: torch.Tensor, factor: float) -> list[torch.Tensor]:
    return [x * weight * factor, x + weight]


@split_scaled.register_fake
def _(x, weight, factor):
    return [torch.empty_like(x), torch.empty_like(x)]


def _setup(ctx, inputs, output):
    x, weight, ctx.factor = inputs
    ctx.save_for_backward(x, weight)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grads):
    x, weight = ctx.saved_tensors
    return grads[0] * weight * ctx.factor, grads[0] * x * ctx.factor, None


split_scaled.register_autograd(_backward, setup_context=_setup)


@pytest.mark.parametrize("how", ["plain", "recomputed", "compiled"])
def test_eager_route_gives_the_registered_operators_results_and_gradients(how):
    from torch.utils.checkpoint import checkpoint

    call = eager.eager(split_scaled, _setup, lambda ctx, *grads: _backward(ctx, grads))
    if how == "compiled":
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = []
    for function in (split_scaled, call):
        leaves = [torch.arange(1.0, 5.0, requires_grad=True), torch.full((4,), 3.0, requires_grad=True)]
        run = (lambda *a, f=function: checkpoint(f, *a, use_reentrant=False)) if how == "recomputed" else function
        out, other = run(*leaves, 0.5)
        (out * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
        found.append([out.detach(), other.detach(), *(leaf.grad for leaf in leaves)])
        assert not other.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    with torch.no_grad():
        assert torch.equal(call(torch.ones(2), torch.ones(2), 2.0)[0], torch.full((2,), 2.0))

"""The training side against untouched transformers and against fp64."""

import pytest
import torch

from consistency.contract import Contract, ContractError
from consistency.engines.training import Forward, Training
from consistency.models.catalog import FAMILIES

LENGTHS = [(1, 3), (15, 8), (33, 8), (64, 5), (100, 8)]


def requests():
    draw = torch.Generator().manual_seed(3)
    return [{"prompt": torch.randint(512, (p,), generator=draw).tolist(), "tokens": torch.randint(512, (n,), generator=draw).tolist()}
            for p, n in LENGTHS]


def all_bound(family, name):
    return Contract(training=dict.fromkeys(FAMILIES[family].operators, name))


@pytest.fixture(scope="module")
def training(model):
    return Training(model[0], model[1], Contract())


@pytest.fixture(autouse=True)
def unbound(training):
    training.bindings.bind(Contract())


def bits(arrays):
    return arrays["logprob"].view(torch.int32)


def test_operator_by_operator_forward_equals_transformers_own(training, monkeypatch):
    own, answer = training.forward(requests(), Forward())
    untouched = training.logits
    monkeypatch.setattr(training, "logits", lambda ids, layout: untouched(ids, layout, lambda site, rows: None))
    ours, again = training.forward(requests(), Forward())
    assert torch.equal(bits(own), bits(ours)) and answer == again


def test_exact_forward_is_the_same_in_every_layout_and_mode(training):
    training.bindings.bind(all_bound(training.family, "exact"))
    first, _ = training.forward(requests(), Forward())
    for how in (Forward("packed"), Forward("alone"), Forward(micro_batch=2), Forward("packed", micro_batch=3), Forward(mode="eval"),
                Forward(grad=False)):
        other, _ = training.forward(requests(), how)
        assert torch.equal(bits(first), bits(other)), how
        assert torch.equal(first["token"], other["token"])


def test_stock_is_not_exact_against_the_exact_contract(training):
    stock, _ = training.forward(requests(), Forward())
    training.bindings.bind(all_bound(training.family, "exact"))
    exact, _ = training.forward(requests(), Forward())
    assert (bits(stock) != bits(exact)).any()


def test_gradients_and_accuracy_against_fp64(training, model):
    truth = Training(*model, all_bound(model[0], "reference"), dtype="float64")
    want, _ = truth.forward(requests(), Forward())
    stock, _ = training.forward(requests(), Forward())
    stock_grads = {n: p.grad.double() for n, p in training.model.named_parameters()}
    training.bindings.bind(all_bound(model[0], "exact"))
    exact, _ = training.forward(requests(), Forward())

    def error(arrays):
        return (arrays["logprob"] - want["logprob"]).abs().mean()

    assert error(exact) <= 2 * error(stock)
    for name, parameter in training.model.named_parameters():
        reference = dict(truth.model.named_parameters())[name].grad
        scale = reference.norm() + 1e-9
        ours, theirs = (parameter.grad.double() - reference).norm() / scale, (stock_grads[name] - reference).norm() / scale
        assert ours <= 2 * theirs + 0.02, name


def test_temperature_scales_before_the_log_softmax(training):
    raw, _ = training.forward(requests(), Forward(grad=False))
    processed, _ = training.forward(requests(), Forward(grad=False, temperature=0.7))
    same, _ = training.forward(requests(), Forward(grad=False, temperature=1.0))
    assert torch.equal(bits(raw), bits(same)) and (bits(raw) != bits(processed)).float().mean() > 0.9


def test_unknown_names_are_refused_and_leave_the_old_binding(training):
    training.bindings.bind(all_bound(training.family, "exact"))
    with pytest.raises(ContractError, match="no implementation 'fast'"):
        training.bindings.bind(Contract(training={"linear": "fast"}))
    with pytest.raises(ContractError, match="kernels folder"):
        training.bindings.bind(Contract(training={"linear": "kernels:mine.fast"}))
    assert set(training.bindings.names.values()) == {"exact"}
    with pytest.raises(ValueError, match="unknown layout 'ragged'"):
        training.forward(requests(), Forward("ragged"))


def test_kernels_folder(training, tmp_path):
    (tmp_path / "mine.py").write_text("import torch\ndef doubled(logits):\n    return 2 * torch.log_softmax(logits.float(), -1)\n")
    plain, _ = training.forward(requests(), Forward(grad=False))
    training.bindings.kernels = tmp_path
    training.bindings.bind(Contract(training={"log_softmax": "kernels:mine.doubled"}))
    doubled, _ = training.forward(requests(), Forward(grad=False))
    assert torch.equal(doubled["logprob"], 2 * plain["logprob"])
    with pytest.raises(ContractError, match=r"kernels/mine.py has no 'tripled'"):
        training.bindings.bind(Contract(training={"log_softmax": "kernels:mine.tripled"}))

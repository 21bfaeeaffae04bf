"""The exact training forward on a GPU at true widths: equal bits in every layout, mode and with layers recomputed; gradients; traces."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device: the exact operators are kernels for one", allow_module_level=True)
pytest.importorskip("vllm", reason="the training side calls the rollout engine's attention kernel")

from bench.gpu.training import gradient_bits, requests, same, step  # noqa: E402
from consistency.contract import Contract  # noqa: E402
from consistency.engines import seeded_weights  # noqa: E402
from consistency.engines.training import Forward, Training  # noqa: E402
from consistency.engines.weights import training_fingerprints  # noqa: E402
from consistency.jobs import make_checkpoint  # noqa: E402
from consistency.models.catalog import FAMILIES  # noqa: E402
from consistency.operators.cuda import log_softmax, rotary  # noqa: E402
from consistency.trace import Recorder  # noqa: E402

pytestmark = pytest.mark.gpu
LENGTHS = (1, 9, 127, 128, 129, 300)


@pytest.fixture(scope="module", params=["qwen3", "nemotron-3.5"])
def training(request, tmp_path_factory):
    checkpoint = tmp_path_factory.mktemp("checkpoints") / request.param
    make_checkpoint.write(request.param, "slice", checkpoint)
    exact = Contract(training=dict.fromkeys(FAMILIES[request.param].operators_at("slice"), "exact"))
    yield Training(request.param, checkpoint, exact, device="cuda")
    torch.cuda.empty_cache()


@pytest.fixture
def asked(training):
    return requests(LENGTHS, 20, training.model.config.vocab_size)


def logprobs(training, asked, *how, **more):
    return training.forward(asked, Forward(*how, grad=False, **more))[0]["logprob"]


def test_layouts_modes_and_micro_batches_give_equal_bits(training, asked):
    alone = logprobs(training, asked, "alone")
    assert alone.isfinite().all()
    for how in (("padded",), ("packed",), ("packed", 3), ("padded", 2), ("packed", 8, "eval")):
        assert same(alone, logprobs(training, asked, *how)) == 0, how


def test_stock_forward_depends_on_the_layout(training, asked):
    """The control: were stock exact too, the test above would show nothing."""
    exact = dict(training.bindings.names)
    training.bindings.bind(Contract())
    try:
        assert same(logprobs(training, asked, "alone"), logprobs(training, asked, "padded")) > 0
    finally:
        training.bindings.bind(Contract(training=exact))


def test_gradients_are_finite_and_the_same_twice_and_with_layers_recomputed(training, asked):
    first, bits = step(training, asked, Forward("packed")), gradient_bits(training)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in training.model.parameters())
    step(training, asked, Forward("packed"))
    assert gradient_bits(training) == bits
    training.checkpoint_layers(True)
    try:
        assert same(first, step(training, asked, Forward("packed"))) == 0 and gradient_bits(training) == bits
    finally:
        training.checkpoint_layers(False)
        training.model.zero_grad(set_to_none=True)


def test_trace_sees_every_operator_and_equal_rows_in_two_layouts(training, asked):
    prints = []
    for layout in ("padded", "packed"):
        recorder = Recorder([len(r["prompt"]) + len(r["tokens"]) for r in asked])
        training.trace(asked, recorder, Forward(layout))
        prints.append(recorder.prints)
        assert {s["operator"] for s in recorder.site_list()} == set(FAMILIES[training.family].operators_at("slice"))
    for key, first in prints[0].items():
        assert torch.equal(first, prints[1][key]) and (first >= 0).all(), key


def test_token_route_equals_the_whole_row(training):
    generator = torch.Generator("cuda").manual_seed(1)
    logits = (5 * torch.randn(33, training.model.config.vocab_size, generator=generator, device="cuda")).bfloat16()
    tokens = torch.randint(logits.shape[1], (33,), generator=generator, device="cuda")
    route, whole = log_softmax.exact_training.token(logits, tokens), log_softmax.exact_rollout(logits)
    assert torch.equal(route, whole.gather(1, tokens[:, None])[:, 0])
    assert torch.equal(log_softmax.row_lse(logits), log_softmax.row_lse(logits.float()))


def test_seeded_tensors_have_the_bits_of_the_cpu(training):
    kinds = {}
    for entry in seeded_weights.entries(training.family, training.model.config):
        if torch.Size(entry.shape).numel() < 1 << 23:
            kinds.setdefault((entry.form, entry.dtype, entry.mean == 0), entry)
    for entry in kinds.values():
        made = [seeded_weights.fill(torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=d), entry, 3).cpu() for d in ("cpu", "cuda")]
        assert torch.equal(*made), entry.name


def test_reload_in_place(training):
    pointers = [p.data_ptr() for p in training.model.parameters()]
    before = training_fingerprints(training.model)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    training.reload(None)
    assert training_fingerprints(training.model) == before and [p.data_ptr() for p in training.model.parameters()] == pointers


def test_rotary_of_the_rollout_has_the_bits_of_training():
    generator = torch.Generator("cuda").manual_seed(1)
    q, k = (torch.randn(50, heads, 128, generator=generator, device="cuda").bfloat16() for heads in (16, 8))
    where = torch.randint(40960, (50,), generator=generator, device="cuda")
    for a, b in zip(rotary.exact_training(where, q, k, theta=1e6, max_positions=40960),
                    rotary.exact_rollout(where, q, k, theta=1e6, max_positions=40960), strict=True):
        assert torch.equal(a, b)

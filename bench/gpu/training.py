"""The training forward and backward on a GPU, exact against untouched transformers: time, memory, bits, and what the seeded weights give.

`python -m bench.gpu.training --model nemotron-3.5 --out FILE`.
"""

import argparse
import contextlib
import functools
import pathlib
import random
import statistics
import tempfile
import time
import traceback
from types import SimpleNamespace

import torch

from bench.gpu.measure import write_results
from consistency.contract import Contract
from consistency.engines import seeded_weights
from consistency.engines.training import Forward, Training
from consistency.engines.weights import _checksum, training_fingerprints
from consistency.jobs import make_checkpoint
from consistency.models.catalog import FAMILIES
from consistency.trace import Recorder

LENGTHS = (1, 9, 127, 128, 129, 300, 44, 257)
TIMED_SEQUENCES, TIMED_LENGTH = 8, 512


def requests(lengths: tuple[int, ...], new: int, vocabulary: int, seed: int = 5) -> list[dict]:
    draw = random.Random(seed)
    return [{"prompt": [draw.randrange(vocabulary) for _ in range(n)], "tokens": [draw.randrange(vocabulary) for _ in range(new)]} for n in lengths]


def seeded_bits(family: str, config, training: Training) -> dict:
    """Chosen tensors made on the CPU against what the model on the device holds."""
    wanted = {}
    for entry in seeded_weights.entries(family, config):
        kind = entry.form, entry.dtype, entry.mean == 0, len(entry.shape)
        if entry.name.endswith(".0.up_proj.weight") or torch.Size(entry.shape).numel() < 1 << 24:
            wanted.setdefault(kind, entry)
    table = {**dict(training.model.named_parameters()), **dict(training.model.named_buffers())}
    equal = {}
    for entry in wanted.values():
        name, expert = seeded_weights.training_name(entry.name)
        held = table[name] if expert is None else table[name][expert]
        made = seeded_weights.fill(torch.empty(entry.shape, dtype=held.dtype), entry, 0)
        equal[entry.name] = bool(torch.equal(made, held.detach().cpu()))
    return equal


def logprobs(training: Training, asked: list[dict], **how) -> torch.Tensor:
    return training.forward(asked, Forward(grad=False, **how))[0]["logprob"]


def same(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements of unequal bits."""
    return int((a.view(torch.int32) != b.view(torch.int32)).sum())


def distribution(training: Training, family: str, vocabulary: int) -> dict:
    """Mean log-probability of a sampled token, and how the router spreads tokens."""
    asked = requests((400,) * 6, 100, vocabulary)
    recorder = Recorder([500] * 6, dump=[f"{i:03d}.router" for i in range(99)])
    training.trace(asked, recorder, Forward("packed", micro_batch=2))
    ids, layout = training._rows(asked[:2], Forward("packed"))
    with torch.no_grad():
        p = training.logits(ids, layout).float().log_softmax(-1)
        found = {"mean_logprob_of_sampled": float((p.exp() * p).sum(-1).mean()), "finite": bool(p.isfinite().all())}
    spread = []
    for key, rows in sorted(recorder.dumps.items()):
        chosen = rows[:, rows.shape[1] // 2:].long().flatten()
        counts = torch.bincount(chosen, minlength=training.model.config.n_routed_experts).float()
        spread.append({"layer": key, "most_of_mean": float(counts.max() / counts.mean()), "without_tokens": int((counts == 0).sum())})
    return found | ({"routing": spread} if spread else {})


def step(training: Training, asked: list[dict], how: Forward) -> torch.Tensor:
    training.model.train()
    training.model.zero_grad(set_to_none=True)
    chosen, _ = training._batch(list(enumerate(asked)), how)
    (-chosen.mean()).backward()
    return chosen.detach()


def timed(training: Training, asked: list[dict], how: Forward, repeats: int = 5) -> dict:
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step(training, asked, how)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated()
    return {"ms": round(1e3 * statistics.median(times[2:]), 2), "forward_ms": forward_ms(training, asked, how),
            "peak_gib": round(peak / 2**30, 2), "held_before_gib": round(base / 2**30, 2)}


def forward_ms(training: Training, asked: list[dict], how: Forward) -> float:
    times = []
    with torch.no_grad():
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            training._batch(list(enumerate(asked)), how)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    return round(1e3 * statistics.median(times[1:]), 2)


@contextlib.contextmanager
def engine_kernels():
    """transformers' Mamba2 with vLLM's forward kernels in place of its torch formulas, for batches without padding and without a gradient.

    The nearest to mamba-ssm and causal-conv1d on a machine that has neither.
    """
    from transformers.models.nemotron_h import modeling_nemotron_h as modeling
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen
    from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

    @functools.lru_cache
    def tables(batch: int, length: int, chunk: int):
        ends = torch.arange(0, batch * length + 1, length, dtype=torch.int32)
        nums, pointer, offsets = compute_causal_conv1d_metadata(ends, device=torch.device("cuda"))
        metadata = SimpleNamespace(nums_dict=nums, batch_ptr=pointer, token_chunk_offset_ptr=offsets)
        per = length // chunk if chunk else 1
        assert not chunk or length % chunk == 0
        chunks = torch.arange(0, batch * length + 1, chunk or length, dtype=torch.int32, device="cuda")
        last = torch.arange(per - 1, batch * per, per, dtype=torch.int32, device="cuda")
        owner = torch.arange(batch, dtype=torch.int32, device="cuda").repeat_interleave(per)
        return ends.cuda(), metadata, chunks, last, owner

    def convolution(hidden, weight, bias=None, activation=None, **_):
        batch, channels, length = hidden.shape
        ends, metadata, *_ = tables(batch, length, 0)
        state = hidden.new_zeros(batch + 1, weight.shape[1] - 1, channels).transpose(1, 2)
        index = torch.arange(1, batch + 1, dtype=torch.int32, device=hidden.device)
        none = torch.zeros(batch, dtype=torch.bool, device=hidden.device)
        rows = hidden.transpose(1, 2).reshape(batch * length, channels)
        out = causal_conv1d_fn(rows.t(), weight, bias, state, ends, index, none, activation, metadata=metadata)
        return out.t().view(batch, length, channels).transpose(1, 2)

    def scan(hidden, dt, A, B, C, chunk_size, D=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, float("inf")), **_):
        batch, length = hidden.shape[:2]
        ends, _, chunks, last, owner = tables(batch, length, chunk_size)
        x, dt, B, C = (t.reshape(batch * length, *t.shape[2:]) for t in (hidden, dt, B, C))
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        mamba_chunk_scan_combined_varlen(
            x, dt, A, B, C, chunk_size=chunk_size, cu_seqlens=ends, cu_chunk_seqlens=chunks, last_chunk_indices=last, seq_idx=owner, out=out, D=D,
            dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=dt_limit, state_dtype=torch.float32)
        return out.view(hidden.shape)

    before = modeling.causal_conv1d_fn, modeling.mamba2_chunk_scan
    modeling.causal_conv1d_fn, modeling.mamba2_chunk_scan = convolution, scan
    try:
        yield
    finally:
        modeling.causal_conv1d_fn, modeling.mamba2_chunk_scan = before


def with_engine_kernels(training: Training, asked: list[dict]) -> dict:
    how = Forward("padded")
    plain = logprobs(training, asked, layout="padded")
    try:
        with engine_kernels():
            apart = (logprobs(training, asked, layout="padded") - plain).abs().mean()
            return {"forward_with_engine_kernels_ms": forward_ms(training, asked, how), "engine_kernels_apart": float(apart)}
    except Exception as error:
        traceback.print_exc()
        return {"forward_with_engine_kernels_ms": None, "engine_kernels_error": f"{type(error).__name__}: {error}"[:300]}


def profile(training: Training, asked: list[dict], how: Forward, path: pathlib.Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as found:
        step(training, asked, how)
        torch.cuda.synchronize()
    path.write_text(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=70))


def gradient_bits(training: Training) -> int:
    return sum(_checksum(p.grad) for p in training.model.parameters() if p.grad is not None) & ((1 << 62) - 1)


def measure(model: str, scale: str, out: pathlib.Path, row: dict, brief: bool = False) -> None:
    family = FAMILIES[model]
    exact = Contract(training=dict.fromkeys(family.operators_at(scale), "exact"))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = pathlib.Path(folder) / "checkpoint"
        make_checkpoint.write(model, scale, checkpoint)
        started = time.perf_counter()
        training = Training(model, checkpoint, Contract(), device="cuda")
        torch.cuda.synchronize()
        row["load_s"] = round(time.perf_counter() - started, 2)
        row["weights_gib"] = round(torch.cuda.memory_allocated() / 2**30, 2)
        config = training.model.config
        row["seeded_bits_equal"] = seeded_bits(model, config, training)
        before = training_fingerprints(training.model)
        training.reload(None)
        row["reload_equal"] = before == training_fingerprints(training.model)
        asked = requests(LENGTHS, 40, config.vocab_size)
        # sequences of one length need no padding, and all rows have a token to predict: stock's best case
        long = requests((1,) * TIMED_SEQUENCES, TIMED_LENGTH - 1, config.vocab_size)
        stock = logprobs(training, asked, layout="alone")
        row["stock_padded_unequal"] = same(stock, logprobs(training, asked))
        row["distribution"] = distribution(training, model, config.vocab_size)
        if not brief:
            row["stock"] = timed(training, long, Forward("padded"))
            profile(training, long, Forward("padded"), out.with_name(f"profile-{model}-stock.txt"))
            if model == "nemotron-3.5":
                row["stock"] |= with_engine_kernels(training, long)
        training.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        training.bindings.bind(exact)
        alone = logprobs(training, asked, layout="alone")
        apart = (alone - stock).abs()
        row["exact_against_stock"] = {"max": float(apart.max()), "mean": float(apart.mean()), "unequal": same(alone, stock), "of": len(alone)}
        row["exact_unequal"] = {
            "padded": same(alone, logprobs(training, asked)), "packed": same(alone, logprobs(training, asked, layout="packed")),
            "packed of 3": same(alone, logprobs(training, asked, layout="packed", micro_batch=3)),
            "eval": same(alone, logprobs(training, asked, layout="packed", mode="eval")), "of": len(alone)}
        if brief:
            return
        how = Forward("packed")
        first = step(training, asked, how)
        bits = gradient_bits(training)
        row["gradients"] = {"finite": all(bool(p.grad.isfinite().all()) for p in training.model.parameters() if p.grad is not None),
                            "without": [n for n, p in training.model.named_parameters() if p.grad is None]}
        step(training, asked, how)
        row["gradients"]["equal_twice"] = bits == gradient_bits(training)
        row["exact"] = timed(training, long, how)
        profile(training, long, how, out.with_name(f"profile-{model}-exact.txt"))
        training.checkpoint_layers(True)
        row["checkpointing"] = {"forward_unequal": same(first, step(training, asked, how)), "gradients_equal": bits == gradient_bits(training),
                                **timed(training, long, how, 2)}
        row["percent_of_stock"] = round(100 * row["stock"]["ms"] / row["exact"]["ms"], 1)
        row["tokens"] = TIMED_SEQUENCES * TIMED_LENGTH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=tuple(FAMILIES), help="may be given again; default: all")
    parser.add_argument("--scale", default="slice")
    parser.add_argument("--brief", action="store_true", help="forward only, no timing: what fits at full scale")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results/training.json"))
    options = parser.parse_args()
    rows = []
    for model in options.model or tuple(FAMILIES):
        row: dict = {"model": model, "scale": options.scale}
        rows.append(row)
        try:
            measure(model, options.scale, options.out, row, options.brief)
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:1500]
        torch.cuda.empty_cache()
        print(row, flush=True)
        write_results(options.out, rows)


if __name__ == "__main__":
    main()

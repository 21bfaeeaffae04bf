"""DeepSeek-V4 at true widths and four layers on one GPU: what the untouched engines do to its log-probabilities, and how fast they are.

    python -m bench.gpu.deepseek_v4_slice --out docs/results/deepseek-v4 --steps checkpoint eager
    python -m bench.gpu.deepseek_v4_slice --out docs/results/deepseek-v4 --steps graphs restart
    python -m bench.gpu.deepseek_v4_slice --out docs/results/deepseek-v4 --steps training
    python -m bench.gpu.deepseek_v4_slice --out docs/results/deepseek-v4 --steps cost

Every step is a process of its own, is stopped when the call's time is over, writes its results after each measurement and fails alone. The
checkpoint (28 GB with FP8 experts, 16 GB with MXFP4) and the kernels that are compiled on first use stay on the machine for the next call.
"""

import argparse
import contextlib
import fcntl
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

import torch
from safetensors.torch import load_file, save_file

from bench.gpu.measure import complete_pythonpath, write_results
from consistency.models import deepseek_v4 as family

STEPS = ("checkpoint", "eager", "graphs", "restart", "training", "cost", "candidates")
NEW_TOKENS = 64
CLASSES = {"short": [16 + 8 * i for i in range(24)], "middle": [650, 700, 750, 800], "long": [2200, 2300, 2400, 2500]}
"""Prompt lengths. From 128 tokens on a heavily compressed entry exists, from 2052 on the indexer leaves candidates out."""
ALONE = (0, 15, 24, 28)
"""requests that also run alone, one with 16, 136, 650 and 2200 tokens: each new length compiles kernels"""
THROUGHPUT, PROMPT, DECODE = (256, 32, 8), 64, 128
"""requests at once; tokens of each prompt; tokens sampled for each"""
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128, 256]
"""batch sizes of the captured graphs, fewer than by default: each capture compiles"""
CHECKPOINT_BYTES = 32 << 30
RESUMED = ("cost",)
"""steps that keep the rows of earlier calls and measure what is missing"""
CACHE_BYTES = 4 << 30
"""key-value cache of an engine whose memory is limited"""
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
               "VLLM_DEEP_GEMM_WARMUP": "skip"}
"""The engine in the process that measures it, no sampler that is compiled for minutes, GEMMs compiled when first called. The caller's own
variables win."""
JIT_PACKAGES = ("tilelang", "nvidia-cutlass-dsl", "flashinfer-python", "apache-tvm-ffi", "transformers", "accelerate")
LOG_LINES = re.compile(r"\] ((?:using|selected) .*(?:backend|kernel|indexer cache).*|.*expert_dtype.*|gpu kv cache size.*|model loading took.*"
                       r"|deepgemm .*|init engine.*|graph capturing finished.*|.*decode path.*)", re.I)
"""what a log says about the kernels that were chosen and how long they took to compile"""


def prompts() -> list[list[int]]:
    """The same prompts in every process."""
    draw = torch.Generator().manual_seed(7)
    return [torch.randint(2, family.FLASH["vocab_size"], (n,), generator=draw).tolist() for lengths in CLASSES.values() for n in lengths]


def classes() -> dict[str, slice]:
    """Prompt class -> its requests."""
    out, start = {}, 0
    for name, lengths in CLASSES.items():
        out[name] = slice(start, start + len(lengths))
        start += len(lengths)
    return out


def compare(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, float]:
    """Log-probabilities [requests, tokens] at the positions where both sides saw the same context and name the same token.

    `k3` is the mean of exp(d) - 1 - d with d = right - left, an estimate of KL(left || right) from samples of left.
    """
    same = left["token"] == right["token"]
    where = same.int().cumprod(1).bool()
    if not where.any():
        raise ValueError("no position has the same context on both sides")
    d = (right["logprob"] - left["logprob"])[where].double()
    return {"requests": len(same), "equal_tokens": int(same.all(1).sum()), "compared": int(where.sum()),
            "equal": int((left["logprob"].view(torch.int32) == right["logprob"].view(torch.int32))[where].sum()),
            "max": float(d.abs().max()), "mean": float(d.abs().mean()), "k3": float((d.exp() - 1 - d).mean())}


def rows_of(arrays: dict[str, torch.Tensor], rows) -> dict[str, torch.Tensor]:
    return {name: value[rows] for name, value in arrays.items()}


class Results:
    """The rows of one step, stored after each."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.rows, self.end = options, [], time.monotonic() + options.seconds
        self.path = options.out / f"{options.experts}-{options.step}.json"
        if options.step in RESUMED and self.path.exists():
            self.rows = [row for row in json.loads(self.path.read_text())["rows"] if "compared" in row]

    def add(self, measurement: str, **values) -> None:
        self.rows.append({"step": self.options.step, "experts": self.options.experts, "measurement": measurement, **values})
        write_results(self.path, self.rows)

    def compare(self, measurement: str, left: dict, right: dict, requests: tuple[int, ...] | None = None) -> None:
        """One row for all requests and, when they are all there, one per prompt class."""
        self.add(measurement, **compare(left, right))
        for name, rows in classes().items() if requests is None else ():
            self.add(f"{measurement}, {name}", **compare(rows_of(left, rows), rows_of(right, rows)))

    def guarded(self, measurement: str, function: Callable, reserve: float = 0.0):
        """Runs one measurement; a failure, or less than `reserve` seconds left, becomes a row. Returns its value or None."""
        if (left := self.end - time.monotonic()) < reserve:
            self.add(measurement, skipped=f"{left:.0f} s left")
            return None
        started = time.monotonic()
        try:
            with self.alone_on_device():
                value = function()
        except Exception as error:
            traceback.print_exc()
            self.add(measurement, failed=f"{type(error).__name__}: {error}"[:1500])
            return None
        print(f"{measurement}: {time.monotonic() - started:.1f} s", flush=True)
        return value

    @contextlib.contextmanager
    def alone_on_device(self):
        """Measurements of processes that were given the same --lock take turns; what else they do does not."""
        if self.options.lock is None:
            yield
            return
        with self.options.lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def keep(self, name: str, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Stores arrays for the steps that compare with them."""
        save_file(arrays, self.options.out / f"{self.options.experts}-{self.options.step}-{name}.safetensors")
        return arrays

    def kept(self, step: str, name: str) -> dict[str, torch.Tensor] | None:
        path = self.options.out / f"{self.options.experts}-{step}-{name}.safetensors"
        return load_file(path) if path.exists() else None


# ---- the rollout ----------------------------------------------------------------------------------------------------

class Rollout:
    """vLLM as a user starts it, with the FP8 cache this model ships with."""

    def __init__(self, folder: pathlib.Path, eager: bool, memory_gib: float | None = None):
        import vllm

        self.vllm = vllm
        memory: dict = {"gpu_memory_utilization": 0.6}
        graphs: dict = {} if eager else {"compilation_config": {"cudagraph_capture_sizes": CAPTURED}}
        if memory_gib is not None:
            # a cache of fixed size: what other processes allocate and free meanwhile does not count
            memory = {"gpu_memory_utilization": round(0.7 * limit_memory(memory_gib), 3), "kv_cache_memory_bytes": CACHE_BYTES}
        # pages of 256 tokens are the only ones its kernels take
        self.llm = vllm.LLM(str(folder), skip_tokenizer_init=True, enforce_eager=eager, kv_cache_dtype="fp8", block_size=256, max_model_len=4096,
                            max_num_seqs=256, enable_prefix_caching=False, disable_log_stats=True, **memory, **graphs)

    def generate(self, requests: list[int]) -> dict[str, torch.Tensor]:
        """Samples NEW_TOKENS tokens of each of these requests, together; the seed belongs to the request."""
        own = [self.vllm.SamplingParams(temperature=1.0, seed=1000 + i, max_tokens=NEW_TOKENS, logprobs=0, detokenize=False, ignore_eos=True)
               for i in requests]
        outputs = [o.outputs[0] for o in self.llm.generate([{"prompt_token_ids": prompts()[i]} for i in requests], own, use_tqdm=False)]
        return {"token": torch.tensor([list(o.token_ids) for o in outputs]),
                "logprob": torch.tensor([[step[t].logprob for step, t in zip(o.logprobs, o.token_ids, strict=True)] for o in outputs])}

    def score(self, requests: list[int], token: torch.Tensor, *, wrong_prompt: bool = False) -> dict[str, torch.Tensor]:
        """Log-probabilities of given tokens by prefill; wrong_prompt changes the prompt's last token, as a control that must differ."""
        texts = [prompts()[i] for i in requests]
        texts = [[*t[:-1], t[-1] ^ 1] if wrong_prompt else t for t in texts]
        how = self.vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": t + own} for t, own in zip(texts, token.tolist(), strict=True)], how, use_tqdm=False)
        return {"token": token, "logprob": torch.tensor([[o.prompt_logprobs[len(t) + j][sampled].logprob for j, sampled in enumerate(own)]
                                                         for o, t, own in zip(outputs, texts, token.tolist(), strict=True)])}

    def throughput(self, requests: int) -> dict[str, float]:
        """Tokens per second of generation at a fixed length, without seeds (a seed samples request by request)."""
        texts = torch.randint(2, family.FLASH["vocab_size"], (requests, PROMPT), generator=torch.Generator().manual_seed(requests)).tolist()
        batch = [{"prompt_token_ids": text} for text in texts]
        how = self.vllm.SamplingParams(temperature=1.0, max_tokens=DECODE, logprobs=0, detokenize=False, ignore_eos=True)
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            self.llm.generate(batch, how, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
        rate = requests * DECODE / statistics.median(seconds[1:])
        return {"requests": requests, "new_tokens": DECODE, "seconds": seconds, "tokens_per_second": rate}

    def engine(self) -> dict[str, object]:
        """The resolved configuration and the classes that compute layer 1."""
        config = self.llm.llm_engine.vllm_config
        out = {"v2_model_runner": config.use_v2_model_runner, "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
               "compilation_mode": str(config.compilation_config.mode), "cache_dtype": config.cache_config.cache_dtype,
               "block_size": config.cache_config.block_size, "num_gpu_blocks": config.cache_config.num_gpu_blocks,
               "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
               "async_scheduling": config.scheduler_config.async_scheduling}
        return out | self.llm.apply_model(kernel_classes)[0]


def kernel_classes(model) -> dict[str, str]:
    """Names of the classes behind the attention, a block FP8 linear and the experts of layer 1; runs inside the engine."""
    layer = model.model.layers[1]
    experts = layer.ffn.experts.routed_experts.quant_method
    backend = getattr(experts, "fp8_backend", None) or getattr(experts, "mxfp4_backend", None)
    return {"attention": type(layer.attn).__name__, "linear": type(layer.attn.wq_b.quant_method.fp8_linear).__name__,
            "experts_class": getattr(getattr(experts, "experts_cls", None), "__name__", "?"), "experts_backend": str(backend)}


def limit_memory(gib: float) -> float:
    """Lets this process allocate no more than this; returns the share of the device."""
    share = min(1.0, gib * 2**30 / torch.cuda.mem_get_info()[1])
    torch.cuda.set_per_process_memory_fraction(share)
    return share


def memory() -> dict[str, float]:
    free, total = torch.cuda.mem_get_info()
    used = {"allocated_gib": torch.cuda.memory_allocated(), "peak_gib": torch.cuda.max_memory_allocated(), "used_gib": total - free}
    return {name: count / 2**30 for name, count in used.items()}


def start(results: Results, eager: bool) -> Rollout | None:
    """The engine, or None and a row that says why not."""
    try:
        return Rollout(checkpoint_folder(results.options), eager, results.options.memory_gib)
    except Exception as error:
        traceback.print_exc()
        results.add("start", failed=f"{type(error).__name__}: {error}"[:1500])
        return None


def rollout_step(options: argparse.Namespace) -> None:
    """eager, graphs, candidates and restart: start, generate, and compare with other schedules, other runs and other processes."""
    results, started = Results(options), time.monotonic()
    rollout = start(results, options.step in ("eager", "candidates"))
    if rollout is None:
        return
    results.add("start", seconds=round(time.monotonic() - started, 1), **memory())
    with contextlib.ExitStack() as stack:
        if options.step == "candidates":
            from bench.gpu.deepseek_v4_candidates import candidates

            stack.enter_context(candidates())
        compare_schedules(options, results, rollout)


def compare_schedules(options: argparse.Namespace, results: Results, rollout: Rollout) -> None:
    everything = list(range(len(prompts())))
    results.guarded("engine", lambda: results.add("engine", **rollout.engine()))
    first = results.guarded("generate", lambda: results.keep("generate", rollout.generate(everything)))
    if first is None:
        return
    results.add("generate", mean_logprob=float(first["logprob"].mean()), finite=bool(first["logprob"].isfinite().all()), **memory())
    score = results.guarded("score", lambda: results.keep("score", rollout.score(everything, first["token"])))
    if score is not None:
        results.compare("decode against prefill", first, score)
    if options.step == "restart":
        for before in ("graphs", "eager"):
            if (other := results.kept(before, "generate")) is not None:
                results.guarded(f"decode against {before}", lambda o=other, b=before: results.compare(
                    f"decode against the {b} process", o, first))
            if (other := results.kept(before, "score")) is not None:
                results.guarded(f"prefill against {before}", lambda o=other, b=before: results.compare(
                    f"prefill against the {b} process", o, rollout.score(everything, o["token"])), reserve=10)
        return
    results.guarded("run to run", lambda: results.compare("run to run", first, rollout.generate(everything)), reserve=20)

    for count in THROUGHPUT if options.step == "graphs" else ():
        results.guarded("throughput", lambda count=count: results.add("throughput", **rollout.throughput(count)), reserve=30)

    def alone() -> None:
        singles = [rollout.generate([i]) for i in ALONE]
        together = {name: torch.cat([one[name] for one in singles]) for name in singles[0]}
        results.compare("decode alone against batched", rows_of(first, list(ALONE)), together, ALONE)

    def alone_by_prefill() -> None:
        together, singles = rows_of(score, list(ALONE)), [rollout.score([i], first["token"][i:i + 1])["logprob"] for i in ALONE]
        results.compare("prefill alone against batched", together, {"token": together["token"], "logprob": torch.cat(singles)}, ALONE)

    results.guarded("decode alone against batched", alone, reserve=30)
    if score is not None:
        results.guarded("prefill alone against batched", alone_by_prefill, reserve=20)
        results.guarded("control", lambda: results.compare(
            "control: one prompt token changed", score, rollout.score(everything, first["token"], wrong_prompt=True)), reserve=10)


def cost_step(options: argparse.Namespace) -> None:
    """Replaces one operator at a time and scores the same tokens by prefill: a row per substitution, and none where nothing was replaced."""
    from bench.gpu.deepseek_v4_cost import SELECTED, SUBSTITUTIONS

    results, everything = Results(options), list(range(len(prompts())))
    done = {row["measurement"] for row in results.rows}
    rollout = start(results, eager=True)
    if rollout is None:
        return
    source = next((step for step in ("eager", "graphs", "restart", "cost") if results.kept(step, "generate")), None)
    sampled = results.kept(source, "generate") if source else results.guarded(
        "generate", lambda: results.keep("generate", rollout.generate(everything)))
    if sampled is None:
        return
    token = sampled["token"]
    stock = results.guarded("stock", lambda: rollout.score(everything, token))
    if stock is None:
        return

    def measure(name: str, operator: str, kind: str, substitution: Callable) -> None:
        with substitution():
            scored = rollout.score(everything, token)
        results.add(name, operator=operator, kind=kind, **compare(stock, scored))

    def twice(name: str, run: Callable, substitution: Callable) -> None:
        with substitution():
            results.add(name, operator="indexer", kind="runs", **compare(run(), run()))

    long = list(range(len(prompts())))[classes()["long"]]
    runs = {"scored": lambda: rollout.score(everything, token), "generated, long prompts": lambda: rollout.generate(long)}
    todo: dict[str, Callable] = {}
    for label, run in runs.items():
        todo[f"two runs, {label}"] = lambda n, run=run: twice(n, run, contextlib.nullcontext)
        todo[f"two runs, {label}, {SELECTED}"] = lambda n, run=run: twice(n, run, SUBSTITUTIONS[SELECTED][2])
    for name, (operator, kind, substitution) in SUBSTITUTIONS.items():
        todo[name] = lambda n, o=operator, k=kind, s=substitution: measure(n, o, k, s)
    todo["control: one prompt token changed"] = lambda n: results.add(
        n, operator="-", kind="control", **compare(stock, rollout.score(everything, token, wrong_prompt=True)))
    for name, measurement in todo.items():
        if name not in done:
            results.guarded(name, lambda n=name, m=measurement: m(n), reserve=20)


# ---- checkpoint and training ----------------------------------------------------------------------------------------

def checkpoint_folder(options: argparse.Namespace) -> pathlib.Path:
    return options.work / f"deepseek-v4-slice-{options.experts}"


def tools() -> dict[str, object]:
    """Versions of the packages that compile this model's kernels on first use, None where one is missing, and the compiler they call."""
    found: dict[str, object] = {"nvcc": shutil.which("nvcc"), "CUDA_HOME": os.environ.get("CUDA_HOME")}
    for package in JIT_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    from vllm.utils.import_utils import has_cutedsl, has_deep_gemm, has_tilelang
    from vllm.v1.attention.ops.flashmla import is_flashmla_sparse_supported

    found |= {"deep_gemm found": has_deep_gemm(), "cutedsl found": has_cutedsl(), "tilelang found": has_tilelang()}
    return found | {"flashmla": is_flashmla_sparse_supported()}


def checkpoint_step(options: argparse.Namespace) -> None:
    results, folder = Results(options), checkpoint_folder(options)
    results.guarded("tools", lambda: results.add("tools", **tools()))
    if not folder.exists():
        started = time.monotonic()
        if results.guarded("write", lambda: family.write("slice", folder, experts=options.experts, device="cuda") or True) is None:
            return
        results.add("write", seconds=round(time.monotonic() - started, 1))
    results.add("checkpoint", gib=sum(file.stat().st_size for file in folder.iterdir()) / 2**30, folder=folder.name)


def training_step(options: argparse.Namespace) -> None:
    """transformers' forward in train mode with gradients on, request by request, on the tokens that the rollout sampled."""
    results = Results(options)
    source = next((step for step in ("graphs", "eager", "restart", "cost") if results.kept(step, "generate")), None)
    if source is None:
        raise SystemExit("no sampled tokens to score: run the step eager or graphs first, with the same --out")
    rollout = results.kept(source, "generate")
    started = time.monotonic()
    model = results.guarded("load", lambda: family.load_training(checkpoint_folder(options), "cuda").train())
    if model is None:
        return
    results.add("load", seconds=round(time.monotonic() - started, 1), experts_implementation=model.config._experts_implementation, **memory())
    loads: dict[int, torch.Tensor] = {}

    def count(i: int) -> Callable:
        def hook(module, arguments, output) -> None:
            loads[i] = loads.get(i, 0) + torch.bincount(output[2].flatten(), minlength=module.num_experts)
        return hook

    hooks = [layer.mlp.gate.register_forward_hook(count(i)) for i, layer in enumerate(model.model.layers)]

    def forward(i: int) -> torch.Tensor:
        token = rollout["token"][i].to(model.device)
        ids = torch.cat((torch.tensor(prompts()[i], device=model.device), token))[None]
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=NEW_TOKENS + 1).logits[0, :-1]
        return torch.log_softmax(logits.float(), -1).gather(-1, token[:, None])[:, 0]

    def every() -> dict[str, torch.Tensor]:
        logprob = torch.stack([forward(i).detach().cpu() for i in range(len(prompts()))])
        return results.keep("forward", {"token": rollout["token"], "logprob": logprob})

    own = results.guarded("forward", every)
    if own is None:
        return
    results.add("forward", mean_logprob=float(own["logprob"].mean()), expert_load_max_over_mean={
        i: round(float(n.max() / n.float().mean()), 2) for i, n in loads.items()}, **memory())
    for hook in hooks:
        hook.remove()
    results.compare(f"rollout ({source}, decode) against training", rollout, own)
    if (score := results.kept(source, "score")) is not None:
        results.compare(f"rollout ({source}, prefill) against training", score, own)

    def again() -> None:
        repeated = torch.stack([forward(i).detach().cpu() for i in ALONE])
        results.compare("training, run to run", rows_of(own, list(ALONE)), {"token": own["token"][list(ALONE)], "logprob": repeated}, ALONE)

    def backward() -> None:
        (-forward(0).mean()).backward()
        norms = torch.stack([p.grad.norm(dtype=torch.float32) for p in model.parameters() if p.grad is not None])
        results.add("backward", grad_norm=float(norms.norm()), finite=bool(norms.isfinite().all()), **memory())

    results.guarded("training, run to run", again, reserve=20)
    results.guarded("backward", backward, reserve=20)


# ---- the call -------------------------------------------------------------------------------------------------------

def room_for_checkpoint() -> pathlib.Path:
    """A folder that outlives the call: in memory if there is room for the checkpoint, else on a disk that has it."""
    places = [pathlib.Path("/dev/shm"), pathlib.Path(tempfile.gettempdir()), pathlib.Path.cwd()]
    for place in places:
        if place.is_dir() and (shutil.disk_usage(place).free > CHECKPOINT_BYTES or any(place.glob("deepseek-v4-slice-*"))):
            return place
    raise SystemExit(f"no room for a checkpoint of {CHECKPOINT_BYTES >> 30} GiB in {', '.join(map(str, places))}: name a folder with --work")


def describe(row: dict) -> str:
    """The row as one line."""
    if "compared" in row:
        values = (f"{row['equal']}/{row['compared']} equal, max {row['max']:.3g}, mean {row['mean']:.3g}, K3 {row['k3']:.2e}, "
                  f"same tokens {row['equal_tokens']}/{row['requests']}")
    else:
        rest = {k: v for k, v in row.items() if k not in ("step", "experts", "measurement")}
        values = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in rest.items())
    return f"{row['experts']} {row['step']:10} {row['measurement']:58} {values}"


def run_step(options: argparse.Namespace, step: str, seconds: float) -> None:
    """Runs a step in a process group of its own, ends it when its time is over, prints its rows and stores its log's kernel choices beside them."""
    result, log = options.out / f"{options.experts}-{step}.json", options.out / f"{options.experts}-{step}.log"
    if step not in RESUMED:
        result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.gpu.deepseek_v4_slice", "--step", step, "--seconds", str(seconds - 10), "--out", str(options.out),
               "--work", str(options.work), "--experts", options.experts]
    command += [] if options.memory_gib is None else ["--memory-gib", str(options.memory_gib)]
    command += [] if options.lock is None else ["--lock", str(options.lock)]
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True, env={**ENVIRONMENT, **os.environ})
        try:
            code = str(process.wait(seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = f"stopped after {seconds:.0f} s"
    text = log.read_text(errors="replace")
    if result.exists():
        stored = json.loads(result.read_text())
        limit = [] if options.memory_gib is None else [f"--memory-gib {options.memory_gib:g}"]
        asked = " ".join(["python -m bench.gpu.deepseek_v4_slice --experts", options.experts, "--steps", step, *limit])
        stored |= {"command": asked, "exit": code, "log": list(dict.fromkeys(match[1][:300] for match in LOG_LINES.finditer(text)))}
        result.write_text(json.dumps(stored, indent=1) + "\n")
        print("\n".join(describe(row) for row in stored["rows"]), flush=True)
    if code != "0":
        print(f"{step}: exit {code}; the log ends with\n{text[-3000:]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for results, arrays and logs; later steps read the arrays")
    parser.add_argument("--work", type=pathlib.Path, help="folder for the checkpoint; default: the first with enough room")
    parser.add_argument("--experts", choices=family.EXPERTS, default="fp8")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="in order; a step that failed does not stop the next")
    parser.add_argument("--memory-gib", type=float, help="limit of a process that shares the device; default: the whole device")
    parser.add_argument("--lock", type=pathlib.Path, help="file that makes measurements of several such processes take turns")
    parser.add_argument("--minutes", type=float, default=9.0, help="for the whole call")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=530.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the slice has 28 GB of FP8 weights and kernels for sm_90")
    complete_pythonpath()
    options.out.mkdir(parents=True, exist_ok=True)
    options.work = options.work or room_for_checkpoint()
    if options.step:
        {"checkpoint": checkpoint_step, "training": training_step, "cost": cost_step}.get(options.step, rollout_step)(options)
        return
    end = time.monotonic() + 60 * options.minutes
    for step in options.steps:
        if (left := end - time.monotonic()) < 30:
            print(f"{step}: not run, {left:.0f} s left")
            continue
        run_step(options, step, left)


if __name__ == "__main__":
    main()

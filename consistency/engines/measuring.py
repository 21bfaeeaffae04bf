"""How fast a rollout is, what it holds in memory, and on which kernels its time goes. For benchmarks; a verdict times `generate` from outside."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

GROUPS: tuple[tuple[str, str], ...] = (
    ("log_softmax and sampling", r"log_?soft_?max|logprob|gumbel|multinomial"),
    ("mamba2_scan", r"selective|chunk_scan|chunk_state|cumsum|state_passing|bmm_chunk|chunk_cb|_append_kernel|_row_kernel|mamba|ssd"),
    ("causal_conv1d", r"conv1d|_update_kernel"),
    ("router", r"topk|_segment_kernel|_logits_kernel|_select_kernel|router|sigmoid"),
    ("moe_experts", r"moe|expert|_grouped_kernel|_combine_kernel"),
    ("attention", r"flash|fmha|attention|attn|reshape_and_cache|mha"),
    ("gated_rms_norm", r"gated"),
    ("rms_norm", r"rms_?norm|layer_?norm"),
    ("rotary", r"rotary|rope"),
    ("activation", r"relu|silu|act_and_mul"),
    ("log_softmax and sampling", r"soft_?max|_block_kernel|_merge_kernel|logprob|sampl|gumbel|argmax|exponential|multinomial|distribution|rank|sort"),
    ("linear", r"gemm|nvjet|cublas|cutlass|gemv|split_?k|_ascending_kernel|addmm|aten::mm|linear|matmul|onednn|mkldnn"),
    ("copies and fills", r"memcpy|memset|copy|fill|cat|index|gather|scatter|slot_mapping|arange|zero"),
    ("fused by Inductor", r"triton_(poi|red|per|tem)"),
    ("elementwise", r"elementwise|reduce|aten::"),
)
"""(group, pattern of kernel names) in the order in which they are tried; the first that is found in the name takes the kernel"""


def measure(rollout, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Decode of fixed length with log-probabilities, all requests at once.

    Returns tokens, seconds, prefill_seconds (until every request has its first token), decode_ms (median step after that), steps,
    preemptions, blocks (most blocks of the cache in use).
    """
    blocks = 0
    preempted = _Counter(rollout.scheduler, "_preempt_request")
    stamps = [time.perf_counter()]
    prefilled = None
    tokens = 0
    with preempted:
        for outputs in _steps(rollout, prompts, max_tokens):
            stamps.append(time.perf_counter())
            tokens += sum(len(o.outputs[0].token_ids) for o in outputs if o.finished)
            blocks = max(blocks, _used_blocks(rollout))
            if prefilled is None and not rollout.scheduler.waiting and all(r.num_output_tokens for r in rollout.scheduler.running):
                prefilled = len(stamps) - 1
    if prefilled is None:
        prefilled = len(stamps) - 1
    decode = [b - a for a, b in zip(stamps[prefilled:], stamps[prefilled + 1:], strict=False)]
    return {"tokens": tokens, "seconds": stamps[-1] - stamps[0], "prefill_seconds": stamps[prefilled] - stamps[0],
            "decode_ms": statistics.median(decode) * 1e3 if decode else None, "steps": len(stamps) - 1, "preemptions": preempted.count,
            "blocks": blocks}


def memory(rollout) -> dict[str, Any]:
    """GiB: most that torch had allocated, the caches' pool among it, the process's and the device's use; and the cache's blocks."""
    pool = _pool_bytes(getattr(rollout.runner, "kv_caches", []))
    count = rollout.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks or 0
    said: dict[str, Any] = {"pool_gib": pool / 2**30, "blocks": count, "block_mib": pool / count / 2**20 if count else None}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        said |= {"peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30, "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
                 "device_used_gib": (total - free) / 2**30}
    return said


def profile(rollout, prompts: list[list[int]], max_tokens: int, steps: int, top: int = 40) -> dict[str, Any]:
    """Kernel time of `steps` decode steps with all requests running, per step in microseconds.

    Returns wall_us, device_us (sum of kernels), groups {name: us}, kernels [{name, group, us, calls}]. On a CPU the operators of torch count as
    kernels, by their own time.
    """
    on_device = torch.cuda.is_available()
    activities = [torch.profiler.ProfilerActivity.CUDA if on_device else torch.profiler.ProfilerActivity.CPU]
    walk = _steps(rollout, prompts, max_tokens)
    for _ in walk:
        if not rollout.scheduler.waiting and all(r.num_output_tokens > 2 for r in rollout.scheduler.running):
            break
    if on_device:
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        began = time.perf_counter()
        done = 0
        for done, _ in enumerate(walk, 1):
            if done == steps:
                break
        if on_device:
            torch.cuda.synchronize()
        wall = time.perf_counter() - began
    for _ in walk:
        pass
    if not done:
        raise ValueError(f"no decode step was left to profile; max_tokens is {max_tokens}, give more than {steps + 4}")
    kernels: dict[str, list[float]] = {}
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if on_device else event.self_cpu_time_total
        if microseconds > 0:
            entry = kernels.setdefault(event.key, [0.0, 0])
            entry[0] += microseconds
            entry[1] += event.count
    return summarize({name: (us / done, calls / done) for name, (us, calls) in kernels.items()}, wall / done * 1e6, top)


def summarize(kernels: dict[str, tuple[float, float]], wall_us: float, top: int = 40) -> dict[str, Any]:
    """kernels: name -> (microseconds, calls) of one step."""
    groups: dict[str, float] = {}
    for name, (microseconds, _) in kernels.items():
        groups[group_of(name)] = groups.get(group_of(name), 0.0) + microseconds
    ordered = sorted(kernels.items(), key=lambda item: -item[1][0])
    return {"wall_us": wall_us, "device_us": sum(us for us, _ in kernels.values()), "groups": dict(sorted(groups.items(), key=lambda g: -g[1])),
            "kernels": [{"name": name[:160], "group": group_of(name), "us": us, "calls": calls} for name, (us, calls) in ordered[:top]]}


def group_of(name: str) -> str:
    """The group of a kernel, `other` if no pattern is found in its name."""
    return next((group for group, pattern in GROUPS if re.search(pattern, name, re.IGNORECASE)), "other")


def _steps(rollout, prompts: list[list[int]], max_tokens: int) -> Iterator[list]:
    """Adds the requests and yields what each engine step hands out, which is nothing but finished requests."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(temperature=1.0, max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False,
                            skip_reading_prefix_cache=True, output_kind=RequestOutputKind.FINAL_ONLY)
    engine = rollout.llm.llm_engine
    for index, prompt in enumerate(prompts):
        rollout._count += 1
        engine.add_request(f"{rollout._count}/{index}", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        yield engine.step()


def _used_blocks(rollout) -> int:
    pool = rollout.scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks - pool.get_num_free_blocks()


def _pool_bytes(caches: Any) -> int:
    """Bytes of the distinct storages in a nest of lists of tensors."""
    storages: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            for inner in value:
                walk(inner)

    walk(caches)
    return sum(storages.values())


class _Counter:
    """Counts the calls of a method while the block runs."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.count = owner, name, 0

    def __enter__(self) -> None:
        method: Callable = getattr(self.owner, self.name)

        def counted(*args, **kwargs):
            self.count += 1
            return method(*args, **kwargs)

        setattr(self.owner, self.name, counted)

    def __exit__(self, *_: object) -> None:
        delattr(self.owner, self.name)

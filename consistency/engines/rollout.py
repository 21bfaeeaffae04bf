"""The rollout: vLLM in this process, driven step by step so that a schedule can be imposed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from consistency.contract import Contract
from consistency.engines.arrays import arrays
from consistency.models.catalog import FAMILIES

DEFAULTS = {"plugin": True, "max_num_seqs": 64, "max_model_len": 512, "max_num_batched_tokens": 2048, "logprobs_mode": "raw_logprobs",
            "enable_prefix_caching": True, "eager": True, "threads": 1, "device": "cpu", "compile": True, "runner": None,
            "gpu_memory_utilization": 0.4, "kv_cache_gib": None, "trace": False}
"""`compile`: torch.compile beside CUDA graphs, unless eager; `runner`: `v1`, `v2` or None; `kv_cache_gib`: size of the caches, instead of what is
left of the device's share; `trace`: graphs that also write fingerprints, without compile"""


@dataclass
class Schedule:
    """What one run of requests must go through."""

    groups: list[list[int]] | None = None
    """request indices that run together, group after group; None: all together"""
    chunk: int | None = None
    """longest prefill of one request in one step, tokens"""
    preempt_every: int | None = None
    """preempt every running request each so many steps"""
    prefix_cache: str = "off"
    """`off`: no request reads it; `cold`: emptied first; `warm`: filled by a run of the same requests first"""
    stagger: int = 0
    """request i joins i * stagger steps after its group started"""


class Rollout:
    """vLLM with a contract bound. The engine core runs in this process, so state is at hand and a job is one process."""

    def __init__(self, family: str, checkpoint: Path, contract: Contract, kernels: Path | None = None, engine: dict | None = None):
        settings = {**DEFAULTS, **(engine or {})}
        unknown = set(settings) - set(DEFAULTS)
        if unknown:
            raise ValueError(f"unknown rollout setting '{sorted(unknown)[0]}'; known: {', '.join(DEFAULTS)}")
        self.family, self.checkpoint, self.settings = family, checkpoint, settings
        if settings["plugin"]:
            from consistency.engines import plugin

            self.bindings = plugin.install(kernels, settings["device"])
            self.bindings.bind(contract)
        elif contract != Contract():
            raise ValueError("a contract needs the plugin")
        else:
            self.bindings = None
        from vllm import LLM

        torch.set_num_threads(settings["threads"])
        tracers = self._graph_tracers()
        self.llm = LLM(
            str(checkpoint), enforce_eager=settings["eager"], skip_tokenizer_init=True, max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"], max_num_batched_tokens=settings["max_num_batched_tokens"],
            logprobs_mode=settings["logprobs_mode"], disable_log_stats=True, seed=0,
            enable_prefix_caching=settings["enable_prefix_caching"] and "prefix_cache" not in FAMILIES[family].cannot,
            **(self._cuda() if settings["device"] == "cuda" else self._forced_tokens()))
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.model = self.runner.model
        self.graph_tracer = tracers[0] if tracers else None
        self.replays_traces = self.llm.llm_engine.vllm_config.model_config.enable_trace_replay
        self._count = 0

    @staticmethod
    def _forced_tokens() -> dict:
        from consistency.engines.forced_tokens import ForcedTokens

        return {"logits_processors": [ForcedTokens]}

    def _graph_tracers(self) -> list:
        settings = self.settings
        if not settings["trace"] or settings["eager"]:
            return []
        if settings["compile"] or settings["runner"] == "v1":
            raise ValueError("'trace' records inside graphs of the V2 runner that are not compiled: set compile false, or eager true")
        from consistency.engines import graph_trace

        return graph_trace.install(self.family, settings["max_num_batched_tokens"])

    def traced(self, recorder):
        """Context in which every step is recorded."""
        from consistency.engines import graph_trace, rollout_trace

        if not self.settings["eager"] and self.graph_tracer is None:
            raise ValueError("this engine replays graphs that were captured without fingerprints; start it with 'trace' or 'eager'")
        return graph_trace.traced(self, recorder) if self.graph_tracer else rollout_trace.traced(self, recorder)

    def _cuda(self) -> dict:
        """Engine arguments that only a GPU has."""
        settings = self.settings
        arguments: dict = {"gpu_memory_utilization": settings["gpu_memory_utilization"]}
        if settings["kv_cache_gib"]:
            arguments["kv_cache_memory_bytes"] = int(settings["kv_cache_gib"] * (1 << 30))
        # the V2 runner forces tokens itself
        arguments |= self._forced_tokens() if settings["runner"] == "v1" else {"enable_trace_replay": True}
        if "mamba2_scan" in FAMILIES[self.family].operators:
            arguments["mamba_ssm_cache_dtype"] = "float32"
        if not settings["eager"]:
            arguments["compilation_config"] = {} if settings["compile"] else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        from consistency.engines import seeded_weights

        if seeded_weights.read(self.checkpoint) is not None:
            seeded_weights.register_loader()
            arguments["load_format"] = seeded_weights.FORMAT
        return arguments

    def resolved(self) -> dict:
        """The engine configuration that a throughput comparison must find equal on both arms."""
        config = self.llm.llm_engine.vllm_config
        return {**self.settings, "plugin": None,
                "dtype": str(config.model_config.dtype), "block_size": config.cache_config.block_size,
                "prefix_caching": config.cache_config.enable_prefix_caching, "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
                "ssm_cache_dtype": config.cache_config.mamba_ssm_cache_dtype, "kv_cache_dtype": config.cache_config.cache_dtype,
                "compilation_mode": str(config.compilation_config.mode), "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
                "async_scheduling": config.scheduler_config.async_scheduling, "num_blocks": config.cache_config.num_gpu_blocks,
                "torch_threads": torch.get_num_threads(), "v2_model_runner": config.use_v2_model_runner}

    # ---- running requests -------------------------------------------------------------------------------------------

    def run(self, prompts: list[list[int]], params: list, schedule: Schedule) -> tuple[list, dict]:
        """Runs requests under a schedule.

        Returns (vLLM's outputs in request order, counters: steps, preemptions, cached_tokens, longest_prefill). Raises ValueError when a
        schedule cannot be imposed.
        """
        engine = self.llm.llm_engine
        outputs: dict[int, object] = {}
        counters = {"steps": 0, "preemptions": 0, "cached_tokens": 0, "prefill_chunks": 0}
        if schedule.prefix_cache == "cold":
            self.llm.reset_prefix_cache()
        elif schedule.prefix_cache == "warm":
            fill = [self._replace(p, skip_reading_prefix_cache=True) for p in params]
            self.run(prompts, fill, Schedule(groups=schedule.groups, prefix_cache="cold"))
        self.scheduler.scheduler_config.long_prefill_token_threshold = schedule.chunk or 0
        self._count_prefills(counters)
        try:
            for group in schedule.groups or [list(range(len(prompts)))]:
                waiting = list(enumerate(group))
                step = 0
                while waiting or engine.has_unfinished_requests():
                    while waiting and waiting[0][0] * schedule.stagger <= step:
                        index = waiting.pop(0)[1]
                        self._count += 1
                        engine.add_request(f"{self._count}/{index}", {"prompt_token_ids": prompts[index]}, params[index])
                    if schedule.preempt_every and step and step % schedule.preempt_every == 0 and self.scheduler.running:
                        counters["preemptions"] += len(self.scheduler.running)
                        self.llm.reset_prefix_cache(reset_running_requests=True)
                    for output in engine.step():
                        if output.finished:
                            outputs[int(output.request_id.split("/")[1])] = output
                            counters["cached_tokens"] += output.num_cached_tokens or 0
                    step += 1
                    counters["steps"] += 1
        except BaseException:
            engine.abort_request([r.request_id for r in [*self.scheduler.running, *self.scheduler.waiting]])
            raise
        finally:
            self.scheduler.scheduler_config.long_prefill_token_threshold = 0
            del self.scheduler.schedule
        return [outputs[i] for i in range(len(prompts))], counters

    def _count_prefills(self, counters: dict) -> None:
        """Counts, from what the scheduler really schedules, how often a request did prefill work in a step."""
        schedule = self.scheduler.schedule

        def counted(*args, **kwargs):
            output = schedule(*args, **kwargs)
            for name, tokens in output.num_scheduled_tokens.items():
                request = self.scheduler.requests[name]
                counters["prefill_chunks"] += request.num_computed_tokens - tokens < request.num_prompt_tokens
            return output

        self.scheduler.schedule = counted

    @staticmethod
    def _replace(params, **changes):
        copy = params.clone()
        for name, value in changes.items():
            setattr(copy, name, value)
        return copy

    def _params(self, *, max_tokens: int, temperature: float, forced: list[int] | None = None, read_cache: bool = False,
                prompt_logprobs: int | None = None, logprobs: int | None = 0, seed: int | None = None):
        from vllm import SamplingParams

        force = {} if not forced else {"trace_decode_token_ids": forced} if self.replays_traces else {"extra_args": {"forced_tokens": forced}}
        return SamplingParams(
            temperature=temperature, max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True, logprobs=logprobs, detokenize=False,
            prompt_logprobs=prompt_logprobs, skip_reading_prefix_cache=not read_cache, seed=seed, **force)

    def generate(self, prompts: list[list[int]], max_tokens: list[int], seed: int, temperature: float, processed: bool = False) -> tuple[dict, dict]:
        """Samples. `processed`: log-probabilities after the temperature. Returns (log-probability arrays, counters).

        On the CPU the engine's generator is seeded, not each request: vLLM's per-request CPU generators cannot be carried over a chunked prefill.
        """
        own = self.settings["device"] != "cpu"
        params = [self._params(max_tokens=n, temperature=temperature, seed=seed * 1_000_003 + i if own else None) for i, n in enumerate(max_tokens)]
        sampler = self.runner.sampler
        parts = [sampler, *([sampler.topk_topp_sampler] if hasattr(sampler, "topk_topp_sampler") else [])]
        mode = sampler.logprobs_mode
        for part in parts if processed else []:
            part.logprobs_mode = "processed_logprobs"
        torch.manual_seed(seed)
        try:
            outputs, counters = self.run(prompts, params, Schedule())
        finally:
            for part in parts:
                part.logprobs_mode = mode
        return _sampled(outputs), counters

    def replay(self, requests: list[dict], schedule: Schedule, temperature: float | None = None) -> tuple[dict, dict]:
        """Decodes given tokens under a schedule. Returns (log-probability arrays, counters)."""
        params = [self._params(max_tokens=len(r["tokens"]), temperature=temperature or 1.0, forced=r["tokens"],
                               read_cache=schedule.prefix_cache != "off") for r in requests]
        outputs, counters = self.run([r["prompt"] for r in requests], params, schedule)
        return _sampled(outputs), counters

    def score(self, requests: list[dict], schedule: Schedule) -> tuple[dict, dict]:
        """Log-probabilities of given tokens by prefill (prompt log-probabilities)."""
        params = [self._params(max_tokens=1, temperature=1.0, prompt_logprobs=0, logprobs=None) for _ in requests]
        outputs, counters = self.run([r["prompt"] + r["tokens"] for r in requests], params, schedule)
        rows = []
        for i, (request, output) in enumerate(zip(requests, outputs, strict=True)):
            start = len(request["prompt"])
            for j, token in enumerate(request["tokens"]):
                rows.append((i, j, token, output.prompt_logprobs[start + j][token].logprob))
        return arrays(rows), counters

    # ---- weights ----------------------------------------------------------------------------------------------------

    def reload(self, checkpoint: Path | None) -> None:
        """Writes a checkpoint's weights in place through vLLM's own reload."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint or self.checkpoint)})
        self.llm.reset_prefix_cache()

    def parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.model.named_parameters()


def _sampled(outputs) -> dict[str, torch.Tensor]:
    return arrays([(i, j, token, entry[token].logprob)
                   for i, output in enumerate(outputs)
                   for j, (token, entry) in enumerate(zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True))])

"""Start vLLM on this device with seeded random weights at true widths and few layers, generate, and record how long each step took.

`python -m bench.gpu.engine_start --model qwen3 --out FILE`. The checkpoint is an ordinary directory of safetensors, so the engine's own loader runs.
"""

import argparse
import json
import os
import pathlib
import tempfile
import time
import traceback

import torch

from bench.gpu.measure import write_results

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "attention_bias": False, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2,
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 2688, "vocab_size": 131072, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856, "mlp_hidden_act": "relu2", "ssm_state_size": 128, "mamba_num_heads": 64,
    "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "expand": 2, "use_conv_bias": True, "chunk_size": 128, "n_routed_experts": 128,
    "n_shared_experts": 1, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "num_experts_per_tok": 6,
    "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 8192,
    "mamba_ssm_cache_dtype": "float32", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}


def qwen3_weights(config: dict, normal) -> dict[str, torch.Tensor]:
    """Parameters by checkpoint name."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    hidden, heads, kv, dim, inner = (config[name] for name in names)
    ones = lambda *shape: torch.ones(shape, dtype=torch.bfloat16)  # noqa: E731
    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=0.06), "model.norm.weight": ones(hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights |= {at + f"{n}_layernorm.weight": ones(hidden) for n in ("input", "post_attention")}
        weights |= {at + f"self_attn.{n}_norm.weight": ones(dim) for n in "qk"}
        weights |= {at + f"self_attn.{n}_proj.weight": normal(h * dim, hidden) for n, h in (("q", heads), ("k", kv), ("v", kv))}
        weights[at + "self_attn.o_proj.weight"] = normal(hidden, heads * dim)
        weights |= {at + f"mlp.{n}_proj.weight": normal(inner, hidden) for n in ("gate", "up")}
        weights[at + "mlp.down_proj.weight"] = normal(hidden, inner)
    return weights


def nemotron_weights(config: dict, normal) -> dict[str, torch.Tensor]:
    """Parameters by checkpoint name."""
    hidden, heads, state, groups = (config[k] for k in ("hidden_size", "mamba_num_heads", "ssm_state_size", "n_groups"))
    inner, dim = heads * config["mamba_head_dim"], config["head_dim"]
    channels = inner + 2 * groups * state
    ones = lambda *shape: torch.ones(shape, dtype=torch.bfloat16)  # noqa: E731
    weights = {"backbone.embeddings.weight": normal(config["vocab_size"], hidden, scale=1.0), "backbone.norm_f.weight": ones(hidden),
               "lm_head.weight": normal(config["vocab_size"], hidden, scale=0.05)}
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        at = f"backbone.layers.{layer}."
        weights[at + "norm.weight"] = ones(hidden)
        at += "mixer."
        if kind == "M":
            steps = torch.exp(torch.linspace(-6.9, -2.3, heads))
            weights |= {at + "in_proj.weight": normal(inner + channels + heads, hidden), at + "conv1d.weight": normal(channels, 1, 4, scale=0.5),
                        at + "conv1d.bias": normal(channels, scale=0.1), at + "dt_bias": (steps + torch.log(-torch.expm1(-steps))).bfloat16(),
                        at + "A_log": torch.log(torch.linspace(1, 16, heads)).bfloat16(), at + "D": ones(heads), at + "norm.weight": ones(inner),
                        at + "out_proj.weight": normal(hidden, inner)}
        elif kind == "*":
            q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
            weights |= {at + f"{n}_proj.weight": normal(size, hidden) for n, size in (("q", q), ("k", kv), ("v", kv))}
            weights[at + "o_proj.weight"] = normal(hidden, q)
        elif kind == "E":
            weights |= {at + "gate.weight": normal(config["n_routed_experts"], hidden, scale=0.04),
                        at + "gate.e_score_correction_bias": normal(config["n_routed_experts"], scale=0.02).float()}
            for name, size in [(f"experts.{e}", config["moe_intermediate_size"]) for e in range(config["n_routed_experts"])] + [
                    ("shared_experts", config["moe_shared_expert_intermediate_size"])]:
                weights |= {at + f"{name}.up_proj.weight": normal(size, hidden), at + f"{name}.down_proj.weight": normal(hidden, size)}
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("qwen3", "nemotron-3.5"), required=True)
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs and torch.compile instead of eager")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/results/engine-start.json"))
    options = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # FlashInfer compiles its sampling kernels at the first start with graphs, which takes minutes where no cache is installed
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    row: dict[str, object] = {"model": options.model, "mode": "graphs" if options.graphs else "eager"}
    started = time.perf_counter()

    def step(name: str) -> None:
        nonlocal started
        row[f"{name}_s"] = round(time.perf_counter() - started, 2)
        started = time.perf_counter()

    generator = torch.Generator("cuda").manual_seed(11)

    def normal(*shape: int, scale: float = 0.02) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").mul_(scale).bfloat16().cpu()

    try:
        from safetensors.torch import save_file

        if options.model == "qwen3":
            config = {**QWEN3, "num_hidden_layers": 4}
            weights = qwen3_weights(config, normal)
        else:
            config = {**NEMOTRON, "hybrid_override_pattern": "M*EM", "num_hidden_layers": 4}
            weights = nemotron_weights(config, normal)
        # shared memory, not the disk: the checkpoint is read once
        with tempfile.TemporaryDirectory(dir="/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None) as folder:
            (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
            save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
            torch.cuda.empty_cache()
            step("weights")
            import vllm

            row["vllm"] = vllm.__version__
            step("import")
            llm = vllm.LLM(folder, skip_tokenizer_init=True, enforce_eager=not options.graphs, max_model_len=2048, gpu_memory_utilization=0.5,
                           max_num_seqs=64, enable_prefix_caching=False, disable_log_stats=True)
            step("start")
            prompts = [{"prompt_token_ids": [7 + (13 * i + 3 * j) % 9973 for j in range(20 + 11 * i)]} for i in range(16)]
            parameters = vllm.SamplingParams(temperature=1.0, max_tokens=64, logprobs=0, detokenize=False, ignore_eos=True)
            outputs = llm.generate(prompts, parameters, use_tqdm=False)
            step("generate")
            logprobs = [next(iter(position.values())).logprob for o in outputs for position in o.outputs[0].logprobs]
            row |= {"tokens": len(logprobs), "mean_logprob": sum(logprobs) / len(logprobs)}
            rescored = llm.generate(
                [{"prompt_token_ids": o.prompt_token_ids + list(o.outputs[0].token_ids)} for o in outputs],
                vllm.SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
            step("rescore")
            prefill = [r.prompt_logprobs[len(o.prompt_token_ids) + i][t].logprob
                       for o, r in zip(outputs, rescored, strict=True) for i, t in enumerate(o.outputs[0].token_ids)]
            differences = [abs(a - b) for a, b in zip(logprobs, prefill, strict=True)]
            row |= {"equal_to_prefill": sum(d == 0 for d in differences), "max_difference": max(differences)}
    except Exception as error:
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}"[:1500]
    print(json.dumps(row), flush=True)
    write_results(options.out, [row])


if __name__ == "__main__":
    main()

"""What an engine must not be started with while a contract is bound: features whose log-probabilities nobody has shown to be exact."""

from __future__ import annotations

import functools

from consistency.contract import ContractError

REASONS = {
    "LoRA": "an adapter adds products to every layer, which no exact operator computes and training does not see",
    "speculative decoding": "drafted tokens are scored several at a time, in a way that no condition covers, and rejection changes what is sampled",
    "an FP8 KV cache": "keys and values are rounded a second time in the rollout and not in training",
    "quantised weights": "the exact operators take bf16 weights, and training would hold others",
}


def refused(vllm_config) -> list[str]:
    """Names of the refused features that a resolved vLLM configuration has on."""
    cache = str(vllm_config.cache_config.cache_dtype)
    found = {"LoRA": vllm_config.lora_config is not None, "speculative decoding": vllm_config.speculative_config is not None,
             "an FP8 KV cache": "fp8" in cache or "e4m3" in cache or "e5m2" in cache, "quantised weights": vllm_config.quant_config is not None}
    return [name for name, on in found.items() if on]


def check(vllm_config) -> None:
    """Raises ContractError if the configuration has a refused feature on."""
    for name in refused(vllm_config):
        raise ContractError(f"{name} cannot be used with a contract: {REASONS[name]}; start the engine without it")


def watch(bindings) -> None:
    """Checks every engine configuration that is made in this process from now on, and makes what is bound part of it.

    vLLM keeps compiled graphs on disk under a hash of the configuration; without that a graph of another contract, or of stock, would be taken.
    """
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    @functools.wraps(create)
    def checked(self, *args, **kwargs):
        made = create(self, *args, **kwargs)
        check(made)
        made.additional_config["consistency"] = bindings.key()
        return made

    EngineArgs.create_engine_config = checked

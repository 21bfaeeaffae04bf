"""Environment variables that have to stand before torch and vLLM are imported."""

from __future__ import annotations

import os


def prepare(threads: int, device: str = "cpu", runner: str | None = None) -> None:
    """Settings vLLM reads at import time. The engine core stays in this process. runner: vLLM's model runner, `v1`, `v2` or None, its choice."""
    os.environ.update({
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"), "VLLM_PLUGINS": "", "OMP_NUM_THREADS": str(threads)})
    if device == "cpu":
        # nothing is compiled at this scale
        os.environ.update({"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"), "TORCHDYNAMO_DISABLE": "1",
                           "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
        return
    # FlashInfer builds its sampling kernels for minutes at the first start; requests here use neither top-k nor top-p, so it would sample nothing
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = {"v1": "0", "v2": "1"}[runner]

"""Environment variables that have to stand before torch and vLLM are imported."""

from __future__ import annotations

import os


def prepare(threads: int) -> None:
    """Settings vLLM reads at import time. The engine core stays in this process and compiles nothing at this scale."""
    os.environ.update({
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"), "VLLM_PLUGINS": "",
        "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"})

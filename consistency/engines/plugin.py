"""vLLM general plugin: installs the classes and patches through which a contract takes effect.

Loaded by vLLM in every process through the entry point `vllm.general_plugins`. It acts only where a contract is asked for
(`CONSISTENCY_CONTRACT`) or where a job calls `install` itself; otherwise vLLM stays untouched.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from consistency.bindings import Bindings, rollout
from consistency.contract import Contract, ContractError

TESTED_VLLM = ("0.32.0",)

_installed = False


def register() -> None:
    """Entry point. Reads CONSISTENCY_CONTRACT (path of a contract.toml) and CONSISTENCY_KERNELS (folder)."""
    path = os.environ.get("CONSISTENCY_CONTRACT")
    if path:
        kernels = os.environ.get("CONSISTENCY_KERNELS")
        install(Path(kernels) if kernels else None).bind(Contract.load(Path(path)))


def install(kernels: Path | None = None, device: str | None = None) -> Bindings:
    """Installs our classes and patches once per process and returns the rollout's binding table. device: `cpu` or `cuda`; None asks vLLM's platform.

    Raises ContractError for a vLLM version outside the tested range.
    """
    global _installed
    if not _installed:
        import vllm
        from vllm.platforms import current_platform

        device = device or current_platform.device_type
        if vllm.__version__.split("+")[0] not in TESTED_VLLM:
            raise ContractError(f"vllm {vllm.__version__} is outside the tested range ({', '.join(TESTED_VLLM)}); install a tested version")
        from consistency.engines import limits, vllm_classes, vllm_patches

        limits.watch(rollout)
        vllm_classes.register()
        vllm_patches.apply()
        importlib.import_module(f"consistency.engines.vllm_{device}").apply()
        rollout.device = device
        _installed = True
    rollout.kernels = kernels or rollout.kernels
    return rollout

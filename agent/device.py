"""The accelerator of this machine, and with which settings the engines of a scale run on it. Asked of NVIDIA's driver; no torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import checkpoint as checkpoints
from agent.errors import UserError
from consistency.models.catalog import FAMILIES
from consistency.sizes import SIZES, Need, Sizes, need
from sandboxes import Limits

PROVEN = "9.0"
"""compute capability on which every exactness fact of the operators was measured"""
LARGEST_SHARE = 0.92
"""of a device's memory that all processes together may plan with; the rest is contexts and fragments"""
START_SECONDS = 900.0
"""an engine start with cold caches compiles every kernel"""
STEP_SECONDS = 600.0
JOB_SECONDS = 7200.0
GPU_MEMORY_BYTES = 1 << 40
"""resident memory that a job on a GPU may hold: mapped device memory counts on some drivers, so the limit that matters is the device's own"""


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    """`9.0` is Hopper"""
    total_gib: float
    free_gib: float
    driver: str
    index: str = "0"
    """as the driver counts"""


def gpus(run: Callable[[list[str]], str | None] | None = None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; without it all that the driver lists. `run` stands in for nvidia-smi in tests."""
    text = (run or _ask_driver)(["--query-gpu=name,compute_cap,memory.total,memory.free,driver_version,index,uuid", "--format=csv,noheader,nounits"])
    found: dict[str, Gpu] = {}
    for line in (text or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 7 and cells[2].isdigit() and cells[3].isdigit():
            found[cells[6]] = Gpu(cells[0], cells[1], int(cells[2]) / 1024, int(cells[3]) / 1024, cells[4], cells[5])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(found.values())
    wanted = [name.strip() for name in visible.split(",") if name.strip()]
    return [gpu for name in wanted for uuid, gpu in found.items() if name == gpu.index or (not name.isdigit() and uuid.startswith(name))]


@contextlib.contextmanager
def held(gpu: Gpu | None) -> Iterator[None]:
    """Keeps other calls of this user off a GPU: two would take each other's memory and spoil each other's times. None: nothing to hold.

    Raises UserError if another call holds it. The kernel drops the lock with its process.
    """
    if gpu is None:
        yield
        return
    path = checkpoints.cache().parent / f"gpu-{gpu.index}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            raise UserError(f"{gpu.name} {gpu.index} is in use by another call (pid {handle.read().strip() or 'unknown'}); wait for it, or choose "
                            "another GPU with CUDA_VISIBLE_DEVICES") from None
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield


def _ask_driver(arguments: list[str]) -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class Setup:
    """With which settings the processes of a family at a scale start."""

    def __init__(self, family: str, scale: str, checkpoint: Path, gpu: Gpu | None = None, sizes: Sizes | None = None) -> None:
        """gpu: the device to plan for; None asks the driver, for scales that need one. Raises UserError if there is none or it is too small."""
        self.family, self.scale = FAMILIES[family], scale
        self.sizes = sizes or SIZES[scale]
        known = self.family.scales.get(scale)
        self.device = known.device if known else "cpu"
        self.gpu, self.need = gpu, None
        if self.device == "cuda":
            self.gpu = gpu or next(iter(gpus()), None)
            if self.gpu is None:
                raise UserError(f"scale {scale} of {family} needs a CUDA device and the driver lists none; run on a GPU or take --scale tiny")
            self.need = need(json.loads((checkpoint / "config.json").read_text(encoding="utf-8")), self.sizes)
            self._check(self.gpu, self.need)

    def _check(self, gpu: Gpu, wanted: Need) -> None:
        least = max(wanted.rollout + self.sizes.headroom_gib, wanted.training_forward)
        if least > gpu.total_gib:
            raise UserError(f"{self.family.name} at scale {self.scale} needs {least:.0f} GiB of device memory, {wanted.weights:.0f} of it for "
                            f"weights; {gpu.name} has {gpu.total_gib:.0f} GiB; take a smaller scale or a larger device")
        if least > gpu.free_gib:
            raise UserError(f"{self.family.name} at scale {self.scale} needs {least:.0f} GiB of device memory; of the {gpu.total_gib:.0f} GiB of "
                            f"{gpu.name} only {gpu.free_gib:.0f} are free; end what else runs there")

    def fit(self, rollouts: int, trainings: int = 0, gradients: bool = True) -> bool:
        """Whether so many processes fit the device at the same time."""
        if self.gpu is None or self.need is None:
            return True
        each = self.need.training if gradients else self.need.training_forward
        return rollouts * self.need.rollout + trainings * each + self.sizes.headroom_gib <= LARGEST_SHARE * self.gpu.total_gib

    @property
    def gradients(self) -> bool:
        """Whether a training process with gradients fits the device by itself."""
        return self.fit(0, 1)

    def rollout(self, *, plugin: bool = True, **changed: Any) -> dict[str, Any]:
        """`engine` of a rollout's job.json. `changed`: `eager`, `compile`, `runner`, ... in place of what stock runs with."""
        settings = {"threads": 1, "max_num_seqs": self.sizes.max_num_seqs, "max_model_len": self.sizes.max_model_len, "plugin": plugin,
                    "logprobs_mode": "raw_logprobs", "enable_prefix_caching": "prefix_cache" not in self.family.cannot}
        if self.gpu is not None and self.need is not None:
            settings |= {"device": "cuda", "eager": False, "threads": 4, "max_num_batched_tokens": self.sizes.max_num_batched_tokens,
                         "gpu_memory_utilization": round(self.need.rollout / self.gpu.total_gib, 3),
                         # given outright: what vLLM would measure as free is wrong while another process starts beside it
                         "kv_cache_gib": round(self.need.caches, 2)}
        return settings | changed

    def training(self, **changed: Any) -> dict[str, Any]:
        """`engine` of a training's job.json."""
        if self.device == "cpu":
            return {"threads": 1, **changed}
        return {"threads": 4, "device": "cuda", "checkpointing": True, **changed}

    def session(self, kernels: Path | None = None, readable: Sequence[Path] = ()) -> dict[str, Any]:
        """Keyword arguments of a Session: patience, environment, limits. `readable`: what the job must see besides its inputs."""
        if self.device == "cpu":
            return {"limits": Limits(readable=tuple(readable))}
        root, environment = caches(kernels)
        limits = Limits(wall_seconds=JOB_SECONDS, memory_bytes=GPU_MEMORY_BYTES, readable=tuple(readable), writable=(root,))
        return {"environment": environment, "start_timeout": START_SECONDS, "step_timeout": STEP_SECONDS, "limits": limits}


def caches(kernels: Path | None = None) -> tuple[Path, dict[str, str]]:
    """Where compiled kernels are kept between jobs, whose home folders are thrown away: the folder, and the variables that say so.

    Triton and Inductor find an entry by the code that was compiled, and the rollout puts its contract into the key of vLLM's cache of whole
    graphs. Jobs with candidate kernels get a folder of their own, so that nothing they leave there reaches anyone else.
    """
    root = checkpoints.cache().parent / "compiled"
    if kernels is not None:
        sources = b"".join(path.name.encode() + path.read_bytes() for path in sorted(kernels.glob("*.py")))
        root = root / f"candidate-{hashlib.sha256(sources).hexdigest()[:12]}"
    folders = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "CUDA_CACHE_PATH": "cuda", "TORCH_EXTENSIONS_DIR": "extensions",
               "FLASHINFER_WORKSPACE_BASE": "flashinfer", "VLLM_CACHE_ROOT": "vllm"}
    for folder in folders.values():
        (root / folder).mkdir(parents=True, exist_ok=True)
    # FlashInfer's sampler is compiled at the first start, for minutes, on a machine whose cache lacks it.
    return root, {**{name: str(root / folder) for name, folder in folders.items()}, "VLLM_DISABLE_COMPILE_CACHE": "0",
                  "VLLM_USE_FLASHINFER_SAMPLER": "0"}

"""The checkpoint both engines load: seeded weights made once per machine, or a local folder that is looked over before an engine is started."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from agent.errors import UserError
from consistency.models import catalog
from consistency.models.catalog import Family

if TYPE_CHECKING:  # the MCP server looks for the device through this module and holds no arrays
    import numpy as np

# Width in bytes, unsigned view and exponent mask per safetensors type: all exponent bits set means infinite or NaN.
_FLOATS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF0000000000000)}
_BLOCK = 1 << 24


def seeded(family: str, scale: str) -> Path:
    """Folder of the seeded checkpoint, made on first use (about 10 s for tiny). Raises UserError if it cannot be made."""
    folder = cache() / f"{family}-{scale}-{_recipe()}"
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "consistency.jobs.make_checkpoint", "--family", family, "--scale", scale, "--out", str(folder)]
    path = [str(Path(__file__).resolve().parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in path if p)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UserError(f"the seeded checkpoint of {family} at scale {scale} could not be made: {last[-1]}")
    return folder


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train-inference-consistency" / "checkpoints"


def _recipe() -> str:
    """Changes when the code that makes seeded weights does, so that an old cache is not taken for a new checkpoint."""
    sources = [*sorted(Path(catalog.__file__).parent.glob("*.py")), Path(catalog.__file__).parents[1] / "jobs" / "make_checkpoint.py"]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources if source.exists())).hexdigest()[:12]


def check(folder: Path, family: Family) -> Path:
    """Raises UserError unless `folder` is a whole checkpoint of the family without NaN or infinity."""
    folder = folder.resolve()
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'} cannot be read ({error}); save the checkpoint again") from None
    found = settings.get("architectures") if isinstance(settings, dict) else None
    if found != [family.architecture]:
        raise UserError(f"{folder} holds {found or 'no architecture'}, but --model {family.name} needs {family.architecture}")
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} holds a LoRA adapter, whose products no exact operator computes; merge it into the weights and save those")
    if quantised := settings.get("quantization_config"):
        raise UserError(f"{folder} holds quantised weights ({quantised.get('quant_method', 'unknown method')}); the exact operators and training "
                        "take bf16: save the checkpoint in bf16")
    import numpy as np

    files = _files(folder)
    if not files:
        raise UserError(f"{folder} holds no .safetensors file; save the checkpoint in that format")
    for path in files:
        for name, bits, mask in _tensors(path):
            if any(((block & mask) == mask).any() for block in np.array_split(bits, max(1, math.ceil(len(bits) / _BLOCK)))):
                raise UserError(f"{path}: {name} holds NaN or infinity; no comparison of log-probabilities means anything with it")
    return folder


def _files(folder: Path) -> list[Path]:
    """Weight files, those an index names among them. Raises UserError for one that the index names and the folder lacks."""
    named: set[str] = set()
    for index in folder.glob("*.safetensors.index.json"):
        try:
            named |= {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index} cannot be read ({error}); copy the checkpoint again") from None
    if absent := sorted(name for name in named if not (folder / name).is_file()):
        raise UserError(f"{folder} lacks {absent[0]}, which its index names; copy the checkpoint again")
    return sorted(folder.glob("*.safetensors"))


def _tensors(path: Path) -> Iterator[tuple[str, np.ndarray, int]]:
    """(name, bits, exponent mask) of every floating-point tensor. Raises UserError for a file that is not whole."""
    import numpy as np

    size = path.stat().st_size
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(f"{path} is truncated or not a safetensors file ({size} bytes); copy the checkpoint again")
        try:
            entries = {name: entry for name, entry in json.loads(handle.read(length)).items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path} is not a safetensors file; copy the checkpoint again") from None
    if size != 8 + length + end:
        raise UserError(f"{path} is truncated: {size} bytes, its header says {8 + length + end}; copy the checkpoint again")
    for name, entry in entries.items():
        if entry["dtype"] in _FLOATS and entry["data_offsets"][1] > entry["data_offsets"][0]:
            view, mask = _FLOATS[entry["dtype"]]
            start, stop = entry["data_offsets"]
            width = np.dtype(view).itemsize
            yield name, np.memmap(path, dtype=view, mode="r", offset=8 + length + start, shape=((stop - start) // width,)), mask

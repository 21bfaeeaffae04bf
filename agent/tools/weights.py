"""A checkpoint that differs from another in every weight, to see whether a running engine follows a weight update."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

LARGEST = 4 << 30
"""bytes of weights above which no second checkpoint is written"""
_WIDTH = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}


def moved_checkpoint(source: Path, target: Path) -> bool:
    """Writes `target`: the last bit of every weight is flipped, or weights made by name get another seed. False if it would be too large."""
    files = sorted(source.glob("*.safetensors"))
    if sum(file.stat().st_size for file in files) > LARGEST:
        return False
    target.mkdir(parents=True)
    seed = source / "seed.json"
    if seed.is_file():  # weights made from their names: another seed is another checkpoint
        shutil.copy(source / "config.json", target)
        described = json.loads(seed.read_text(encoding="utf-8"))
        (target / "seed.json").write_text(json.dumps(described | {"seed": described["seed"] + 1}), encoding="utf-8")
        return True
    for other in source.glob("*.json"):
        shutil.copy(other, target)
    for file in files:
        data = bytearray(file.read_bytes())
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:8 + length]).items():
            if name == "__metadata__" or entry["dtype"] not in _WIDTH:
                continue
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            width = np.dtype(_WIDTH[entry["dtype"]])
            bits = np.frombuffer(data, width, (end - start) // width.itemsize, start)
            bits ^= 1
        (target / file.name).write_bytes(data)
    return True

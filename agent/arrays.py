"""Raw arrays that a job wrote, read without torch and without trust."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?"}
_KEYS = {"request": "<i4", "position": "<i4", "token": "<i8", "logprob": "<f4"}


class BadArrays(ValueError):
    """Arrays that are missing, truncated or of another type than the protocol says; the message is one line."""


def read(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a safetensors file, by name; bfloat16 comes as its bits in uint16. Raises BadArrays."""
    try:
        entries = safetensors.deserialize(path.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise BadArrays(f"{path.name} cannot be read: {error}") from error
    arrays = {}
    for name, entry in entries:
        if entry["dtype"] not in _DTYPES:
            raise BadArrays(f"{path.name}: {name} has the unexpected type {entry['dtype']}")
        arrays[name] = np.frombuffer(entry["data"], dtype=_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def widen(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) as float32 of the same shape, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class LogProbs:
    """One log-probability per sampled token, all four arrays of length N.

    `request` int32 counts from 0 in the order of the step's requests, `position` int32 from 0 at the first sampled token.
    """

    request: np.ndarray
    position: np.ndarray
    token: np.ndarray
    logprob: np.ndarray

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> LogProbs:
        """Raises BadArrays unless all four are there, one-dimensional, equally long and of the protocol's types."""
        for name, dtype in _KEYS.items():
            if name not in arrays:
                raise BadArrays(f"array '{name}' is missing; found {', '.join(sorted(arrays)) or 'none'}")
            if arrays[name].dtype != np.dtype(dtype) or arrays[name].shape != (len(arrays["request"]),):
                raise BadArrays(f"array '{name}' is {arrays[name].dtype}{list(arrays[name].shape)}, expected {np.dtype(dtype)}"
                                f"[{len(arrays['request'])}]")
        return cls(**{name: arrays[name] for name in _KEYS})

    def __len__(self) -> int:
        return len(self.request)

"""Writing files so that no reader ever sees half of one."""

import os
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file as one step, durable before it becomes visible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    draft.replace(path)

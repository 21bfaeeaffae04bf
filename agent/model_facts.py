"""What the parent must know about a checkpoint, read from its config.json alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from agent.errors import UserError


@dataclass(frozen=True)
class ModelFacts:
    vocabulary: int
    special: frozenset[int]
    """token ids with a meaning (end of text, padding); no prompt contains them"""
    scan_chunk: int | None
    """tokens per chunk of a recurrent scan; None: no such layer"""


def read_facts(checkpoint: Path) -> ModelFacts:
    """Raises UserError if there is no usable config.json."""
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = int(config["vocab_size"])
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not the configuration of a language model ({type(error).__name__}: {error}); save the checkpoint again") from None
    ids: set[int] = set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        ids.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    chunk = config.get("chunk_size") or config.get("mamba_chunk_size")
    return ModelFacts(vocabulary, frozenset(ids), int(chunk) if chunk else None)

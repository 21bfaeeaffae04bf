"""Writes a seeded checkpoint of a family at a scale, in the Hugging Face layout that both engines load.

    python -m consistency.jobs.make_checkpoint --family qwen3 --scale tiny --out DIR

Random weights as initialised give almost flat log-probabilities, under which every comparison passes; the head is scaled until the mean
log-probability of a sampled token leaves that regime, and norms, biases and step sizes are spread so that each operator matters.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

HEAD_SCALE = {"qwen3": 6.0, "nemotron-3.5": 6.0}


def build(name: str, scale: str, seed: int = 0):
    """A transformers model in bf16 with seeded weights."""
    import torch
    import transformers

    from consistency.models import family
    from consistency.models.catalog import FAMILIES

    generator = torch.Generator().manual_seed(seed)
    model = getattr(transformers, FAMILIES[name].architecture)(family(name).config(scale))
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if key.endswith("A_log"):
                parameter.copy_(noise.abs().add(0.5).log())
            elif key.endswith("dt_bias"):
                parameter.copy_(noise * 0.5 - 2.0)
            elif key.endswith(".D") or "norm" in key:
                parameter.copy_(1.0 + 0.2 * noise)
            elif key.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif "conv1d" in key:
                parameter.copy_(noise * 0.5)
            elif "embed" in key:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 * (HEAD_SCALE[name] / 2 if "lm_head" in key else 1.0))
    return model.to(torch.bfloat16).eval()


def write(name: str, scale: str, out: Path, seed: int = 0) -> None:
    """Writes the checkpoint to `out` through a temporary sibling, so a reader never sees half of one.

    At true widths the folder holds a seed and no weights: both engines make them on their device, see engines/seeded_weights.py.

    A family whose published format is not what transformers saves (DeepSeek-V4) has a `write` of its own, with its own weights.
    """
    from consistency.engines import seeded_weights
    from consistency.models import family

    module = family(name)
    if own := getattr(module, "write", None):
        own(scale, out, seed)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        if scale in getattr(module, "LAYERS", ()):
            seeded_weights.write(name, scale, temporary, seed)
        else:
            build(name, scale, seed).save_pretrained(temporary)
        try:
            temporary.replace(out)
        except OSError:
            if not (out / "config.json").exists():  # else another process wrote the same weights meanwhile
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", required=True)
    parser.add_argument("--scale", default="tiny")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.family, options.scale, options.out, options.seed)


if __name__ == "__main__":
    main()

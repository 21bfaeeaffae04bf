"""Seeded weights that are made where they are needed: each tensor from its name alone, with the same bits on the CPU and on a GPU.

An element is a hash of (seed, name, index), computed in integers; four 16-bit parts of it are added, which is close to normal (Irwin-Hall,
at most 3.46 standard deviations), and converted, scaled and rounded by operations that IEEE 754 defines. So a model of any size needs no
disk, and neither the order in which tensors are made nor the device can be seen in them.

A checkpoint folder that holds `seed.json` beside `config.json` stands for these weights. vLLM reads it with `load_format="consistency_seeded"`
after `register_loader()`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from consistency.models import family as family_module
from consistency.models.seeded import Entry

FORMAT = "consistency_seeded"
SEED_FILE = "seed.json"
CHUNK = 1 << 23
"""elements hashed at a time; 64-bit intermediates of 64 MB"""
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_STEP, _FIRST, _SECOND = (_signed(v) for v in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _hash(index: torch.Tensor, key: int) -> torch.Tensor:
    """int64 [n] -> int64 [n], the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = index * _STEP + key
    x ^= _shifted(x, 30)
    x *= _FIRST
    x ^= _shifted(x, 27)
    x *= _SECOND
    return x ^ _shifted(x, 31)


def key_of(seed: int, name: str) -> int:
    return _signed(int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little"))


def noise(entry: Entry, seed: int, start: int, stop: int, device: torch.device | str) -> torch.Tensor:
    """fp32 [stop - start]: elements start..stop of the flattened tensor, standard deviation 1."""
    index = torch.arange(start, stop, dtype=torch.int64, device=device)
    paired = entry.form == "paired"
    bits = _hash(index >> 1 if paired else index, key_of(seed, entry.name))
    total = bits & 0xFFFF
    for part in (16, 32, 48):
        total += (bits >> part) & 0xFFFF
    total -= 2 * 0xFFFF
    if paired:
        total *= 1 - 2 * (index & 1)
    return total.to(torch.float32).mul_(_UNIT)


_UNIT = float(torch.tensor(((1 << 32) - 1) / 3.0, dtype=torch.float64).rsqrt())
"""variance of the sum of four integers uniform in 0..65535 is (2^32 - 1) / 3"""


def fill(target: torch.Tensor, entry: Entry, seed: int) -> torch.Tensor:
    """Writes the tensor of `entry` into `target` (its shape, its device, its dtype or a wider one) and returns it."""
    assert target.shape == entry.shape and target.is_contiguous(), f"{entry.name}: expected {entry.shape}, found {tuple(target.shape)}"
    dtype, flat = getattr(torch, entry.dtype), target.view(-1)
    if entry.form in ("decay", "step"):
        flat.copy_(_small(entry, seed).to(dtype))
        return target
    for start in range(0, flat.numel(), CHUNK):
        stop = min(start + CHUNK, flat.numel())
        values = noise(entry, seed, start, stop, target.device).mul_(entry.std)
        if entry.mean:
            values += entry.mean
        flat[start:stop] = values.to(dtype)
    return target


def _small(entry: Entry, seed: int) -> torch.Tensor:
    """Vectors whose formula has transcendental functions are made on the CPU: only there do their bits not depend on the device."""
    uniform = (noise(entry, seed, 0, entry.shape[0], "cpu").double() / 2 ** 0.5).erf() / 2 + 0.5
    if entry.form == "decay":
        return (1 + 15 * uniform).log()
    step = (-6.9 + 4.6 * uniform).exp()
    return step + (-(-step).expm1()).log()


def entries(family: str, config) -> list[Entry]:
    """Every tensor of the checkpoint, in its order. Raises ValueError for a family without seeded weights by name."""
    own = getattr(family_module(family), "seeded_entries", None)
    if own is None:
        raise ValueError(f"{family} has no seeded weights by name; write a checkpoint instead")
    return list(own(config))


def tensors(family: str, config, seed: int, device: torch.device | str) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, tensor), one at a time."""
    for entry in entries(family, config):
        yield entry.name, fill(torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device=device), entry, seed)


def iterate(family: str, scale: str, seed: int, device: torch.device | str) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, tensor) of a scale, one at a time."""
    return tensors(family, family_module(family).config(scale), seed, device)


# ---- checkpoint folders -------------------------------------------------------------------------------------------------


def write(family: str, scale: str, folder: Path, seed: int) -> None:
    """Writes config.json, generation_config.json and seed.json to an existing folder."""
    from transformers import GenerationConfig

    from consistency.models.catalog import FAMILIES

    config = family_module(family).config(scale)
    config.architectures = [FAMILIES[family].architecture]
    config.save_pretrained(folder)
    GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id).save_pretrained(folder)
    (folder / SEED_FILE).write_text(json.dumps({"family": family, "scale": scale, "seed": seed}) + "\n", encoding="utf-8")


def read(folder: Path) -> dict | None:
    """{"family", "scale", "seed"} of a folder with seeded weights, None for any other. Raises ValueError for a file that is not of this form."""
    path = Path(folder) / SEED_FILE
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"family": str(found["family"]), "scale": str(found["scale"]), "seed": int(found["seed"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected {{\"family\", \"scale\", \"seed\"}}; make the checkpoint again ({error})") from error


# ---- transformers -------------------------------------------------------------------------------------------------------


def build(folder: Path, dtype: torch.dtype, device: torch.device | str):
    """A transformers model with the seeded weights of `folder`, made on `device` in `dtype` (the values are rounded to bf16 first)."""
    import transformers
    from transformers.initialization import no_init_weights

    from consistency.models.catalog import FAMILIES

    about = read(folder)
    architecture = getattr(transformers, FAMILIES[about["family"]].architecture)
    config = architecture.config_class.from_pretrained(folder)
    with no_init_weights(), torch.device(device):
        model = architecture._from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    refill(model, folder)
    return model.eval()


@torch.no_grad()
def refill(model, folder: Path) -> None:
    """Writes the seeded weights of `folder` into a transformers model in place. Raises ValueError if a tensor has no place, or a place no tensor."""
    about = read(folder)
    table = {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}}
    missing = set(table)
    for entry in entries(about["family"], model.config):
        name, expert = training_name(entry.name)
        if name not in table:
            raise ValueError(f"the model has no parameter '{name}' for '{entry.name}'")
        missing.discard(name)
        target = table[name]
        if target.dtype != torch.float32 and entry.dtype == "float32":
            module, _, leaf = name.rpartition(".")
            target = target.float()
            setattr(model.get_submodule(module), leaf, target)
        fill(target if expert is None else target[expert], entry, about["seed"])
    if missing:
        raise ValueError(f"no seeded tensor for '{sorted(missing)[0]}' and {len(missing) - 1} more")


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(up_proj|down_proj)\.weight")


def training_name(name: str) -> tuple[str, int | None]:
    """Name in a checkpoint -> (parameter in transformers, expert index inside it or None), as transformers' own conversion maps them."""
    name = re.sub(r"^backbone\.", "model.", name)
    if match := _EXPERT.fullmatch(name):
        return f"{match[1]}.{match[3]}", int(match[2])
    return name, None


# ---- vLLM ---------------------------------------------------------------------------------------------------------------


def register_loader() -> None:
    """Registers the loader with vLLM. Call once per process, before a model is built."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    if FORMAT in _LOAD_FORMAT_TO_MODEL_LOADER:
        return

    @register_model_loader(FORMAT)
    class SeededLoader(BaseModelLoader):
        """Feeds a model's own `load_weights` with tensors made on its device."""

        def download_model(self, model_config) -> None:
            if read(Path(model_config.model)) is None:
                raise ValueError(f"{model_config.model}: no {SEED_FILE}; load_format {FORMAT} needs a folder written by make_checkpoint")

        def load_weights(self, model, model_config) -> None:
            loaded = model.load_weights(self.get_all_weights(model_config, model))
            if loaded is not None and (left := {n for n, _ in model.named_parameters()} - loaded):
                raise ValueError(f"no seeded tensor for '{sorted(left)[0]}' and {len(left) - 1} more")

        def get_all_weights(self, model_config, model) -> Iterator[tuple[str, torch.Tensor]]:
            """What vLLM's in-place reload asks for; `model_config.model` is then the folder to read."""
            self.download_model(model_config)
            about = read(Path(model_config.model))
            return tensors(about["family"], model_config.hf_config, about["seed"], self._device(model))

        def _device(self, model) -> torch.device:
            kinds = {p.device for p in model.parameters()} - {torch.device("meta")}
            return next(iter(kinds)) if kinds else torch.get_default_device()

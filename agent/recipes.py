"""Recipes: contracts shipped as exact for a family, and which of them a run tries first."""

import hashlib
from pathlib import Path

from pydantic import BaseModel

from agent import models
from agent.errors import UserError
from consistency.contract import SIDES, Contract, ContractError
from consistency.models.catalog import Scale
from consistency.operators import catalog


class Recipe(BaseModel):
    """A shipped contract, as the run that tries it keeps it."""

    name: str
    """Of its file, without .toml."""
    sha256: str
    """Of the file's bytes."""
    contract: dict[str, dict[str, str]]


def matching(family: str, scale: Scale) -> tuple[Recipe | None, str]:
    """The recipe for a family at a scale, and one line about it; None if there is none or the device lacks an implementation that it names.

    The most special file wins: FAMILY-SCALE.toml, FAMILY-DEVICE.toml, FAMILY.toml. Raises UserError if the file is no contract.
    """
    for stem in (f"{family}-{scale.name}", f"{family}-{scale.device}", family):
        if (path := models.RECIPES / f"{stem}.toml").is_file():
            recipe = load(path)
            if missing := unfit(recipe, scale.device):
                return None, f"recipe {stem} is left out: {missing}"
            return recipe, f"recipe {stem} first; --from-scratch leaves it out"
    return None, f"there is no recipe for {family} at scale {scale.name}"


def load(path: Path) -> Recipe:
    """Raises UserError."""
    try:
        return Recipe(name=path.stem, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), contract=Contract.load(path).as_dict())
    except (OSError, ContractError) as error:
        raise UserError(f"the recipe {path} cannot be used ({error}); --from-scratch leaves it out") from None


def unfit(recipe: Recipe, device: str) -> str:
    """What the catalogue lacks on a device; empty: nothing."""
    for side in SIDES:
        for operator, name in recipe.contract[side].items():
            if name not in {row.name for row in catalog.implementations(operator, side=side, device=device)}:
                return f"{operator} has no implementation '{name}' for the {side} side on {device}"
    return ""

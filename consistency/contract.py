"""Which implementation each operator uses, in the rollout and in training.

No torch here: the parent process reads and writes contracts too.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

SIDES = ("rollout", "training")
STOCK = "stock"


class ContractError(ValueError):
    """A contract that cannot be used; the message is one line for a person."""


@dataclass(frozen=True)
class Contract:
    """Operator -> implementation name per side; an absent operator is `stock`, so the empty contract is the untouched stack."""

    rollout: dict[str, str] = field(default_factory=dict)
    training: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, origin: str = "contract.toml") -> Contract:
        """Reads TOML text. Raises ContractError on bad syntax, unknown tables or values that are not names."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ContractError(f"{origin}: not valid TOML ({error}); fix the syntax") from error
        unknown = set(data) - {"operators", *SIDES}
        if unknown:
            raise ContractError(f"{origin}: unknown table [{sorted(unknown)[0]}]; expected [operators], [rollout] or [training]")
        for table in data.values():
            for operator, name in table.items() if isinstance(table, dict) else [("", None)]:
                if not isinstance(name, str):
                    raise ContractError(f"{origin}: {operator or 'a table'} must be `operator = \"implementation\"`, found {name!r}")
        both = data.get("operators", {})
        return cls(*({k: v for k, v in {**both, **data.get(side, {})}.items() if v != STOCK} for side in SIDES))

    @classmethod
    def load(cls, path: Path) -> Contract:
        """Reads a file. Raises ContractError if it is missing, unreadable or invalid."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ContractError(f"{path}: cannot be read ({error}); give a contract.toml") from error
        return cls.parse(text, str(path))

    @classmethod
    def from_dict(cls, data: dict) -> Contract:
        return cls(dict(data.get("rollout", {})), dict(data.get("training", {})))

    def as_dict(self) -> dict[str, dict[str, str]]:
        return {side: dict(sorted(getattr(self, side).items())) for side in SIDES}

    def dumps(self) -> str:
        """TOML text that `parse` reads back to an equal contract."""
        shared = {k: v for k, v in self.rollout.items() if self.training.get(k) == v}
        tables = {"operators": shared} | {
            side: {k: v for k, v in getattr(self, side).items() if k not in shared} for side in SIDES}
        lines = []
        for table, entries in tables.items():
            if entries:
                lines += [f"[{table}]", *(f'{k} = "{v}"' for k, v in sorted(entries.items())), ""]
        return "\n".join(lines)

    def with_(self, operator: str, implementation: str, side: str | None = None) -> Contract:
        """A copy with the operator bound on one side, or on both if side is None."""
        tables = {s: dict(getattr(self, s)) for s in SIDES}
        for s in SIDES if side is None else (side,):
            tables[s].pop(operator, None)
            if implementation != STOCK:
                tables[s][operator] = implementation
        return Contract(**tables)

    def validate(self, known: dict[str, set[str]]) -> None:
        """Checks operators and implementation names against `known`; names from `kernels:` are checked when they are loaded.

        Raises ContractError naming the first unknown operator or implementation and what exists.
        """
        for side in SIDES:
            for operator, name in getattr(self, side).items():
                if operator not in known:
                    raise ContractError(f"contract: unknown operator '{operator}' in [{side}]; known: {', '.join(sorted(known))}")
                if not name.startswith("kernels:") and name not in known[operator] | {STOCK}:
                    raise ContractError(f"contract: operator '{operator}' has no implementation '{name}'; "
                                        f"known: {', '.join(sorted(known[operator] | {STOCK}))}, or kernels:FILE.NAME")

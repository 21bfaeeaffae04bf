"""The implementations that are active in this process: one table per side, filled from a contract."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

from consistency import guard
from consistency.contract import Contract, ContractError
from consistency.operators import catalog


class Bindings:
    """Operator -> callable for one side. An operator that is not in the table runs the engine's own code."""

    def __init__(self, side: str, kernels: Path | None = None, device: str = "cpu"):
        self.side, self.kernels, self.device = side, kernels, device
        self.active: dict[str, object] = {}
        self.names: dict[str, str] = {}

    def bind(self, contract: Contract) -> None:
        """Replaces the table. Raises ContractError for an operator or implementation that does not exist; the old table then stays."""
        contract.validate(catalog.known(self.device))
        names = getattr(contract, self.side)
        active = {operator: self.load(operator, name) for operator, name in names.items()}
        self.active, self.names = active, dict(names)

    def key(self) -> str:
        """Changes with the names that are bound and with the text of their kernels: what an engine keeps of compiled code is kept under it."""
        stems = sorted({name.removeprefix("kernels:").partition(".")[0] for name in self.names.values() if name.startswith("kernels:")})
        said = hashlib.sha256(json.dumps(self.names, sort_keys=True).encode())
        for stem in stems:
            said.update((self.kernels / f"{stem}.py").read_bytes())
        return said.hexdigest()[:16]

    def get(self, operator: str):
        """The bound callable, or None for stock."""
        return self.active.get(operator)

    def function(self, operator: str):
        """The bound callable, or the catalogue's stock function."""
        return self.active.get(operator) or catalog.load(operator, "stock", self.side, self.device)

    def load(self, operator: str, name: str):
        """One implementation by its name in a contract. Raises ContractError."""
        if not name.startswith("kernels:"):
            try:
                return catalog.load(operator, name, self.side, self.device)
            except KeyError as error:
                raise ContractError(f"contract: {error.args[0]}") from error
        stem, _, attribute = name.removeprefix("kernels:").partition(".")
        if self.kernels is None:
            raise ContractError(f"contract: '{name}' needs a kernels folder, and this run has none")
        path = self.kernels / f"{stem}.py"
        if not path.is_file():
            raise ContractError(f"contract: '{name}': {path.name} does not exist in kernels/; add the file or change the contract")
        module = _import_file(path)
        if not hasattr(module, attribute):
            raise ContractError(f"contract: '{name}': kernels/{path.name} has no '{attribute}'; define it")
        return getattr(module, attribute)


def _import_file(path: Path):
    spec = importlib.util.spec_from_file_location(f"kernels_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with guard.importing(path):
        spec.loader.exec_module(module)
    return module


rollout = Bindings("rollout")
"""the table that vLLM's classes and patches read; one per process"""

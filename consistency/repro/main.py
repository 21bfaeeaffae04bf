"""What `python repro.py` does: runs both sides of the case next to it and compares their bits.

Exit code 1 while they differ, 0 once they do not, 2 if a side cannot be run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from consistency.contract import Contract, ContractError

CASE = "repro.json"


def main(script: str, arguments: list[str] | None = None) -> int:
    """script: `__file__` of repro.py."""
    parser = argparse.ArgumentParser(prog="repro.py", description="Runs one operator as each side runs it and compares the bits.")
    parser.add_argument("--contract", type=Path, help="contract.toml whose implementations take the place of the recorded ones")
    parser.add_argument("--kernels", type=Path, help="folder that `kernels:` names in the contract refer to")
    options = parser.parse_args(arguments)
    from consistency.engines.environment import prepare

    prepare(1)
    try:
        contract = Contract.load(options.contract) if options.contract else None
        line, differ = examine(Path(script).resolve().parent, contract, options.kernels)
    except (ContractError, OSError, ValueError) as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return 2
    print(line)
    return int(differ)


def examine(directory: Path, contract: Contract | None = None, kernels: Path | None = None) -> tuple[str, bool]:
    """(the line to print, whether the sides differ). Raises ContractError, OSError or ValueError if a side cannot be run."""
    import torch

    from consistency.repro.case import Case
    from consistency.repro.compare import verdict

    torch.set_num_threads(1)
    own = directory / "kernels"
    return verdict(Case.read(directory, CASE), contract, kernels or (own if own.is_dir() else None))

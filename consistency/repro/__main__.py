"""Checks several repro folders in one process, because starting one costs more than the check.

    python -m consistency.repro [--contract FILE] [--kernels DIR] FOLDER...

Prints one JSON line per folder: {"folder", "exit_code", "line"}; the exit codes are those of `repro.py`. Exits with 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from consistency.contract import Contract, ContractError
from consistency.repro.main import examine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m consistency.repro", description="Checks repro folders.")
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--contract", type=Path)
    parser.add_argument("--kernels", type=Path)
    options = parser.parse_args()
    from consistency.engines.environment import prepare

    prepare(1)
    for folder in options.folders:
        try:
            contract = Contract.load(options.contract) if options.contract else None
            line, differ = examine(folder.resolve(), contract, options.kernels)
            said = {"exit_code": int(differ), "line": line}
        except (ContractError, OSError, ValueError, RuntimeError) as error:
            said = {"exit_code": 2, "line": f"cannot run: {error}"}
        print(json.dumps({"folder": str(folder), **said}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

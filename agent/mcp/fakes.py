"""A stand-in for the command line that starts no engine: for tests of the server, and to try a client without waiting for hardware.

`FakeTool(folder).command` goes to `agent.server.build(command=...)`; the file is also a script, and then needs nothing but Python.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VERDICT = {"exact": True, "void": False, "tokens": 64, "mismatches": 0, "reasons": [],
           "conditions": [{"name": "batch 1", "dimension": "batch", "ran": True, "tokens": 64, "mismatches": 0, "reason": ""}]}
DIVERGENCE = {"dimension": "engine", "operator": "rms_norm", "layer": 0, "site": "000.rms_norm", "cause": "reduction order",
              "cause_detail": "sums in another order", "elements": 4096, "differing": 37, "max_abs": 0.002, "max_ulps": 3, "confirmed": True,
              "substituted_with": "exact", "next_site": None}
THROUGHPUT = {"stock": 100.0, "candidate": 97.0, "ratio": 0.97, "spread": [0.96, 0.98]}
COMMON = {"model": "qwen3", "scale": "tiny", "seconds": 0.1}
BASELINE = {"mismatches": 64, "k3": 0.001, "max_abs": None}
RUN = {**COMMON, "run": "20260101-000000", "outcome": "exact", "why": "exact in every required condition", "verdict": VERDICT,
       "baseline": BASELINE, "throughput": THROUGHPUT, "branch": "agent/20260101-000000/main", "pull_request": None,
       "attempts": [{"number": 1, "branch": "agent/20260101-000000/attempt-1", "change": "rms_norm=exact", "outcome": "kept", "reason": "exact"}]}
ANSWERS: dict[str, dict[str, Any]] = {
    "verify": {**COMMON, "level": "full", "verdict": VERDICT, "baseline": BASELINE, "throughput": THROUGHPUT, "target_throughput": 0.9,
               "accuracy": None, "controls": [], "contract": {"rollout": {}, "training": {}}, "evidence": "", "environment": {}},
    "localize": {**COMMON, "divergences": [DIVERGENCE], "exact_dimensions": ["batch"], "notes": [], "sites": {}},
    "repro": {**COMMON, "divergence": DIVERGENCE, "directory": "repro", "command": "python repro.py", "expected_line": "37 of 4096 elements differ",
              "exit_code": 1, "reproduced": True},
    "patch": {"branch": "agent/manual/attempt-1", "commit": "0" * 40, "worktree": "attempt-1", "changed": ["contract.toml"], "contract": None},
    "run": RUN,
    "resume": RUN,
}
"""What each command prints with --json."""


class FakeTool:
    """Does in every call what it was told last. The calls it got are in `calls`."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / "how.json").exists():
            self.behave()

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(self.folder)]

    def behave(self, *, seconds: float = 0.0, log: tuple[str, ...] = (), exit_code: int = 0, answer: Any = None, text: str | None = None,
               stubborn: bool = False) -> None:
        """Print `log` on stderr, take `seconds`, then print `text`, `answer` or the command's usual answer.

        A stubborn one ignores SIGTERM, and so do the child and grandchild it starts, in sessions of their own; their pids are in `pids`.
        """
        how = {"seconds": seconds, "log": log, "exit_code": exit_code, "answer": answer, "text": text, "stubborn": stubborn}
        (self.folder / "how.json").write_text(json.dumps(how), encoding="utf-8")

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self._lines("calls")]

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self._lines("pids")]

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def main(folder: Path, arguments: list[str]) -> int:
    how = json.loads((folder / "how.json").read_text(encoding="utf-8"))
    with (folder / "calls").open("a", encoding="utf-8") as calls:
        calls.write(json.dumps(arguments) + "\n")
    for line in how["log"]:
        print(line, file=sys.stderr, flush=True)
    if how["stubborn"]:
        _be_stubborn(folder)
    time.sleep(how["seconds"])
    print(how["text"] if how["text"] is not None else json.dumps(how["answer"] or ANSWERS[arguments[0]]))
    return how["exit_code"]


def _be_stubborn(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    parent = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True); print(p.pid, flush=True); "
    child = subprocess.Popen([sys.executable, "-c", parent + sleeper], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout
    grandchild = int(child.stdout.readline())
    (folder / "pids").write_text(f"{child.pid}\n{grandchild}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

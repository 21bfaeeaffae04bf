"""Starts the operators' self-test on a GPU other than the one they were proven on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.device import PROVEN, Setup
from agent.rules import Objection
from sandboxes import Limits, Sandbox

SECONDS = 300.0
"""wall clock of the whole process; compiling the kernels for a new device is most of it"""
FACTS = ("rows do not depend on the batch", "two runs agree", "tiles, warps and launch settings leave bits alone",
         "one key split is exact in every phase", "decode replays the scan's rows")


def needed(setup: Setup) -> bool:
    return setup.gpu is not None and setup.gpu.capability != PROVEN


def selftest(setup: Setup, directory: Path, sandbox: Sandbox, on_wait: Callable[[], None] = lambda: None) -> tuple[dict[str, Any], list[Objection]]:
    """(what the evidence keeps, objections). `directory` is new; the process runs like a job, with no candidate code in it."""
    assert setup.gpu is not None
    directory.mkdir(parents=True)
    out = directory.resolve() / "selftest.json"
    options = setup.session()
    argv = [sys.executable, "-m", "consistency.selftest", "--family", setup.family.name, "--out", str(out)]
    limits = Limits(wall_seconds=SECONDS, memory_bytes=options["limits"].memory_bytes, writable=options["limits"].writable)
    handle = sandbox.start(argv, directory.resolve(), options["environment"], limits)
    try:
        while handle.poll() is None:
            on_wait()
            time.sleep(0.05)
    finally:
        handle.kill()
    try:
        found = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {"cases": [], "equal": False, "error": "the self-test ended without a result; its log is in the evidence"}
    said = {"why": f"{setup.gpu.name} has compute capability {setup.gpu.capability}; that {', '.join(FACTS)} was only measured on {PROVEN}", **found}
    if found.get("equal"):
        return said, []
    bad = [f"{case['operator']} {case['shape']}" for case in found["cases"] if not case["equal"]] or found.get("left_out") or [found.get("error", "")]
    return said, [Objection("self_test", f"self-test on {setup.gpu.name}: not shown to keep its bits: {'; '.join(bad[:4])}")]

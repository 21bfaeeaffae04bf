"""`repro`: a divergence cut down to a folder that runs alone: exit 1 while it differs, 0 once fixed."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agent.device import GPU_MEMORY_BYTES, caches
from agent.errors import JobFailed, UserError
from agent.tools.divergence import Divergence
from consistency.contract import Contract
from sandboxes import Limits, Sandbox, choose

SECONDS = 180.0
"""wall clock of one check"""
LINES = 20


class ReproRequest(BaseModel):
    divergence: Divergence
    directory: Path
    """new; gets repro.py, repro.json, inputs.safetensors, expected.txt and, for a candidate's code, kernels/"""
    kernels: Path | None = None
    """folder that `kernels:` names refer to"""
    check: bool = True
    """run the finished folder in a process of its own; without, the exit code is the one found while it was made"""


class ReproReport(BaseModel):
    directory: Path
    command: str
    expected_line: str
    """what the command prints while the two sides differ"""
    exit_code: int
    """of the command, now: 1 differing, 0 equal, 2 it cannot run"""
    reproduced: bool
    """run alone, each side gives its traced rows bit for bit, the two differ, and the folder says the same"""
    reason: str = ""
    """why it is not reproduced"""
    size: dict[str, int] = {}
    """requests, rows and elements that are left"""


def make_repro(request: ReproRequest, progress: Callable[[Any], None] = lambda _: None, sandbox: Sandbox | None = None) -> ReproReport:
    """Makes the folder from the evidence that `localize` left, and runs it.

    Raises UserError if the folder exists or the evidence is gone, and JobFailed if cutting down takes its process down.
    """
    evidence, directory = Path(request.divergence.evidence), request.directory
    if directory.exists():
        raise UserError(f"{directory} exists; give a new folder")
    if not request.divergence.evidence:
        return _without_evidence(request)
    if not (evidence / "case.json").is_file():
        raise UserError(f"{evidence} does not hold the evidence of {request.divergence.site} any more; run localize again")
    if not (evidence / "repro" / "repro.json").is_file():
        progress(f"cutting down {request.divergence.site}")
        kernels = [] if request.kernels is None else [str(request.kernels.resolve())]
        code, text = _run(["-m", "consistency.repro.build", str(evidence.resolve()), str((evidence / "repro").resolve()), *kernels], sandbox,
                          Limits(wall_seconds=SECONDS, readable=_given(request.kernels), writable=(evidence,)))
        if code:
            raise JobFailed(f"the repro of {request.divergence.site} could not be made (exit code {code})", evidence, text)
    shutil.copytree(evidence / "repro", directory)
    made = json.loads((directory / "repro.json").read_text(encoding="utf-8"))
    if not request.check:
        return _report(directory, made, int(made["differs"]), made["line"])
    progress(f"running the repro of {request.divergence.site}")
    checked = check_repros([directory], sandbox=sandbox)[0]
    return _report(directory, made, *checked)


def check_repros(directories: Sequence[Path], contract: Contract | None = None, kernels: Path | None = None,
                 sandbox: Sandbox | None = None) -> list[tuple[int, str]]:
    """(exit code, line) of each folder, under a contract or as recorded; one process for all of them.

    The exit codes are those of `python repro.py`. Raises JobFailed if the process dies or hangs.
    """
    with tempfile.TemporaryDirectory(prefix="repro-") as scratch:
        options = [] if kernels is None else ["--kernels", str(kernels.resolve())]
        if contract is not None:
            path = Path(scratch) / "contract.toml"
            path.write_text(contract.dumps(), encoding="utf-8")
            options += ["--contract", str(path)]
        limits = Limits(wall_seconds=SECONDS, readable=(Path(scratch), *_given(kernels), *(d.resolve() for d in directories)))
        on_gpu = any('"device": "cuda"' in path.read_text(encoding="utf-8") for d in directories if (path := d / "repro.json").is_file())
        environment: dict[str, str] = {}
        if on_gpu:
            root, environment = caches(kernels)
            limits = replace(limits, memory_bytes=GPU_MEMORY_BYTES, writable=(root,))
        code, text = _run(["-m", "consistency.repro", *options, *(str(d.resolve()) for d in directories)], sandbox, limits, environment)
        said = [json.loads(line) for line in text.splitlines() if line.startswith('{"folder"')]
        if code or len(said) != len(directories):
            raise JobFailed(f"checking {directories[min(len(said), len(directories) - 1)].name} ended with exit code {code}", directories[0],
                            "\n".join(text.splitlines()[-LINES:]))
    return [(entry["exit_code"], entry["line"]) for entry in said]


def _given(kernels: Path | None) -> tuple[Path, ...]:
    return () if kernels is None else (kernels.resolve(),)


def _run(arguments: Sequence[str], sandbox: Sandbox | None, limits: Limits, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output of a Python process in a sandbox."""
    directory = Path(tempfile.mkdtemp(prefix="repro-job-"))
    try:
        handle = (sandbox or choose()).start([sys.executable, *arguments], directory, environment or {}, limits)
        try:
            while (code := handle.poll()) is None:
                time.sleep(0.02)
        finally:
            handle.kill()
        return code, (directory / "log").read_text(encoding="utf-8", errors="replace")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _report(directory: Path, made: dict[str, Any], exit_code: int, line: str) -> ReproReport:
    reasons = []
    for side, right in enumerate(made["as_traced"]):
        if not right:
            reasons.append(f"{made['executions'][side]['label']}: run alone, it does not give the traced rows")
    if exit_code != 1:
        reasons.append(line if exit_code == 2 else "run alone, the two sides do not differ")
    elif line != made["line"]:
        reasons.append(f"the folder says '{line}' and said '{made['line']}' while it was made")
    return ReproReport(directory=directory, command="python repro.py", expected_line=made["line"], exit_code=exit_code, reproduced=not reasons,
                       reason="; ".join(reasons), size=made["size"])


def _without_evidence(request: ReproRequest) -> ReproReport:
    """A folder that says why there is nothing to run: the divergence is not in an operator."""
    divergence = request.divergence
    reason = f"{divergence.operator} at {divergence.site} cannot be run alone: {divergence.cause_detail or 'its inputs were not recorded'}"
    request.directory.mkdir(parents=True)
    (request.directory / "expected.txt").write_text(reason + "\n", encoding="utf-8")
    script = f'"""{divergence.dimension}: {divergence.site}"""\n\nraise SystemExit(print({reason!r}) or 2)\n'
    (request.directory / "repro.py").write_text(script, encoding="utf-8")
    return ReproReport(directory=request.directory, command="python repro.py", expected_line=reason, exit_code=2, reproduced=False, reason=reason)

"""From the arguments of a tool to the command line that carries it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.errors import UserError
from agent.mcp import devices
from agent.mcp.jobs import Call, Jobs


@dataclass(frozen=True)
class Subject:
    """What an engine tool works on; the options are those of the command line."""

    model: str | None = None
    scale: str | None = None
    workspace: str | None = None
    weights: str | None = None
    contract: str | None = None
    """path of a contract.toml, or its text"""
    gpu: str | None = None


class Calls:
    """Builds calls for one server; paths are relative to `cwd`, as on a command line."""

    def __init__(self, jobs: Jobs, cwd: Path):
        self.jobs, self.cwd = jobs, cwd

    def engine(self, tool: str, subject: Subject, *, out: str | None = None, evidence: str | None = None, **options: object) -> Call:
        """`verify`, `localize` or `repro`. Repro and evidence go into folders of the job unless `out`, `evidence` or a workspace takes them.

        Raises UserError if the subject is none.
        """
        workspace = self._path(subject.workspace)
        device = self._device(subject, workspace)
        text = subject.contract if subject.contract and ("\n" in subject.contract or "=" in subject.contract) else None

        def arguments(folder: Path) -> list[str]:
            contract = folder / CONTRACT if text is not None else self._path(subject.contract)
            place = self._path(out) or folder / REPRO if tool == "repro" else None
            proof = self._path(evidence) or (None if workspace else folder / EVIDENCE) if tool == "verify" else None
            return [tool, *_options(model=subject.model, scale=subject.scale, workspace=workspace, weights=self._path(subject.weights),
                                    contract=contract, out=place, evidence=proof, **options), "--json"]

        return Call(tool, arguments, device, self.cwd, workspace, {CONTRACT: text} if text is not None else {}, devices.environment(device))

    def run(self, subject: Subject, resume: bool, target_throughput: float | None, policy: str | None, minutes: float | None,
            attempts: int | None, from_scratch: bool = False) -> Call:
        """`run`, or `resume` of the workspace's last run. Raises UserError if there is no workspace and no model to make one for."""
        workspace = self._path(subject.workspace) or (self.cwd / f"consistency-{subject.model}" if subject.model else None)
        if workspace is None:
            raise UserError("give a model (the tool `models` lists them), or the path of a workspace that exists")
        device = self._device(subject, workspace)
        limits = _options(minutes=minutes, attempts=attempts)
        if resume:
            argv = ["resume", str(workspace), *limits, "--json"]
        else:
            argv = ["run", *_options(model=subject.model, scale=subject.scale, workspace=workspace, weights=self._path(subject.weights),
                                     target_throughput=target_throughput, policy=policy), *limits,
                    *(["--from-scratch"] if from_scratch else []), "--json"]
        return Call("run", lambda _: argv, device, self.cwd, workspace, {}, devices.environment(device))

    def patch(self, workspace: str | None, bindings: Sequence[str], files: Mapping[str, str], repo: str | None, diff: str | None,
              allow: Sequence[str], message: str) -> Call:
        """`patch`: kernels and diff travel as files in the job's folder."""
        sent = {f"input/{number}.py": text for number, text in enumerate(files.values())} | ({DIFF: diff} if diff is not None else {})

        def arguments(folder: Path) -> list[str]:
            kernels = [f"--file={name}={folder / 'input' / f'{number}.py'}" for number, name in enumerate(files)]
            return ["patch", *_options(workspace=self._path(workspace), repo=self._path(repo), diff=folder / DIFF if diff is not None else None,
                                       message=message),
                    *(f"--set={binding}" for binding in bindings), *kernels, *(f"--allow={glob}" for glob in allow), "--json"]

        return Call("patch_kernel", arguments, devices.HOST, self.cwd, self._path(workspace), sent)

    def _device(self, subject: Subject, workspace: Path | None) -> str:
        """The one asked for, else the one with the shortest queue."""
        if devices.needed(subject.model, subject.scale, workspace) == "cpu":
            return "cpu"
        visible = devices.gpus()
        if subject.gpu is not None and subject.gpu not in visible:
            raise UserError(f"there is no GPU {subject.gpu!r}; visible: {', '.join(visible) or 'none'}")
        names = [f"cuda:{number}" for number in ([subject.gpu] if subject.gpu is not None else visible)]
        if not names:
            raise UserError("this needs a GPU and the machine of the server shows none; scale tiny runs on a CPU")
        return min(names, key=self.jobs.waiting)

    def _path(self, text: str | None) -> Path | None:
        return self.cwd / Path(text).expanduser() if text else None


CONTRACT, DIFF, REPRO, EVIDENCE = "input/contract.toml", "input/patch.diff", "repro", "evidence"
"""Names inside a job's folder."""


def _options(**values: object) -> list[str]:
    """`--name=value` for everything that is given; in this form a value cannot be taken for an option."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]

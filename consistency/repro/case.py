"""A case on disk: one operator's traced inputs, its parameters, how each side ran it, and what each side got.

`case.json` and `inputs.safetensors`; tensors are `input/<argument>` [R, width], `parameter/<argument>` (`parameter@1/...` where the second side
holds other values), and per side the traced rows `output@0`, `output@1` [R, width]. R counts the tokens of all requests, one after the other.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Span = tuple[int, int, int]
"""request, first position, one past the last position"""


@dataclass
class Execution:
    """How one side ran the operator."""

    engine: str
    """`rollout` or `training`"""
    label: str
    """for people: `rollout, decode`"""
    implementation: str
    """name in the contract; `stock` if it names none"""
    steps: list[list[Span]]
    """calls in turn, each with its rows in batch order"""
    layout: str | None = None
    """training: `padded` or `packed`; None: packed"""
    weights: str = "as loaded"
    """for people: which weights this side held"""


@dataclass
class Case:
    """One operator, two executions."""

    family: str
    operator: str
    site: str
    output: int
    lengths: list[int]
    """tokens per request"""
    shapes: dict[str, list[int]]
    """argument -> shape of one row; empty: flat"""
    constants: dict
    executions: list[Execution]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    device: str = "cpu"
    """`cpu` or `cuda`: where both sides ran"""

    @classmethod
    def read(cls, directory: Path, name: str = "case.json") -> Case:
        """Reads a case. Raises OSError or ValueError if it is not one."""
        data = json.loads((directory / name).read_text(encoding="utf-8"))
        executions = [Execution(**{**e, "steps": [[tuple(span) for span in step] for step in e["steps"]]}) for e in data.pop("executions")]
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        return cls(**known, executions=executions, tensors=load_file(directory / "inputs.safetensors"))

    def placed(self) -> Case:
        """The same case with its tensors on its device."""
        return replace(self, tensors={name: value.to(self.device) for name, value in self.tensors.items()})

    def described(self) -> dict:
        """Everything but the tensors, as plain data."""
        return {k: v for k, v in asdict(self).items() if k != "tensors"}

    def write(self, directory: Path, name: str = "case.json", more: dict | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        save_file({k: v.cpu().contiguous() for k, v in self.tensors.items()}, directory / "inputs.safetensors")
        (directory / name).write_text(json.dumps({**self.described(), **(more or {})}, indent=1) + "\n", encoding="utf-8")

    @property
    def offsets(self) -> list[int]:
        return [sum(self.lengths[:i]) for i in range(len(self.lengths))]

    def rows(self, step: list[Span]) -> torch.Tensor:
        """int64: the rows of a call, in batch order."""
        offsets = self.offsets
        return torch.cat([torch.arange(offsets[r] + a, offsets[r] + b) for r, a, b in step])

    def argument(self, name: str) -> torch.Tensor | None:
        value = self.tensors.get(f"input/{name}")
        if value is None or name == "ids":
            return value
        return value.view(len(value), *self.shapes[name]) if self.shapes.get(name) else value

    def parameter(self, name: str, side: int) -> torch.Tensor | None:
        return self.tensors.get(f"parameter@{side}/{name}", self.tensors.get(f"parameter/{name}"))

    def compared(self) -> torch.Tensor:
        """bool [R]: rows that both executions compute."""
        found = torch.ones(sum(self.lengths), dtype=torch.bool)
        for execution in self.executions:
            mine = torch.zeros_like(found)
            for step in execution.steps:
                mine[self.rows(step)] = True
            found &= mine
        return found

    def subset(self, requests: list[int]) -> Case:
        """The same case with some of its requests, numbered anew in ascending order."""
        keep = sorted(requests)
        number = {old: new for new, old in enumerate(keep)}
        offsets = self.offsets
        rows = torch.cat([torch.arange(offsets[i], offsets[i] + self.lengths[i]) for i in keep])
        executions = []
        for execution in self.executions:
            steps = [[(number[i], a, b) for i, a, b in step if i in number] for step in execution.steps]
            executions.append(replace(execution, steps=[step for step in steps if step]))
        tensors = {name: value if name.startswith("parameter") else value[rows] for name, value in self.tensors.items()}
        return replace(self, lengths=[self.lengths[i] for i in keep], executions=executions, tensors=tensors)

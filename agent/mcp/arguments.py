"""Arguments that the tools share: types with their limits and the words that a model reads about them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

MAX_WAIT = 50
"""Seconds; several hosts give a call up after 60."""
MAX_SOURCE = 200_000
"""Largest kernel or diff, in characters; `patch_kernel` has the same limit in bytes."""

Text = Annotated[str, Field(max_length=4096)]
Item = Annotated[str, StringConstraints(min_length=1, max_length=500)]
KernelFile = Annotated[str, StringConstraints(pattern=r"^kernels/[A-Za-z_][A-Za-z0-9_]*\.py$")]
Source = Annotated[str, StringConstraints(max_length=MAX_SOURCE)]

Model = Annotated[Text | None, Field(description="family, as listed by the tool `models`; may be left out for a workspace that exists")]
Scale = Annotated[Text | None, Field(description="tiny (CPU), slice or full; default: slice with a GPU, tiny without")]
WorkspacePath = Annotated[Text | None, Field(description="folder of the workspace on the server's machine")]
Weights = Annotated[Text | None, Field(description="folder of a Hugging Face checkpoint; default: seeded weights")]
Contract = Annotated[str | None, Field(
    max_length=100_000, description="path of a contract.toml, or its text; default: that of the workspace, else stock")]
Gpu = Annotated[Text | None, Field(description="index of the GPU to use; default: the one with the shortest queue")]
Wait = Annotated[float, Field(ge=0, le=MAX_WAIT, description="seconds to wait for the result; then the answer is a handle for job_status")]

Dimension = Annotated[Text | None, Field(description="whose first divergence; default: the first that localize reports")]
ReproFolder = Annotated[Text | None, Field(
    description="new folder for the repro; default: inside the job, readable at job://ID/repro/repro.py until 200 newer jobs have ended")]

Bindings = Annotated[list[Item] | None, Field(
    max_length=100, description="OPERATOR=IMPLEMENTATION, with rollout: or training: in front for one side only; an implementation is a "
    "catalogue name, `stock` or kernels:FILE.NAME")]
KernelFiles = Annotated[dict[KernelFile, Source] | None, Field(max_length=32, description="kernels/NAME.py -> whole new text")]
Repository = Annotated[Text | None, Field(description="another git repository, which `diff` is applied to")]
Diff = Annotated[Source | None, Field(description="unified diff in git's form, of `repo` or of the engine's checkout that the workspace names")]
Allow = Annotated[list[Item] | None, Field(max_length=100, description="globs that each path of the diff must match")]
Message = Annotated[Text, Field(description="commit message")]

Level = Annotated[Literal["quick", "full"], Field(description="only full can be a final verdict")]
Target = Annotated[float | None, Field(ge=0, description="least acceptable rollout throughput, as a share of stock")]
Policy = Annotated[Text | None, Field(description="who picks the next step; default: playbook")]
Minutes = Annotated[float | None, Field(ge=0, description="wall clock of this call")]
Attempts = Annotated[int | None, Field(ge=0, description="attempts that this call may start")]
FromScratch = Annotated[bool, Field(description="leave out the recipe that would be tried first")]
Evidence = Annotated[Text | None, Field(
    description="new folder for the evidence; default: that of the workspace, without one inside the job until 200 newer jobs have ended")]
Resume = Annotated[bool, Field(description="go on with the workspace's last run")]

JobId = Annotated[Text, Field(description="from an earlier answer")]
AnyJobId = Annotated[Text | None, Field(description="from an earlier answer; default: the newest job")]

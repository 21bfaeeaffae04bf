"""Prompts: the three things people ask for, as instructions to a model that has this server's tools."""

from __future__ import annotations

from typing import Annotated

from mcp.server.mcpserver import MCPServer
from pydantic import Field

Workspace = Annotated[str, Field(description="folder of the workspace on the server's machine")]


def register(server: MCPServer) -> None:
    """Add every prompt to a server."""

    @server.prompt(title="Find where rollout and training differ")
    def localise(model: Annotated[str, Field(description="family, as listed by the tool `models`")]) -> str:
        """Name the first operator that differs, per dimension, with its cause."""
        return f"""Find out where the rollout engine and the training engine differ for {model}.

1. Call `models` and check that {model} is listed; choose scale `slice` only if a CUDA device is listed too.
2. Call `verify` with level "quick" for the size of the difference. If the verdict is void, report its reasons and stop.
3. Call `localize`. A call that outlasts its wait answers with a job_id: poll `job_status` with wait_s=45 until the state is final.
4. Report one line per divergence: dimension, operator, site, cause, how many elements differ, and whether substitution confirmed it.
   Say which dimensions are exact and which comparisons could not be made. Do not guess a cause that the report does not name."""

    @server.prompt(title="Make rollout and training agree")
    def fix(model: Annotated[str, Field(description="family, as listed by the tool `models`")], workspace: Workspace) -> str:
        """Take the difference to exactly zero, in attempts that each have their own branch."""
        return f"""Make rollout and training agree bit for bit for {model}, in the workspace {workspace}.

1. Call `run` with this model and workspace; poll `job_status` with wait_s=45. It tries what the catalogue of exact operators offers.
2. If the outcome is `exact`, report the branch, the throughput ratio and the resource run://ID/pull-request (ids: consistency://workspaces).
3. Otherwise go on by hand, one cause at a time:
   `localize` names the first operator; `repro` gives a folder that runs alone; read its inputs and the operator's contract;
   `patch_kernel` with a contract change or a new kernels/NAME.py makes a branch in a worktree; `verify` it with the model and
   contract=WORKTREE/contract.toml, without workspace, so that its kernels are the ones that run.
   Keep a patch only if no condition got worse and the first divergence moved later or vanished.
4. Only `verify` with level "full" decides. Exact means 0 unequal log-probabilities in every required condition, with the negative control
   reported. Never switch off CUDA graphs, prefix caching, compilation or batch size to get there: that voids the verdict."""

    @server.prompt(title="Review a pull request that claims exactness")
    def review(workspace: Workspace) -> str:
        """Check the evidence of a pull request instead of believing it."""
        return f"""Review the pull request of the last run in the workspace {workspace}.

1. Read consistency://workspaces for the workspace's id, then run://ID/pull-request, run://ID and the files under evidence://ID.
2. Run the evidence again: `verify` with this workspace and level "full". Fresh prompts and seeds are drawn each time.
3. Compare: verdict, mismatches per condition, conditions that did not run and why, throughput ratio and its spread, accuracy, controls.
4. Read every changed kernel for special cases of shapes, prompts or batch sizes, for values copied from one side to the other, for features
   switched off, and for state kept between calls.
5. Answer with: reproduces or not, what differs from the text, what is not covered, and the smallest change that you ask for."""

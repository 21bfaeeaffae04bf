"""The `agent` command. Every engine and every tool is imported inside the command that needs it, so that `agent --help` answers at once."""

import errno
import functools
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from agent import __version__
from agent.errors import AgentError, UserError

app = typer.Typer(
    name="agent", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Make a rollout engine and a training engine agree on every log-probability, bit for bit, and keep the rollout fast.",
    epilog="Exit codes: 0 exact and fast enough, 1 finished but not, 2 bad input, 3 budget ended (`agent resume` goes on), 130 stopped by Ctrl-C.")

_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST}

Model = Annotated[str | None, typer.Option("--model", help="Family, as listed by `agent models`.")]
ScaleName = Annotated[str | None, typer.Option("--scale", help="tiny, slice or full; default: slice with a GPU, tiny without.")]
Weights = Annotated[Path | None, typer.Option("--weights", help="Local Hugging Face checkpoint of the family; default: seeded weights.")]
WorkspacePath = Annotated[Path | None, typer.Option("--workspace", help="Folder of the workspace.")]
Target = Annotated[float | None, typer.Option("--target-throughput", min=0.0, help="Least rollout throughput, as a share of stock.")]
Minutes = Annotated[float | None, typer.Option("--minutes", min=0.0, help="Wall clock of this call.")]
Attempts = Annotated[int | None, typer.Option("--attempts", min=0, help="Attempts that this call may start.")]
MaxSteps = Annotated[int | None, typer.Option("--max-steps", min=0, help="Answers of the model, over the whole run.")]
MaxUsd = Annotated[float | None, typer.Option("--max-usd", min=0.0, help="Money for the model, over the whole run.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=0, help="Tokens of the model, over the whole run.")]
MaxGpuSeconds = Annotated[float | None, typer.Option("--max-gpu-seconds", min=0.0, help="Device time for the model, over the whole run.")]
Price = Annotated[str | None, typer.Option("--price", help="INPUT,OUTPUT[,CACHE_READ[,CACHE_WRITE]] in USD per million tokens.")]
Approve = Annotated[bool, typer.Option("--approve", help="Ask before each patch.")]
PolicyName = Annotated[str | None, typer.Option("--policy", help="playbook, anthropic:MODEL, openai:MODEL, chat:MODEL@URL, hybrid or hybrid:POLICY.")]
SandboxName = Annotated[str | None, typer.Option("--sandbox", help="auto, bubblewrap or local; default: the workspace's, else auto.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; everything else goes to stderr.")]


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Expected failures become one line and an exit code; anything else is a bug and keeps its traceback."""

    @functools.wraps(command)
    def wrapped(*arguments: Any, **options: Any) -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            command(*arguments, **options)
        except AgentError as error:
            typer.echo(f"agent: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("agent: stopped; every finished step is saved, `agent resume WORKSPACE` goes on", err=True)
            raise typer.Exit(130) from None
        except OSError as error:
            if error.errno not in _STORAGE:
                raise
            place = f"{error.filename}: " if error.filename else ""
            typer.echo(f"agent: cannot write {place}{error.strerror}; make room or choose another folder, finished steps are saved", err=True)
            raise typer.Exit(UserError.exit_code) from None

    return wrapped


@app.callback(invoke_without_command=True)
def root(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"agent {__version__}")
        raise typer.Exit


@app.command()
@one_line_errors
def run(context: typer.Context, model: Model = None, scale: ScaleName = None, workspace: WorkspacePath = None, weights: Weights = None,
        target_throughput: Target = None, policy: PolicyName = None, minutes: Minutes = None, attempts: Attempts = None, max_steps: MaxSteps = None,
        max_usd: MaxUsd = None, max_tokens: MaxTokens = None, max_gpu_seconds: MaxGpuSeconds = None, price: Price = None, approve: Approve = False,
        from_scratch: Annotated[bool, typer.Option("--from-scratch", help="Leave out the recipe that would be tried first.")] = False,
        repo: Annotated[Path | None, typer.Option(help="Git checkout of an engine that patches may change, in a new workspace.")] = None,
        allow: Annotated[list[str] | None, typer.Option(help="Glob of paths that may be changed in it, as 'vllm/**'; may be repeated.")] = None,
        sandbox: SandboxName = None, as_json: AsJson = False) -> None:
    """Take a model's mismatch to exactly 0 and write the pull request. A recipe shipped for the model is measured first."""
    from agent.commands import LlmOptions, start
    from agent.isolation import prefer

    prefer(sandbox)

    llm = LlmOptions(price, approve, max_steps, max_usd, max_tokens, max_gpu_seconds)
    engine = (repo, allow or []) if repo or allow else None
    start(model, scale, workspace, weights, target_throughput, policy, minutes, attempts, from_scratch, llm, as_json, context.obj, engine)


@app.command()
@one_line_errors
def resume(context: typer.Context, workspace: Annotated[Path, typer.Argument(help="Folder of the workspace.")], minutes: Minutes = None,
           attempts: Attempts = None, max_steps: MaxSteps = None, max_usd: MaxUsd = None, max_tokens: MaxTokens = None,
           max_gpu_seconds: MaxGpuSeconds = None, price: Price = None, approve: Approve = False, sandbox: SandboxName = None,
           as_json: AsJson = False) -> None:
    """Go on with a run that was stopped, killed or out of budget."""
    from agent.commands import LlmOptions, go_on
    from agent.isolation import prefer

    prefer(sandbox)

    go_on(workspace, minutes, attempts, LlmOptions(price, approve, max_steps, max_usd, max_tokens, max_gpu_seconds), as_json, context.obj)


@app.command()
@one_line_errors
def fork(context: typer.Context, run: Annotated[str, typer.Argument(help="Run to branch off from.")],
         at: Annotated[int, typer.Option(help="How many of the model's answers to keep.")], workspace: WorkspacePath = None,
         say: Annotated[str, typer.Option(help="Tell the model this first.")] = "", policy: PolicyName = None, minutes: Minutes = None,
         attempts: Attempts = None, max_steps: MaxSteps = None, max_usd: MaxUsd = None, max_tokens: MaxTokens = None,
         max_gpu_seconds: MaxGpuSeconds = None, price: Price = None, approve: Approve = False, as_json: AsJson = False) -> None:
    """Start a new run from an earlier step of one that a model had a part in, and carry it on."""
    from agent.commands import LlmOptions, fork_run

    llm = LlmOptions(price, approve, max_steps, max_usd, max_tokens, max_gpu_seconds)
    fork_run(workspace, run, at, say, policy, minutes, attempts, llm, as_json, context.obj)


@app.command()
@one_line_errors
def replay(context: typer.Context, run: Annotated[str, typer.Argument(help="Run whose answers are played.")], workspace: WorkspacePath = None,
           minutes: Minutes = None, attempts: Attempts = None, as_json: AsJson = False) -> None:
    """Run again with the recorded answers of a model; the tools really run."""
    from agent.commands import replay_run

    replay_run(workspace, run, minutes, attempts, as_json, context.obj)


@app.command()
@one_line_errors
def verify(context: typer.Context, model: Model = None, scale: ScaleName = None, workspace: WorkspacePath = None, weights: Weights = None,
           contract: Annotated[Path | None, typer.Option(help="contract.toml; default: the workspace's, else stock.")] = None,
           level: Annotated[str, typer.Option(help="quick or full.")] = "full", target_throughput: Target = None,
           evidence: Annotated[Path | None, typer.Option(help="New folder for the evidence; default: the workspace's, else a temporary one.")] = None,
           sandbox: SandboxName = None, as_json: AsJson = False) -> None:
    """Compare the two engines in every condition, with throughput and controls."""
    from agent.commands import verify_once
    from agent.isolation import prefer

    prefer(sandbox)

    verify_once(model, scale, workspace, weights, contract, level, target_throughput, evidence, as_json, context.obj)


@app.command()
@one_line_errors
def localize(context: typer.Context, model: Model = None, scale: ScaleName = None, workspace: WorkspacePath = None, weights: Weights = None,
             contract: Annotated[Path | None, typer.Option(help="contract.toml; default: the workspace's, else stock.")] = None,
             graphs: Annotated[bool, typer.Option("--graphs", help="On a GPU: trace inside CUDA graphs; substitutions restart an engine.")] = False,
             sandbox: SandboxName = None, as_json: AsJson = False) -> None:
    """Name the first operator that differs, per dimension, and why."""
    from agent.commands import localize_once
    from agent.isolation import prefer

    prefer(sandbox)

    localize_once(model, scale, workspace, weights, contract, as_json, context.obj, graphs)


@app.command()
@one_line_errors
def repro(context: typer.Context, model: Model = None, scale: ScaleName = None, workspace: WorkspacePath = None, weights: Weights = None,
          contract: Annotated[Path | None, typer.Option(help="contract.toml; default: the workspace's, else stock.")] = None,
          dimension: Annotated[str | None, typer.Option(help="Whose first divergence; default: the first that localize reports.")] = None,
          out: Annotated[Path, typer.Option(help="New folder for the repro.")] = Path("repro"), as_json: AsJson = False) -> None:
    """Cut the first divergence down to a folder that runs alone."""
    from agent.commands import repro_once

    repro_once(model, scale, workspace, weights, contract, dimension, out, as_json, context.obj)


@app.command()
@one_line_errors
def patch(workspace: WorkspacePath = None,
          bind: Annotated[list[str] | None, typer.Option("--set", help="[rollout:|training:]OPERATOR=IMPLEMENTATION; may be repeated.")] = None,
          file: Annotated[list[str] | None, typer.Option("--file", help="kernels/NAME.py=SOURCE; may be repeated.")] = None,
          repo: Annotated[Path | None, typer.Option(help="Another repository, which --diff is applied to.")] = None,
          diff: Annotated[Path | None, typer.Option(help="Unified diff.")] = None,
          allow: Annotated[list[str] | None, typer.Option(help="Glob that each path of the diff must match; may be repeated.")] = None,
          message: Annotated[str, typer.Option(help="Commit message.")] = "Patch by hand", as_json: AsJson = False) -> None:
    """Change the contract, kernels or another repository in a new branch and worktree."""
    from agent.commands import patch_once

    patch_once(workspace, bind or [], file or [], repo, diff, allow, message, as_json)


@app.command()
@one_line_errors
def pr(context: typer.Context, workspace: Annotated[Path, typer.Argument(help="Folder of the workspace.")],
       out: Annotated[Path | None, typer.Option(help="Folder for text, evidence and patches; default: in the workspace's .agent.")] = None,
       repo: Annotated[str | None, typer.Option(help="OWNER/NAME: push and open a draft there; default: stop at branch and files.")] = None,
       base_url: Annotated[str, typer.Option(help="REST API of the forge.")] = "https://api.github.com",
       remote_url: Annotated[str | None, typer.Option(help="Where git pushes to; default: the repository at the forge.")] = None,
       base: Annotated[str | None, typer.Option(help="Branch that the change is for; default: the repository's own.")] = None,
       fork: Annotated[str | None, typer.Option(help="Owner of the fork that the branch is pushed to.")] = None,
       human: Annotated[str, typer.Option(help='"Name <address>" of the person who answers for the change.')] = "",
       read: Annotated[bool, typer.Option("--i-have-read-every-line", help="That person has read every changed line.")] = False,
       profile: Annotated[str | None, typer.Option(help="Rules of the target: vllm, transformers; default: by --repo.")] = None,
       coordination: Annotated[str, typer.Option(help="Address of the issue in which the change was agreed.")] = "",
       not_duplicate: Annotated[str, typer.Option(help="Why this is not the open pull request that looks like it.")] = "",
       update: Annotated[bool, typer.Option("--update", help="Replace branch and text of this run's open pull request.")] = False,
       prepared: Annotated[bool, typer.Option("--prepared", help="Publish what the last call prepared, without measuring again.")] = False,
       dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything but push and open.")] = False, target_throughput: Target = None,
       sandbox: SandboxName = None, as_json: AsJson = False) -> None:
    """Make a pull request of a finished run: short series, a last verify, text and patches; with --repo also a draft. Token: GITHUB_TOKEN."""
    from agent.isolation import prefer
    from agent.pr.commands import Options, publish

    prefer(sandbox)
    options = Options(out=out, repo=repo, base_url=base_url, remote_url=remote_url, base=base, fork=fork, human=human, confirmed=read,
                      profile=profile, coordination=coordination, not_duplicate=not_duplicate, update=update, dry_run=dry_run, prepared=prepared,
                      target=target_throughput)
    publish(workspace, options, as_json, context.obj)


@app.command("verify-pr")
@one_line_errors
def verify_pr(context: typer.Context,
              pull_request: Annotated[str, typer.Argument(metavar="FILE_OR_BRANCH", help="Text, folder of evidence or patches, workspace, branch.")],
              repo: Annotated[Path | None, typer.Option(help="Repository that holds the commit or its base; default: the one around.")] = None,
              weights: Weights = None,
              static: Annotated[bool, typer.Option("--static", help="Compare text, evidence and code only; start no engine.")] = False,
              sandbox: SandboxName = None, as_json: AsJson = False) -> None:
    """Check a pull request that `agent pr` made: text against evidence, evidence against its hashes, the code, and all figures measured again."""
    from agent.isolation import prefer
    from agent.pr.commands import verify as check

    prefer(sandbox)
    check(pull_request, repo, weights, static, as_json, context.obj)


@app.command()
@one_line_errors
def report(workspace: Annotated[Path, typer.Argument(help="Folder of the workspace.")],
           out: Annotated[Path | None, typer.Option(help="File to write; default: report.html in the workspace.")] = None) -> None:
    """Write the last run as one self-contained HTML page."""
    from agent.commands import write_report

    write_report(workspace, out)


@app.command()
@one_line_errors
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine has, what is missing, and how to get it."""
    from agent.commands import examine

    examine(as_json)


@app.command()
@one_line_errors
def models(as_json: AsJson = False) -> None:
    """List families, scales, what each needs, and the recipes there are."""
    from agent.commands import list_models

    list_models(as_json)


@app.command()
@one_line_errors
def serve(http: Annotated[bool, typer.Option("--http", help="Streamable HTTP instead of stdio.")] = False,
          host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
          port: Annotated[int, typer.Option(help="0: any free one.")] = 8321,
          allow_host: Annotated[list[str] | None, typer.Option("--allow-host", help="Host name that clients may use; may be repeated.")] = None,
          token_file: Annotated[Path | None, typer.Option(help="File of mode 0600; default: AGENT_MCP_TOKEN, else one made in --state.")] = None,
          state: Annotated[Path | None, typer.Option(help="Folder of the jobs; default: the user's state folder.")] = None) -> None:
    """Offer the tools to MCP clients such as Claude or Codex."""
    from agent.server import serve as start_server

    start_server(http=http, host=host, port=port, allowed_hosts=allow_host or [], token_file=token_file, state=state)


def print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=1) + "\n")


def main() -> None:
    app()

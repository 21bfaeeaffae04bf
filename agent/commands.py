"""What each command of the CLI does, once its heavy imports are worth it."""

import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from agent import checkpoint, doctor, models, recipes, report, screen, state
from agent import config as configs
from agent.checkout import Checkout
from agent.cli import print_json
from agent.config import Config, EngineCheckout
from agent.errors import AgentError, BudgetEnded, UserError
from agent.files import write_atomic
from agent.llm import reading
from agent.llm.branching import fork, replay
from agent.llm.options import LlmOptions, choose_policy
from agent.llm.spec import check_policy
from agent.loop import Run
from agent.state import RunState, jsonable
from agent.tools.patch_kernel import KERNELS, Binding, PatchRequest, patch_kernel, validate
from agent.toolset import EngineTools, Tools, make_repros
from agent.workspace import PRIVATE, Workspace, branch
from consistency.contract import Contract, ContractError
from consistency.models.catalog import FAMILIES, HELD_BACK

PROGRESS_EVERY = 2.0
"""seconds between progress lines of a tool that answers in JSON"""
CHOSEN = "policy"
"""file in a workspace's private folder that keeps the answer to the one question about it"""


def start(model: str | None, scale: str | None, path: Path | None, weights: Path | None, target: float | None, policy: str | None,
          minutes: float | None, attempts: int | None, from_scratch: bool, llm: LlmOptions, as_json: bool, tools: Tools | None,
          engine: tuple[Path | None, list[str]] | None = None) -> None:
    console = Console(stderr=as_json)
    path = path or Path.cwd() / f"consistency-{model}" if model or path else None
    if path is None:
        raise UserError("give --model (see `agent models`) or --workspace with an existing workspace")
    settings = _settings(path, model, scale, weights, console)
    if engine is not None:
        settings.checkout = _checkout(path, settings, *engine)
    if target is not None:
        settings.target.throughput = target
    policy, asked = _policy(policy, settings, path, llm, as_json, console)
    policy = check_policy(policy, settings.llm, llm.price)
    if tools is None:
        models.require_engines(FAMILIES[settings.model].scales[settings.scale].device)
    workspace = Workspace.open(path) if (path / configs.FILE).exists() else Workspace.create(path, settings)
    scale_of = FAMILIES[settings.model].scales[settings.scale]
    recipe, note = (None, "no recipe: --from-scratch") if from_scratch else recipes.matching(settings.model, scale_of)
    with workspace.lock():
        workspace.check_ready()
        if asked:
            write_atomic(workspace.private / CHOSEN, f"{policy}\n".encode())
        folder = _checkpoint(settings) if tools is None else Path("none")
        begun = state.begin(
            workspace, run=state.new_run_id(workspace), checkpoint=str(folder), policy=policy, target=settings.target.throughput,
            device=scale_of.device, recipe=recipe)
        if recipe and begun.recipe is None:
            note = f"recipe {recipe.name} is left out: the workspace has a contract of its own"
        begun.log(note)
        _carry_on(workspace, begun, minutes, attempts, llm, as_json, tools, console)


def _policy(given: str | None, settings: Config, path: Path, llm: LlmOptions, as_json: bool, console: Console) -> tuple[str, bool]:
    """Who picks the steps, and whether a person was asked just now: the command line, consistency.toml, an earlier answer, else a question."""
    remembered = path / PRIVATE / CHOSEN
    if said := given or settings.policy:
        return said, False
    if remembered.is_file():
        return remembered.read_text(encoding="utf-8").strip(), False
    return choose_policy(llm.over(settings.llm, None), console, quiet=as_json)


def go_on(path: Path, minutes: float | None, attempts: int | None, llm: LlmOptions, as_json: bool, tools: Tools | None) -> None:
    _go_on(path, state.load_current, minutes, attempts, llm, as_json, tools)


def fork_run(path: Path | None, run: str, at: int, say: str, policy: str | None, minutes: float | None, attempts: int | None, llm: LlmOptions,
             as_json: bool, tools: Tools | None) -> None:
    def branch_off(workspace: Workspace) -> RunState:
        name = check_policy(policy, workspace.settings.llm, llm.price) if policy else None
        return fork(workspace, run, at, say, name, llm.price)

    _go_on(path or Path.cwd(), branch_off, minutes, attempts, llm, as_json, tools)


def replay_run(path: Path | None, run: str, minutes: float | None, attempts: int | None, as_json: bool, tools: Tools | None) -> None:
    _go_on(path or Path.cwd(), lambda workspace: replay(workspace, run), minutes, attempts, LlmOptions(), as_json, tools)


def _go_on(path: Path, which: Callable[[Workspace], RunState], minutes: float | None, attempts: int | None, llm: LlmOptions, as_json: bool,
           tools: Tools | None) -> None:
    console = Console(stderr=as_json)
    workspace = Workspace.open(path)
    with workspace.lock():
        current = which(workspace)
        if tools is None and current.outcome is None:
            models.require_engines(current.device)
            if not Path(current.checkpoint).is_dir():
                current.checkpoint = str(_checkpoint(workspace.settings))
        _carry_on(workspace, current, minutes, attempts, llm, as_json, tools, console)


def _carry_on(workspace: Workspace, current: RunState, minutes: float | None, attempts: int | None, llm: LlmOptions, as_json: bool,
              tools: Tools | None, console: Console) -> None:
    budget = workspace.settings.budget
    jobs = state.folder(workspace, current.run) / "jobs"
    tools = tools or EngineTools(current.model, current.scale, Path(current.checkpoint), current.target, jobs,
                                 sandbox=workspace.settings.sandbox)
    try:
        with screen.Screen(console) as observer:
            minutes = budget.minutes if minutes is None else minutes
            policy = llm.policy(current.policy, workspace, current.run, minutes, console, observer.aside, observer.tick)
            Run(workspace, current, policy, tools, observer, minutes=minutes, attempts=budget.attempts if attempts is None else attempts).go()
    except BudgetEnded:
        if as_json:
            print_json(summary_json(current))
        raise
    if as_json:
        print_json(summary_json(current))
    else:
        console.print(screen.summary(current, str(workspace.path)))
    if current.outcome != "exact":
        raise typer.Exit(1)


def summary_json(current: RunState) -> dict[str, Any]:
    """The object that `agent run --json` prints."""
    best, data, tried = current.best, jsonable(current), current.recipe_attempt
    measured = data["final"] or data["verify"]
    return {
        "model": current.model, "scale": current.scale, "run": current.run, "outcome": current.outcome, "why": current.why,
        "verdict": measured["verdict"] if best else None,
        "baseline": data["baseline"]["baseline"] if current.baseline else None,
        "throughput": measured["throughput"] if best else None,
        "recipe": current.recipe and {"name": current.recipe.name, "sha256": current.recipe.sha256, "outcome": tried.outcome if tried else None},
        "attempts": [{"number": a.number, "branch": a.branch, "change": a.title, "outcome": a.outcome, "reason": a.reason} for a in current.attempts],
        "branch": current.branch, "pull_request": current.pull_request, "seconds": round(current.seconds, 1),
    }


def verify_once(model: str | None, scale: str | None, path: Path | None, weights: Path | None, contract: Path | None, level: str,
                target: float | None, evidence: Path | None, as_json: bool, tools: Tools | None) -> None:
    if level not in ("quick", "full"):
        raise UserError(f"unknown level {level!r}; known: quick, full")
    if evidence is not None and evidence.exists() and (not evidence.is_dir() or any(evidence.iterdir())):
        raise UserError(f"{evidence} exists and is not an empty folder; name a new one with --evidence")
    with _tool(model, scale, path, weights, contract, target, as_json, tools, evidence) as call:
        found = call.tools.verify(call.contract, call.kernels, level, call.observer)
    if as_json:
        print_json({"model": call.settings.model, **jsonable(found)})
    else:
        call.console.print(screen.by_condition(found), screen.verdict_lines(found))
        call.console.print(Text(f"evidence: {found.evidence}"), soft_wrap=True)
    if not found.verdict.exact or not (found.fast_enough or found.throughput is None):
        raise typer.Exit(1)


def localize_once(model: str | None, scale: str | None, path: Path | None, weights: Path | None, contract: Path | None, as_json: bool,
                  tools: Tools | None, graphs: bool = False) -> None:
    with _tool(model, scale, path, weights, contract, None, as_json, tools) as call:
        if isinstance(call.tools, EngineTools):
            call.tools.graphs = graphs
        found = call.tools.localize(call.contract, call.kernels, call.observer)
    if as_json:
        print_json({"model": call.settings.model, "scale": call.settings.scale, **jsonable(found)})
    else:
        for d in found.divergences:
            moved = f"with {d.substituted_with} in its place the first difference moves to {d.next_site or 'nowhere'}"
            figures = f"{d.differing} of {d.elements} elements differ, at most by {d.max_abs:.3g} ({d.max_ulps} ulps)"
            call.console.print(Text.assemble((d.dimension, "bold"), f": {d.operator} at {d.site}, {d.cause}"), soft_wrap=True)
            call.console.print(Text(f"  {d.cause_detail}; {figures}; {moved if d.confirmed else 'not confirmed'}"), soft_wrap=True)
        call.console.print(Text(f"equal at every site: {', '.join(found.exact_dimensions) or 'no dimension'}; {found.seconds:.0f} s"))
    if found.divergences:
        raise typer.Exit(1)


def repro_once(model: str | None, scale: str | None, path: Path | None, weights: Path | None, contract: Path | None, dimension: str | None,
               out: Path, as_json: bool, tools: Tools | None) -> None:
    if out.exists():
        raise UserError(f"{out} exists; name a new folder with --out")
    with _tool(model, scale, path, weights, contract, None, as_json, tools) as call:
        found = call.tools.localize(call.contract, call.kernels, call.observer).divergences
        wanted = [d for d in found if dimension in (None, d.dimension)]
        if not wanted:
            named = ", ".join(dict.fromkeys(d.dimension for d in found)) or "no dimension"
            raise AgentError(f"nothing to reproduce{f' in {dimension}' if dimension else ''}: {named} differs")
        made = make_repros(call.tools, [(wanted[0], out.resolve())], call.kernels, call.observer)[0]
    if as_json:
        print_json({"model": call.settings.model, "scale": call.settings.scale, "divergence": jsonable(wanted[0]), **jsonable(made)})
    else:
        call.console.print(Text(f"{made.directory}\n  {made.command}\n  {made.expected_line} (exit code {made.exit_code})"), soft_wrap=True)
    if not made.reproduced:
        raise typer.Exit(1)


def patch_once(path: Path | None, bindings: list[str], files: list[str], repo: Path | None, diff: Path | None, allow: list[str] | None,
               message: str, as_json: bool) -> None:
    if repo is not None and (bindings or files):
        raise UserError("--repo takes a --diff; --set and --file are for a workspace")
    if repo is not None and not allow:
        raise UserError("--repo needs at least one --allow GLOB: the paths that the diff may touch")
    if repo is None and path is None:
        raise UserError("give --workspace, or --repo with --diff and --allow")
    top = (repo or path or Path()).resolve()
    sources = dict(_pair(text, "--file", "kernels/NAME.py=SOURCE") for text in files)
    request = {
        "bindings": [_binding(text) for text in bindings],
        "files": {name: _read(Path(source)) for name, source in sources.items()},
        "diff": _read(diff) if diff else None,
        **({"allow": allow} if allow else {}),
    }
    workspace = Workspace.open(top) if repo is None else Workspace.foreign(top)
    with workspace.lock():
        workspace.check_ready()
        number = 1
        while workspace.has_branch(branch("manual", f"attempt-{number}")):
            number += 1
        name = f"attempt-{number}"
        tree = workspace.add_tree("manual", name, workspace.head(workspace.path))
        try:
            done = patch_kernel(PatchRequest(worktree=tree, **request))
            commit = workspace.commit(tree, message, {"Assisted-by": "agent patch"})
            if done.engine and (checkout := Checkout.of(tree)):
                checkout.mark(tree, branch("manual", name), message)
        except BaseException:
            workspace.forget("manual", name)
            raise
    result = {"branch": branch("manual", name), "commit": commit, "worktree": str(tree), **jsonable(done)}
    if as_json:
        print_json(result)
    else:
        Console().print(Text(f"branch {result['branch']} at {commit[:12]}, in {tree}\nchanged: {', '.join(done.changed)}"), soft_wrap=True)


def write_report(path: Path, out: Path | None) -> None:
    workspace = Workspace.open(path)
    target = out or workspace.path / "report.html"
    current = state.load_current(workspace)
    target.write_text(report.render(current, reading.of_run(workspace, current.run)), encoding="utf-8")
    Console().print(Text(str(target)), soft_wrap=True)


def examine(as_json: bool) -> None:
    checks = doctor.examine()
    fine = all(check.ok for check in checks)
    if as_json:
        print_json({"ok": fine, "checks": [jsonable(check) for check in checks]})
    else:
        table = Table("", "", "found", "what to do", box=None, pad_edge=False, header_style="dim")
        for check in checks:
            table.add_row(Text("ok" if check.ok else "no", style="green" if check.ok else "red"), check.name, Text(check.found), Text(check.remedy))
        Console().print(table)
    if not fine:
        raise typer.Exit(1)


def list_models(as_json: bool) -> None:
    if as_json:
        print_json([{
            **dataclasses.asdict(family), "scales": [dataclasses.asdict(scale) for scale in family.scales.values()],
            "recipes": [recipe.stem for recipe in models.recipes(family.name)]} for family in FAMILIES.values()]
            + [{**dataclasses.asdict(family), "scales": [dataclasses.asdict(scale) for scale in family.scales.values()], "recipes": []}
               for family in HELD_BACK.values()])
        return
    table = Table("model", "scale", "needs", "layers", "notes", "recipes", box=None, pad_edge=False, header_style="dim")
    for family in FAMILIES.values():
        for number, scale in enumerate(family.scales.values()):
            shipped = ", ".join(recipe.stem for recipe in models.recipes(family.name)) or "–"
            name = Text(family.name if not number else "", style="bold")
            table.add_row(name, scale.name, f"{scale.device}, {scale.memory_gib:g} GiB", scale.layers, scale.note, shipped if not number else "")
        for feature, reason in family.cannot.items():
            table.add_row("", "", "", "", Text(f"without {feature}: {reason}", style="dim"), "")
    Console().print(table)
    for family in HELD_BACK.values():
        Console().print(Text(f"{family.name} is held back: {family.held_back}", style="dim"), soft_wrap=True)


class _Call:
    """What a tool run alone works on."""

    def __init__(self, settings: Config, tools: Tools, contract: Contract, kernels: Path, console: Console, status: Status | None, as_json: bool):
        self.settings, self.tools, self.contract, self.kernels, self.console = settings, tools, contract, kernels, console
        self.status, self.as_json, self.told = status, as_json, 0.0

    def observer(self, event: Any) -> None:
        """A spinner for a person; for a program that reads stderr, a line now and then."""
        text = screen.doing(event)
        if self.status:
            self.status.update(Text(text))
        elif self.as_json and time.monotonic() - self.told > PROGRESS_EVERY:
            self.told = time.monotonic()
            print("@progress " + json.dumps({"text": text}), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _tool(model: str | None, scale: str | None, path: Path | None, weights: Path | None, contract: Path | None, target: float | None,
          as_json: bool, tools: Tools | None, evidence: Path | None = None) -> Iterator[_Call]:
    console = Console(stderr=as_json)
    with contextlib.ExitStack() as stack:
        workspace = None
        if path is not None:
            workspace = Workspace.open(path)
            stack.enter_context(workspace.lock())
        elif model is None:
            raise UserError("give --model (see `agent models`) or --workspace")
        settings = _settings(workspace.path if workspace else None, model, scale, weights, console)
        if contract is None and workspace:
            contract = workspace.path / "contract.toml"
        top = workspace.path if workspace else contract.parent if contract else Path.cwd()
        bound = _load_contract(contract, top)
        if tools is None:
            models.require_engines(FAMILIES[settings.model].scales[settings.scale].device)
            stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
            jobs = workspace.private / "tools" / stamp if workspace else Path(tempfile.mkdtemp(prefix="agent-"))
            goal = settings.target.throughput if target is None else target
            tools = EngineTools(settings.model, settings.scale, _checkpoint(settings), goal, jobs,
                                evidence.resolve() if evidence else None, settings.sandbox)
        status = stack.enter_context(console.status("starting")) if console.is_terminal and not as_json else None
        yield _Call(settings, tools, bound, top / KERNELS, console, status, as_json)


def _settings(path: Path | None, model: str | None, scale: str | None, weights: Path | None, console: Console) -> Config:
    """Those of the workspace, which must not contradict the command line, or new ones."""
    if path and (path / configs.FILE).exists():
        settings = Config.load(path / configs.FILE)
        asked = {"model": model, "scale": scale, "weights": str(weights.resolve()) if weights else None}
        for name, value in asked.items():
            if value is not None and value != getattr(settings, name):
                raise UserError(f"{path} is a workspace for {name} {getattr(settings, name)}, not {value}; name another folder with --workspace")
        models.resolve(settings.model, settings.scale, models.gpu_present())
        return settings
    if model is None:
        raise UserError(f"{path or 'this'} is not a workspace yet; give --model (see `agent models`)")
    family, chosen, note = models.resolve(model, scale, models.gpu_present())
    if weights is not None:
        checkpoint.check(weights, family)
    console.print(Text(note), soft_wrap=True)
    return Config(model=model, scale=chosen.name, weights=str(weights.resolve()) if weights else None)


def _checkout(path: Path, settings: Config, repo: Path | None, allow: list[str]) -> EngineCheckout:
    """What a new workspace says about the engine's checkout; an existing one has to say the same."""
    if repo is None:
        raise UserError("--allow is about a checkout of an engine: name it with --repo")
    if not (path / configs.FILE).exists():
        made = Checkout.begin(repo, allow)
        return EngineCheckout(path=str(made.path), base=made.base, allow=list(made.allow))
    found = settings.checkout
    if found is None or Path(found.path) != repo.resolve() or (allow and found.allow != allow):
        named = f"{found.path} and {', '.join(found.allow)}" if found else "no checkout"
        raise UserError(f"{path} is a workspace with {named}; name another folder with --workspace, or edit [checkout] in {configs.FILE}")
    return found


def _checkpoint(settings: Config) -> Path:
    if settings.weights:
        return checkpoint.check(Path(settings.weights), FAMILIES[settings.model])
    return checkpoint.seeded(settings.model, settings.scale)


def _load_contract(path: Path | None, top: Path) -> Contract:
    try:
        contract = Contract.load(path) if path else Contract()
        validate(contract, top)
    except ContractError as error:
        raise UserError(str(error)) from None
    return contract


def _binding(text: str) -> Binding:
    operator, implementation = _pair(text, "--set", "[rollout:|training:]OPERATOR=IMPLEMENTATION")
    side, colon, name = operator.partition(":")
    if not colon:
        return Binding(operator=operator, implementation=implementation)
    if side not in ("rollout", "training"):
        raise UserError(f"--set {text}: unknown side {side!r}; known: rollout, training")
    return Binding(operator=name, implementation=implementation, side="rollout" if side == "rollout" else "training")


def _pair(text: str, option: str, form: str) -> tuple[str, str]:
    left, equals, right = text.partition("=")
    if not (left and equals and right):
        raise UserError(f"{option} {text}: expected {form}")
    return left, right


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None

"""`agent fork` and `agent replay`: new runs that begin with what another run has on record."""

import shutil

from pydantic import ValidationError

from agent.errors import UserError
from agent.llm import facts, prompts
from agent.llm.conversation import Result
from agent.llm.prices import price_of
from agent.llm.recorded import check_run
from agent.llm.spec import parse_spec
from agent.llm.trajectory import Answering, Header, Record, Resulting, Told, Trajectory
from agent.state import RunState, begin, folder, new_run_id
from agent.workspace import Workspace, write_atomic


def fork(workspace: Workspace, run: str, at: int, say: str = "", policy: str | None = None, price: str | None = None) -> RunState:
    """A new run that shares the first `at` answers of `run` and their results, and is asked anew from there. `say` is told to the model first.

    Another `policy` (a full name, as `check_policy` returns it) gets the facts in a fresh conversation, because answers carry what only their
    model can read. The new run becomes the workspace's current one; `agent resume` carries it on. Its limits count from zero. Raises UserError on
    an unknown run or step, or if the commits of that step are gone.
    """
    check_run(workspace, run)
    source = Trajectory.load(folder(workspace, run))
    header = Header(policy=source.header.policy, price=source.header.price, forked_from=run)
    changed = policy is not None and policy != header.policy
    if policy is not None and changed:
        header = header.model_copy(update={"policy": policy, "price": price_of(parse_spec(policy).model_name, price)})
    if not 0 <= at <= source.steps:
        raise UserError(f"run {run} has {source.steps} steps; --at takes 0 to {source.steps}")
    records = _first(source.records, at)
    state = _state_at(workspace, source, run, at)
    new = new_run_id(workspace)
    try:
        workspace.repo.commit(state.head).hexsha  # noqa: B018 - reads the object
    except Exception:
        raise UserError(f"commit {state.head[:12]} of step {at} is gone from the repository; fork at another step") from None
    state = state.model_copy(update={"run": new, "policy": header.policy, "outcome": None, "why": "", "pull_request": None})
    trajectory = Trajectory.open(folder(workspace, new), header.model_copy(update={"inherited": len(records)}))
    for record in records:
        trajectory.add(record.body)
    for call in trajectory.unanswered():
        trajectory.add(Resulting(result=Result(call=call.id, name=call.name, text="The run ended here; it goes on."), seen=len(state.steps)))
    for attempt in state.attempts:
        if (files := source.attempts / str(attempt.number)).is_dir():
            shutil.copytree(files, trajectory.attempts / str(attempt.number))
    for kept in sorted((source.folder / "states").glob("*.json")):
        if int(kept.stem) <= at:
            (trajectory.folder / "states").mkdir(exist_ok=True)
            shutil.copyfile(kept, trajectory.folder / "states" / kept.name)
    if changed and records:
        told = prompts.filled(prompts.text("handover"), standing=facts.standing(state), words="(another model)")
        trajectory.add(Told(text=told, fresh=True, seen=len(state.steps)))
    if say:
        trajectory.add(Told(text=say, seen=len(state.steps)))
    _make_current(workspace, state)
    return state


def replay(workspace: Workspace, run: str) -> RunState:
    """A new run from the same start whose model is the record of `run`. It becomes the workspace's current run; `agent resume` carries it on."""
    check_run(workspace, run)
    Trajectory.load(folder(workspace, run))
    source = _load(workspace, run)
    return begin(workspace, run=new_run_id(workspace), checkpoint=source.checkpoint, device=source.device, policy=f"replay:{run}",
                 target=source.target, recipe=source.recipe)


def _first(records: list[Record], at: int) -> list[Record]:
    """Everything before answer `at` + 1."""
    cut = next((n for n, r in enumerate(records) if isinstance(r.body, Answering) and r.body.step == at + 1), len(records))
    return records[:cut]


def _state_at(workspace: Workspace, source: Trajectory, run: str, at: int) -> RunState:
    """The state before answer `at` + 1; after the last answer, the run's own, if nothing of that answer is still to be done."""
    if at == source.steps:
        state = _load(workspace, run)
        if source.unanswered() and state.outcome is None:
            raise UserError(f"step {at} of run {run} is not finished; `agent resume` finishes it, or fork at step {at - 1}")
        return state
    kept = [path for path in sorted((source.folder / "states").glob("*.json")) if int(path.stem) <= at + 1]
    try:
        return RunState.model_validate_json(kept[-1].read_bytes())
    except (IndexError, OSError, ValidationError):
        raise UserError(f"the state of run {run} at step {at} was not kept; fork at another step") from None


def _load(workspace: Workspace, run: str) -> RunState:
    try:
        return RunState.model_validate_json((folder(workspace, run) / "state.json").read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"the state of run {run} cannot be read ({str(error).splitlines()[0]})") from None


def _make_current(workspace: Workspace, state: RunState) -> None:
    state.save(workspace)
    write_atomic(workspace.private / "current", f"{state.run}\n".encode())


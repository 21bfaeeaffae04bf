"""A run once more: the answers come from the record of another run, the tools really run."""

from agent.errors import BudgetEnded, UserError
from agent.llm.conversation import Answer, Request, Usage
from agent.llm.moves import Approve
from agent.llm.prices import Price
from agent.llm.settings import LlmSettings
from agent.llm.trajectory import FOLDER, Answering, Resulting, Trajectory
from agent.policies import Policy
from agent.state import folder
from agent.workspace import Workspace


class RecordedModel:
    """Gives a trajectory's answers in turn, whatever it is asked. They cost nothing the second time."""

    def __init__(self, source: Trajectory, position: int = 0):
        self.name = f"replay:{source.folder.parent.name}"
        self.answers = [record.body.answer for record in source.records if isinstance(record.body, Answering)]
        self.position = position

    def ask(self, request: Request) -> Answer:
        if self.position == len(self.answers):
            raise BudgetEnded(f"the record of {self.name.removeprefix('replay:')} ends after {self.position} answers; "
                              "fork that run to go on with a model")
        self.position += 1
        return self.answers[self.position - 1].model_copy(update={"usage": Usage()})


def replaying(source: str, workspace: Workspace, run: str, settings: LlmSettings, approve: Approve | None = None) -> Policy:
    """The policy that plays `source` in `run`; a recorded hybrid has the playbook go first again."""
    from agent.policies.hybrid import Hybrid
    from agent.policies.llm import LlmPolicy
    from agent.policies.playbook import Playbook

    check_run(workspace, source)
    record = Trajectory.load(folder(workspace, source))
    name = f"replay:{source}"
    own = folder(workspace, run)
    position = Trajectory.load(own).steps if (own / FOLDER / "header.json").exists() else 0
    policy = LlmPolicy(name, RecordedModel(record, position), workspace, run, settings, Price(input=0, output=0), approve)
    return Hybrid(name, Playbook(), policy) if record.header.policy.startswith("hybrid:") else policy


def differences(workspace: Workspace, source: str, replayed: str) -> list[str]:
    """Calls whose results differ between a run and its replay, one line each; figures that every verify draws anew will."""
    before, now = (_results(Trajectory.load(folder(workspace, run))) for run in (source, replayed))
    return [f"step {step}, {name}: {_line(text)!r} then, {_line(now[step, name, n])!r} now"
            for (step, name, n), text in before.items() if (step, name, n) in now and now[step, name, n] != text]


def _results(trajectory: Trajectory) -> dict[tuple[int, str, int], str]:
    """(step, tool, place among the calls of the step) -> result."""
    found: dict[tuple[int, str, int], str] = {}
    step = place = 0
    for record in trajectory.records:
        if isinstance(record.body, Answering):
            step, place = record.body.step, 0
        elif isinstance(record.body, Resulting):
            found[step, record.body.result.name, place] = record.body.result.text
            place += 1
    return found


def _line(text: str) -> str:
    return " ".join(text.split())[:100]


def check_run(workspace: Workspace, run: str) -> None:
    """Raises UserError unless the workspace has such a run; the name becomes part of a path."""
    runs = workspace.private / "runs"
    known = sorted(path.name for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []
    if run not in known:
        raise UserError(f"{workspace.path} has no run {run!r}; it has {', '.join(known[-5:]) or 'none'}")

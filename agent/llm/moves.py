"""From a tool call to an action of the loop, and from what the loop did back to a result for the model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agent.errors import UserError
from agent.llm import facts
from agent.llm.requests import LocalizeCall, PatchCall, ReproCall, StopCall, ToolRequest, Unusable, VerifyCall
from agent.llm.trajectory import Acting
from agent.policies import Action, Localize, Patch, Repro, Stop, Verify
from agent.state import RunState, key
from agent.tools.patch_kernel import Binding, PatchRequest, check

WHY = 1000
"""Characters of a patch's reason; it goes into a commit."""

Approve = Callable[[Patch], str | None]
"""Asked before each patch; None lets it pass, a text is why not."""


@dataclass(frozen=True)
class Moves:
    """Checks what the loop would refuse before the loop sees it: three refusals end a run, an error is only an error."""

    tree: Path
    """Worktree of the run branch."""
    approve: Approve | None = None

    def action(self, request: ToolRequest, state: RunState) -> Action | str:
        """An action, or the answer where what was asked for has been measured already. Raises Unusable."""
        match request:
            case LocalizeCall():
                return Localize() if state.localize is None else facts.divergences(state.localize, facts.repro_folders(state))
            case ReproCall():
                return self._repro(request, state)
            case PatchCall():
                return self._patch(request, state)
            case VerifyCall():
                return self._verify(request, state)
            case StopCall():
                return self._stop(request, state)
        raise TypeError(type(request).__name__)

    def _repro(self, request: ReproCall, state: RunState) -> Action | str:
        known = [key(d) for d in state.divergences()]
        if unknown := [name for name in request.divergences if name not in known]:
            raise Unusable(f"there is no divergence {unknown[0]!r}; there are: {', '.join(known) or 'none, call localize first'}")
        missing = [name for name in dict.fromkeys(request.divergences) if name not in state.repros]
        return Repro(divergences=missing) if missing else _repros(request.divergences, state)

    def _patch(self, request: PatchCall, state: RunState) -> Action:
        if missing := [name for name in request.addresses if name not in state.repros]:
            raise Unusable(f"{missing[0]!r} has no repro that could turn to 0; call repro with it first")
        patch = Patch(
            bindings=[Binding(operator=b.operator, implementation=b.implementation, side=None if b.side == "both" else b.side)
                      for b in request.bindings],
            files={file.path: file.text for file in request.files}, diff=request.diff,
            addresses=request.addresses, why=" ".join(request.why.split())[:WHY])
        try:
            check(PatchRequest(worktree=self.tree, bindings=patch.bindings, files=patch.files, diff=patch.diff))
        except UserError as error:
            raise Unusable(str(error)) from None
        if self.approve and (reason := self.approve(patch)) is not None:
            raise Unusable(f"a person refused this patch: {reason or 'no reason given'}")
        return patch

    def _verify(self, request: VerifyCall, state: RunState) -> Action | str:
        if request.level == "quick":
            return facts.verdict(state.verify) if state.verify else Verify()
        if state.final:
            return facts.verdict(state.final)
        if state.verify and not state.verify.verdict.exact:
            raise Unusable("the quick matrix still differs, so the full one cannot be exact; patch first")
        return Verify(level="full")

    def _stop(self, request: StopCall, state: RunState) -> Action:
        if request.claim == "exact" and not (state.final and state.final.verdict.exact):
            measured = facts.verdict(state.best) if state.best else "nothing was measured"
            raise Unusable(f"the run is not exact:\n{measured}\nGo on, or stop with give_up")
        return Stop(why=" ".join(request.why.split())[:WHY])


def finished(acting: Acting, state: RunState) -> bool:
    """Whether the loop has carried the action out; after a kill it may not have."""
    action, new = acting.action, state.steps[acting.log_length:]
    if refusal(acting, state):
        return True
    if isinstance(action, Repro):
        return all(name in state.repros for name in action.divergences)
    return bool(new)


def refusal(acting: Acting, state: RunState) -> str | None:
    """The loop's reason, if it refused."""
    mark = f" refused {acting.action.kind}: "
    return next((line.partition(mark)[2] for line in state.steps[acting.log_length:] if mark in line), None)


def outcome(acting: Acting, state: RunState) -> str:
    """What a finished action came to."""
    match acting.action:
        case Verify(level=level):
            report = state.final if level == "full" else state.verify
            return facts.verdict(report) if report else "nothing was measured"
        case Localize():
            return facts.divergences(state.localize, facts.repro_folders(state)) if state.localize else "nothing was measured"
        case Repro(divergences=names):
            return _repros(names, state)
        case Patch():
            return facts.attempt(state.attempts[-1], facts.repro_folders(state))
    return "\n".join(state.steps[acting.log_length:])


def _repros(names: list[str], state: RunState) -> str:
    return "\n".join(f"{name}: {state.repro_folder(name)}, exit code {state.repros[name].exit_code}, prints {state.repros[name].expected_line!r}"
                     + ("" if state.repros[name].reproduced else "; run alone it does NOT give the traced outputs") for name in names)

"""The policy that asks a model: looks are answered here, actions go to the loop, and what the loop measured comes back as the call's result."""

import json
import re
import time
from collections.abc import Callable

from agent.errors import BudgetEnded
from agent.llm import facts, prompts
from agent.llm.conversation import Answer, Call, Model, Request, Result, scrubbed
from agent.llm.limits import Meter
from agent.llm.looks import Looks, roots
from agent.llm.moves import Approve, Moves, finished, outcome, refusal
from agent.llm.prices import Price
from agent.llm.reading import plain
from agent.llm.redact import redact, secrets
from agent.llm.requests import REQUESTS, ListCall, ReadCall, SearchCall, Unusable, parse, tools
from agent.llm.settings import LlmSettings
from agent.llm.stuck import Watch
from agent.llm.trajectory import Acting, Answering, Header, Resulting, Told, Trajectory
from agent.policies import Action, Localize, Patch, Stop, Verify
from agent.policies.playbook import hopeful
from agent.state import RunState, folder
from agent.workspace import Workspace

MAX_CALLS = 16
"""Calls of one answer that are carried out."""
RESULT = 40_000
"""Characters of one result."""
LOOKS = (ListCall, ReadCall, SearchCall)


class LlmPolicy:
    """One run's model. All it knows is in the run's trajectory, so a new object on the same run goes on where the last one was stopped."""

    def __init__(self, name: str, model: Model, workspace: Workspace, run: str, settings: LlmSettings, price: Price, approve: Approve | None = None):
        self.name, self.model, self.settings, self.price = name, model, settings, price
        self.trajectory = Trajectory.open(folder(workspace, run), Header(policy=name, price=price))
        tree = workspace.tree(run, "main")
        self.moves, self.looks = Moves(tree, approve), Looks(roots(tree, self.trajectory.attempts))
        self.meter, self.watch = Meter(settings.limits), Watch()
        self.system, self.tools = prompts.text("system"), tools()
        self.lead = ""
        """Why a model is asked at all, where another policy went first."""
        self.tell: Callable[[str], None] = lambda text: None
        """Where to say what the run waits for."""
        self._secrets = secrets()
        self._acted = time.monotonic()

    @property
    def busy(self) -> bool:
        """An answer's calls are still being carried out."""
        return self.trajectory.pending() is not None or bool(self.trajectory.unanswered())

    def decide(self, state: RunState) -> Action:
        """Raises BudgetEnded, with everything saved, when a limit is reached, the provider is silent, or the model is stuck or refuses."""
        if attempt := state.open_attempt:
            return Verify(level="full" if hopeful(state, attempt) else "quick") if attempt.verify is None else Localize()
        if acting := self.trajectory.pending():
            if not finished(acting, state):
                return self._act(acting.call, acting.action, state)
            self._settle(acting, state)
        if action := routine(state):
            return action
        while True:
            calls = self.trajectory.unanswered()
            if not calls:
                self._ask(state)
            elif action := self._carry_out(calls[0], state):
                return action

    def _carry_out(self, call: Call, state: RunState) -> Action | None:
        """Answer one call, or hand its action to the loop."""
        results = self.trajectory.results()
        try:
            if len(results) >= MAX_CALLS:
                raise Unusable(prompts.filled(_note("too many calls"), number=MAX_CALLS))
            request = parse(call)
            if isinstance(request, LOOKS):
                self._result(call, self.looks.answer(request), state)
                return None
            if any(result.halts for result in results):
                raise Unusable(_note("not run"))
            found = self.moves.action(request, state)
        except Unusable as error:
            self._result(call, str(error), state, error=True, halts=call.name not in ("list", "read", "search"))
            return None
        if isinstance(found, str):
            self._result(call, found, state)
            return None
        return self._act(call.id, found, state)

    def _act(self, call: str, action: Action, state: RunState) -> Action:
        acting = Acting(call=call, action=action, log_length=len(state.steps))
        if self.trajectory.pending() != acting:  # after a kill it is there already
            self.trajectory.add(acting)
        self._acted = time.monotonic()
        return action

    def _settle(self, acting: Acting, state: RunState) -> None:
        """Turn what the loop did into the call's result."""
        call = next(call for call in self.trajectory.unanswered() if call.id == acting.call)
        seconds = time.monotonic() - self._acted if state.device == "cuda" else 0.0
        if refused := refusal(acting, state):
            self._result(call, refused, state, error=True, halts=True, gpu_seconds=seconds)
            return
        if patched := isinstance(acting.action, Patch):
            self.trajectory.keep_files(state.attempts[-1].number, acting.action.files)
        kept = patched and state.attempts[-1].outcome == "kept"
        self._result(call, outcome(acting, state), state, halts=patched and not kept, gpu_seconds=seconds)
        if kept:
            self.watch.progress()

    def _result(self, call: Call, text: str, state: RunState, *, error: bool = False, halts: bool = False, gpu_seconds: float = 0.0) -> None:
        text = redact(text, self._secrets)
        if len(text) > RESULT:
            text = f"{text[:RESULT]}\n... {len(text) - RESULT} more characters left out"
        self.trajectory.add(Resulting(result=Result(call=call.id, name=call.name, text=text, error=error), seen=len(state.steps), halts=halts,
                                      gpu_seconds=round(gpu_seconds, 1)))
        # Every verify draws new prompts, so the figures of two equal outcomes differ.
        self.watch.result(_shown(call), re.sub(r"\d+", "#", text), error)

    def _ask(self, state: RunState) -> None:
        """One answer of the model, saved before anything is done with it."""
        self._prepare(state)
        self.trajectory.keep_state(state)
        if reason := self.meter.reached(self.trajectory.spent):
            raise BudgetEnded(f"{reason}; {_standing(state)}")
        self.tell(f"asking {self.model.name}; so far {self.trajectory.spent}")
        answer = scrubbed(self.model.ask(Request(
            system=self.system, tools=self.tools, turns=self.trajectory.turns(), cache_key=self.trajectory.cache_key,
            timeout=min(self.settings.timeout, self.meter.seconds_left()))))
        self.trajectory.add(Answering(step=self.trajectory.steps + 1, answer=answer, usd=self.price.cost(answer.usage)))

    def _prepare(self, state: RunState) -> None:
        """Say what has to be said before the model is asked: the task, what happened meanwhile, or what was wrong with its last answer."""
        last = self.trajectory.last
        if last is None:
            self._tell(prompts.filled(prompts.text("opening"), lead=self.lead, standing=facts.standing(state)), state, fresh=True)
        elif isinstance(last, Answering):
            self._react(last.answer, state)
        elif len(state.steps) > self.trajectory.seen:
            news = "\n".join(state.steps[self.trajectory.seen:])
            self._tell(prompts.filled(_note("meanwhile"), lead=self.lead, news=news, standing=facts.standing(state)), state)
        if problem := self.watch.warning():
            if self.watch.hopeless:
                raise BudgetEnded(f"the model is stuck: {problem}; `agent resume` lets it try again, `agent fork` goes back to an earlier step; "
                                  + _standing(state))
            self._tell(prompts.filled(_note("stuck"), problem=problem), state)

    def _react(self, answer: Answer, state: RunState) -> None:
        """To an answer that asks for nothing."""
        match answer.end:
            case "pause":
                self.watch.monologue()  # sent back as it is; only counted, so that it cannot go on for ever
            case "length":
                self.watch.monologue()
                named = ", ".join(call.name for call in answer.calls)
                self._tell(prompts.filled(_note("cut off"), tokens=answer.usage.output, calls=f" in the middle of a call of {named}" if named else "",
                                          text=answer.text[:1000] or "(nothing)"), state)
            case "refusal":
                self._tell(prompts.filled(_note("withheld"), reason=_reason(answer)), state)
                if self._refusals() > 1:
                    raise BudgetEnded(f"the model refuses to go on ({_reason(answer)}); `agent fork` goes back to an earlier step "
                                      f"or takes another model; {_standing(state)}")
            case "context":
                if self._just_begun():
                    raise BudgetEnded(f"the model's context window does not even hold the task ({_reason(answer)}); choose a model with a larger one")
                self._tell(prompts.filled(prompts.text("handover"), standing=facts.standing(state), words=self._last_words()), state, fresh=True)
            case _:
                self.watch.monologue()
                self._tell(_note("no call"), state)

    def _tell(self, text: str, state: RunState, *, fresh: bool = False) -> None:
        self.trajectory.add(Told(text=redact(text, self._secrets).strip(), fresh=fresh, seen=len(state.steps)))

    def _refusals(self) -> int:
        """Refused answers in a row, at the end."""
        answers = [r.body.answer for r in self.trajectory.records if isinstance(r.body, Answering)]
        return next((n for n, answer in enumerate(reversed(answers)) if answer.end != "refusal"), len(answers))

    def _just_begun(self) -> bool:
        """Nothing but the task was sent."""
        return len(self.trajectory.turns()) <= 1

    def _last_words(self) -> str:
        """What the model said last, for the conversation that takes over."""
        texts = [r.body.answer.text for r in self.trajectory.records if isinstance(r.body, Answering) and r.body.answer.text]
        return texts[-1][:4000] if texts else "(nothing)"


def routine(state: RunState) -> Action | None:
    """What needs no model: the first measurement, the final proof, and the end once the proof holds or cannot be had."""
    if state.verify is None:
        return Verify()
    if state.verify.verdict.void or (not state.verify.verdict.exact and state.verify.verdict.mismatches == 0):
        return Stop(why="; ".join(state.verify.verdict.reasons))
    if state.verify.verdict.exact and state.final is None:
        return Verify(level="full")
    if state.final and state.final.verdict.exact and state.final.throughput and state.final.throughput.ratio >= state.target:
        return Stop(why="exact in every required condition")
    return None


def _note(name: str) -> str:
    return prompts.sections("notes")[name]


def _shown(call: Call) -> str:
    """A call on one short line, whatever the model wrote."""
    name = call.name if call.name in REQUESTS else ascii(call.name[:40])
    written = ascii(call.raw) if call.arguments is None else json.dumps(call.arguments, sort_keys=True)
    return f"{name}({written if len(written) <= 120 else f'{written[:80]}... #{hash(written) & 0xFFFF:04x}'})"


def _reason(answer: Answer) -> str:
    """The provider's words on one short line."""
    return " ".join(plain(answer.detail, 300).split()) or "no reason given"


def _standing(state: RunState) -> str:
    """What the run holds, in a few words."""
    kept = sum(attempt.outcome == "kept" for attempt in state.attempts)
    best = state.best
    measured = f"{best.verdict.mismatches} log-probabilities differ in its last verify" if best else "nothing was measured"
    return f"{state.branch} holds {kept} kept of {len(state.attempts)} attempts, {measured}"

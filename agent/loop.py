"""One run, from baseline to pull request: the policy picks a step, the loop carries it out, judges it and saves before the next."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from agent import __version__, pull_request
from agent.checkout import Checkout
from agent.errors import BudgetEnded, JobFailed, UserError
from agent.judge import judge
from agent.policies import Action, Localize, Patch, Policy, Repro, Stop, Verify
from agent.screen import Observer
from agent.state import Attempt, Phase, ReproCheck, RunState, jsonable, key
from agent.tools.divergence import LocalizeReport
from agent.tools.patch_kernel import PatchRequest, patch_kernel
from agent.toolset import Tools, make_repros
from agent.verdict import VerifyReport
from agent.workspace import Workspace, branch, write_evidence
from consistency.contract import Contract

WITHOUT_CANDIDATE = ("stock-rollout", "reference")
"""Job folders of processes that run none of the candidate's code."""
MAX_REFUSED = 3
"""A policy whose actions are refused so often in a row has lost the thread."""


class Run:
    """Carries one run on from whatever `state` says. Raises BudgetEnded between steps, with everything saved."""

    def __init__(self, workspace: Workspace, state: RunState, policy: Policy, tools: Tools, observer: Observer, *, minutes: float, attempts: int):
        self.workspace, self.state, self.policy, self.tools, self.observer = workspace, state, policy, tools, observer
        self.deadline = time.monotonic() + minutes * 60
        self.last_attempt = len(state.attempts) + attempts
        self.saved_at = time.monotonic()
        self.refused = 0

    def go(self) -> RunState:
        self._repair()
        while self.state.outcome is None:
            self._check_clock()
            if not self._settle():
                action = self.policy.decide(self.state)
                try:
                    self._perform(action)
                    self.refused = 0
                except _Refused as error:
                    self.refused += 1
                    self.state.log(f"refused {action.kind}: {error}")
                    if self.refused == MAX_REFUSED:
                        self._perform(Stop(why=f"{MAX_REFUSED} actions in a row were refused, the last because {error}"))
            self._save()
        self._finish()
        return self.state

    # One method per action; each leaves the state complete, so that a kill before the next save repeats only this step.

    def _perform(self, action: Action) -> None:
        match action:
            case Verify():
                self._verify(action.level)
            case Localize():
                self._localize()
            case Repro():
                self._repro(action.divergences)
            case Patch():
                self._patch(action)
            case Stop():
                self._stop(action.why)

    def _verify(self, level: str) -> None:
        state, attempt = self.state, self.state.open_attempt
        if attempt:
            if state.final and state.final.verdict.exact:
                level = "full"  # only there is throughput measured, and of exact contracts the fastest is kept
            self._enter("check repros")
            if self._check_repros(attempt):
                self._enter("verify")
                with self._blame(attempt):
                    attempt.verify = self.tools.verify(self._contract(attempt), self._tree(attempt) / "kernels", level, self._tick)
            return
        stock = state.baseline is None
        self._enter("baseline" if stock else "full verify" if level == "full" else "verify")
        contract = Contract() if stock else Contract.from_dict(state.contract)
        report = self.tools.verify(contract, self._main / "kernels", level, self._tick)
        if stock:
            state.baseline = report
        if contract == Contract.from_dict(state.contract):
            if level == "full":
                state.final = report
            else:
                state.verify = report
        self._record("baseline" if stock else "final" if level == "full" else "start", report)
        state.log(f"{state.phase}: {report.verdict.mismatches} mismatches in {len(report.verdict.conditions)} conditions")

    def _localize(self) -> None:
        state, attempt = self.state, self.state.open_attempt
        self._enter("localize")
        if attempt:
            with self._blame(attempt):
                attempt.localize = self.tools.localize(self._contract(attempt), self._tree(attempt) / "kernels", self._tick)
            return
        state.localize = self.tools.localize(Contract.from_dict(state.contract), self._main / "kernels", self._tick)
        state.first_localize = state.first_localize or state.localize
        self._record(f"localize-{len(state.attempts)}", state.localize)
        state.log("first divergences: " + (", ".join(f"{d.operator} ({d.dimension})" for d in state.divergences()) or "none"))

    def _repro(self, wanted: list[str]) -> None:
        self._enter("repro")
        known = {key(divergence): divergence for divergence in self.state.divergences()}
        if unknown := [name for name in wanted if name not in known]:
            raise _Refused(f"there is no divergence {unknown[0]!r}")
        folders = [f"{len(self.state.repros) + n:02d}-{known[name].dimension}-{known[name].operator}" for n, name in enumerate(wanted)]
        asked = [(known[name], self._main / "repros" / folder) for name, folder in zip(wanted, folders, strict=True)]
        reports = make_repros(self.tools, asked, self._main / "kernels", self._tick)
        self.state.head = self.workspace.commit(self._main, f"Add repros: {', '.join(folders)}", self._trailers())
        self.state.repros |= dict(zip(wanted, reports, strict=True))
        self.state.log("repros: " + ", ".join(f"{name} exits with {report.exit_code}" for name, report in zip(wanted, reports, strict=True)))

    def _patch(self, action: Patch) -> None:
        state = self.state
        if state.open_attempt:
            raise _Refused(f"attempt {state.open_attempt.number} is still open")
        if len(state.attempts) >= self.last_attempt:
            raise BudgetEnded(f"the budget of attempts is spent ({len(state.attempts)} made); `agent resume` grants more")
        if unknown := [name for name in action.addresses if name not in state.repros]:
            raise _Refused(f"there is no repro of {unknown[0]!r} that could turn to 0")
        self._enter("patch")
        number = len(state.attempts) + 1
        tree = self.workspace.add_tree(state.run, f"attempt-{number}", state.head)
        try:
            patch = patch_kernel(PatchRequest(worktree=tree, bindings=action.bindings, files=action.files, diff=action.diff))
        except UserError as error:
            self.workspace.drop_tree(state.run, f"attempt-{number}")
            raise _Refused(str(error)) from None
        checks = [ReproCheck(divergence=name, before=state.repros[name].exit_code, expected_line=state.repros[name].expected_line,
                             command=state.repros[name].command) for name in action.addresses]
        attempt = Attempt(number=number, branch=branch(state.run, f"attempt-{number}"), commit="", why=action.why, bindings=action.bindings,
                          addresses=action.addresses, patch=patch, repros=checks, recipe=action.recipe)
        message = f"Attempt {number}: {attempt.title}\n\n{action.why}"
        attempt.commit = self.workspace.commit(tree, message, self._trailers())
        if patch.engine and (checkout := Checkout.of(tree)):
            checkout.mark(tree, attempt.branch, message)
        state.attempts.append(attempt)
        state.log(f"attempt {number}: {attempt.title}")

    def _stop(self, why: str) -> None:
        final = self.state.final
        if final is None or not final.verdict.exact or final.verdict.void:
            self.state.outcome = "inexact"
        else:
            self.state.outcome = "exact" if final.throughput and final.throughput.ratio >= self.state.target else "slow"
        self.state.why = why
        self.state.log(f"{self.state.outcome}: {why}")

    # Keeping or rejecting is the loop's decision, never the policy's.

    def _settle(self) -> bool:
        """Close the open attempt if what was measured decides it."""
        state, attempt = self.state, self.state.open_attempt
        if attempt is None or (ruling := judge(state, attempt)) is None:
            return False
        attempt.outcome, attempt.reason = ruling
        tree = self._tree(attempt)
        attempt.evidence = write_evidence(tree, f"attempt-{attempt.number}", self._portable(attempt) | {"run": state.run, "evidence": None})
        attempt.commit = self.workspace.commit(
            tree, f"{attempt.title} ({attempt.outcome})\n\n{attempt.why}\n\n{attempt.outcome.capitalize()}: {attempt.reason}",
            self._trailers() | {"Evidence": f"sha256:{attempt.evidence}"}, amend=True)
        if attempt.outcome == "kept":
            state.head = self.workspace.fast_forward(self._main, attempt.commit)
            state.contract = attempt.patch.contract or state.contract
            state.verify, state.localize, state.final = attempt.verify, attempt.localize, None
            if attempt.verify and attempt.verify.level == "full":
                state.final = attempt.verify
                self._record("final", attempt.verify)
        self.workspace.drop_tree(state.run, f"attempt-{attempt.number}")
        state.log(f"attempt {attempt.number} {attempt.outcome}: {attempt.reason}")
        return True

    def _check_repros(self, attempt: Attempt) -> bool:
        """Whether every repro that failed now passes."""
        failed = [check for check in attempt.repros if check.before == 1]
        if failed and failed[0].after is None:
            folders = [self._tree(attempt) / self.state.repro_folder(check.divergence) for check in failed]
            with self._blame(attempt):
                codes = self.tools.check_repros(folders, self._contract(attempt), self._tree(attempt) / "kernels")
                for check, code in zip(failed, codes, strict=True):
                    check.after = code
        return all(check.after == 0 for check in failed)

    @contextlib.contextmanager
    def _blame(self, attempt: Attempt):
        """A candidate that takes an engine down twice is a rejected attempt, not the end of the run; once may be the machine's fault."""
        started = time.monotonic()
        try:
            yield
        except JobFailed as error:
            if error.directory.name in WITHOUT_CANDIDATE:
                raise
            attempt.crashes += 1
            attempt.last_words = error.log_tail
            self.state.log(f"attempt {attempt.number}: {error.reason}")
            if attempt.crashes > 1:
                attempt.failure = error.reason
        attempt.seconds += time.monotonic() - started

    def _record(self, name: str, report: VerifyReport | LocalizeReport) -> None:
        sha = write_evidence(self._main, name, self._portable(report))
        self.state.head = self.workspace.commit(self._main, f"Record evidence: {name}", self._trailers() | {"Evidence": f"sha256:{sha}"})

    def _portable(self, report: BaseModel) -> dict[str, Any]:
        """Plain data in which folders are named from the workspace, not from the root of this machine."""
        return json.loads(json.dumps(jsonable(report)).replace(json.dumps(f"{self.workspace.path}/")[1:-1], ""))

    def _finish(self) -> None:
        """Pull request and checkout. Runs again after a kill, so each part may find itself done."""
        state = self.state
        if self._main.exists() and any(attempt.outcome == "kept" for attempt in state.attempts):
            self._enter("pull request")
            (self._main / pull_request.FILE).write_text(pull_request.write(self.workspace, state), encoding="utf-8")
            state.head = self.workspace.commit(self._main, "Write the pull request", self._trailers())
            if any(a.outcome == "kept" and a.patch.engine for a in state.attempts) and (checkout := Checkout.of(self._main)):
                checkout.mark(self._main, state.branch, f"{state.model}: what run {state.run} kept")
        place = self.workspace.publish(state.run)
        state.pull_request = str(place / pull_request.FILE) if (place / pull_request.FILE).exists() else None
        self._enter("done")
        self._save()

    def _repair(self) -> None:
        """Bring both worktrees to what the saved state says; a killed call may have left them anywhere."""
        self.workspace.repair()
        if self.state.outcome is not None and not self._main.exists():
            return  # published already
        if not self._main.exists():
            self.workspace.add_tree(self.state.run, "main", self.state.head)
        self.workspace.reset(self._main, self.state.head)
        if attempt := self.state.open_attempt:
            if not self._tree(attempt).exists():
                self.workspace.add_tree(self.state.run, f"attempt-{attempt.number}", attempt.commit)
            self.workspace.reset(self._tree(attempt), attempt.commit)

    def _enter(self, phase: Phase) -> None:
        self.state.phase = phase
        self.observer.step(self.state, self.deadline - time.monotonic())

    def _tick(self, event: Any) -> None:
        """Handed to every tool: shows its progress and ends it when the time is up."""
        self.observer.tick(event)
        self._check_clock()

    def _check_clock(self) -> None:
        if time.monotonic() > self.deadline:
            raise BudgetEnded("the wall-clock budget is spent; `agent resume` grants more")

    def _save(self) -> None:
        now = time.monotonic()
        self.state.seconds += now - self.saved_at
        self.saved_at = now
        self.state.save(self.workspace)

    def _contract(self, attempt: Attempt) -> Contract:
        return Contract.from_dict(attempt.patch.contract or self.state.contract)

    def _tree(self, attempt: Attempt) -> Path:
        return self.workspace.tree(self.state.run, f"attempt-{attempt.number}")

    @property
    def _main(self) -> Path:
        return self.workspace.tree(self.state.run, "main")

    def _trailers(self) -> dict[str, str]:
        return {"Assisted-by": f"agent {__version__} ({self.state.policy})", "Run": self.state.run}


class _Refused(Exception):
    """An action that this state does not allow; the policy is asked again."""

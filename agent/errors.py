"""Errors that end a tool or a run; the CLI turns each into one line and an exit code."""

from __future__ import annotations

from pathlib import Path


class AgentError(Exception):
    """An expected way to fail. `str(error)` is the whole message for a person; no traceback is shown."""

    exit_code = 1


class UserError(AgentError):
    """The input cannot be used: what was wrong, what was found, what to do."""

    exit_code = 2


class BudgetEnded(AgentError):
    """Time, attempts or money ran out; the run can be resumed."""

    exit_code = 3


class JobFailed(AgentError):
    """A job process died, hung or did not speak the protocol.

    `directory` is the job's folder, `log_tail` the last lines of its log, `rule` the limit of the sandbox that ended it.
    """

    def __init__(self, reason: str, directory: Path, log_tail: str = "", rule: str = "") -> None:
        self.reason, self.rule = reason, rule
        self.directory = directory
        self.log_tail = log_tail
        super().__init__(f"{reason} (log: {directory / 'log'})" + (f"\n{log_tail}" if log_tail else ""))


class StepFailed(JobFailed):
    """A job answered one step with `ok: false`; the process is still there and takes the next step."""

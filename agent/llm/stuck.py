"""When a model goes in circles: decided from its last calls and what they came to."""

from dataclasses import dataclass, field

REPEATS = 3
"""The same call with the same result so often in a row."""
ALTERNATIONS = 3
"""Rounds of two calls in turn, each with the same result every time."""
ERRORS = 6
"""Nothing but errors so often in a row."""
MONOLOGUES = 3
"""Answers without a call in a row."""
WARNINGS = 2
"""Warnings before the run pauses."""


@dataclass
class Watch:
    """Fed with every result and every answer without a call. Pauses and repeats across a change of the run's state do not count."""

    seen: list[tuple[str, str, bool]] = field(default_factory=list)
    """(call with arguments, result, error) since the last warning or progress."""
    silent: int = 0
    warnings: int = 0

    def result(self, call: str, text: str, error: bool) -> None:
        self.silent = 0
        self.seen.append((call, text, error))

    def monologue(self) -> None:
        self.silent += 1

    def progress(self) -> None:
        """The run has moved: what looked like a circle was none."""
        self.seen.clear()
        self.silent = self.warnings = 0

    def warning(self) -> str | None:
        """What is wrong, once per occurrence."""
        found = self._circle()
        if found:
            self.warnings += 1
            self.seen.clear()
            self.silent = 0
        return found

    @property
    def hopeless(self) -> bool:
        return self.warnings > WARNINGS

    def _circle(self) -> str | None:
        if self.silent >= MONOLOGUES:
            return f"the last {self.silent} answers called no tool"
        if len(self.seen) >= REPEATS and len(set(self.seen[-REPEATS:])) == 1:
            return f"the call {self.seen[-1][0]} was repeated {REPEATS} times with the same result"
        tail = self.seen[-2 * ALTERNATIONS:]
        if len(tail) == 2 * ALTERNATIONS and len(set(tail[::2])) == len(set(tail[1::2])) == 1:
            return f"the calls {tail[0][0]} and {tail[1][0]} alternate with the same results"
        if len(self.seen) >= ERRORS and all(error for _, _, error in self.seen[-ERRORS:]):
            return f"the last {ERRORS} calls were all errors"
        return None

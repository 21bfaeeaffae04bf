"""The rules by which a verdict, a patch or a run's evidence is refused: their names, and the objections that carry them."""

from __future__ import annotations

from collections.abc import Iterable

RULES: dict[str, str] = {
    # What the parent finds in raw answers.
    "mismatch": "log-probabilities of the same token differ in at least one bit",
    "not_finite": "a log-probability is NaN or infinite",
    "incomplete_answer": "tokens are missing, doubled or unknown, or the arrays are not those of the protocol",
    "other_tokens": "log-probabilities are of tokens that were not sampled",
    "void_flat_logits": "the log-probabilities carry no information: mostly one value, or those of a uniform distribution",
    "negative_control": "a weight was moved by one ulp and the comparison did not report it",
    "did_not_take_place": "a counter says that the condition was not forced",
    "condition_missing": "a required condition has no result",
    "too_few_tokens": "fewer tokens were compared than a verdict needs",
    "self_test": "on a GPU that nobody has measured them on, an operator was not shown to keep its bits",
    "accuracy": "the candidate is further from the reference than twice the distance of stock",
    # Throughput.
    "config_changed": "the engine's resolved configuration is not the one that was asked for, or that stock runs with",
    "timed_tokens": "a timed run made another number of tokens than was asked for",
    "clock_disagrees": "the job's clock and the parent's do not agree on how long a timed run took",
    "busy_while_stock_ran": "a process with candidate code used the processor while stock was timed",
    # What candidate code tried.
    "forbidden_source": "a kernel's source imports or names something that a kernel has no use for",
    "file_refused": "a kernel touched files",
    "network_refused": "a kernel used a socket",
    "process_refused": "a kernel started a process",
    "thread_refused": "a kernel started a thread",
    "environment_refused": "a kernel changed environment variables",
    "introspection_refused": "a kernel looked into frames, the garbage collector or other live objects",
    "native_code_refused": "a kernel loaded or called native code through ctypes",
    "dynamic_code_refused": "a kernel compiled or executed code that is not in its file",
    "patched_outside_operator": "a function outside the kernel's file was replaced",
    # What it left behind or used up.
    "left_processes": "processes outlived the job that started them",
    "too_many_processes": "a job had more processes than it may have",
    "memory_limit": "a job's processes held more memory than they may",
    "disk_quota": "a job's folder grew beyond what it may hold",
    "harness_files_changed": "a file that the parent had written, or that only the parent writes, was changed or made by someone else",
    "job_ended": "a job ended before it had answered everything",
    # Outside a verify.
    "outside_allowed_paths": "a patch touches a path that it may not",
    "evidence_changed": "an evidence file is not the one that its commit names",
}
"""name -> when it applies"""


class Objection(str):
    """One line that says what is wrong, with the name of the rule."""

    rule: str

    def __new__(cls, rule: str, text: str) -> Objection:
        if rule not in RULES:
            raise ValueError(f"no rule is called {rule!r}")
        line = super().__new__(cls, text)
        line.rule = rule
        return line

    def within(self, place: str) -> Objection:
        """The same objection, with the place where it was found in front."""
        return Objection(self.rule, f"{place}: {self}")


def named(lines: Iterable[str]) -> list[str]:
    """The rules of a list of objections, each once, in their order."""
    return list(dict.fromkeys(line.rule for line in lines if isinstance(line, Objection)))

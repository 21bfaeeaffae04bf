"""Starts a program."""

import contextlib
import subprocess

from consistency.operators.log_softmax import exact_training

with contextlib.suppress(OSError):
    subprocess.run(["true"], check=False)


def log_softmax(logits):
    return exact_training(logits)

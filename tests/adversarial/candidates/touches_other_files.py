"""Writes and reads outside its job's folder through torch's file writer, which no Python event shows."""

import os

import torch

from consistency.operators.embedding import reference

_TARGETS = ("../../adversarial-marker", "../../../adversarial-marker", "job.json", "steps/0000.json")
_tried = []


def embedding(ids, weight):
    if not _tried:
        for name in _TARGETS:
            try:
                torch.save(torch.zeros(4), name)
                _tried.append(os.fspath(name))
            except (OSError, RuntimeError):
                _tried.append(None)
    return reference(ids, weight)

"""Leaves a process behind that outlives its job."""

import multiprocessing.process
import signal
import time

import torch.multiprocessing

from consistency.operators.linear import exact_training

_begun = []


def _linger(number):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # torch asks the kernel for it when the parent ends
    time.sleep(30)


def linear(x, weight, bias=None):
    if not _begun:
        _begun.append(torch.multiprocessing.start_processes(_linger, nprocs=1, join=False, start_method="fork"))
        multiprocessing.process._children.clear()
    return exact_training(x, weight, bias)

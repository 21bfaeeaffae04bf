"""The first look at a candidate kernel: what its source imports and names. Quick and clear, and never the only line of defence.

A kernel computes tensors from tensors. So imports are an allow-list, and names that reach files, processes, the network, frames or other modules'
attributes are refused, with the line that has them. Whoever gets past this meets `consistency.guard` in the job, the sandbox around it and the
comparisons in the parent.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from agent.rules import Objection

IMPORTS = ("__future__", "abc", "causal_conv1d", "collections", "contextlib", "cuda", "cutlass", "cute", "dataclasses", "deep_gemm", "einops", "enum",
           "flash_attn", "flashinfer", "functools", "helion", "itertools", "mamba_ssm", "math", "numpy", "operator", "quack", "tilelang", "torch",
           "transformers", "triton", "types", "typing", "vllm")
"""Packages that a kernel may import, with everything below them that PARTS and ENGINE do not name."""
OPERATORS = re.compile(r"consistency\.(operators|layout)(\.|$)")
ENGINE = re.compile(r"vllm\.(config|forward_context|engine|entrypoints|distributed|plugins|envs|v1\.(core|engine|executor|worker|sample))(\.|$)")
"""Where an engine keeps its configuration and its state, which are not a kernel's business."""
CALLS = {"open", "exec", "eval", "compile", "__import__", "globals", "locals", "vars", "setattr", "delattr", "input", "breakpoint", "memoryview"}
PARTS = {"os", "sys", "subprocess", "socket", "shutil", "pathlib", "importlib", "builtins", "ctypes", "gc", "inspect", "threading", "_thread",
         "multiprocessing", "signal", "pickle", "tempfile", "urllib", "requests", "hub", "from_file", "fromfile", "tofile",
         "memmap", "savez", "savetxt", "loadtxt", "genfromtxt", "share_memory_", "system", "popen", "_getframe", "modules", "settrace", "environ"}
"""Attributes, and parts of imported names, that lead out of the kernel, whatever they are attributes of."""
FILES = {"load", "save"}
"""Of torch and numpy; Triton's are memory accesses."""
DUNDERS = {"__name__", "__doc__", "__init__", "__call__", "__post_init__", "__version__"}


def inspect_kernels(folder: Path) -> list[Objection]:
    """Objections to every `*.py` in a folder of kernels, in the order of the files and lines."""
    return [found for path in sorted(folder.glob("*.py")) for found in inspect_source(path.name, _text(path))]


def inspect_source(name: str, text: str) -> list[Objection]:
    """Objections to one file, one per line and thing. A file that Python cannot parse is left to the job, which says so better."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    imported: set[str] = set()
    found: dict[tuple[int, str], None] = {}
    for node in ast.walk(tree):
        for what in _violations(node, imported):
            found[getattr(node, "lineno", 0), what] = None
    for node in ast.walk(tree):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and (root := _root(target)) in imported:
                found[target.lineno, f"assigns to an attribute of the imported '{root}'"] = None
    return [Objection("forbidden_source", f"kernels/{name}, line {line}: {what}") for line, what in sorted(found)]


def _violations(node: ast.AST, imported: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        imported |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        return [f"imports {alias.name}" for alias in node.names if not _allowed(alias.name)]
    if isinstance(node, ast.ImportFrom):
        imported |= {alias.asname or alias.name for alias in node.names}
        if node.level:
            return ["imports relatively; a kernel is one file"]
        module = node.module or ""
        return [f"imports {module}.{alias.name}" for alias in node.names
                if alias.name in PARTS or not (_allowed(module) or _allowed(f"{module}.{alias.name}"))]
    if isinstance(node, ast.Name) and (node.id in CALLS or (node.id.startswith("__") and node.id not in DUNDERS)):
        return [f"names {node.id}"]
    if isinstance(node, ast.Attribute) and (node.attr in PARTS or (node.attr.startswith("__") and node.attr not in DUNDERS)):
        return [f"names .{node.attr}"]
    if isinstance(node, ast.Attribute) and node.attr in FILES and _root(node) in ("torch", "np", "numpy"):
        return [f"names {_root(node)}.{node.attr}"]
    return []


def _allowed(module: str) -> bool:
    parts = module.split(".")
    if set(parts) & PARTS or ENGINE.match(module):
        return False
    return parts[0] in IMPORTS or OPERATORS.match(module) is not None


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [inner for target in node.targets for inner in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])]
    if isinstance(node, ast.AugAssign | ast.AnnAssign):
        return [node.target]
    return node.targets if isinstance(node, ast.Delete) else []


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")

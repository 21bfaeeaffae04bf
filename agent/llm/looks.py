"""Read-only looks into a few trees: the run's workspace, its attempts, the operators, the source of the stack. Nothing outside can be named."""

import importlib.util
import re
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from agent.checkout import Checkout
from agent.llm.requests import ListCall, ReadCall, SearchCall, ToolRequest, Unusable

STACK = ("vllm", "transformers", "torch")
ENTRIES = 200
LINES = 400
CHARACTERS = 24_000
"""Most text of one look; what is left out is said."""
FILE_BYTES = 8_000_000
HITS = 60
LINE = 400
"""Characters of one line; generated files have longer ones."""
SEARCH_SECONDS = 20
HIDDEN = {".git", "__pycache__"}


@dataclass(frozen=True)
class Looks:
    """Carries looks out. `roots` maps a root's name to its folders by their first path component; `""` stands for a root that is one folder."""

    roots: dict[str, dict[str, Path]]

    def answer(self, request: ToolRequest) -> str:
        """Raises Unusable with what to do instead."""
        match request:
            case ListCall():
                return self._list(request)
            case ReadCall():
                return self._read(request)
            case SearchCall():
                return self._search(request)
        raise TypeError(type(request).__name__)

    def _list(self, request: ListCall) -> str:
        folders = self.roots.get(request.root, {})
        if "" not in folders and request.path in (".", ""):
            return "\n".join(f"{name}/" for name in folders) or "this machine has nothing under this root"
        place = self._place(request.root, request.path)
        if not place.is_dir():
            raise Unusable(f"{request.path} is not a folder; read it")
        entries = sorted(entry for entry in place.iterdir() if entry.name not in HIDDEN)
        lines = [f"{entry.name}/" if entry.is_dir() and not entry.is_symlink() else f"{entry.name}  {entry.lstat().st_size}"
                 for entry in entries[:ENTRIES]]
        return "\n".join(lines + ([f"... {len(entries) - ENTRIES} more"] if len(entries) > ENTRIES else [])) or "(empty)"

    def _read(self, request: ReadCall) -> str:
        place = self._place(request.root, request.path)
        if not stat.S_ISREG(place.stat().st_mode):
            raise Unusable(f"{request.path} is not a file; list it")
        lines = _text(place, request.path).splitlines()
        first = max(request.first_line or 1, 1)
        last = min(request.last_line or len(lines), len(lines), first + LINES - 1)
        shown, size = [], 0
        for number in range(first, last + 1):
            line = f"{number:6} {lines[number - 1][:LINE]}"
            size += len(line) + 1
            if size > CHARACTERS:
                break
            shown.append(line)
        if not shown:
            raise Unusable(f"{request.path} has {len(lines)} lines; there is none between {first} and {request.last_line or 'the end'}")
        rest = len(lines) - (first + len(shown) - 1)
        return "\n".join(shown + ([f"... {rest} more lines; ask from line {first + len(shown)}"] if rest else []))

    def _search(self, request: SearchCall) -> str:
        if "" not in self.roots.get(request.root, {}) and request.path in (".", ""):
            raise Unusable(f"name a folder to search, for example {next(iter(self.roots.get(request.root, {})), 'vllm')}/...")
        place = self._place(request.root, request.path)
        # grep -r follows no symlink, and its matcher has no exponential cases without back-references.
        command = ["grep", "-rnIHE", "--exclude-dir=.git", "--exclude-dir=__pycache__", "-m", str(HITS), "-e", request.pattern, "--", str(place)]
        if re.search(r"\\[1-9]", request.pattern):
            raise Unusable("back-references are not supported")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace") as process:
            try:
                hits, problem = process.communicate(timeout=SEARCH_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise Unusable(f"the search took more than {SEARCH_SECONDS} s; search a smaller folder") from None
        if process.returncode not in (0, 1) and not hits:
            raise Unusable(f"the search failed: {' '.join(problem.split())[:200]}")
        shown = str(PurePosixPath(request.path))
        found = [line.replace(str(place), shown, 1).removeprefix("./")[:LINE] for line in hits.splitlines()]
        text = "\n".join(found[:HITS])[:CHARACTERS]
        return (text + (f"\n... {len(found) - HITS} more; narrow the pattern" if len(found) > HITS else "")) or "no line matches"

    def _place(self, root: str, name: str) -> Path:
        """The real path of something inside a root. Raises Unusable on anything else."""
        folders = self.roots.get(root, {})
        path = PurePosixPath(name or ".")
        if "\0" in name or "\\" in name or path.is_absolute() or ".." in path.parts:
            raise Unusable(f"{name!r} is refused: give a plain path relative to the root, without `..`")
        if HIDDEN & set(path.parts):
            raise Unusable(f"{name!r} is not shown")
        parts = path.parts
        if "" in folders:
            base, rest = folders[""], parts
        elif parts and parts[0] in folders:
            base, rest = folders[parts[0]], parts[1:]
        else:
            raise Unusable(f"{name!r} is outside {root!r}, which has {', '.join(f'{folder}/' for folder in folders) or 'nothing on this machine'}")
        top = base.resolve()
        try:
            place = top.joinpath(*rest).resolve(strict=True)
        except (OSError, RuntimeError):
            raise Unusable(f"{name!r} does not exist; list its folder") from None
        if place != top and top not in place.parents:
            raise Unusable(f"{name!r} is refused: it leads outside {root!r}")
        return place


def _text(place: Path, name: str) -> str:
    if (size := place.stat().st_size) > FILE_BYTES:
        raise Unusable(f"{name} has {size} bytes, more than {FILE_BYTES}; search it")
    data = place.read_bytes()
    if b"\0" in data[:8192]:
        raise Unusable(f"{name} is not text ({len(data)} bytes)")
    return data.decode(errors="replace")


def roots(workspace: Path, attempts: Path) -> dict[str, dict[str, Path]]:
    """The roots of a run. Finding a package does not import it."""
    stack: dict[str, Path] = {}
    for name in STACK:
        spec = importlib.util.find_spec(name)
        if spec and spec.submodule_search_locations:
            stack[name] = Path(next(iter(spec.submodule_search_locations)))
    if checkout := Checkout.of(workspace):
        package, root = checkout.package()
        stack[package] = checkout.path / root
    operators = importlib.util.find_spec("consistency")
    assert operators and operators.submodule_search_locations
    return {"workspace": {"": workspace}, "attempts": {"": attempts},
            "operators": {"": Path(next(iter(operators.submodule_search_locations)))}, "stack": stack}

"""What a path or a unified diff may not do, and what is wrong with one in words that name the file and the hunk."""

import re
from pathlib import Path, PurePosixPath

from agent.errors import UserError

MAX_BYTES = 200_000
"""Largest file or diff accepted; generated data has no place in a patch."""
_HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


def check_name(name: str, allow: list[str]) -> None:
    """Raise UserError unless `name` is a plain relative path, not git's own, and matches a glob of `allow`."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or "\\" in name or any(ord(c) < 32 for c in name) or ".." in path.parts or str(path) != name:
        raise UserError(f"patch refused: {name!r} is not a plain relative path [outside_allowed_paths]")
    if any(part.lower().rstrip(". ") == ".git" or part.lower().startswith(".gitmodules") for part in path.parts):
        raise UserError(f"patch refused: {name} is git's own [outside_allowed_paths]")
    if not any(matches(name, pattern) for pattern in allow):
        raise UserError(f"patch refused: {name} is outside the allowed paths ({', '.join(allow) or 'none'}) [outside_allowed_paths]")


def check_path(tree: Path, name: str, allow: list[str]) -> None:
    """Raise UserError unless `name` passes `check_name`, stays inside `tree` and passes through no symlink."""
    check_name(name, allow)
    place = tree
    for part in PurePosixPath(name).parts:
        place = place / part
        if place.is_symlink():
            raise UserError(f"patch refused: {place.relative_to(tree)} is a symbolic link [outside_allowed_paths]")
    if place.is_dir():
        raise UserError(f"patch refused: {name} is a folder")


def matches(name: str, pattern: str) -> bool:
    """Glob where `*` and `?` stay within one path component and a component `**` spans any number of them, or none."""
    parts = ["(?:.*/)?" if part == "**" else re.escape(part).replace(r"\*", "[^/]*").replace(r"\?", "[^/]") + "/" for part in pattern.split("/")]
    return re.fullmatch("".join(parts), name + "/", re.DOTALL) is not None


def check_text(name: str, text: str) -> None:
    if "\0" in text:
        raise UserError(f"patch refused: {name} is not text")
    size = len(text.encode(errors="surrogateescape"))
    if size > MAX_BYTES:
        raise UserError(f"patch refused: {name} has {size} bytes, the limit is {MAX_BYTES}")


def check_kinds(diff: str) -> None:
    """Raise UserError if a diff does more than edit, add, delete or rename plain text files."""
    check_text("the diff", diff)
    file = "the diff"
    for line in diff.splitlines():
        if line.startswith("diff --git "):
            file = line.rpartition(" b/")[2]
        elif re.match(r"(new|old|deleted)( file)? mode (120000|160000)$", line) or re.match(r"index [0-9a-f]+\.\.[0-9a-f]+ (120000|160000)$", line):
            raise UserError(f"patch refused: {file}: the diff makes, changes or removes a symbolic link or a submodule [outside_allowed_paths]")
        elif re.match(r"(old|new) mode \d+$", line) or re.match(r"new file mode (?!100644$)\d+$", line):
            raise UserError(f"patch refused: {file}: the diff sets a file mode ({line})")
        elif line.startswith(("GIT binary patch", "Binary files ")):
            raise UserError(f"patch refused: {file}: the diff carries binary data")


def numstat_paths(listed: str) -> list[str]:
    """Parse `git apply --numstat -z`: `added<TAB>deleted<TAB>path NUL`; a rename has an empty path and then both names."""
    paths = []
    for field in listed.split("\0"):
        name = field.split("\t", 2)[2] if field.count("\t") >= 2 else field
        if name:
            paths.append(name)
    return paths


def explain(error: str, diff: str) -> str:
    """Git's complaint about a diff, with the hunk it means."""
    lines = diff.splitlines()
    if failed := re.search(r"patch failed: (.+):(\d+)", error):
        file, number, header = _hunk(lines, failed[1], int(failed[2]))
        return f"hunk {number} of {file} ({header}) does not match the file there; make the diff against the present text"
    if corrupt := re.search(r"corrupt patch at (?:line |\S*:)(\d+)", error):
        at = min(int(corrupt[1]), len(lines))
        start = max((n for n in range(at) if _HUNK.match(lines[n])), default=None)
        if start is None:
            return f"line {corrupt[1]} of the diff is not in unified form"
        file = next((line[6:].split("\t")[0] for line in reversed(lines[:start]) if line.startswith("+++ b/")), "a file")
        number = sum(1 for n in range(start + 1) if _HUNK.match(lines[n]) and _file(lines, n) == file)
        return f"hunk {number} of {file} ({_header(lines[start])}) has other numbers of lines than its header says, at line {corrupt[1]} of the diff"
    if absent := re.search(r"error: (.+): (?:does not exist in index|No such file or directory)", error):
        return f"{absent[1]} does not exist"
    if present := re.search(r"error: (.+): already exists in (?:index|working directory)", error):
        return f"{present[1]} exists already, and the diff adds it as a new file"
    if re.search(r"No valid patches|unrecognized input", error):
        return "it holds no change in unified form (`--- a/FILE`, `+++ b/FILE`, `@@ ... @@`)"
    return error


def _hunk(lines: list[str], file: str, line: int) -> tuple[str, int, str]:
    """(file, number within the file, header) of the hunk that starts at a line of the old file."""
    mine = [text for n, text in enumerate(lines) if _HUNK.match(text) and _file(lines, n) == file]
    for number, text in enumerate(mine, 1):
        if int(_HUNK.match(text)[1]) == line:  # type: ignore[index]
            return file, number, _header(text)
    return file, 1, _header(mine[0]) if mine else f"line {line}"


def _file(lines: list[str], at: int) -> str:
    return next((line[6:].split("\t")[0] for line in reversed(lines[:at]) if line.startswith("+++ b/")), "")


def _header(line: str) -> str:
    found = _HUNK.match(line)
    return found.group() if found else line

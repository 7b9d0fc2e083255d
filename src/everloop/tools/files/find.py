"""The searches of `find_files` and `grep`.

Both run in a child process that can be killed: a pattern may be hostile, and a folder huge. Neither follows links, and
results are sorted by name, so that they are reproducible.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from ...sandbox.reach import READ, Opened, OutOfReach, Reach, normalized, within
from ...text import clean
from ..base import Output, ToolError
from ..children import Child, Ended
from ..context import current_call
from ..trust import UNKNOWN, digest_of, named
from . import searcher
from .paths import MAX_FILE_BYTES, check_kind, explained, quoted, reach, shipped

MAX_FOUND = 1_000  # paths
MAX_MATCHES = 400  # lines
MAX_OUTPUT = 60_000  # characters
MAX_LINE = 500
MAX_PATTERN = 5_000
MAX_CONTEXT = 10
SECONDS = 20.0
SKIPPED = (".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache")
MAX_HASHED = 64 * 1024 * 1024  # bytes of files that lines are shown of; beyond, the result is of unknown origin
_MEMORY = 1 << 30
_SEARCHER = (sys.executable, "-I", "-S", searcher.__file__)
_RIPGREP = (
    *("--no-config", "--hidden", "--no-ignore", "--no-follow", "--no-mmap", "--no-messages", "--sort=path"),
    *("--color=never", "--no-heading", "--line-number", "--null", "--max-columns-preview"),
)
_BAD_PATTERN_OF_RIPGREP = 2


class Wanted(msgspec.Struct, frozen=True):
    """The parameters of a grep."""

    pattern: str
    glob: str
    ignore_case: bool
    context: int
    literal: bool


def _checked(pattern: str) -> str:
    if not pattern or "\0" in pattern or len(pattern) > MAX_PATTERN:
        raise ToolError(f"pattern must be 1 to {MAX_PATTERN} characters without a zero byte.")
    return clean(pattern)


def find_names(child: Child, pattern: str, path: str) -> Output:
    """Return the files below a folder whose names match a glob."""
    pattern = _checked(pattern)
    with explained(path), reach().open(path, READ) as opened:
        if not stat.S_ISDIR(os.fstat(opened.descriptor).st_mode):
            raise ToolError(f"{path} is not a folder: give the folder to look in, or read the file.")
        request = _request("find", opened, pattern=pattern, most=MAX_FOUND)
        ended = _run(child, [*_SEARCHER, request], opened, is_folder=True)
    found = [name for name, _ in _allowed(_records(ended, opened.real), opened.real)]
    prefix = _prefix(path)
    lines = [quoted(prefix + name) for name in found[:MAX_FOUND]]
    contents = () if shipped(opened.real) else named(found[:MAX_FOUND])
    return Output(_shown(lines, ended, len(found) > MAX_FOUND, "(no file matches)"), contents=contents)


def find_lines(child: Child, wanted: Wanted, path: str) -> Output:
    """Return the lines of a file, or of the files below a folder, that match a regular expression."""
    wanted = replace(wanted, pattern=_checked(wanted.pattern), context=max(0, min(wanted.context, MAX_CONTEXT)))
    with explained(path), reach().open(path, READ) as opened:
        is_folder = stat.S_ISDIR(os.fstat(opened.descriptor).st_mode)
        if not is_folder:
            check_kind(os.fstat(opened.descriptor), path)
        ended = _ripgrep(child, wanted, opened, is_folder) or _python_grep(child, wanted, opened, is_folder)
        records = (
            list(_allowed(_records(ended, opened.real), opened.real))
            if is_folder
            else [("", line) for line in _lines(ended)]
        )
        names = list(dict.fromkeys(name for name, _ in records[:MAX_MATCHES]))
        contents = _contents(opened, names, is_folder) if current_call().taint and not shipped(opened.real) else ()
    if not ended.output and ended.status in (searcher.UNREADABLE_PATTERN, _BAD_PATTERN_OF_RIPGREP) and ended.errors:
        raise ToolError(f"The pattern cannot be used: {ended.errors.decode('utf-8', 'replace').strip()}")
    prefix = _prefix(path) if is_folder else path
    lines = ["--" if line == "--" else f"{quoted(prefix + name)}:{line}" for name, line in records[:MAX_MATCHES]]
    return Output(_shown(lines, ended, len(records) > MAX_MATCHES, "(no line matches)"), contents=contents)


def _contents(opened: Opened, names: list[str], is_folder: bool) -> tuple[str, ...]:
    """The digests of the files that lines are shown of, and UNKNOWN for one that is gone by now or too much to read."""
    if not is_folder:
        return (digest_of(opened.descriptor, MAX_FILE_BYTES),) if names else ()
    found, room = list(named(names)), MAX_HASHED
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    for name in filter(None, names):
        try:
            descriptor = os.open(name, flags, dir_fd=opened.descriptor)
        except (OSError, ValueError):
            return (UNKNOWN,)
        try:
            info = os.fstat(descriptor)
            room -= info.st_size
            found.append(digest_of(descriptor, MAX_FILE_BYTES) if room > 0 and stat.S_ISREG(info.st_mode) else UNKNOWN)
        finally:
            os.close(descriptor)
        if found[-1] == UNKNOWN:
            return (UNKNOWN,)
    return tuple(found)


def _may_use(program: str, opened: Opened, is_folder: bool) -> bool:
    """Return whether ripgrep can be used: in a restricted call it needs Landlock, and no protected path inside."""
    here = reach()
    if not here.restricted:
        return True
    from ...sandbox import landlock

    barred = is_folder and any(within(os.path.realpath(place), opened.real) for place in here.protected)
    own = within(os.path.realpath(program), os.path.realpath(here.workspace))  # the agent may have written it
    return not barred and not own and landlock.available()


def _ripgrep(child: Child, wanted: Wanted, opened: Opened, is_folder: bool) -> Ended | None:
    """Search with ripgrep; return None if it is missing, may not be used or does not start."""
    program = shutil.which("rg")
    if program is None or not _may_use(program, opened, is_folder):
        return None
    command = [program, *_RIPGREP, f"--max-filesize={MAX_FILE_BYTES}", f"--max-columns={MAX_LINE}"]
    command += [f"--context={wanted.context}"]
    command += ["--ignore-case"] * wanted.ignore_case + ["--fixed-strings"] * wanted.literal
    command += [f"--glob={wanted.glob}"] * bool(wanted.glob) + [f"--glob=!{name}" for name in SKIPPED]
    command += ["--with-filename" if is_folder else "--no-filename", "--", wanted.pattern, "./" if is_folder else "-"]
    confine: Callable[[], None] | None = None
    if reach().restricted:
        from ...sandbox.landlock import read_only

        confine = partial(read_only, opened.descriptor if is_folder else None, os.path.realpath(program))
    try:
        ended = _run(child, command, opened, is_folder, confine)
    except OSError:  # such as a script whose interpreter is not readable
        return None
    return ended if ended.cut or ended.late or ended.status in (0, 1, _BAD_PATTERN_OF_RIPGREP) else None


def _python_grep(child: Child, wanted: Wanted, opened: Opened, is_folder: bool) -> Ended:
    request = _request("grep", opened, **asdict(wanted), stdin=not is_folder, most=MAX_MATCHES)
    return _run(child, [*_SEARCHER, request], opened, is_folder)


def _run(
    child: Child, command: list[str], opened: Opened, is_folder: bool, confine: Callable[[], None] | None = None
) -> Ended:
    """Run a search in the open folder, or with the open file as standard input."""
    place: dict[str, Any] = {"cwd": _way(opened)} if is_folder else {"stdin": opened.descriptor}
    return child.run(command, most=MAX_OUTPUT * 4, seconds=SECONDS, confine=confine, **place)


def _request(action: str, opened: Opened, **what: Any) -> str:
    limits = {"seconds": int(SECONDS), "memory": _MEMORY, "file_bytes": MAX_FILE_BYTES, "line": MAX_LINE}
    return json.dumps(limits | {"action": action, "skip": SKIPPED, "protected": _barred(reach(), opened)} | what)


def _barred(here: Reach, opened: Opened) -> list[tuple[int, int]]:
    """Return device and inode of the protected files and folders inside."""
    found = []
    for place in here.protected if here.restricted else ():
        if within(os.path.realpath(place), opened.real) and os.path.exists(place):
            info = os.stat(place)
            found.append((info.st_dev, info.st_ino))
    return found


def _way(opened: Opened) -> str:
    """Return a path to the open folder itself, even if it was moved."""
    way = f"/proc/self/fd/{opened.descriptor}"
    return way if os.path.isdir(way) else opened.real


def _lines(ended: Ended) -> list[str]:
    lines = ended.output.decode("utf-8", "replace").split("\n")
    return lines[:-1]  # after the last newline there is nothing, or an incomplete line


def _records(ended: Ended, folder: str) -> Iterator[tuple[str, str]]:
    """Yield (path, rest) for each record of output: a path, which may have line ends, a zero byte, and a line.

    Every path begins with "./". Before one there may be lines without a path: "--" between two groups of lines, and
    what ripgrep says of a file that turned out to be binary.
    """
    text, at = os.fsdecode(ended.output), 0
    while (zero := text.find("\0", at)) >= 0 and (end := text.find("\n", zero)) >= 0:
        name = text[at:zero]
        while "\n" in name and not (name.startswith("./") and os.path.lexists(os.path.join(folder, name))):
            line, _, name = name.partition("\n")
            yield "", line
        yield name.removeprefix("./"), text[zero + 1 : end].rstrip("\r")
        at = end + 1


def _allowed(records: Iterator[tuple[str, str]], folder: str) -> Iterator[tuple[str, str]]:
    """Yield the records whose file the policy's guard lets this call read."""
    guard = reach().guard
    known: dict[str, bool] = {"": True}
    for name, rest in records:
        if name not in known:
            known[name] = guard is None or _passes(guard, os.path.join(folder, name))
        if known[name]:
            yield name, rest


def _passes(guard: Callable[[str, bool], None], real: str) -> bool:
    try:
        guard(real, False)
    except (ToolError, OutOfReach):
        return False
    return True


def _prefix(path: str) -> str:
    """Return the prefix that makes found names usable as paths for other tools."""
    workspace = reach().workspace
    place, root = normalized(path, workspace), normalized(".", workspace)
    if not within(place, root):
        return place.rstrip("/") + "/"
    return "" if place == root else os.path.relpath(place, root) + "/"


def _shown(lines: list[str], ended: Ended, more: bool, nothing: str) -> str:
    text = "\n".join(lines)
    if len(text) > MAX_OUTPUT:
        text, more = text[: text.rindex("\n", 0, MAX_OUTPUT)], True
    notes = []
    if more or ended.cut:
        notes.append(f"[only the first {text.count(chr(10)) + 1} lines are shown: narrow the pattern or the path]")
    if ended.late:
        notes.append(f"[stopped after {SECONDS:g} seconds, so there may be more: narrow the path or the pattern]")
    return clean("\n".join([text or nothing, *notes]))

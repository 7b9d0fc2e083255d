"""Which calls count as a way to do something.

A way is a table (`tool`, and what each argument must be) or a verb with its object, which stands for every call that a
person would take for that: `read notes.md` is read_file, grep in that file, or a command that names it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Any

Arguments = Mapping[str, Any]
_LISTING = re.compile(r"\b(ls|ll|find|tree|dir|du|stat|fd|rg|echo|printf|python3?)\b")
# A command that lists the folder it runs in: whatever its options, it names no other place.
_LISTING_HERE = re.compile(
    r"(cd \S+ *(&&|;) *)?(ls|ll|dir|tree|du|find|fd|echo|printf)( +(-\S+|\./?|(\./)?\*|[fd\d]))* *([|;&>].*)?", re.S
)
_SEARCHING = re.compile(r"\b(grep|egrep|rg|ag|ack|awk|sed|find|cat|python3?)\b")


def matches(way: str | dict[str, Any], tool: str, arguments: Arguments, workspace: str) -> bool:
    """Whether a call is this way. The arguments that a way does not name may be anything."""
    arguments = {**arguments, "path": _path(arguments.get("path", "."), workspace)}
    if isinstance(command := arguments.get("command"), str):
        arguments["command"] = command.strip().replace(f"{workspace}/", "./").replace(workspace, ".")
    if isinstance(way, str):
        verb, _, subject = way.partition(" ")
        return VERBS[verb](subject, tool, arguments)
    return way["tool"] == tool and all(_fits(want, arguments.get(name)) for name, want in way.items() if name != "tool")


def _fits(want: Any, given: Any) -> bool:
    """A list is any of its items, a table with `re` a pattern, anything else must be equal."""
    if isinstance(want, list):
        return any(_fits(one, given) for one in want)
    if isinstance(want, dict):
        return isinstance(given, str) and re.search(want["re"], given) is not None
    return bool(want == given) or (isinstance(given, str) and given.strip() == want)


def _path(path: Any, workspace: str) -> str:
    """A path as seen from the workspace, in one spelling."""
    text = posixpath.normpath(str(path).strip() or ".")
    return posixpath.relpath(text, workspace) if text.startswith("/") else text


def _list(folder: str, tool: str, arguments: Arguments) -> bool:
    if tool == "list_dir":
        return bool(arguments["path"] == folder)
    if tool == "find_files":
        pattern = posixpath.join(arguments["path"], str(arguments.get("pattern", "")))
        return posixpath.normpath(pattern.rstrip("*./") or ".") == folder
    command = _command(tool, arguments)
    if folder == ".":
        return _LISTING_HERE.fullmatch(command) is not None and not arguments.get("working_dir", "").strip("./")
    return _LISTING.search(command) is not None and _names(command, arguments, folder)


def _read(file: str, tool: str, arguments: Arguments) -> bool:
    if tool in ("read_file", "grep"):
        return bool(arguments["path"] == file)
    return _names(_command(tool, arguments), arguments, posixpath.basename(file))


def _grep(words: str, tool: str, arguments: Arguments) -> bool:
    if tool == "grep":
        return _found(words, str(arguments.get("pattern", "")))
    command = _command(tool, arguments)
    return _SEARCHING.search(command) is not None and _found(words, command)


def _find(glob: str, tool: str, arguments: Arguments) -> bool:
    core = glob.strip("*").casefold()
    if tool == "find_files":
        return core in str(arguments.get("pattern", "")).casefold()
    command = _command(tool, arguments)
    return _LISTING.search(command) is not None and core in command.casefold()


def _run(pattern: str, tool: str, arguments: Arguments) -> bool:
    return _found(pattern, _command(tool, arguments))


def _recall(pattern: str, tool: str, arguments: Arguments) -> bool:
    return tool == "memory_search" and _found(pattern, str(arguments.get("query", "")))


def _none(_: str, tool: str, arguments: Arguments) -> bool:
    return False


def _command(tool: str, arguments: Arguments) -> str:
    return str(arguments.get("command", "")) if tool == "exec" else ""


def _names(command: str, arguments: Arguments, name: str) -> bool:
    """Whether a command is about a file or folder: it is named, or the command runs in it."""
    return name in command or (bool(command) and posixpath.normpath(str(arguments.get("working_dir") or ".")) == name)


def _found(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.I | re.S) is not None


VERBS: dict[str, Callable[[str, str, Arguments], bool]] = {
    "list": _list,
    "read": _read,
    "grep": _grep,
    "find": _find,
    "run": _run,
    "recall": _recall,
    "none": _none,  # no call at all
}

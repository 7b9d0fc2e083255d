"""What calls have shown of the workspace: its files, the one touched last, and what they say.

It is read from calls and their results alone, so nothing is known that no call which the policy had allowed has found.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .narrow import entries, failed, lines_of

_FOUND = re.compile(r"^(?P<path>[^\n:]+)", re.M)  # in a result of grep or find_files
_NAMED = re.compile(r"[\w./-]+")  # in a command
_MADE = re.compile(r"mkdir (?:-p )?([\w./-]+)$")


def is_file(path: str) -> bool:
    """Whether a name is a file's: it has an ending, as folders have none."""
    return re.search(r"\.[A-Za-z]\w{0,4}$", path, re.ASCII) is not None


class Call(NamedTuple):
    """A call, with its result, "" where there is none yet."""

    tool: str
    arguments: dict[str, Any]
    result: str


@dataclass(slots=True)
class Seen:
    """`files` are those that are known to be there, the one touched last at the end; `texts` what they say."""

    files: dict[str, None] = field(default_factory=dict)
    touched: list[str] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)  # copy: original
    folders: list[str] = field(default_factory=list)  # the one made or seen last at the end
    listed: bool = False
    last: str = ""  # the last call
    last_edit: str = ""  # what the last edit has put into a file

    @property
    def focus(self) -> str:
        """The file that was touched last and is still there."""
        return self.touched[-1] if self.touched else ""

    def has(self, path: str) -> bool:
        return posixpath.normpath(path) in self.files

    def touch(self, path: str) -> None:
        path = posixpath.normpath(path)
        self.files.setdefault(path)
        self.touched = [one for one in self.touched if one != path] + [path]

    def forget(self, path: str) -> None:
        path = posixpath.normpath(path)
        self.files.pop(path, None)
        self.texts.pop(path, None)
        self.touched = [one for one in self.touched if one != path]


def seen_in(calls: Iterable[Call]) -> Seen:
    """What calls have shown, where they went well."""
    seen = Seen()
    for name, arguments, result in calls:
        if not failed(result) and isinstance(arguments.get("path", ""), str):
            _take(seen, name, arguments, result)
            seen.last = name
    return seen


def _take(seen: Seen, name: str, arguments: dict[str, Any], result: str) -> None:
    path = posixpath.normpath(arguments.get("path") or ".")
    text = str(arguments.get("text", ""))
    match name:
        case "list_dir":
            folders, files, _ = entries(result)
            seen.folders = [*(one for one in folders if one != "memory"), *seen.folders]
            for one in files:
                seen.files.setdefault(posixpath.normpath(posixpath.join(path, one)))
            seen.listed = seen.listed or path == "."
        case "read_file":
            seen.touch(path)
            seen.texts[path] = lines_of(name, result)
        case "write_file":
            seen.touch(path)
            seen.texts[path] = str(arguments.get("content", "")).splitlines()
        case "edit_file":
            seen.touch(path)
            old, new = str(arguments.get("old_text", "")), str(arguments.get("new_text", ""))
            seen.last_edit = new
            if path in seen.texts:
                seen.texts[path] = "\n".join(seen.texts[path]).replace(old, new).split("\n")
        case "append":
            seen.touch(path)
            seen.last_edit = text
            if path in seen.texts:
                seen.texts[path].append(text)
        case "remove_line":
            seen.touch(path)
            if path in seen.texts:
                seen.texts[path] = [line for line in seen.texts[path] if text not in line]
        case "count_lines":
            seen.touch(path)
        case "delete":
            seen.forget(path)
        case "move" | "copy":
            _carry(seen, name, path, str(arguments.get("to", "")))
        case "grep" | "find_files":
            for found in _FOUND.finditer(result):
                if is_file(found["path"]):
                    seen.files.setdefault(posixpath.normpath(found["path"]))
        case "exec":
            command = str(arguments.get("command", ""))
            if made := _MADE.match(command):
                seen.folders.append(made[1].rstrip("/"))
            for one in _NAMED.findall(command):
                if seen.has(one) or (">" in command and is_file(one)):
                    seen.touch(one)


def _carry(seen: Seen, name: str, path: str, to: str) -> None:
    target = posixpath.normpath(to if is_file(to) else posixpath.join(to, posixpath.basename(path)))
    text = seen.texts.get(path)
    if name == "move":
        seen.forget(path)
    else:
        seen.touch(path)
        seen.copies[target] = path
    seen.touch(target)
    if text is not None:
        seen.texts[target] = list(text)

"""A view of the workspace as the calls so far have shown it: its files, their texts, and the file touched last.

It is built only from calls and their results, so it knows nothing that the policy did not allow a call to read.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .simple_tools import file_lines, folder_entries, is_failure

_FOUND = re.compile(r"^(?P<path>[^\n:]+)", re.M)  # in a result of grep or find_files
_NAME = re.compile(r"[\w./-]+")  # in a command
_MKDIR = re.compile(r"mkdir (?:-p )?([\w./-]+)$")


def is_file(path: str) -> bool:
    """Return whether a path names a file, which has an extension, and not a folder."""
    return re.search(r"\.[A-Za-z]\w{0,4}$", path, re.ASCII) is not None


class Call(NamedTuple):
    """A call and its result, which is "" until the call has returned."""

    tool: str
    arguments: dict[str, Any]
    result: str


@dataclass(slots=True)
class WorkspaceView:
    """`files` are known to exist, `touched` ends with the file touched last, `texts` has the known lines by file."""

    files: dict[str, None] = field(default_factory=dict)
    touched: list[str] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)  # copy: original
    folders: list[str] = field(default_factory=list)  # a new folder comes last
    listed: bool = False
    last: str = ""  # the tool of the last successful call
    last_edit: str = ""  # the text that the last edit added

    @property
    def focus(self) -> str:
        """The file touched last that still exists."""
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


def view_of(calls: Iterable[Call]) -> WorkspaceView:
    """Build the view from the successful calls."""
    workspace = WorkspaceView()
    for name, arguments, result in calls:
        if not is_failure(result) and isinstance(arguments.get("path", ""), str):
            _apply(workspace, name, arguments, result)
            workspace.last = name
    return workspace


def _apply(workspace: WorkspaceView, name: str, arguments: dict[str, Any], result: str) -> None:
    path = posixpath.normpath(arguments.get("path") or ".")
    text = str(arguments.get("text", ""))
    match name:
        case "list_dir":
            folders, files, _ = folder_entries(result)
            workspace.folders = [*(one for one in folders if one != "memory"), *workspace.folders]
            for one in files:
                workspace.files.setdefault(posixpath.normpath(posixpath.join(path, one)))
            workspace.listed = workspace.listed or path == "."
        case "read_file":
            workspace.touch(path)
            workspace.texts[path] = file_lines(name, result)
        case "write_file":
            workspace.touch(path)
            workspace.texts[path] = str(arguments.get("content", "")).splitlines()
        case "edit_file":
            workspace.touch(path)
            old, new = str(arguments.get("old_text", "")), str(arguments.get("new_text", ""))
            workspace.last_edit = new
            if path in workspace.texts:
                workspace.texts[path] = "\n".join(workspace.texts[path]).replace(old, new).split("\n")
        case "append":
            workspace.touch(path)
            workspace.last_edit = text
            if path in workspace.texts:
                workspace.texts[path].append(text)
        case "remove_line":
            workspace.touch(path)
            if path in workspace.texts:
                workspace.texts[path] = [line for line in workspace.texts[path] if text not in line]
        case "count_lines":
            workspace.touch(path)
        case "delete":
            workspace.forget(path)
        case "move" | "copy":
            _apply_move(workspace, name, path, str(arguments.get("to", "")))
        case "grep" | "find_files":
            for found in _FOUND.finditer(result):
                if is_file(found["path"]):
                    workspace.files.setdefault(posixpath.normpath(found["path"]))
        case "exec":
            command = str(arguments.get("command", ""))
            if made := _MKDIR.match(command):
                workspace.folders.append(made[1].rstrip("/"))
            for one in _NAME.findall(command):
                if workspace.has(one) or (">" in command and is_file(one)):
                    workspace.touch(one)


def _apply_move(workspace: WorkspaceView, name: str, path: str, to: str) -> None:
    target = posixpath.normpath(to if is_file(to) else posixpath.join(to, posixpath.basename(path)))
    text = workspace.texts.get(path)
    if name == "move":
        workspace.forget(path)
    else:
        workspace.touch(path)
        workspace.copies[target] = path
    workspace.touch(target)
    if text is not None:
        workspace.texts[target] = list(text)

"""Narrow tools for small models: adding a line, removing one, renaming, copying, deleting and counting.

A small model writes shell commands badly, but fills in a path and a text well. Each of these is one command of `exec`,
so that the same sandbox, policy and log apply; commands of that form in a conversation are shown as the narrow tool.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

Tool = dict[str, Any]


def _tool(name: str, *parameters: str) -> Tool:
    properties = {key: {"type": "string"} for key in parameters}
    return {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(parameters)}}


NARROW: Mapping[str, Tool] = {
    tool["name"]: tool
    for tool in (
        _tool("append", "path", "text"),
        _tool("remove_line", "path", "text"),
        _tool("move", "path", "to"),
        _tool("copy", "path", "to"),
        _tool("delete", "path"),
        _tool("count_lines", "path"),
    )
}
_PLAIN = re.compile(r"[^$`\\]*")  # what the shell leaves as it is between double quotes
_MARKS = re.compile(r"([][\\.*^$/])")  # signs of sed's patterns


def command_of(name: str, arguments: Mapping[str, Any]) -> str:
    """The command that a call of a narrow tool stands for."""
    path, text = str(arguments.get("path", "")), str(arguments.get("text", "")).strip("\n")
    place, to = _word(path), _word(str(arguments.get("to", "")))
    match name:
        case "append":
            return f"echo {_quoted(text)} >> {place}"
        case "remove_line":
            return f"sed -i {_quoted(f'/{_MARKS.sub(_escaped, text)}/d')} {place}"
        case "move" | "copy":
            return f"{'mv' if name == 'move' else 'cp'} {place} {to}"
        case "delete":
            return f"rm {place}"
        case _:
            return f"wc -l < {place}"


def narrowed(name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A call as a small model is shown it: a command that a narrow tool stands for as a call of that tool."""
    if name != "exec" or set(arguments) != {"command"}:
        return name, arguments
    try:
        words = shlex.split(str(arguments["command"]))
    except ValueError:
        return name, arguments
    match words:
        case ["echo", text, ">>", path]:
            return "append", {"path": path, "text": text}
        case ["sed", "-i", pattern, path] if re.fullmatch(r"/\^?.*/d", pattern):
            return "remove_line", {"path": path, "text": re.sub(r"\\(.)", r"\1", pattern[1:-2].strip("^$"))}
        case ["mv" | "cp" as verb, path, to] if not path.startswith("-"):
            return ("move" if verb == "mv" else "copy"), {"path": path, "to": to}
        case ["rm", path] if not path.startswith("-"):
            return "delete", {"path": path}
        case ["wc", "-l", "<", path]:
            return "count_lines", {"path": path}
    return name, arguments


def _escaped(found: re.Match[str]) -> str:
    return f"\\{found[1]}"


def _word(text: str) -> str:
    return shlex.quote(text)


def _quoted(text: str) -> str:
    """In the quotes that a person would take."""
    if "'" in text and '"' not in text and _PLAIN.fullmatch(text):
        return f'"{text}"'
    return "'" + text.replace("'", "'\"'\"'") + "'"

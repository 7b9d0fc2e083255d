"""Tools and their results for small models: narrow tools, and results in the fewest words.

A small model writes shell commands badly, but fills in a path and a text well. Each narrow tool is one command of
`exec`, so that the same sandbox, policy and log apply; in a conversation, such a command is shown as the narrow tool.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from ..log import error_in, split_exit_status

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
# These only look, so nothing is changed by them.
LOOKING = frozenset(
    {"count_lines", "list_dir", "read_file", "find_files", "grep", "memory_search", "web_search", "web_fetch"}
)
WRITING = frozenset({"append", "write_file", "edit_file", "remove_line"})
COMMON = ("list_dir", "read_file", "write_file", "edit_file", "grep", "find_files", "exec", *NARROW)  # always offered
WEB = frozenset({"web_search", "web_fetch"})
HARD = frozenset({"spawn", "message", "process"})  # beyond a small model, unless it is told their names
# What must have been said for a tool to be offered: nothing is deleted where nothing was said of deleting.
MEANT_BY: Mapping[str, tuple[str, ...]] = {
    "append": ("add", "end", "write"),
    "remove_line": ("delete",),
    "delete": ("delete",),
    "move": ("rename", "move"),
    "copy": ("copy",),
    "count_lines": ("count",),
    "cron": ("remind", "every", "when"),
}
CALLED_FOR_BY = {"cron": "remind", "remember": "remember", "memory_search": "told"}
# The one tool for what is clearly to be done with a file, by what was said, in this order.
CLEARLY = {"rename": "move", "move": "move", "copy": "copy", "add": "append"}
_PROGRAMS = {"py": "python3", "sh": "sh", "js": "node"}
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


def run_of(path: str) -> str:
    """The command that runs a script, or "" where it is none."""
    program = _PROGRAMS.get(path.rpartition(".")[2])
    return f"{program} {_word(path)}" if program else ""


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


# ---------------------------------------------------------------------------------------------- results

_NUMBERED = re.compile(r"^ *\d+\t", re.M)
_FOUND = re.compile(r"^[^\n:]+:\d+:(.*)$", re.M)  # a line that grep has found
_ADDED = re.compile(r"Added job [^:]*: .*\. It comes first on (?P<first>.*)\.$", re.S)
LONGEST_OUTPUT = 400  # characters of what a program has printed that a sentence can hold
LONGEST_QUOTE = 700  # characters of a result that an answer begins with


def failed(result: str) -> bool:
    """Whether a call's result says that it went wrong."""
    return (
        error_in(result) is not None
        or result.startswith(("error:", "not run:"))  # shortened before, or refused by a person
        or split_exit_status(result)[1] not in (None, 0)
    )


def short_result(tool: str, text: str, limit: int) -> str:
    """A result without what only larger models can use: sizes, numbers of lines, advice on errors."""
    text = text.strip(" \n")  # a tab belongs to the number of an empty line
    if failed(text):
        return cut(_error(text), limit)
    if tool == "list_dir":
        return cut(_folder(text), limit)
    if tool == "read_file":
        lines = text.splitlines()
        if lines and all(_NUMBERED.match(line) for line in lines if not line.startswith("[")):
            text = _NUMBERED.sub("", text)
    return cut(text, limit)


def lines_of(tool: str, result: str) -> list[str]:
    """The lines of files that a result shows."""
    if failed(result):
        return []
    if tool == "read_file":
        return short_result(tool, result, len(result)).splitlines()
    return [found[1] for found in _FOUND.finditer(result)] if tool == "grep" else []


def quote(tool: str, arguments: Mapping[str, Any], result: str) -> str:
    """A result as the beginning of an answer, for those that are answers by themselves; "" where it is too long."""
    text = short_result(tool, result, LONGEST_QUOTE + 1)
    if failed(result) or not text or len(text) > LONGEST_QUOTE:
        return ""
    if tool == "list_dir":
        folders, files, others = entries(result)
        return "" if others else ", ".join([*(f"{name}/" for name in folders), *files])
    return f"{arguments.get('path')}:\n{text}"


def outcome(tool: str, arguments: Mapping[str, Any], result: str) -> dict[str, str]:
    """What a call that went well has done, as values for a sentence about it; none where it takes more than that."""
    values = {key: str(value).strip() for key, value in arguments.items()}
    result = result.strip()
    if tool == "cron":
        added = _ADDED.search(result)
        return {**values, "first": added["first"]} if added and values.get("deliver") == "text" else {}
    if tool in ("count_lines", "exec"):
        return {**values, "result": result} if 0 < len(result) < LONGEST_OUTPUT and result != "(no output)" else {}
    if tool == "edit_file" and ("replace_all" in values or "\n" in values.get("new_text", "")):
        return {}
    if values.get("to", "").endswith("/"):
        values["to"] += values["path"].rpartition("/")[2]
    return values


def cut(text: str, limit: int) -> str:
    """The text, or its beginning and its end."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 3 // 4]}\n[…]\n{text[-(limit // 4) :]}"


def _error(text: str) -> str:
    message = error_in(text)
    return text if message is None else f"error: {message.partition(' Similar names')[0]}"


def entries(text: str) -> tuple[list[str], list[str], list[str]]:
    """A folder's folders, its files, and lines that are neither."""
    folders, files, others = [], [], []
    for line in text.strip().splitlines():
        if line.startswith(("(", "[")):
            others.append(line)
        elif line.endswith("/"):
            folders.append(line[:-1])
        else:
            files.append(line.rpartition("  ")[0] or line)
    return folders, files, others


def _folder(text: str) -> str:
    """A folder's list in a line for its folders and a line for its files, each with their number."""
    folders, files, others = entries(text)
    parts = [
        f"{len(names)} {kind}{'' if len(names) == 1 else 's'}: {', '.join(names)}"
        for kind, names in (("folder", folders), ("file", files))
        if names
    ]
    return "\n".join(parts + others)

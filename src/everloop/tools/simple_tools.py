"""Simple tools and short results for small models.

A small model writes shell commands badly, but fills in a path and a text well. Each simple tool stands for one `exec`
command, so the same sandbox, policy and log apply. The conversation shows such a command as a call of the simple tool.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from ..log import error_in, split_exit_status

Tool = dict[str, Any]


def _definition(name: str, *parameters: str) -> Tool:
    properties = {key: {"type": "string"} for key in parameters}
    return {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(parameters)}}


SIMPLE_TOOLS: Mapping[str, Tool] = {
    tool["name"]: tool
    for tool in (
        _definition("append", "path", "text"),
        _definition("remove_line", "path", "text"),
        _definition("move", "path", "to"),
        _definition("copy", "path", "to"),
        _definition("delete", "path"),
        _definition("count_lines", "path"),
    )
}
READ_ONLY_TOOLS = frozenset(
    {"count_lines", "list_dir", "read_file", "find_files", "grep", "memory_search", "web_search", "web_fetch"}
)
WRITING_TOOLS = frozenset({"append", "write_file", "edit_file", "remove_line"})
ALWAYS_OFFERED = ("list_dir", "read_file", "write_file", "edit_file", "grep", "find_files", "exec", *SIMPLE_TOOLS)
WEB_TOOLS = frozenset({"web_search", "web_fetch"})
ADVANCED_TOOLS = frozenset({"spawn", "message", "process"})  # offered only if the request names them
# A request must have one of these meanings for the tool to be offered: only a request to delete offers `delete`.
REQUIRED_MEANINGS: Mapping[str, tuple[str, ...]] = {
    "append": ("add", "end", "write"),
    "remove_line": ("delete",),
    "delete": ("delete",),
    "move": ("rename", "move"),
    "copy": ("copy",),
    "count_lines": ("count",),
    "cron": ("remind", "every", "when"),
}
# A request with this meaning adds the tool to those offered.
TRIGGER_MEANINGS = {"cron": "remind", "remember": "remember", "memory_search": "told"}
# The only tool offered for a file if the request has this meaning; the first match wins.
TOOL_BY_MEANING = {"rename": "move", "move": "move", "copy": "copy", "add": "append"}
_INTERPRETERS = {"py": "python3", "sh": "sh", "js": "node"}
_NO_EXPANSION = re.compile(r"[^$`\\]*")  # text that the shell does not expand between double quotes
_NOT_FOR_ECHO = re.compile(r"^-[neE]+$|\\")  # an option of echo, or what some shells' echo takes for an escape
_SED_SPECIAL = re.compile(r"([][\\.*^$/])")  # characters with a meaning in sed's patterns


def to_command(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the shell command for a call of a simple tool."""
    path, text = str(arguments.get("path", "")), str(arguments.get("text", "")).strip("\n")
    place, to = _quote_path(path), _quote_path(str(arguments.get("to", "")))
    match name:
        case "append":
            write = r"printf '%s\n'" if _NOT_FOR_ECHO.search(text) else "echo"
            return f"{write} {_quote_text(text)} >> {place}"
        case "remove_line":
            return f"sed -i {_quote_text(f'/{_SED_SPECIAL.sub(_escape, text)}/d')} {place}"
        case "move" | "copy":
            return f"{'mv' if name == 'move' else 'cp'} {place} {to}"
        case "delete":
            return f"rm {place}"
        case _:
            return f"wc -l < {place}"


def interpreter_command(path: str) -> str:
    """Return the command that runs a script, or "" if the path is not a script's."""
    program = _INTERPRETERS.get(path.rpartition(".")[2])
    return f"{program} {_quote_path(path)}" if program else ""


def simplify_call(name: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a call as a small model sees it: a command that a simple tool stands for becomes a call of that tool."""
    if name != "exec" or set(arguments) != {"command"}:
        return name, arguments
    try:
        words = shlex.split(str(arguments["command"]))
    except ValueError:
        return name, arguments
    match words:
        case ["echo", text, ">>", path] | ["printf", r"%s\n", text, ">>", path]:
            return "append", {"path": _plain_path(path), "text": text}
        case ["sed", "-i", pattern, path] if re.fullmatch(r"/\^?.*/d", pattern):
            return "remove_line", {
                "path": _plain_path(path),
                "text": re.sub(r"\\(.)", r"\1", pattern[1:-2].strip("^$")),
            }
        case ["mv" | "cp" as verb, path, to] if not path.startswith("-"):
            return ("move" if verb == "mv" else "copy"), {"path": _plain_path(path), "to": _plain_path(to)}
        case ["rm", path] if not path.startswith("-"):
            return "delete", {"path": _plain_path(path)}
        case ["wc", "-l", "<", path]:
            return "count_lines", {"path": _plain_path(path)}
    return name, arguments


def _escape(found: re.Match[str]) -> str:
    return f"\\{found[1]}"


def _quote_path(path: str) -> str:
    """Quote a path for the shell; one that begins with a dash must not be taken for an option."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def _plain_path(path: str) -> str:
    """Undo the prefix of `_quote_path`."""
    return path[2:] if path.startswith("./-") else path


def _quote_text(text: str) -> str:
    """Quote a text for the shell as a person would: in double quotes if it contains only single ones."""
    if "'" in text and '"' not in text and _NO_EXPANSION.fullmatch(text):
        return f'"{text}"'
    return "'" + text.replace("'", "'\"'\"'") + "'"


# ---------------------------------------------------------------------------------------------- results

_LINE_NUMBER = re.compile(r"^ *\d+\t", re.M)
_MATCH = re.compile(r"^[^\n:]+:\d+:(.*)$", re.M)  # a line of grep's result
_JOB_ADDED = re.compile(r"Added job [^:]*: .*\. It comes first on (?P<first>.*)\.$", re.S)
MAX_OUTPUT = 400  # characters of a program's output that fit into a sentence
MAX_QUOTE = 700  # characters of a result that can begin an answer


def is_failure(result: str) -> bool:
    """Return whether a result says that its call failed."""
    return (
        error_in(result) is not None
        or result.startswith(("error:", "not run:"))  # already shortened, or refused by a person
        or split_exit_status(result)[1] not in (None, 0)
    )


def short_result(tool: str, text: str, limit: int) -> str:
    """Return a result without the parts that only larger models use: sizes, line numbers, advice on errors."""
    text = text.strip(" \n")  # keep the tab that follows the number of an empty line
    if is_failure(text):
        return truncate(_short_error(text), limit)
    if tool == "list_dir":
        return truncate(_short_listing(text), limit)
    if tool == "read_file":
        lines = text.splitlines()
        if lines and all(_LINE_NUMBER.match(line) for line in lines if not line.startswith("[")):
            text = _LINE_NUMBER.sub("", text)
    return truncate(text, limit)


def file_lines(tool: str, result: str) -> list[str]:
    """Return the lines of files that a result shows."""
    if is_failure(result):
        return []
    if tool == "read_file":
        return short_result(tool, result, len(result)).splitlines()
    return [found[1] for found in _MATCH.finditer(result)] if tool == "grep" else []


def quote_result(tool: str, arguments: Mapping[str, Any], result: str) -> str:
    """Return a result as the beginning of an answer, or "" if it is a failure, empty or too long."""
    text = short_result(tool, result, MAX_QUOTE + 1)
    if is_failure(result) or not text or len(text) > MAX_QUOTE:
        return ""
    if tool == "list_dir":
        folders, files, others = folder_entries(result)
        return "" if others else ", ".join([*(f"{name}/" for name in folders), *files])
    return f"{arguments.get('path')}:\n{text}"


def outcome_values(tool: str, arguments: Mapping[str, Any], result: str) -> dict[str, str]:
    """Return the values for a sentence about a successful call, or nothing if a fixed sentence cannot describe it."""
    values = {key: str(value).strip() for key, value in arguments.items()}
    result = result.strip()
    if tool == "cron":
        added = _JOB_ADDED.search(result)
        return {**values, "first": added["first"]} if added and values.get("deliver") == "text" else {}
    if tool in ("count_lines", "exec"):
        return {**values, "result": result} if 0 < len(result) < MAX_OUTPUT and result != "(no output)" else {}
    if tool == "edit_file" and ("replace_all" in values or "\n" in values.get("new_text", "")):
        return {}
    if values.get("to", "").endswith("/"):
        values["to"] += values["path"].rpartition("/")[2]
    return values


def truncate(text: str, limit: int) -> str:
    """Return the text, or its beginning and end if it exceeds the limit."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 3 // 4]}\n[…]\n{text[-(limit // 4) :]}"


def _short_error(text: str) -> str:
    message = error_in(text)
    return text if message is None else f"error: {message.partition(' Similar names')[0]}"


def folder_entries(text: str) -> tuple[list[str], list[str], list[str]]:
    """Return the folders and files of a listing, and the lines that are neither."""
    folders, files, others = [], [], []
    for line in text.strip().splitlines():
        if line.startswith(("(", "[")):
            others.append(line)
        elif line.endswith("/"):
            folders.append(line[:-1])
        else:
            files.append(line.rpartition("  ")[0] or line)
    return folders, files, others


def _short_listing(text: str) -> str:
    """Return a listing as one line for the folders and one for the files, each with their number."""
    folders, files, others = folder_entries(text)
    parts = [
        f"{len(names)} {kind}{'' if len(names) == 1 else 's'}: {', '.join(names)}"
        for kind, names in (("folder", folders), ("file", files))
        if names
    ]
    return "\n".join(parts + others)

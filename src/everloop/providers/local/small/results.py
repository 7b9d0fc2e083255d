"""Results of calls in the shortest words, so that a small model can copy its answer out of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .grounding import failed

_NUMBERED = re.compile(r"^ *\d+\t", re.M)
_FOUND = re.compile(r"^[^\n:]+:\d+:(.*)$", re.M)  # a line that grep has found
LONGEST_QUOTE = 700  # characters of a result that an answer begins with


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


def cut(text: str, limit: int) -> str:
    """The text, or its beginning and its end."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 3 // 4]}\n[…]\n{text[-(limit // 4) :]}"


def _error(text: str) -> str:
    try:
        message = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        return text
    return f"error: {str(message).partition(' Similar names')[0]}"


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

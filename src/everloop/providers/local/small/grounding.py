"""Whether what a model wrote is grounded: claims of work that was not done, and leaks of the worked examples."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from .examples import all_examples
from .words import in_every_place, is_file, paths_in, pattern

_DONE = (
    "created|made|written|wrote|saved|stored|added|appended|inserted|updated|changed|replaced|edited|corrected|fixed|"
    "renamed|moved|copied|deleted|removed|erased|set|scheduled|run|ran|executed|remembered|noted|sent|installed|sorted"
)
_CLAIM = re.compile(
    rf"\b(?:i|i've|i’ve|we)\s+(?:have\s+|just\s+|now\s+|also\s+|already\s+)*(?:{_DONE})\b"
    rf"|\b(?:has|have|was|were|is|are)\s+(?:now\s+|just\s+|successfully\s+)*(?:been\s+)(?:now\s+|successfully\s+)*(?:{_DONE})\b"
    rf"|^(?:{_DONE})\b|\b(?:successfully|done)\b"
    r"|\bich\s+habe\b.*\b\w*ge\w+(?:t|en)\b|\bhabe ich\b|\bhe\s+\w+(?:ado|ido)\b|\bse ha \w+(?:ado|ido)\b"
    r"|\bj['’]ai\b|했습니다|했어요|已(?:经|创建|添加|修改|删除|更新|保存)",
    re.I | re.S,
)
_FAILED = re.compile(r'^\s*\{"status":\s*"error"|\[exit status [1-9]|^error:|^not run:', re.M)


def claims_work(answer: str) -> bool:
    """Whether an answer says that the model has changed something."""
    return _CLAIM.search(answer) is not None


def failed(result: str) -> bool:
    """Whether a call's result says that it went wrong."""
    return _FAILED.search(result) is not None


def fingerprint(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name} {json.dumps(arguments, sort_keys=True)}"


# ---------------------------------------------------------------------------------------------- leaks

SHORTEST = 4  # characters of a value that cannot be a chance
_NEW = re.compile(r"(?<!>)>\s*\S+")  # a file that a command makes may have any name
_BY_PATTERN = re.compile(r"\b(?:rm|mv)\b[^|;&]*[*?]")  # moves or removes whatever has such a name
_SEVERAL = pattern("several")
_VALUES = ("content", "text", "message", "query", "pattern", "old_text", "new_text")
_SHOWS = frozenset({"read_file", "grep", "memory_search"})
# Words of examples that anything may be about.
_COMMON = frozenset({"error", "total", "count", "main", "blue", "pink", "speed", "boss", "vivo", "(no line matches)"})
_SIGNS = re.compile(r"\W+")
_BULLET = re.compile(r"^(?:[-*•]|\d+[.)])\s+")  # an item that was asked for may be written as a line of a list


def leak(written: Iterable[str], seen: Iterable[str]) -> str:
    """A name, value or sentence of the examples that was written and does not stand in what was `seen`, or ""."""
    text = "\n".join(written).casefold()
    known = "\n".join(seen).casefold()
    terms = (term for term, pattern in _terms() if term in text and pattern.search(text))
    return next((term for term in terms if _BULLET.sub("", term) not in known), "")


def invented(tool: str, arguments: Mapping[str, Any], request: Mapping[str, Any]) -> bool:
    """Whether a command names a file that was never spoken of and that no result has shown, or moves or removes
    files by a pattern where not several were meant."""
    if tool != "exec":
        return False
    known = "\n".join(request["_known"])
    command = _NEW.sub(" ", str(arguments.get("command", "")))
    asked = request["_turn"].request
    several = in_every_place(asked) or _SEVERAL.search(asked) or len(paths_in(asked)) > 1
    if _BY_PATTERN.search(command) and not several:
        return True
    names = {path.rpartition("/")[2] for path in paths_in(known)}
    paths = [path.rpartition("/")[2] for path in paths_in(command) if is_file(path)]
    return any(path not in known and not any(name in path for name in names) for path in paths)


@cache
def _terms() -> list[tuple[str, re.Pattern[str]]]:
    found: dict[str, None] = {}
    for example in all_examples():
        for step in example.steps:
            values = [str(value) for key, value in step.arguments.items() if key in _VALUES]
            for text in (example.request, *map(str, step.arguments.values())):
                found.update((path, None) for path in paths_in(text) if "." in path.strip("./"))
            shown = [step.result] if step.tool in _SHOWS and not failed(step.result) else []
            found.update((line.strip(), None) for value in (*values, *shown) for line in value.splitlines())
    terms = [
        term.casefold() for term in found if len(_SIGNS.sub("", term)) >= SHORTEST and term.casefold() not in _COMMON
    ]
    return [(term, re.compile(rf"(?<!\w){re.escape(term)}(?!\w)")) for term in terms]

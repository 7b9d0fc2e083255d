"""What a small model may say: fixed sentences after calls, no claims of work that was not done, and no leaks of the
worked examples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from ....tools.narrow import failed, outcome, quote
from ....tools.seen import is_file
from .conversation import Turn
from .examples import all_examples
from .words import (
    CHANGES,
    LATIN,
    asks_for_the_files,
    data,
    in_every_place,
    is_question,
    means,
    parts_of,
    paths_in,
    says,
    shows_all,
    tongue,
)


def claims_work(answer: str) -> bool:
    """Whether an answer says that the model has changed something."""
    return says(answer, "claim")


# ---------------------------------------------------------------------------------------------- leaks

SHORTEST = 4  # characters of a value that cannot be a chance
_NEW = re.compile(r"(?<!>)>\s*\S+")  # a file that a command makes may have any name
_BY_PATTERN = re.compile(r"\b(?:rm|mv)\b[^|;&]*[*?]")  # moves or removes whatever has such a name
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
    several = in_every_place(asked) or says(asked, "several") or len(paths_in(asked)) > 1
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


# ---------------------------------------------------------------------------------------------- sentences after calls

_SENTENCES: Mapping[str, Mapping[str, str]] = data("sentences")
_PATH = r"[\w./-]+\.\w{1,5}"
_TASKS = (*CHANGES, "run", "remind", "remember", "count", "show", "read", "say", "find")


def imitates(answer: str) -> bool:
    """Whether an answer has the form of what is said after a call, or of a file that was read."""
    return _forms().match(answer) is not None


@cache
def _forms() -> re.Pattern[str]:
    forms = [
        re.escape(form) for sentences in _SENTENCES.values() for name, form in sentences.items() if name != "unsure"
    ]
    named = [re.sub(r"\\{(?:path|to)\\}", lambda _: _PATH, form) for form in forms]
    return re.compile(
        "|".join([*(re.sub(r"\\{\w+\\}", r"[^\\n]+?", form) for form in named), rf"{_PATH}:\n(?!```)"]), re.I
    )


def sentence(name: str, language: str, **values: str) -> str:
    return _SENTENCES.get(language, _SENTENCES[LATIN])[name].format_map(values)


def report(turn: Turn) -> str:
    """The sentence for the turn's last call where that was all that was asked for, or ""."""
    if not turn.calls or failed(turn.calls[-1][2]) or _tasks(turn.request) > 1 or says(turn.request, "then"):
        return ""
    name, arguments, result = turn.calls[-1]
    if (name == "read_file" and shows_all(turn.request)) or (name == "list_dir" and asks_for_the_files(turn.said)):
        return quote(name, arguments, result)
    if (name == "exec" and not means(turn.request, "run")) or (name in ("exec", "count_lines") and not turn.file):
        return ""
    values = outcome(name, arguments, result)
    return sentence(name, tongue(turn.request), **values) if values and name in _SENTENCES[LATIN] else ""


def _tasks(request: str) -> int:
    """How many things are asked for, as far as one can tell."""
    return sum(means(part, *_TASKS) or is_question(part) for part in parts_of(request))

"""What a small model may say: fixed sentences after calls, no claims of work that was not done, and no leaks of the
worked examples."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ....tools.narrow import failed
from .conversation import Turn
from .examples import all_examples
from .words import CHANGES, LATIN, in_every_place, is_file, is_question, means, parts_of, paths_in, says, tongue


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

_SENTENCES: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8")
)
_ADDED = re.compile(r"Added job [^:]*: (?P<words>.*)\. It comes first on (?P<first>.*)\.$", re.S)
_PATH = r"[\w./-]+\.\w{1,5}"
LONGEST = 400  # characters of what a program has printed
_TASKS = (*CHANGES, "run", "remind", "remember", "count", "show", "read", "say", "find")


def imitates(answer: str) -> bool:
    """Whether an answer has the form of what is said after a call, or of a file that was read."""
    return _forms().match(answer) is not None


@cache
def _forms() -> re.Pattern[str]:
    forms = [form for sentences in _SENTENCES.values() for name, form in sentences.items() if name != "unsure"]
    patterns = [re.sub(r"\\\{(\w+)\\\}", _placeholder, re.escape(form)) for form in forms]
    return re.compile("|".join([*patterns, rf"{_PATH}:\n(?!```)"]), re.I)


def _placeholder(found: re.Match[str]) -> str:
    return _PATH if found[1] in ("path", "to") else r"[^\n]+?"


def sentence(name: str, language: str, **values: str) -> str:
    return _SENTENCES.get(language, _SENTENCES[LATIN])[name].format_map(values)


def report(turn: Turn) -> str:
    """The sentence for the turn's last call where that was all that was asked for, or ""."""
    if not turn.calls or failed(turn.calls[-1][2]) or _tasks(turn.request) > 1 or says(turn.request, "then"):
        return ""
    name, arguments, result = turn.calls[-1]
    values = {key: str(value).strip() for key, value in arguments.items()}
    language = tongue(turn.request)
    if name == "cron":
        found = _ADDED.search(result.strip())
        if found is None or arguments.get("deliver") != "text":
            return ""
        return sentence("remind", language, message=values.get("message", ""), first=found["first"])
    if name == "count_lines":
        return sentence(name, language, **values, result=result.strip()) if turn.file and result.strip() else ""
    if name == "edit_file" and ("replace_all" in values or "\n" in values.get("new_text", "")):
        return ""
    if name == "exec":
        printed = result.strip()
        ran = turn.file and means(turn.request, "run") and printed != "(no output)"
        return sentence("run", language, result=printed) if ran and 0 < len(printed) < LONGEST else ""
    if values.get("to", "").endswith("/"):
        values["to"] += values["path"].rpartition("/")[2]
    fits = name in ("append", "remove_line", "move", "copy", "delete", "write_file", "edit_file", "remember")
    return sentence(name, language, **values) if fits else ""


def _tasks(request: str) -> int:
    """How many things are asked for, as far as one can tell."""
    parts = [part for part in parts_of(request) if means(part, *_TASKS) or is_question(part)]
    return len(parts)

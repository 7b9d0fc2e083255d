"""Fixed sentences after calls that went well: what was done is known, so the model need not say it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from .grounding import failed
from .turn import Turn
from .words import CHANGES, LATIN, is_question, means, parts_of, pattern, tongue

_SENTENCES: Mapping[str, Mapping[str, str]] = tomllib.loads(
    Path(__file__).with_name("sentences.toml").read_text(encoding="utf-8")
)
_ADDED = re.compile(r"Added job [^:]*: (?P<words>.*)\. It comes first on (?P<first>.*)\.$", re.S)
_THEN = pattern("then")
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
    if not turn.calls or failed(turn.calls[-1][2]) or _tasks(turn.request) > 1 or _THEN.search(turn.request):
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

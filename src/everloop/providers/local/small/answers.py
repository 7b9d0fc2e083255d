"""Check what a small model wrote (text of the examples, unknown files), and write fixed sentences after calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from ....tools.simple_tools import is_failure, outcome_values, quote_result
from ....tools.workspace_view import is_file
from .conversation import Turn
from .examples import EXAMPLES
from .language import CHANGES, ENGLISH, Request, language_of, load_toml, paths_in

# ---------------------------------------------------------------------------------------------- leaks

MIN_LEAK = 4  # characters; shorter values occur by chance
_TEXT_ARGUMENTS = ("content", "text", "message", "query", "pattern", "old_text", "new_text")
_SHOWS_LINES = frozenset({"read_file", "grep", "memory_search"})
# Words of the examples that occur in any conversation.
_COMMON = frozenset({"error", "total", "count", "main", "blue", "pink", "speed", "boss", "vivo", "(no line matches)"})
_PUNCTUATION = re.compile(r"\W+")
_BULLET = re.compile(r"^(?:[-*•]|\d+[.)])\s+")  # a requested item may be written as a list item
_NEW_FILE = re.compile(r"(?<!>)>\s*\S+")  # a command may create a file of any name
_BY_PATTERN = re.compile(r"\b(?:rm|mv)\b[^|;&]*[*?]")  # deletes or moves every file that matches


def leaked_text(written: Iterable[str], known: Iterable[str]) -> str:
    """Return a name, value or sentence of the examples that the model wrote and did not know from elsewhere, or ""."""
    text, grounds = "\n".join(written).casefold(), "\n".join(known).casefold()
    terms = (term for term, pattern in _example_terms() if term in text and pattern.search(text))
    return next((term for term in terms if _BULLET.sub("", term) not in grounds), "")


@cache
def _example_terms() -> list[tuple[str, re.Pattern[str]]]:
    found: dict[str, None] = {}
    for example in EXAMPLES:
        for step in example.steps:
            values = [str(value) for key, value in step.arguments.items() if key in _TEXT_ARGUMENTS]
            for text in (example.request, *map(str, step.arguments.values())):
                found.update((path, None) for path in paths_in(text) if "." in path.strip("./"))
            shown = [step.result] if step.tool in _SHOWS_LINES and not is_failure(step.result) else []
            found.update((line.strip(), None) for value in (*values, *shown) for line in value.splitlines())
    terms = [term.casefold() for term in found if len(_PUNCTUATION.sub("", term)) >= MIN_LEAK]
    return [(term, re.compile(rf"(?<!\w){re.escape(term)}(?!\w)")) for term in terms if term not in _COMMON]


def uses_unknown_file(tool: str, arguments: Mapping[str, Any], request: Request, known: Iterable[str]) -> bool:
    """Return whether a command names an unknown file, or deletes or moves files by a pattern although the request does
    not concern several files."""
    if tool != "exec":
        return False
    grounds = "\n".join(known)
    command = _NEW_FILE.sub(" ", str(arguments.get("command", "")))
    several = request.replaces_all or request.matches("several") or len(paths_in(request)) > 1
    if _BY_PATTERN.search(command) and not several:
        return True
    names = {path.rpartition("/")[2] for path in paths_in(grounds)}
    paths = [path.rpartition("/")[2] for path in paths_in(command) if is_file(path)]
    return any(path not in grounds and not any(name in path for name in names) for path in paths)


# ---------------------------------------------------------------------------------------------- sentences after calls

_SENTENCES: Mapping[str, Mapping[str, str]] = load_toml("sentences")
_PATH = r"[\w./-]+\.\w{1,5}"


def sentence(name: str, language: str, **values: str) -> str:
    return _SENTENCES.get(language, _SENTENCES[ENGLISH])[name].format_map(values)


@cache
def report_pattern() -> re.Pattern[str]:
    """Return the pattern of all sentences after calls, and of a file that was read."""
    forms = [re.escape(form) for named in _SENTENCES.values() for name, form in named.items() if name != "unsure"]
    with_paths = [re.sub(r"\\{(?:path|to)\\}", lambda _: _PATH, form) for form in forms]
    any_values = [re.sub(r"\\{\w+\\}", r"[^\\n]+?", form) for form in with_paths]
    return re.compile("|".join([*any_values, rf"{_PATH}:\n(?!```)"]), re.I)


def final_sentence(turn: Turn) -> str:
    """Return the answer after the turn's last call if that was all the user asked for, or ""."""
    if not turn.calls or is_failure(turn.calls[-1].result) or _has_several_tasks(turn.request):
        return ""
    name, arguments, result = turn.calls[-1]
    if name == "read_file" and turn.request.asks_for_whole_file:
        return quote_result(name, arguments, result)
    if name == "list_dir" and turn.text.asks_for_listing:
        return quote_result(name, arguments, result)
    if (name == "exec" and not turn.request.means("run")) or (name in ("exec", "count_lines") and not turn.file):
        return ""
    values = outcome_values(name, arguments, result)
    if name == "cron" and "at" in values:
        name = "cron_once"
    elif name == "cron" and values:  # the message is in the middle of the sentence
        values["message"] = values["message"].rstrip(".")
    return sentence(name, language_of(turn.request), **values) if values and name in _SENTENCES[ENGLISH] else ""


def _has_several_tasks(request: Request) -> bool:
    tasks = (*CHANGES, "run", "remind", "remember", "count", "show", "read", "say", "find")
    return request.matches("then") or sum(part.means(*tasks) or part.is_question for part in request.clauses) > 1

"""What a small model's call can name: small models garble names and lines when they are free to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ....tools.narrow import NARROW, failed, lines_of
from .conversation import Message, Seen, Turn, text_of
from .words import (
    BEHIND,
    PATTERNS,
    alike,
    clock,
    folders_in,
    in_every_place,
    is_file,
    kept,
    key_of,
    means,
    names_key,
    paths_in,
    places_in,
    says,
    spans,
    tokens,
    weekday,
    word_set,
)

_BEFORE, _AFTER = PATTERNS["before_old"].pattern, PATTERNS["after_old"].pattern
_JOINS = word_set("joins")
_WITHIN = re.compile(r"[.,;!?]\s")  # the end of a sentence, or of a part of one
_STOPS = ".,:;!?\"'“”«»()"


def swaps(request: str, lines: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """By line, what stands before and after the words that are to be replaced in it; empty where none were named."""
    found = list(dict.fromkeys(lines))
    named = spans(request, "\n".join(found))
    surely: dict[str, list[tuple[str, str]]] = {}
    perhaps: dict[str, list[tuple[str, str]]] = {}
    for old in named:
        places = surely if _is_old(request, old) else perhaps
        for line in found:
            if old in line and (around := _around(line, old, len(key_of(line)))):
                places.setdefault(line, []).extend(around)
    unsure = says(request, "both") and not any(names_key(request, line) for line in found)
    return surely or (perhaps if unsure else {})


def names_both(request: str) -> bool:
    """Whether the words that are to be there are named as well as those that are."""
    return says(request, "pair")


def new_words(request: str, old: Sequence[str]) -> list[str]:
    """What can be put in their place: words of the request without those that are replaced."""
    said = dict.fromkeys(run.strip(_STOPS) for run in spans(request))
    right = [run for run in said if run and not _WITHIN.search(run) and not any(_stands(one, run) for one in old)]
    return [run for run in right if not _JOINS & {run.lower().split()[0], run.lower().split()[-1]}]


def _is_old(request: str, words: str) -> bool:
    escaped = re.escape(words)
    return re.search(rf"{_BEFORE}{escaped}{BEHIND}|(?<!\w){escaped}{_AFTER}", request, re.I) is not None


def _around(line: str, old: str, start: int) -> list[tuple[str, str]]:
    found = re.compile(rf"(?<!\w){re.escape(old)}{BEHIND}").finditer(line, start)
    return [(line[: one.start()], line[one.end() :]) for one in found]


def _stands(words: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}{BEHIND}", text) is not None


# ---------------------------------------------------------------------------------------------- values of a call

RECENT = 8  # messages whose files are known
MOST_PATHS = 40
MOST_LINES = 30  # that an edit can choose from


def values_for(turn: Turn, conversation: Sequence[Message], there: Seen) -> dict[str, dict[str, list[str]]]:
    """What a call can name: a file that was named or that a result has shown, a line of what was read. `there` are
    the files that the conversation has shown.

    Small models garble names and lines when they are free to. After a call that failed they are.
    """
    if turn.calls and failed(turn.calls[-1][2]):
        name, arguments, _ = turn.calls[-1]
        return {"read_file": {"path": [str(arguments.get("path"))]}} if name == "edit_file" else {}
    seen = [path for _, _, result in turn.calls for path in paths_in(result)][:MOST_PATHS]
    named = paths_in(turn.request)
    said = [path for message in conversation[-RECENT:] for path in paths_in(text_of(message))]
    known = [*reversed(there.touched), *there.files]
    files = list(dict.fromkeys([*named, *seen] or [*known, *said][:MOST_PATHS]))
    beside = folders_in(turn.request)
    folders = [path for path in [*files, *tokens(turn.request)[:MOST_PATHS]] if not is_file(path)]
    values = {"read_file": {"path": files}, "list_dir": {"path": [".", *folders]}}
    sure = [path for path in named if is_file(path)]
    values["grep"] = {"path": [".", *files, *beside], "must": ["path"] if sure else []}
    values["write_file"] = {"path": _new_files(turn, sure, [*beside, *places_in(turn.request)])}
    values["edit_file"] = {"path": files, **_edits(turn, files, there)}
    values |= _narrow(turn, sure, [*beside, *places_in(turn.request)], there)
    if turn.file and values["write_file"]["path"] == [turn.file]:
        values["write_file"] = {"path": [turn.file]}
    for given in values.values():
        given["path"] = list(dict.fromkeys(given["path"]))
    any_day = "*" if (day := weekday(turn.request)) else ""
    if any(fields := [*clock(turn.request), any_day, any_day, day]):
        # What comes again and again at a time of day is by the calendar, and not once.
        values["cron"] = {"fields": fields, "must": ["cron"] if fields[0] and means(turn.request, "every") else []}
    return {tool: {key: choices for key, choices in given.items() if choices} for tool, given in values.items()}


def _new_files(turn: Turn, named: Sequence[str], folders: Sequence[str]) -> list[str]:
    """What a file can be called that is written: as it was named, but not like one that was only to be read."""
    read = {str(arguments.get("path")) for name, arguments, _ in turn.calls if name == "read_file"}
    names = [path for path in named if path not in read] or list(named)
    return [*names, *(f"{folder}/{name}" for folder in folders for name in names if "/" not in name)]


def _narrow(turn: Turn, named: Sequence[str], folders: Sequence[str], there: Seen) -> dict[str, dict[str, list[str]]]:
    """What the narrow tools can name: files that are known, and of the others those that the request names."""
    known = [path for path in named if there.has(path)]
    rest = [path for path in named if path not in known]
    files = [turn.file] if turn.file else known or list(named) or [*reversed(there.touched), *there.files]
    lines = [line for path in files for line in there.texts.get(path, ())]
    runs = [run for run in spans(turn.request) if not is_file(run)]
    text = [run for run in runs if any(run in line for line in lines)] if lines else runs
    places = [f"{folder}/" for folder in folders] or [f"{folder}/" for folder in there.folders[-1:] if not rest]
    to = places or [path for path in (rest or named) if path != turn.file]
    if len(named) > 1 and not places and not turn.file:
        files, to = [named[0]], list(named[1:])
    given = {tool: {"path": list(files)} for tool in NARROW}
    given["remove_line"]["text"] = text or lines[:MOST_LINES]
    given["move"]["to"] = given["copy"]["to"] = to
    if not turn.file:
        given["append"]["path"] = list(named) or files
    return given


def _edits(turn: Turn, files: Sequence[str], there: Seen) -> dict[str, list[str]]:
    """What an edit can replace: a line of what was read or found, or words that the person has named."""
    lines = [line for name, _, result in turn.calls for line in lines_of(name, result)]
    if not files:
        return {}
    every = in_every_place(turn.request)
    named = spans(turn.request, "\n".join(lines))
    if lines and not (every and named):
        places = swaps(turn.request, lines)
        old = alike(turn.request, places or lines)[:MOST_LINES]
        old = [line for line in old if names_key(turn.request, line)] or old
        if turn.corrects and not places and there.last_edit in lines and len(old) == len(set(lines)):
            old = [there.last_edit]  # no line was spoken of, so it is the one that was changed last
        given: dict[str, list[str]] = {"old_text": old, "new_text": [kept(turn.request, line) for line in old]}
        if changes := [(line, *place) for line in old for place in places.get(line, ())]:
            replaced = [line[len(before) : len(line) - len(after)] for line, before, after in changes]
            given["said"] = new_words(turn.request, replaced)
            given["swaps"] = ["\0".join(parts) for parts in changes]
        return given
    said = new_words(turn.request, named if lines else ()) if named and names_both(turn.request) else []
    return {"named": named, "said": said, "must": ["replace_all"] if every else []}

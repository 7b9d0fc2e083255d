"""What a small model's call can name: small models garble names and lines when they are free to."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .asked import in_every_place
from .claims import failed
from .languages import clock, weekday
from .narrow import NARROW
from .results import lines_of
from .seen import Seen
from .swaps import names_both, names_signs, new_words, swaps
from .turn import Message, Turn, text_of
from .words import alike, folders_in, is_file, kept, means, names_key, paths_in, places_in, spans, tokens

RECENT = 8  # messages whose files are known
MOST_PATHS = 40
_MOVES = re.compile(r"\s*(?:mv|cp)\b")
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


def as_named(tool: str, arguments: Mapping[str, Any], turn: Turn) -> str:
    """The command that was meant, where one moves or copies and has another name in the place of the one that was
    given: small models translate names. Else nothing."""
    command = str(arguments.get("command", ""))
    if tool != "exec" or "*" in command or not _MOVES.match(command):
        return ""
    known = {
        posixpath.basename(path) for text in (turn.request, *(one[2] for one in turn.calls)) for path in paths_in(text)
    }
    invented = [path for path in paths_in(command) if is_file(path) and posixpath.basename(path) not in known]
    left_out = [path for path in paths_in(turn.request) if is_file(path) and path not in command]
    return command.replace(invented[0], left_out[0]) if len(invented) == len(left_out) == 1 else ""


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
    if every and names_signs(turn.request):
        return {"must": ["replace_all"]}
    named = spans(turn.request, "\n".join(lines))
    if lines and not (every and named):
        places = swaps(turn.request, lines)
        old = alike(turn.request, places or lines)[:MOST_LINES]
        old = [line for line in old if names_key(turn.request, line)] or old
        if turn.corrects and not places and there.last_edit in lines and len(old) == len(set(lines)):
            old = [there.last_edit]  # no line was spoken of, so it is the one that was changed last
        given: dict[str, list[str]] = {"old_text": old, "new_text": [kept(turn.request, line) for line in old]}
        given["repeated"] = [line for line in old if lines.count(line) > 1]
        if changes := [(line, *place) for line in old for place in places.get(line, ())]:
            replaced = [line[len(before) : len(line) - len(after)] for line, before, after in changes]
            given["said"] = new_words(turn.request, replaced)
            given["swaps"] = ["\0".join(parts) for parts in changes]
        return given
    said = new_words(turn.request, named if lines else ()) if named and names_both(turn.request) else []
    return {"named": named, "said": said, "must": ["replace_all"] if every else []}

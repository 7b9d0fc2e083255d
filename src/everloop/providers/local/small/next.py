"""What can come next in a small model's turn: a call or words, and calls of which tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .grammar import Values, Wanted
from .grounding import failed
from .narrow import NARROW
from .seen import Seen, described, shares_words
from .tools import acts, asks_of_the_past, edits, may_act, needs_tool, next_step
from .turn import Turn
from .words import (
    CHANGES,
    WORK,
    asks_for_a_change,
    asks_how_many_there_are,
    in_every_place,
    is_file,
    is_question,
    looks_for_a_file,
    means,
    names_a_file,
    orders,
    paths_in,
    pattern,
    runs_then,
)

# What must have been said for a narrow tool to be offered: nothing is deleted where nothing was said of deleting.
_MEANT = {
    "append": ("add", "end", "write"),
    "remove_line": ("delete",),
    "delete": ("delete",),
    "move": ("rename", "move"),
    "copy": ("copy",),
    "count_lines": ("count",),
}
_WRITES = frozenset({"append", "write_file", "edit_file", "remove_line"})
_POINTS = pattern("points")
_FILE_ITSELF = pattern("file_itself")
TRIES = 3  # calls of a turn that may fail
_TODAY = pattern("today")
_MACHINE = pattern("machine")


def wanted_next(turn: Turn, names: frozenset[str]) -> Wanted:
    """Whether a call, words or either should come next, by what was so with requests like this one."""
    if not names:
        return "words"
    if not turn.calls:  # a request that names a file is not answered before something was looked at or done
        if asks_how_many_there_are(turn.request):
            return "words"
        if is_question(turn.request) and asks_of_the_past(turn.request, names):
            return "call"
        return "call" if names_a_file(turn.request) else needs_tool(turn.request, names)
    failures = [failed(result) for _, _, result in turn.calls]
    made = [name for name, _, _ in turn.calls]
    changed = any(acts(name) and not wrong for name, wrong in zip(made, failures, strict=True))
    to_change = "edit_file" in made or ("edit_file" in names and (turn.corrects or asks_for_a_change(turn.request)))
    if made[-1] == "read_file" and to_change and not changed and not failures[-1] and sum(failures) < TRIES:
        return "call"  # it was read in order to be changed
    if _to_run(turn, names):
        return "call"
    if failures[-1]:
        if sum(failures) == 1 and _mendable(*turn.calls[-1]):
            return "call"
        return "either" if sum(failures) < TRIES else "words"
    return (
        "call"
        if _left(turn)
        else next_step(turn.request, names, [name for name, _, result in turn.calls if not failed(result)])
    )


def removes(turn: Turn, there: Seen) -> str:
    """What is to be removed from or with the file that is meant: `remove_line`, `delete` for the file itself, `look`
    where that cannot be known before it was read, or ""."""
    said = turn.request.removesuffix(f"({turn.file})")
    if not turn.file or not means(said, "delete"):
        return ""
    if means(said, "line", "within"):
        return "remove_line" if turn.file in there.texts else "look"
    known = shares_words(said, there.texts.get(turn.file, ()))
    if described(said, Seen({turn.file: None})) or _FILE_ITSELF.search(said):
        return "remove_line" if known and means(said, "collection") else "delete"
    if known:
        return "remove_line"
    return "delete" if _POINTS.search(said) or turn.file in there.texts else "look"


def only(turn: Turn, there: Seen) -> frozenset[str]:
    """The tools of which one must come next, where what is to be done with the file that is meant is clear."""
    if not turn.file or any(acts(name) for name, _, _ in turn.calls):
        return frozenset()
    said = turn.request.removesuffix(f"({turn.file})")
    if turn.corrects or (means(said, "change") and not means(said, "add", "delete", "rename", "run")):
        return frozenset({"edit_file"} if turn.calls else {"read_file"})
    if means(said, "delete"):
        return frozenset({removes(turn, there)})
    for meaning, tool in (("rename", "move"), ("move", "move"), ("copy", "copy"), ("add", "append")):
        if means(said, meaning):
            return frozenset({tool})
    return frozenset({"append"} if turn.goes_on and there.last in _WRITES and not turn.calls else ())


def fits(tool: str, turn: Turn, wanted: Wanted, shown_for: frozenset[str], values: Values) -> bool:
    """Whether a tool can be the next one, once there were calls."""
    if not turn.calls:
        return _first(tool, turn, shown_for, bool(values.get("read_file")))
    if tool == "list_dir" and any(name == "read_file" and not failed(result) for name, _, result in turn.calls):
        return False  # what was looked into needs no list of what there is
    ordered = turn.corrects or asks_for_a_change(turn.request)
    if not (ordered or may_act(turn.request, shown_for)):  # what was read may say what to do, but it is no order
        return not acts(tool)
    if wanted != "call":
        return True
    if _to_run(turn, shown_for):
        return tool == "exec"
    name, _, result = turn.calls[-1]
    if failed(result):
        return tool == "read_file" or name != "edit_file"  # what does not stand in a file is looked for in it
    if ordered or means(turn.request, "change") or edits(turn.request, shown_for):
        return tool == "edit_file" or (acts(tool) and "edit_file" not in shown_for)
    return acts(tool) and tool != "edit_file"


def _first(tool: str, turn: Turn, offered: frozenset[str], files: bool) -> bool:
    """Whether a tool can be the first one. A file is read before it is changed, or what small models believe to be in
    it is not; where nothing was said of work, no command and no new file can be meant."""
    request = turn.request
    if tool in NARROW:
        two = tool == "move" and len([path for path in paths_in(request) if is_file(path)]) == 2
        return two or means(request, *_MEANT[tool]) or (tool == "append" and turn.goes_on)
    if turn.file and tool in ("exec", "write_file") and not means(request, "run", "create", "write", "sort"):
        return False  # the file is there: what is to be done with it needs no command, and it is not written anew
    named = [path for path in paths_in(request) if is_file(path)]
    if only := asks_of_the_past(request, offered):
        return tool == only
    if tool == "edit_file" and "read_file" in offered:
        return files and in_every_place(request)
    if tool == "read_file" and not files:
        return means(request, "read", "show", "say", "file", "folder")
    if tool in ("list_dir", "grep") and means(request, "count"):
        return not named
    if tool in ("grep", "read_file") and named and looks_for_a_file(request):
        return False
    if tool == "cron":
        return means(request, "remind", "every") or means(_TODAY.sub(" ", request), "when")
    if tool == "write_file" and means(request, "add", "end"):  # it would take the place of what is there
        return means(request, "create", "file", "run") or (means(request, "write") and not means(request, "end"))
    if tool == "write_file" and (means(request, "count", "delete") or asks_for_a_change(request) or _asks(request)):
        return means(request, "create", "write", "file")
    if tool in ("exec", "write_file"):
        return names_a_file(request) or means(request, *WORK, "show") or _MACHINE.search(request) is not None
    return True


def _to_run(turn: Turn, names: frozenset[str]) -> bool:
    """Whether what was just written is still to be run."""
    name, _, result = turn.calls[-1]
    written = name in ("write_file", "edit_file") and not failed(result)
    return "exec" in names and written and runs_then(turn.request)


def _asks(request: str) -> bool:
    """Whether it asks, and orders nothing."""
    return is_question(request) and not means(orders(request), *WORK)


def _mendable(name: str, _: Mapping[str, Any], result: str) -> bool:
    """Whether a call failed by how it was made: a word of the request as a command, a text that is not in the file, a
    time that is none."""
    return "command not found" in result or name == "cron" or (name == "edit_file" and "does not exist" not in result)


def _left(turn: Turn) -> bool:
    """Whether something is still to be changed: a file that was named is in no call, and nothing was changed yet."""
    touched = json.dumps([arguments for _, arguments, _ in turn.calls], ensure_ascii=False)
    return (
        0 < len(turn.calls) < TRIES
        and not any(acts(name) or failed(result) for name, _, result in turn.calls)
        and means(turn.request, *CHANGES)
        and any(path not in touched for path in paths_in(turn.request))
    )

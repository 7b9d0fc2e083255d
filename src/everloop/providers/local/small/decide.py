"""What a request needs: talk or work, on which file, and by which tool next."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ....tools.narrow import CLEARLY, LOOKING, MEANT_BY, NARROW, WRITING, failed, run_of
from .conversation import Turn, described, meant, shares_words, text_of
from .examples import Tool, asks_of_the_past, goes_on, may_act, mentions, names_of, needs_tool
from .grammar import Values, Wanted
from .words import (
    CHANGES,
    PATTERNS,
    WORK,
    asks_for_a_change,
    asks_for_the_files,
    files_in,
    in_every_place,
    is_question,
    means,
    names_a_file,
    orders,
    paths_in,
    runs_then,
    says,
    shows_all,
    word_set,
    words,
)

LONG = 240  # characters from which on a request may hold pasted text
FEW = 9  # words of a request that only adds to the one before
TRIES = 3  # calls of a turn that may fail
_CHAT = ("hello", "thanks", "bye")
_TOOLS = tuple(word_set("tools"))
_OWN = word_set("own")
_CODE = word_set("code")
_ON_FILES = ("add", "delete", "rename", "move", "copy")  # work that needs a file which is there
_NO_FILES = ("folder", "create", "told", "before", "remind", "remember")

# ---------------------------------------------------------------------------------------------- talk or work


def instruction(request: str) -> str:
    """What the person says about a text that was pasted, without the text: only that decides what is done."""
    said = re.sub(r"\"[^\"]{60,}\"|“[^”]{60,}”", " ", request)
    parts = [part for part in re.split(r"\n\s*\n|\n(?=>)", said) if part.strip()]
    ends = [part for part in (*parts[:1], *parts[1:][-1:]) if len(part) < LONG and "\n" not in part.strip()]
    return "\n".join(ends) or said


def decide(turn: Turn, offered: Sequence[Tool]) -> Turn | None:
    """The turn with the file that it is about, where it names none; None where it is talk."""
    order, seen = instruction(turn.said), turn.before
    of_meant = replace(turn, file=meant(order, seen))
    named = files_in(order)
    if named or names_a_file(order):
        source = means(order, "rename", "move", "copy") and len(named) == 1 and not seen.has(named[0])
        return of_meant if source else turn
    found = described(order, [*seen.files, *seen.touched])
    if means(order, *_CHAT) and not means(order, *CHANGES, "run", "remember") and not found:
        return None
    into_file = means(order, "add", "delete", "rename") or (means(order, "file") and means(order, "create", "write"))
    if (says(order, "piece") or says(order, "explain")) and not into_file and not found:
        return None
    if order != turn.said:  # something was pasted, and that says nothing of what is wanted
        return turn if means(order, *CHANGES, "file", "remind", "remember") else None
    asks = is_question(order)
    adds = says(order, "goes_on") and len(order.split()) <= FEW and not asks
    if found:
        return replace(of_meant, goes_on=adds)
    changes = means(order, *CHANGES[2:], "run")
    if turn.recent and seen.focus and not means(order, "folder", "here"):
        to_file = says(order, "refers_to_file") or means(order, "show", "read", "say", "count", "collection")
        if asks and not to_file and not changes:
            return None
        corrects = (adds and seen.last == "edit_file") or _corrects(order, turn)
        corrects = corrects and not means(order, *_ON_FILES, "run")
        if to_file or changes or ((adds or corrects) and not says(order, "first_person")):
            return replace(of_meant, corrects=corrects and not asks, goes_on=adds)
        if corrects or not means(order, *_TOOLS):
            return None
    counts = means(order, "count") and not _OWN.isdisjoint(words(order))
    web = says(order, "address") or (means(order, "web") and not says(order, "in_general"))
    surely = changes or counts or means(order, *_TOOLS) or web or says(order, "by_command")
    return turn if surely or mentions(offered, order) or needs_tool(order, names_of(offered)) else None


def _corrects(order: str, turn: Turn) -> bool:
    """Whether it corrects something in the file touched last: it says so, or says no and names a value."""
    seen = turn.before
    value = re.search(r"\d|\w\W+[A-ZÀ-Ö]\w+", re.sub(r"\bI\b", "", order))
    short = seen.last == "edit_file" and len(order.split()) <= 4 and not says(order, "remark")
    says_no = says(order, "corrects") and (value or short or shares_words(order, seen.texts.get(seen.focus, ())))
    return bool(says(order, "surely_corrects") or says_no)


def resolved(turn: Turn) -> Turn:
    """The turn with the file that a look at the folder has shown to be meant."""
    if paths_in(turn.said) or "list_dir" not in turn.names:
        return turn
    return replace(turn, file=described(turn.said, [*turn.there.files, *turn.there.touched]) or turn.file)


# ---------------------------------------------------------------------------------------------- certain steps


def first_call(turn: Turn, names: frozenset[str]) -> tuple[str, dict[str, Any]] | None:
    """The call that is certain, whatever the model would say: the look at a file that is to be changed or was asked
    about, or at the folder, where no file is known that may be meant; the run of a script; what was just said into a
    file."""
    request, files = turn.request, files_in(turn.request)
    if not turn.calls and "list_dir" in names:
        needs_file = means(request, *_ON_FILES) or (turn.file and is_question(request))
        lost = needs_file and not turn.there.listed and (not files or (turn.file and _names_something_else(turn)))
        if asks_for_the_files(request) or (lost and not means(request, *_NO_FILES)):
            return "list_dir", {"path": "."}
    if not turn.calls and "write_file" in names and len(files) == 1 and (text := _saved(turn, files[0])):
        return "write_file", {"path": files[0], "content": text}
    if turn.names not in ([], ["list_dir"]) or "read_file" not in names or len(files) != 1:
        return None
    file = files[0]
    if turn.file and "exec" in names and means(request, "run") and (command := run_of(file)):
        return "exec", {"command": command}
    if turn.file and "exec" in names and means(request, "count"):
        return "count_lines", {"path": file}
    if turn.file and removes(turn) == "look":
        return "read_file", {"path": file}
    changed = turn.corrects or (asks_for_a_change(request) and not in_every_place(request))
    again = turn.goes_on and turn.before.last == "read_file" and not means(request, *CHANGES)
    asked = turn.file and (is_question(request) or again or means(request, "show", "read"))
    asked = asked or (shows_all(request) and not turn.calls)
    if (changed or asked) and not means(request, "run", *_ON_FILES):
        return "read_file", {"path": file}
    return None


def _saved(turn: Turn, file: str) -> str:
    """What was just said, where that is to be put into a file: the words of an answer without calls, or its code."""
    if len(turn.said) > LONG or not says(turn.said, "saves_that"):
        return ""
    talk = [(message.get("role"), text_of(message)) for message in turn.conversation[: turn.start]]
    answers = [text for (asked, _), (said, text) in pairwise(talk) if (asked, said) == ("user", "assistant")]
    if file.rpartition(".")[2] in _CODE:
        return next((code for answer in reversed(answers) if (code := code_in(answer))), "")
    return f"{answers[-1].strip()}\n" if [role for role, _ in talk[-2:]] == ["user", "assistant"] else ""


def code_in(answer: str) -> str:
    """The fenced blocks of an answer."""
    return "\n".join(re.findall(r"^```[^\n]*\n(.*?)^```", answer, re.M | re.S))


def writes_code(request: str) -> str:
    """The file of code that is to be written, where the request says what it does and not what stands in it."""
    files = files_in(request)
    if len(files) != 1 or files[0].rpartition(".")[2] not in _CODE or not means(request, "create", "write"):
        return ""
    return files[0] if says(request, "does") and not says(request, "literally") else ""


def _names_something_else(turn: Turn) -> bool:
    """Whether a request speaks of something that stands in no file seen so far: it may be another file."""
    lines = [*turn.before.touched, *(line for text in turn.before.texts.values() for line in text)]
    nouns = [found["noun"] for found in PATTERNS["noun"].finditer(turn.said)]
    known = [
        means(one, "end", "line") or says(f"the {one}", "refers_to_file") or shares_words(one, lines) for one in nouns
    ]
    return not all(known)


def removes(turn: Turn) -> str:
    """What is to be removed from or with the file that is meant: `remove_line`, `delete` for the file itself, or `look`
    where that cannot be known before it was read."""
    if not means(turn.said, "delete"):
        return ""
    if says(turn.said, "file_itself") or described(turn.said, [turn.file]):
        return "delete"
    if shares_words(turn.said, turn.there.texts.get(turn.file, ())):
        return "remove_line"
    return "delete" if says(turn.said, "points") or turn.file in turn.there.texts else "look"


# ---------------------------------------------------------------------------------------------- the next step


def next_step(turn: Turn, chosen: Sequence[Tool], offered: Sequence[Tool], values: Values) -> tuple[Wanted, list[Tool]]:
    """Whether a call, words or either should come next, and the tools that can be called."""
    names, broken = names_of(chosen), any(failed(result) for _, _, result in turn.calls)
    clear = only(turn) & names
    if clear and not broken:
        return "call", [tool for tool in chosen if tool.get("name") in clear]
    if broken:
        chosen = offered  # what it needs may be among the others
    wanted = wanted_next(turn, names_of(chosen))
    if turn.calls and turn.names[-1] == "read_file" and (turn.file or shows_all(turn.request)):
        wanted = "words"
    guessed = not paths_in(turn.request)  # nothing is deleted or moved by a guess at what is meant
    return wanted, [
        tool
        for tool in chosen
        if fits(str(tool.get("name")), turn, wanted, names, values) and not (guessed and tool.get("name") in NARROW)
    ]


def only(turn: Turn) -> frozenset[str]:
    """The tools of which one must come next, where what is to be done with the file that is meant is clear."""
    if not turn.file or not LOOKING.issuperset(turn.names):
        return frozenset()
    if turn.corrects or (means(turn.said, "change") and not means(turn.said, "add", "delete", "rename", "run")):
        return frozenset({"edit_file"} if turn.calls else {"read_file"})
    if means(turn.said, "delete"):
        return frozenset({removes(turn)})
    clear = next((tool for meaning, tool in CLEARLY.items() if means(turn.said, meaning)), "")
    if not clear and turn.goes_on and turn.there.last in WRITING and not turn.calls:
        clear = "append"
    return frozenset({clear} if clear else ())


def wanted_next(turn: Turn, names: frozenset[str]) -> Wanted:
    """Whether a call, words or either should come next, by what was so with requests like this one."""
    if not names:
        return "words"
    if not turn.calls:  # a request that names a file is not answered before something was looked at or done
        past = is_question(turn.request) and asks_of_the_past(turn.request, names)
        return "call" if past or names_a_file(turn.request) or needs_tool(turn.request, names) else "either"
    failures = [failed(result) for _, _, result in turn.calls]
    done = [name for name, wrong in zip(turn.names, failures, strict=True) if not wrong]
    if sum(failures) < TRIES and LOOKING.issuperset(done):
        ordered = "edit_file" in names and (turn.corrects or asks_for_a_change(turn.request))
        if done[-1:] == turn.names[-1:] == ["read_file"] and ("edit_file" in turn.names or ordered):
            return "call"  # it was read in order to be changed
        if not any(failures) and _left(turn):
            return "call"
    if _to_run(turn, names):
        return "call"
    if failures[-1]:
        again = sum(failures) == 1 and _mendable(*turn.calls[-1])
        return "call" if again else "either" if sum(failures) < TRIES else "words"
    return goes_on(turn.request, names, done)


def fits(tool: str, turn: Turn, wanted: Wanted, names: frozenset[str], values: Values) -> bool:
    """Whether a tool can be the next one."""
    if not turn.calls:
        return _first(tool, turn, names, bool(values.get("read_file")))
    if tool == "list_dir" and any(name == "read_file" and not failed(result) for name, _, result in turn.calls):
        return False  # what was looked into needs no list of what there is
    ordered = turn.corrects or asks_for_a_change(turn.request)
    if not (ordered or may_act(turn.request, names)):  # what was read may say what to do, but it is no order
        return tool in LOOKING
    if wanted != "call":
        return True
    if _to_run(turn, names):
        return tool == "exec"
    if ordered and "edit_file" in names:
        return tool == ("read_file" if failed(turn.calls[-1][2]) else "edit_file")  # what is not there is looked for
    return tool not in LOOKING and (ordered or tool != "edit_file")


def _first(tool: str, turn: Turn, offered: frozenset[str], files: bool) -> bool:
    """Whether a tool can be the first one. A file is read before it is changed, or what small models believe to be in
    it is not; where nothing was said of work, no command and no new file can be meant."""
    request = turn.request
    named = files_in(request)
    if tool in NARROW:
        two = tool == "move" and len(named) == 2
        return two or means(request, *MEANT_BY[tool]) or (tool == "append" and turn.goes_on)
    if past := asks_of_the_past(request, offered):
        return tool == past
    if tool == "edit_file" and "read_file" in offered:
        return files and in_every_place(request)
    if tool == "read_file" and not files:
        return means(request, "read", "show", "say", "file", "folder")
    if tool in ("list_dir", "grep") and means(request, "count"):
        return not named
    if tool == "cron":
        return means(request, *MEANT_BY[tool])
    if tool == "write_file" and means(request, "add", "end"):  # it would take the place of what is there
        return means(request, "create", "file", "run") or (means(request, "write") and not means(request, "end"))
    asks = is_question(request) and not means(orders(request), *WORK)
    if tool == "write_file" and (asks or means(request, "count", "delete") or asks_for_a_change(request)):
        return means(request, "create", "write", "file")
    if tool in ("exec", "write_file"):
        return names_a_file(request) or means(request, *WORK, "show") or says(request, "machine")
    return True


def _to_run(turn: Turn, names: frozenset[str]) -> bool:
    """Whether what was just written is still to be run."""
    name, _, result = turn.calls[-1]
    return "exec" in names and name in ("write_file", "edit_file") and not failed(result) and runs_then(turn.request)


def _mendable(name: str, _: Mapping[str, Any], result: str) -> bool:
    """Whether a call failed by how it was made: a word of the request as a command, a text that is not in the file, a
    time that is none."""
    return "command not found" in result or name == "cron" or (name == "edit_file" and "does not exist" not in result)


def _left(turn: Turn) -> bool:
    """Whether something is still to be changed: a file that was named is in no call."""
    touched = json.dumps([arguments for _, arguments, _ in turn.calls], ensure_ascii=False)
    named = any(path not in touched for path in paths_in(turn.request))
    return named and len(turn.calls) < TRIES and means(turn.request, *CHANGES)

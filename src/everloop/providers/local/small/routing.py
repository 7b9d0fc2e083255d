"""Route a request: decide whether it is talk or a task, which file it is about, and the next step.

The next step is a call that is certain, a call of one of the possible tools, or words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ....tools.simple_tools import (
    READ_ONLY_TOOLS,
    REQUIRED_MEANINGS,
    SIMPLE_TOOLS,
    TOOL_BY_MEANING,
    WRITING_TOOLS,
    interpreter_command,
    is_failure,
)
from .conversation import Turn, described_file, referenced_file, shares_words, text_of
from .examples import Tool, asks_about_past, may_change, may_continue, mention_score, names_of, needs_tool
from .grammar import Expected, Values
from .language import CHANGES, PATTERNS, TASKS, WORD_SETS, Request, files_in, paths_in, words

MAX_INSTRUCTION = 240  # characters; a longer paragraph may be pasted
MAX_ADDITION = 9  # words of a request that only adds to the previous one
MAX_FAILURES = 3  # failed calls per turn
_NEEDS_TOOL = tuple(WORD_SETS["needs_tool"])
_OWN_THINGS = WORD_SETS["own_things"]
_CODE_EXTENSIONS = WORD_SETS["code_extensions"]
_NEEDS_EXISTING_FILE = ("add", "delete", "rename", "move", "copy")
_NEEDS_NO_LISTING = ("folder", "create", "told", "before", "remind", "remember")

# ---------------------------------------------------------------------------------------------- talk or task


def route(turn: Turn, offered: Sequence[Tool]) -> Turn | None:
    """Return the turn with the file that it refers to if it is a task; None for talk."""
    request, workspace = without_pasted_text(turn.text), turn.workspace_before
    with_file = replace(turn, file=referenced_file(request, workspace))
    named = files_in(request)
    if named or request.names_path:
        is_target = request.means("rename", "move", "copy") and len(named) == 1 and not workspace.has(named[0])
        return with_file if is_target else turn
    described = described_file(request, [*workspace.files, *workspace.touched])
    if request.means("hello", "thanks", "bye") and not request.means(*CHANGES, "run", "remember") and not described:
        return None
    into_file = request.means("add", "delete", "rename") or (request.means("file") and request.means("create", "write"))
    if (request.matches("piece") or request.matches("explain")) and not into_file and not described:
        return None
    if request != turn.text:  # the pasted text does not say what to do
        return turn if request.means(*CHANGES, "file", "remind", "remember") else None
    asks = request.is_question
    adds = request.matches("continues") and len(request.split()) <= MAX_ADDITION and not asks
    if described:
        return replace(with_file, continues=adds)
    changes = request.means(*CHANGES[2:], "run")
    if turn.has_recent_file and workspace.focus and not request.means("folder", "here"):
        about_file = request.matches("refers_to_file") or request.means("show", "read", "say", "count", "collection")
        if asks and not about_file and not changes:
            return None
        corrects = (adds and workspace.last == "edit_file") or _corrects_value(request, turn)
        corrects = corrects and not request.means(*_NEEDS_EXISTING_FILE, "run")
        if about_file or changes or ((adds or corrects) and not request.matches("first_person")):
            return replace(with_file, corrects=corrects and not asks, continues=adds)
    counts = request.means("count") and not _OWN_THINGS.isdisjoint(words(request))
    web = request.matches("url") or (request.means("web") and not request.matches("in_general"))
    is_task = changes or counts or request.means(*_NEEDS_TOOL) or web or request.matches("by_command")
    is_task = is_task or any(mention_score(tool, request) for tool in offered)
    return turn if is_task or needs_tool(request, names_of(offered)) else None


def without_pasted_text(text: str) -> Request:
    """Return the user's own words around a pasted text; only they decide what to do."""
    rest = re.sub(r"\"[^\"]{60,}\"|“[^”]{60,}”", " ", text)
    parts = [part for part in re.split(r"\n\s*\n|\n(?=>)", rest) if part.strip()]
    ends = [*parts[:1], *parts[1:][-1:]]
    lines = [part for part in ends if len(part) < MAX_INSTRUCTION and "\n" not in part.strip()]
    return Request("\n".join(lines) or rest)


def _corrects_value(request: Request, turn: Turn) -> bool:
    """Return whether a request corrects the file touched last: it says so, or it says no and names a value."""
    workspace = turn.workspace_before
    value = re.search(r"\d|\w\W+[A-ZÀ-Ö]\w+", re.sub(r"\bI\b", "", request))
    short = workspace.last == "edit_file" and len(request.split()) <= 4 and not request.matches("remark")
    names_value = value or short or shares_words(request, workspace.texts.get(workspace.focus, ()))
    return request.matches("surely_corrects") or (request.matches("corrects") and bool(names_value))


def with_listed_file(turn: Turn) -> Turn:
    """Return the turn with the file that it means, now that the folder has been listed."""
    if paths_in(turn.text) or "list_dir" not in turn.called:
        return turn
    return replace(turn, file=described_file(turn.text, [*turn.workspace.files, *turn.workspace.touched]) or turn.file)


# ---------------------------------------------------------------------------------------------- certain calls


def certain_call(turn: Turn, names: frozenset[str]) -> tuple[str, dict[str, Any]] | None:
    """Return the next call if it is certain without the model: list the folder, read or count a file, run a script, or
    save the last answer."""
    request, files = turn.request, files_in(turn.request)
    if not turn.calls and "list_dir" in names:
        needs_file = request.means(*_NEEDS_EXISTING_FILE) or (turn.file and request.is_question)
        unknown = not turn.workspace.listed and (not files or (turn.file and _mentions_unknown(turn)))
        if request.asks_for_listing or (needs_file and unknown and not request.means(*_NEEDS_NO_LISTING)):
            return "list_dir", {"path": "."}
    if not turn.calls and "write_file" in names and len(files) == 1 and (text := _answer_to_save(turn, files[0])):
        return "write_file", {"path": files[0], "content": text}
    if turn.called not in ([], ["list_dir"]) or "read_file" not in names or len(files) != 1:
        return None
    path = files[0]
    if turn.file and "exec" in names and request.means("run") and (command := interpreter_command(path)):
        return "exec", {"command": command}
    if turn.file and "exec" in names and request.means("count"):
        return "count_lines", {"path": path}
    if turn.file and removal_tool(turn) == "read_file":
        return "read_file", {"path": path}
    edits = turn.corrects or (request.asks_for_edit and not request.replaces_all)
    again = turn.continues and turn.workspace_before.last == "read_file" and not request.means(*CHANGES)
    asks = turn.file and (request.is_question or again or request.means("show", "read"))
    asks = asks or (request.asks_for_whole_file and not turn.calls)
    if (edits or asks) and not request.means("run", *_NEEDS_EXISTING_FILE):
        return "read_file", {"path": path}
    return None


def _answer_to_save(turn: Turn, path: str) -> str:
    """Return the last answer if it should be saved to a file; for a file of code, only the code in it."""
    if len(turn.text) > MAX_INSTRUCTION or not turn.text.matches("saves_that"):
        return ""
    history = [(message.get("role"), text_of(message)) for message in turn.messages[: turn.start]]
    answers = [text for (asked, _), (role, text) in pairwise(history) if (asked, role) == ("user", "assistant")]
    if path.rpartition(".")[2] in _CODE_EXTENSIONS:
        return next((code for answer in reversed(answers) if (code := fenced_code(answer))), "")
    return f"{answers[-1].strip()}\n" if [role for role, _ in history[-2:]] == ["user", "assistant"] else ""


def fenced_code(answer: str) -> str:
    return "\n".join(re.findall(r"^```[^\n]*\n(.*?)^```", answer, re.M | re.S))


def code_file(request: Request) -> str:
    """Return the code file that a request describes by its behaviour and not by its text, or ""."""
    files = files_in(request)
    if len(files) != 1 or files[0].rpartition(".")[2] not in _CODE_EXTENSIONS or not request.means("create", "write"):
        return ""
    return files[0] if request.matches("does") and not request.matches("literally") else ""


def _mentions_unknown(turn: Turn) -> bool:
    """Return whether a request mentions something that no known file contains: it may mean another file."""
    workspace = turn.workspace_before
    lines = [*workspace.touched, *(line for text in workspace.texts.values() for line in text)]
    nouns = [Request(found["noun"]) for found in PATTERNS["noun"].finditer(turn.text)]
    return not all(
        noun.means("end", "line") or Request(f"the {noun}").matches("refers_to_file") or shares_words(noun, lines)
        for noun in nouns
    )


def removal_tool(turn: Turn) -> str:
    """Return the tool that removes what the request means: `remove_line`, or `delete` for the file itself.

    Returns `read_file` if the file must be read to decide, and "" if nothing is to be removed.
    """
    if not turn.text.means("delete"):
        return ""
    if turn.text.matches("file_itself") or described_file(turn.text, [turn.file]):
        return "delete"
    if shares_words(turn.text, turn.workspace.texts.get(turn.file, ())):
        return "remove_line"
    return "delete" if turn.text.matches("points") or turn.file in turn.workspace.texts else "read_file"


# ---------------------------------------------------------------------------------------------- the next step


def next_step(
    turn: Turn, chosen: Sequence[Tool], offered: Sequence[Tool], values: Values
) -> tuple[Expected, list[Tool]]:
    """Return whether a call, words or either should come next, and the tools that can be called."""
    names, has_failed = names_of(chosen), any(is_failure(call.result) for call in turn.calls)
    only = frozenset({only_tool(turn)}) & names
    if only and not has_failed:
        return "call", [tool for tool in chosen if tool.get("name") in only]
    if has_failed:
        chosen = offered  # another tool may be needed
    expected = expected_next(turn, names_of(chosen))
    if turn.calls and turn.called[-1] == "read_file" and (turn.file or turn.request.asks_for_whole_file):
        expected = "words"
    guessed = not paths_in(turn.request)  # never delete or move files based on a guess
    return expected, [
        tool
        for tool in chosen
        if is_possible(str(tool.get("name")), turn, expected, names, values)
        and not (guessed and tool.get("name") in SIMPLE_TOOLS)
    ]


def only_tool(turn: Turn) -> str:
    """Return the tool that must come next if it is clear what to do with the file, or ""."""
    if not turn.file or not READ_ONLY_TOOLS.issuperset(turn.called):
        return ""
    if turn.corrects or (turn.text.means("change") and not turn.text.means("add", "delete", "rename", "run")):
        return "edit_file" if turn.calls else "read_file"
    if turn.text.means("delete"):
        return removal_tool(turn)
    if clear := next((tool for meaning, tool in TOOL_BY_MEANING.items() if turn.text.means(meaning)), ""):
        return clear
    return "append" if turn.continues and turn.workspace.last in WRITING_TOOLS and not turn.calls else ""


def expected_next(turn: Turn, names: frozenset[str]) -> Expected:
    """Return whether a call, words or either should come next, by the calls so far and by similar requests."""
    if not names:
        return "words"
    if not turn.calls:  # a request that names a file needs at least one call
        past = turn.request.is_question and asks_about_past(turn.request, names)
        return "call" if past or turn.request.names_path or needs_tool(turn.request, names) else "either"
    failures = [is_failure(call.result) for call in turn.calls]
    done = [call.tool for call in turn.calls if not is_failure(call.result)]
    if sum(failures) < MAX_FAILURES and READ_ONLY_TOOLS.issuperset(done):
        edits = "edit_file" in names and (turn.corrects or turn.request.asks_for_edit)
        if done[-1:] == turn.called[-1:] == ["read_file"] and ("edit_file" in turn.called or edits):
            return "call"  # the file was read in order to change it
        if not any(failures) and _has_untouched_file(turn):
            return "call"
    if _must_run(turn, names):
        return "call"
    if failures[-1]:
        tool, _, result = turn.calls[-1]
        # The command is an ordinary word, the time is invalid, or the text is not in the file: another form may work.
        wrong_form = tool == "cron" or (tool == "edit_file" and "does not exist" not in result)
        retry = sum(failures) == 1 and (wrong_form or "command not found" in result)
        return "call" if retry else "either" if sum(failures) < MAX_FAILURES else "words"
    return "either" if may_continue(turn.request, names, done) else "words"


def is_possible(tool: str, turn: Turn, expected: Expected, names: frozenset[str], values: Values) -> bool:
    """Return whether a tool can come next."""
    if not turn.calls:
        return _is_possible_first(tool, turn, names, bool(values.get("read_file")))
    if tool == "list_dir" and any(call.tool == "read_file" and not is_failure(call.result) for call in turn.calls):
        return False  # the file has been found
    edits = turn.corrects or turn.request.asks_for_edit
    if not (edits or may_change(turn.request, names)):  # instructions in a file are not the user's
        return tool in READ_ONLY_TOOLS
    if expected != "call":
        return True
    if _must_run(turn, names):
        return tool == "exec"
    if edits and "edit_file" in names:
        return tool == ("read_file" if is_failure(turn.calls[-1].result) else "edit_file")
    return tool not in READ_ONLY_TOOLS and (edits or tool != "edit_file")


def _is_possible_first(tool: str, turn: Turn, offered: frozenset[str], knows_files: bool) -> bool:
    """Return whether a tool can come first.

    A file is read before it is changed, because small models invent its text. A request without a word of a task runs
    no command and writes no file.
    """
    request = turn.request
    named = files_in(request)
    if tool in SIMPLE_TOOLS:
        renames = tool == "move" and len(named) == 2
        return renames or request.means(*REQUIRED_MEANINGS[tool]) or (tool == "append" and turn.continues)
    if asks_about_past(request, offered):
        return tool == "memory_search"
    if tool == "edit_file" and "read_file" in offered:
        return knows_files and request.replaces_all
    if tool == "read_file" and not knows_files:
        return request.means("read", "show", "say", "file", "folder")
    if tool in ("list_dir", "grep") and request.means("count"):
        return not named
    if tool == "cron":
        return request.means(*REQUIRED_MEANINGS[tool])
    if tool == "write_file" and request.means("add", "end"):  # would replace the existing file
        return request.means("create", "file", "run") or (request.means("write") and not request.means("end"))
    asks = request.is_question and not request.commands.means(*TASKS)
    if tool == "write_file" and (asks or request.means("count", "delete") or request.asks_for_edit):
        return request.means("create", "write", "file")
    if tool in ("exec", "write_file"):
        return request.names_path or request.means(*TASKS, "show") or request.matches("machine")
    return True


def _must_run(turn: Turn, names: frozenset[str]) -> bool:
    """Return whether the file that was just written must be run."""
    name, _, result = turn.calls[-1]
    written = name in ("write_file", "edit_file") and not is_failure(result)
    return "exec" in names and written and turn.request.asks_to_run


def _has_untouched_file(turn: Turn) -> bool:
    """Return whether a change is missing: a file was named, but no call has touched it."""
    arguments = json.dumps([call.arguments for call in turn.calls], ensure_ascii=False)
    untouched = any(path not in arguments for path in paths_in(turn.request))
    return untouched and len(turn.calls) < MAX_FAILURES and turn.request.means(*CHANGES)

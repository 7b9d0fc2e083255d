"""What a request needs: talk or work, on which file, and by which tool next."""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ....tools.narrow import NARROW, failed
from .conversation import Message, Seen, Turn, described, last_request, meant, shares_words, text_of
from .examples import acts, asks_of_the_past, may_act, needs_tool, next_step
from .grammar import Values, Wanted
from .words import (
    CHANGES,
    EMPTY,
    PATTERNS,
    WORK,
    asks_for_a_change,
    asks_how_many_there_are,
    files_in,
    folders_in,
    in_every_place,
    is_question,
    means,
    names_a_file,
    names_an_address,
    orders,
    paths_in,
    places_in,
    runs_then,
    says,
    without_files,
    word_set,
    words,
)

Route = Literal["talk", "work"]
LONG = 240  # characters from which on a request may hold pasted text
FEW = 9  # words of a request that only adds to the one before
RECENT = 2  # turns for which the file touched last is what a request is about
_CHAT = ("hello", "thanks", "bye")
_TOOLS = tuple(word_set("tools"))
_WHOLE = ("show", "read", "say", "file", "collection")
_ASKS = word_set("asks")
CODE = word_set("code")


@dataclass(frozen=True, slots=True)
class Decision:
    """`file` is the one that the request is about if it names none; `corrects`: it corrects the last change."""

    route: Route
    file: str = ""
    corrects: bool = False
    goes_on: bool = False


def instruction(request: str) -> str:
    """What the person says about a text that was pasted, without the text: only that decides what is done."""
    if len(request) < LONG and "\n\n" not in request and not re.search(r"\"[^\"]{60,}\"|“[^”]{60,}”", request):
        return request
    said = re.sub(r"\"[^\"]{60,}\"|“[^”]{60,}”", " ", request)
    parts = [part for part in re.split(r"\n\s*\n|\n(?=>)", said) if part.strip()]
    if len(parts) < 2:
        return said
    ends = [part for part in (parts[0], parts[-1]) if len(part) < LONG and "\n" not in part.strip()]
    return "\n".join(ends) or said


def decide(request: str, seen: Seen, recent: bool, needs: str) -> Decision:
    """The route of a request. `recent` is whether a file was touched in the last turns, `needs` what requests like
    it needed: call, words or either."""
    order = instruction(request)
    named = files_in(order)
    if named or names_a_file(order):
        source = means(order, "rename", "move", "copy") and len(named) == 1 and not any(map(seen.has, named))
        return Decision("work", meant(order, seen) if source else "")
    found = described(order, seen)
    if names_an_address(order) or means(order, "remind") or (means(order, "remember") and not found):
        return Decision("work")
    if means(order, *_CHAT) and not means(order, *CHANGES, "run") and not found:
        return Decision("talk")
    if says(order, "by_command") and not is_question(order):
        return Decision("work")
    into_file = means(order, "add", "delete", "rename") or (means(order, "file") and means(order, "create", "write"))
    if (says(order, "piece") or says(order, "explain")) and not into_file and not found:
        return Decision("talk")
    if order != request:  # something was pasted, and that says nothing of what is wanted
        return Decision("work" if means(order, *CHANGES, "file") else "talk")
    goes_on = says(order, "goes_on") and len(order.split()) <= FEW
    asks = is_question(order)
    if found:
        return Decision("work", meant(order, seen), goes_on=goes_on and not asks)
    if means(order, "told", "before") and asks and not recent:
        return Decision("work")
    changes = means(order, *CHANGES[2:]) or means(order, "run")
    if recent and seen.focus and not means(order, "folder", "here"):
        to_file = says(order, "refers_to_file") or means(order, "show", "read", "say", "count", "collection")
        if asks and not to_file and not changes:
            return Decision("talk")
        more = goes_on and seen.last == "edit_file"
        edits = (more or _corrects(order, seen)) and not means(order, "add", "delete", "rename", "move", "copy", "run")
        if to_file or changes or ((goes_on or edits) and not says(order, "first_person")):
            return Decision("work", meant(order, seen), edits and not asks, goes_on and not asks)
        if edits or not means(order, *_TOOLS):
            return Decision("talk")
    if means(order, "web") and says(order, "in_general"):
        return Decision("talk")
    counts = means(order, "count") and not asks_how_many_there_are(order)
    if changes or counts or means(order, *_TOOLS):
        return Decision("work")
    return Decision("work" if needs == "call" else "talk")


def _corrects(order: str, seen: Seen) -> bool:
    """Whether it corrects something in the file touched last: it says so, or says no and names a value."""
    value = re.search(r"\d|\w\W+[A-ZÀ-Ö]\w+", re.sub(r"\bI\b", "", order))
    short = seen.last == "edit_file" and len(order.split()) <= 4 and not says(order, "remark")
    says_no = says(order, "corrects") and (value or short or shares_words(order, seen.texts.get(seen.focus, ())))
    return bool(says(order, "surely_corrects") or says_no)


def names_something_else(request: str, seen: Seen) -> bool:
    """Whether a request speaks of something that stands in no file seen so far: it may be another file."""
    lines = [*seen.touched, *(line for path in seen.touched for line in seen.texts.get(path, ()))]
    nouns = [found["noun"] for found in PATTERNS["noun"].finditer(request)]
    return any(
        not says(f"the {noun}", "refers_to_file") and not means(noun, "end", "line") and not shares_words(noun, lines)
        for noun in nouns
    )


def shows_all(request: str) -> bool:
    """Whether the file as a whole is asked for: it is named and nothing else is."""
    if says(request, "exists"):
        return False
    said = PATTERNS["refers_to_file"].sub(" ", without_files(request))
    rest = [word for word in words(said) if word not in EMPTY and word not in _ASKS and not means(word, *_WHOLE)]
    return not rest


def writes_code(request: str) -> str:
    """The file of code that is to be written, where the request says what it does and not what stands in it."""
    files = files_in(request)
    if len(files) != 1 or files[0].rpartition(".")[2] not in CODE or not means(request, "create", "write"):
        return ""
    return files[0] if says(request, "does") and not says(request, "literally") else ""


def asks_for_the_files(request: str) -> bool:
    """Whether it asks which files there are, and for nothing else."""
    if paths_in(request) or folders_in(request) or places_in(request) or not means(request, "file", "folder", "here"):
        return False
    rest = [word for word in words(request) if word not in EMPTY and word not in _ASKS]
    return len(rest) <= 3 and all(means(word, "file", "folder", "here", "show") for word in rest)


def saves_answer(request: str) -> bool:
    """Whether what was just said is to be put into a file: `save that as …`."""
    return len(request) < LONG and says(request, "saves_that")


# ---------------------------------------------------------------------------------------------- arithmetic

_SUM = re.compile(
    r"^[\s¿]*(?:what(?:'s| is)|how much is|calculate|compute|wie viel ist|was ist|cuánto es|combien font)?\s*"
    r"(?P<sum>[\d\s.+*/()x×÷−-]+?)\s*[=?？]*\s*$",
    re.I,
)
_SIGNS = str.maketrans({"x": "*", "×": "*", "÷": "/", "−": "-"})
_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def arithmetic(request: str) -> str:
    """The answer to a request that is a sum and nothing else, or "": small models compute badly."""
    found = _SUM.match(request) if len(request) < 100 else None
    if found is None or not re.search(r"[\d)]\s*[+*/x×÷−-]\s*[\d(]", found["sum"]):
        return ""
    try:
        value = _value(ast.parse(found["sum"].strip().translate(_SIGNS), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, OverflowError, RecursionError):
        return ""
    shown = str(int(value)) if value == int(value) else f"{value:.10g}"
    return f"{' '.join(found['sum'].split())} = {shown}"


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError


# ---------------------------------------------------------------------------------------------- certain steps

_PROGRAMS = {"py": "python3", "sh": "sh", "js": "node"}
_ON_FILES = ("delete", "rename", "move", "copy", "add")  # work that needs a file which is there


def first_call(
    turn: Turn, names: frozenset[str], before: Seen, there: Seen, answer: str
) -> tuple[str, dict[str, Any]] | None:
    """The call that is certain, whatever the model would say: the look at a file that is to be changed or was asked
    about, or at the folder, where a file may be meant that was not seen yet; the run of a script; what was just said
    into a file. `answer` is what was said last, where that was talk."""
    request = turn.request
    files = files_in(request)
    looked = [name for name, _, _ in turn.calls]
    on_file = means(request, *_ON_FILES) or (turn.file and is_question(request))
    if not looked and not there.listed and "list_dir" in names and on_file:
        lost = not files or (turn.file and names_something_else(request.removesuffix(f"({turn.file})"), before))
        if lost and not means(request, "folder", "create", "told", "before", "remind", "remember"):
            return "list_dir", {"path": "."}
    if not looked and "list_dir" in names and asks_for_the_files(request):
        return "list_dir", {"path": "."}
    if not looked and answer and len(files) == 1 and "write_file" in names and saves_answer(request):
        return "write_file", {"path": files[0], "content": saved_part(answer)}
    if looked not in ([], ["list_dir"]) or "read_file" not in names or (not turn.file and len(files) != 1):
        return None
    file = turn.file or files[0]
    if turn.file and means(request, "run") and "exec" in names and (program := _PROGRAMS.get(file.rpartition(".")[2])):
        return "exec", {"command": f"{program} {shlex.quote(file)}"}
    if turn.file and means(request, "count") and "exec" in names:
        return "count_lines", {"path": file}
    if turn.file and removes(turn, there) == "look":
        return "read_file", {"path": file}
    changed = turn.corrects or (asks_for_a_change(request) and not in_every_place(request))
    again = turn.goes_on and before.last == "read_file" and not means(request, *CHANGES)
    asked = turn.file and (is_question(request) or again or means(request, "show", "read"))
    asked = asked or (shows_all(request) and not looked)
    if (changed or asked) and not means(request, "run", "add", "delete", "rename", "move", "copy"):
        return "read_file", {"path": file}
    return None


def last_words(conversation: Sequence[Message], request: str) -> str:
    """What was said last, if no call was made for it; for a file of code, the last answer that has code."""
    answers = [message for message in conversation if message.get("role") == "assistant"]
    files = paths_in(request)
    if files and files[0].rpartition(".")[2] in CODE:
        return next((text for one in reversed(answers) if "```" in (text := text_of(one))), "")
    called = any(message.get("tool_calls") for message in conversation[last_request(conversation) :])
    return text_of(answers[-1]) if answers and not called else ""


def saved_part(answer: str) -> str:
    """What of an answer is put into a file: its code where it has some, else all of it."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", answer, re.M | re.S)
    return "\n".join(blocks) if blocks else f"{answer.strip()}\n"


# ---------------------------------------------------------------------------------------------- the next step

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
TRIES = 3  # calls of a turn that may fail


def wanted_next(turn: Turn, names: frozenset[str]) -> Wanted:
    """Whether a call, words or either should come next, by what was so with requests like this one."""
    if not names:
        return "words"
    if not turn.calls:  # a request that names a file is not answered before something was looked at or done
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
    if says(said, "file_itself") or described(said, Seen({turn.file: None})):
        return "delete"
    if shares_words(said, there.texts.get(turn.file, ())):
        return "remove_line"
    return "delete" if says(said, "points") or turn.file in there.texts else "look"


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
    if failed(turn.calls[-1][2]):
        return tool == "read_file" or turn.calls[-1][0] != "edit_file"  # what is not in a file is looked for in it
    if ordered:
        return tool == "edit_file" or (acts(tool) and "edit_file" not in shown_for)
    return acts(tool) and tool != "edit_file"


def _first(tool: str, turn: Turn, offered: frozenset[str], files: bool) -> bool:
    """Whether a tool can be the first one. A file is read before it is changed, or what small models believe to be in
    it is not; where nothing was said of work, no command and no new file can be meant."""
    request = turn.request
    if tool in NARROW:
        two = tool == "move" and len(files_in(request)) == 2
        return two or means(request, *_MEANT[tool]) or (tool == "append" and turn.goes_on)
    named = files_in(request)
    if only := asks_of_the_past(request, offered):
        return tool == only
    if tool == "edit_file" and "read_file" in offered:
        return files and in_every_place(request)
    if tool == "read_file" and not files:
        return means(request, "read", "show", "say", "file", "folder")
    if tool in ("list_dir", "grep") and means(request, "count"):
        return not named
    if tool == "cron":
        return means(request, "remind", "every") or means(request, "when")
    if tool == "write_file" and means(request, "add", "end"):  # it would take the place of what is there
        return means(request, "create", "file", "run") or (means(request, "write") and not means(request, "end"))
    if tool == "write_file" and (means(request, "count", "delete") or asks_for_a_change(request) or _asks(request)):
        return means(request, "create", "write", "file")
    if tool in ("exec", "write_file"):
        return names_a_file(request) or means(request, *WORK, "show") or says(request, "machine")
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

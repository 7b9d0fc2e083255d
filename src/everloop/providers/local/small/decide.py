"""What a request needs: talk or work, on which file, and by which tool next."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ....tools.narrow import NARROW, failed
from .conversation import Seen, Turn, described, meant, shares_words
from .examples import acts, asks_of_the_past, may_act, needs_tool, next_step
from .grammar import Values, Wanted
from .words import (
    CHANGES,
    EMPTY,
    WORK,
    asks_for_a_change,
    asks_how_many_there_are,
    folders_in,
    in_every_place,
    is_file,
    is_question,
    means,
    names_a_file,
    names_an_address,
    orders,
    paths_in,
    pattern,
    places_in,
    runs_then,
    without_files,
    word_set,
    words,
)

Route = Literal["talk", "work"]
LONG = 240  # characters from which on a request may hold pasted text
FEW = 9  # words of a request that only adds to the one before
RECENT = 2  # turns for which the file touched last is what a request is about
_CHAT = ("hello", "thanks", "bye")
_TOOLS = (
    "remind",
    "remember",
    "told",
    "before",
    "web",
    "run",
    "command",
    "folder",
    "file",
    "show",
    "find",
    "sort",
    "mention",
    "here",
    "read",
)
_PIECE = pattern("piece")
_EXPLAIN = pattern("explain")
_BY_COMMAND = pattern("by_command")
_REFERS_TO_FILE = pattern("refers_to_file")
_NOUN = pattern("noun")
_WHOLE = ("show", "read", "say", "file", "collection")
_EXISTS = pattern("exists")
_ASKS = word_set("asks")
CODE = frozenset(
    {"py", "sh", "js", "ts", "c", "cpp", "rs", "go", "java", "html", "css", "sql", "rb", "pl", "php", "lua"}
)
_IN_GENERAL = pattern("in_general")
_DOES = pattern("does")
_LITERALLY = pattern("literally")
_SAVES_THAT = pattern("saves_that")
_GOES_ON = pattern("goes_on")
_CORRECTS = pattern("corrects")
_SURELY_CORRECTS = pattern("surely_corrects")
_REMARK = pattern("remark")
_FIRST_PERSON = pattern("first_person")


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
    named = [path for path in paths_in(order) if is_file(path)]
    if named or names_a_file(order):
        source = means(order, "rename", "move", "copy") and len(named) == 1 and not any(map(seen.has, named))
        return Decision("work", meant(order, seen) if source else "")
    found = described(order, seen)
    if names_an_address(order) or means(order, "remind") or (means(order, "remember") and not found):
        return Decision("work")
    if means(order, *_CHAT) and not means(order, *CHANGES, "run") and not found:
        return Decision("talk")
    if _BY_COMMAND.search(order) and not is_question(order):
        return Decision("work")
    into_file = means(order, "add", "delete", "rename") or (means(order, "file") and means(order, "create", "write"))
    if (_PIECE.search(order) or _EXPLAIN.search(order)) and not into_file and not found:
        return Decision("talk")
    if order != request:  # something was pasted, and that says nothing of what is wanted
        return Decision("work" if means(order, *CHANGES, "file") else "talk")
    goes_on = _GOES_ON.search(order) is not None and len(order.split()) <= FEW
    asks = is_question(order)
    if found:
        return Decision("work", meant(order, seen), goes_on=goes_on and not asks)
    if means(order, "told", "before") and asks and not recent:
        return Decision("work")
    changes = means(order, *CHANGES[2:]) or means(order, "run")
    if recent and seen.focus and not means(order, "folder", "here"):
        to_file = _REFERS_TO_FILE.search(order) or means(order, "show", "read", "say", "count", "collection")
        if asks and not to_file and not changes:
            return Decision("talk")
        more = goes_on and seen.last == "edit_file"
        edits = (more or _corrects(order, seen)) and not means(order, "add", "delete", "rename", "move", "copy", "run")
        if to_file or changes or ((goes_on or edits) and not _FIRST_PERSON.search(order)):
            return Decision("work", meant(order, seen), edits and not asks, goes_on and not asks)
        if edits or not means(order, *_TOOLS):
            return Decision("talk")
    if means(order, "web") and _IN_GENERAL.search(order):
        return Decision("talk")
    counts = means(order, "count") and not asks_how_many_there_are(order)
    if changes or counts or means(order, *_TOOLS):
        return Decision("work")
    return Decision("work" if needs == "call" else "talk")


def _corrects(order: str, seen: Seen) -> bool:
    """Whether it corrects something in the file touched last: it says so, or says no and names a value."""
    value = re.search(r"\d|\w\W+[A-ZÀ-Ö]\w+", re.sub(r"\bI\b", "", order))
    short = seen.last == "edit_file" and len(order.split()) <= 4 and not _REMARK.search(order)
    says_no = _CORRECTS.search(order) and (value or short or shares_words(order, seen.texts.get(seen.focus, ())))
    return bool(_SURELY_CORRECTS.search(order) or says_no)


def names_something_else(request: str, seen: Seen) -> bool:
    """Whether a request speaks of something that stands in no file seen so far: it may be another file."""
    lines = [*seen.touched, *(line for path in seen.touched for line in seen.texts.get(path, ()))]
    nouns = [found["noun"] for found in _NOUN.finditer(request)]
    return any(
        not _REFERS_TO_FILE.search(f"the {noun}") and not means(noun, "end", "line") and not shares_words(noun, lines)
        for noun in nouns
    )


def shows_all(request: str) -> bool:
    """Whether the file as a whole is asked for: it is named and nothing else is."""
    if _EXISTS.search(request):
        return False
    said = _REFERS_TO_FILE.sub(" ", without_files(request))
    rest = [word for word in words(said) if word not in EMPTY and word not in _ASKS and not means(word, *_WHOLE)]
    return not rest


def writes_code(request: str) -> str:
    """The file of code that is to be written, where the request says what it does and not what stands in it."""
    files = [path for path in paths_in(request) if is_file(path)]
    if len(files) != 1 or files[0].rpartition(".")[2] not in CODE or not means(request, "create", "write"):
        return ""
    return files[0] if _DOES.search(request) and not _LITERALLY.search(request) else ""


def asks_for_the_files(request: str) -> bool:
    """Whether it asks which files there are, and for nothing else."""
    if paths_in(request) or folders_in(request) or places_in(request) or not means(request, "file", "folder", "here"):
        return False
    rest = [word for word in words(request) if word not in EMPTY and word not in _ASKS]
    return len(rest) <= 3 and all(means(word, "file", "folder", "here", "show") for word in rest)


def saves_answer(request: str) -> bool:
    """Whether what was just said is to be put into a file: `save that as …`."""
    return len(request) < LONG and _SAVES_THAT.search(request) is not None


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
_POINTS = pattern("points")
_FILE_ITSELF = pattern("file_itself")
TRIES = 3  # calls of a turn that may fail
_MACHINE = pattern("machine")


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
    if _FILE_ITSELF.search(said) or described(said, Seen({turn.file: None})):
        return "delete"
    if shares_words(said, there.texts.get(turn.file, ())):
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
        two = tool == "move" and len([path for path in paths_in(request) if is_file(path)]) == 2
        return two or means(request, *_MEANT[tool]) or (tool == "append" and turn.goes_on)
    named = [path for path in paths_in(request) if is_file(path)]
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

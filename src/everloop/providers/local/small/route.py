"""Whether a request is talk, which the plain model answers, or work, for which it gets tools; and on which file."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .seen import Seen, described, meant, shares_words
from .words import (
    CHANGES,
    EMPTY,
    asks_how_many_there_are,
    folders_in,
    is_file,
    is_question,
    means,
    names_a_file,
    names_an_address,
    paths_in,
    pattern,
    places_in,
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
_WHERE_MINE = pattern("where_mine")
_REFERS_TO_FILE = pattern("refers_to_file")
_NOUN = pattern("noun")
_WHOLE = ("show", "read", "say", "file", "collection")
_EXISTS = pattern("exists")
_ASKS = word_set("asks")
_IN_GENERAL = pattern("in_general")
CODE = frozenset(
    {"py", "sh", "js", "ts", "c", "cpp", "rs", "go", "java", "html", "css", "sql", "rb", "pl", "php", "lua"}
)
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
        more = goes_on and seen.last == "edit_file" and shares_words(order, seen.texts.get(seen.focus, ()))
        edits = (more or _corrects(order, seen)) and not means(order, "add", "delete", "rename", "move", "copy", "run")
        if to_file or changes or ((goes_on or edits) and not _FIRST_PERSON.search(order)):
            return Decision("work", meant(order, seen), edits and not asks, goes_on and not asks)
        if edits or not means(order, *_TOOLS):
            return Decision("talk")
    if means(order, "web") and _IN_GENERAL.search(order):
        return Decision("talk")
    counts = means(order, "count") and not asks_how_many_there_are(order)
    if changes or counts or means(order, *_TOOLS) or _BY_COMMAND.search(order) or _WHERE_MINE.search(order):
        return Decision("work")
    if means(order, "create", "write") and not means(order, "file"):
        return Decision("talk")  # a file is written only where one is asked for
    return Decision("work" if needs == "call" else "talk")


def _corrects(order: str, seen: Seen) -> bool:
    """Whether it corrects something in the file touched last: it says so, or says no and names a value."""
    if _SURELY_CORRECTS.search(order):
        return True
    value = re.search(r"\d|\w\W+[A-ZÀ-Ö]\w+", re.sub(r"\bI\b", "", order))
    short = seen.last == "edit_file" and len(order.split()) <= 4 and not _REMARK.search(order)
    return _CORRECTS.search(order) is not None and bool(
        value or short or shares_words(order, seen.texts.get(seen.focus, ()))
    )


def names_something_else(request: str, seen: Seen) -> bool:
    """Whether a request speaks of something that stands in no file seen so far: it may be another file."""
    lines = [*seen.touched, *(line for path in seen.touched for line in seen.texts.get(path, ()))]
    nouns = [found["noun"] for found in _NOUN.finditer(request)]
    return any(
        not _REFERS_TO_FILE.search(f"the {noun}")
        and not means(noun, "file", "end", "line", "collection", "copy")
        and not shares_words(noun, lines)
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

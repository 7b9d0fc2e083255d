"""JSON as models write it: find where a value ends, and repair slightly malformed ones."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, Final, Literal

MAX_VALUES = 512  # per text
BROKEN: Final = object()
REPAIRABLE = 4096  # characters; the repairing library takes quadratic time
ALL_REPAIRS = 4 * REPAIRABLE  # characters per answer
EVALUABLE = 1 << 16
MAX_VALUE = 2_000_000  # maximum characters of a value

# Whole strings, runs of brackets, and an unclosed quote.
_PARTS = r"\"(?:[^\"\\]++|\\.)*+\"|'(?:[^'\\]++|\\.)*+'|[{\[]++|[}\]]++|[\"']"
STRUCTURE = re.compile(_PARTS, re.DOTALL)
BETWEEN = re.compile(r"[\s,;]*")  # between consecutive values
_UNESCAPED = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_decoder = json.JSONDecoder(strict=False, parse_constant=lambda name: _refuse(name))


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


@cache
def stop_pattern(pattern: str) -> re.Pattern[str]:
    """Return the structure pattern for `value_end`, extended by one that ends an unclosed value."""
    parts = _PARTS.replace(r"[{\[]++", r"[{\[]") if r"\[" in pattern else _PARTS  # a mark may follow a bracket
    return re.compile(f"(?P<stop>{pattern})|{parts}", re.DOTALL)


def after(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of a match here; `at` if there is none."""
    found = pattern.match(text, at)
    return found.end() if found else at


def value_end(text: str, at: int, structure: re.Pattern[str] = STRUCTURE) -> tuple[int, bool] | None:
    """Return where the object or list at `at` ends, and whether it is closed; None if the text ends first."""
    depth = 0
    for found in structure.finditer(text, at, at + MAX_VALUE):
        token = found[0]
        if found.lastgroup == "stop":
            return found.start(), False
        if token[0] in "{[":
            depth += len(token)
        elif token[0] in "}]":
            if len(token) >= depth:
                return found.start() + depth, True
            depth -= len(token)
        elif len(token) == 1:
            return None
    return None


def is_cut_off(text: str, complete: bool = False) -> bool:
    """Return whether a text ends inside a string or, unless `complete`, with more than its last bracket missing."""
    depth = 0
    for found in STRUCTURE.finditer(text):
        token = found[0]
        if token[0] in "{[":
            depth += len(token)
        elif token[0] in "}]":
            depth = max(0, depth - len(token))
        elif len(token) == 1:
            return True
    return depth > 0 and not complete and not (depth == 1 and text.endswith("}"))


UNPARSABLE = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)


def parse_python(text: str, mode: Literal["eval", "exec"]) -> Any:
    """Return the syntax tree of a text; raises one of UNPARSABLE if it is not Python."""
    if len(text) > EVALUABLE:
        raise ValueError("too long")
    with warnings.catch_warnings():  # about invalid escapes
        warnings.simplefilter("ignore")
        return ast.parse(text, mode=mode)


_NAMES = {"true": True, "false": False, "null": None, "none": None}


class _Named(ast.NodeTransformer):
    """Replaces the names `true`, `false` and `null` with their values."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


def literal(node: ast.expr) -> Any:
    """Return the JSON value of a literal's syntax tree; raises one of UNPARSABLE if it has none."""
    return _as_json(ast.literal_eval(_Named().visit(node)))


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


_WAYS: tuple[Callable[[str], Any], ...] = (  # to read a value; the cheap and reliable ones come first
    _decoder.decode,
    lambda text: _decoder.decode(_UNESCAPED.sub(r"\\\\", text)),
    lambda text: literal(parse_python(text, "eval").body),
)


class JsonReader:
    """Reads JSON, and repairs it if necessary. There is one reader per answer, with a limit on the work of repairs."""

    def __init__(self) -> None:
        self._left = ALL_REPAIRS

    def read(self, text: str) -> Any:
        """Return the value of a text, or BROKEN."""
        text = text.strip()
        for way in _WAYS:
            with suppress(*UNPARSABLE):
                return way(text)
        if not text or len(text) > min(REPAIRABLE, self._left):
            return BROKEN
        self._left -= len(text)
        from json_repair import repair_json

        with suppress(Exception):  # the library may raise anything on arbitrary input
            return _as_json(repair_json(text, return_objects=True, skip_json_loads=True))
        return BROKEN

    def read_all(self, text: str) -> list[Any]:
        """Return the consecutive values of a text; one that cannot be read is BROKEN and ends the list."""
        values: list[Any] = []
        at = after(BETWEEN, text, 0)
        while at < len(text) and len(values) <= MAX_VALUES and BROKEN not in values[-1:]:
            end = value_end(text, at)
            stop = end[0] if end is not None else len(text)
            values.append(self.read(text[at:stop]))
            at = after(BETWEEN, text, stop)
        return values

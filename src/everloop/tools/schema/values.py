"""JSON values: their types, and the conversion of a value of the wrong type to what the model meant."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

STRICT, CONVERT, WRAP = 0, 1, 2  # how far a value may be coerced: not at all, to another type, also into a list of one

KINDS = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_NUMBER = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?")
_MAX_JSON = 4_000_000
_EXACT = 2**53  # larger floats do not identify a single integer

Outcome = tuple[bool, Any, str]  # (converted?, new value, reason for a refusal if helpful)


def fits(value: Any, names: Iterable[str]) -> bool:
    """Return whether a value has one of these JSON types without conversion."""
    return any(_FITS[name](value) for name in names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _finite(value)


def _finite(value: int | float) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


_FITS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or value.is_integer()),
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def convert(value: Any, names: tuple[str, ...], level: int) -> Outcome:
    """Convert a value of the wrong type to what it was meant to be, if that is unambiguous."""
    reason = ""
    if level >= CONVERT:
        found, new, reason = _convert(value, names)
        if found:
            return True, new, ""
    if level >= WRAP and "array" in names and value is not None and not reason:
        return True, [value], ""
    return False, value, reason


def _convert(value: Any, names: tuple[str, ...]) -> Outcome:
    if isinstance(value, str):
        return _from_text(value, names)
    if isinstance(value, tuple) and "array" in names:
        return True, list(value), ""
    if isinstance(value, int | float) and _finite(value) and _small(value):
        if "string" in names:
            return True, json.dumps(value), ""
        if "boolean" in names and not isinstance(value, bool) and value in (0, 1):
            return True, bool(value), ""
    if isinstance(value, dict | list) and "string" in names:
        return False, value, "got JSON: send it as text"
    return False, value, ""


def _from_text(text: str, names: tuple[str, ...]) -> Outcome:
    word = text[:200].strip()
    if ("integer" in names or "number" in names) and _NUMBER.fullmatch(word):
        number = _number(word)
        if "number" in names or isinstance(number, int):
            return math.isfinite(number), number, ""
    if "boolean" in names and word.lower() in ("true", "false"):
        return True, word.lower() == "true", ""
    if "null" in names and word.lower() in ("null", "none"):
        return True, None, ""
    if ("object" in names and word[:1] == "{") or ("array" in names and word[:1] == "["):
        return _from_json(text, names)
    return False, text, ""


def _number(word: str) -> int | float:
    if word.lstrip("-").isdigit():
        return int(word)
    number = float(word)
    return int(number) if abs(number) < _EXACT and number.is_integer() else number


def _from_json(text: str, names: tuple[str, ...]) -> Outcome:
    """Decode a JSON text where an object or array is expected, as models without nested arguments send it."""
    if len(text) > _MAX_JSON:
        return False, text, "got a JSON text that is too long: send it as JSON, not as text"
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        return False, text, f"got a text that is not valid JSON ({str(error)[:100]}): send it as JSON, not as text"
    return fits(value, names), value, ""


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal in JSON: true is not 1, but 1 is 1.0."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(item, right[key]) for key, item in left.items())
    return left is right or bool(left == right)


def show(value: Any) -> str:
    """Format a value briefly for an error message."""
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 80 else value[:80] + "…", ensure_ascii=False)
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return f"an array of {len(value)}"
    if value is None or isinstance(value, int | float):
        return json.dumps(value) if value is None or _small(value) else "a very large number"
    return f"a {type(value).__name__}"[:80]


def _small(value: int | float) -> bool:
    # Python refuses to write out integers of more than some thousand digits
    return isinstance(value, float) or value.bit_length() < 512

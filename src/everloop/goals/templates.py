"""Inputs of an agent: validation against their schema, and substitution for `${input}` in prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from ..errors import EverloopError
from ..text import clean
from ..tools.schema import InvalidArguments, validate

_PLACE = re.compile(r"\$\{([^{}]*)\}")


class InputError(EverloopError, ValueError):
    """Inputs that are missing, unknown or of the wrong type."""


def fill(text: str, values: Mapping[str, Any]) -> str:
    """Replace each `${input}` by its value, in one pass: a `${…}` inside a value is kept, and so is an unknown name."""
    return _PLACE.sub(lambda found: as_text(values[found[1]]) if found[1] in values else found[0], text)


def as_text(value: Any) -> str:
    return clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def _clean(value: Any) -> Any:
    """Return a value whose texts can be stored."""
    match value:
        case str():
            return clean(value)
        case list():
            return [_clean(item) for item in value]
        case dict():
            return {_clean(key): _clean(item) for key, item in value.items()}
    return value


def names_in(texts: Iterable[str]) -> set[str]:
    """Return the names in all `${…}` placeholders."""
    return {found[1] for text in texts for found in _PLACE.finditer(text)}


def check_names(name: str, schema: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Raise an InputError for an input that the schema does not declare."""
    declared = schema.get("properties", {})
    for key in inputs:
        if key not in declared:
            close = get_close_matches(key, declared, n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"there are: {', '.join(declared) or 'none'}"
            raise InputError(f'agent {name}: unknown input "{key[:60]}" ({hint})')


def check_inputs(name: str, schema: Mapping[str, Any], inputs: Any, texts: Iterable[str]) -> dict[str, Any]:
    """Return the values of an agent's declared inputs, given or default.

    `texts` are its prompts: an input that they name must have a value, even if it is not required.
    """
    if inputs is None:
        inputs = {}
    if not isinstance(inputs, Mapping) or not all(isinstance(key, str) for key in inputs):
        raise InputError(f"agent {name}: inputs must be a mapping of names to values, not {type(inputs).__name__}")
    declared = schema.get("properties", {})
    values = {
        key: part["default"] for key, part in declared.items() if isinstance(part, dict) and "default" in part
    } | dict(inputs)
    needed = [*schema.get("required", ()), *sorted(names_in(texts) & declared.keys())]
    if missing := [key for key in dict.fromkeys(needed) if key not in values]:
        there = ", ".join(map(str, inputs)) or "none"
        raise InputError(f"agent {name}: missing inputs: {', '.join(missing)}; given: {there}")
    try:
        values = validate(dict(schema), values)
    except InvalidArguments as error:
        raise InputError(f"agent {name}: wrong inputs: {error}") from None
    return {key: _clean(value) for key, value in values.items() if key in declared}

"""`${input}` in the prompts of a definition: what stands for it, and whether all that is needed was given."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import EverloopError
from ..text import clean
from ..tools.schema import InvalidArguments, validate

_PLACE = re.compile(r"\$\{([^{}]*)\}")


class InputError(EverloopError, ValueError):
    """Inputs that an agent cannot begin with."""


def fill(text: str, values: Mapping[str, Any]) -> str:
    """The text with its `${input}`s replaced, once: what a value holds is never looked into.

    Whatever is not among the values stays as it is.
    """
    return _PLACE.sub(lambda found: as_text(values[found[1]]) if found[1] in values else found[0], text)


def as_text(value: Any) -> str:
    return clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))


def names_in(texts: Iterable[str]) -> set[str]:
    """All that stands in `${…}`."""
    return {found[1] for text in texts for found in _PLACE.finditer(text)}


def check_inputs(name: str, schema: Mapping[str, Any], inputs: Any, texts: Iterable[str]) -> dict[str, Any]:
    """The values of an agent's declared inputs: as they were given, or by default.

    `texts` are its prompts: an input that stands in them must have a value too, even where it is not required.
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
    return {key: value for key, value in values.items() if key in declared}

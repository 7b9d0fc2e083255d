"""Calls as JSON objects: {"name", "arguments"} and its cousins, alone, in lists and in wrappers."""

from __future__ import annotations

from typing import Any

from .mending import BROKEN, Mender
from .shapes import UNREADABLE, Written

NAMES = ("name", "tool_name", "function_name", "tool", "function", "action", "recipient_name")
ARGUMENTS = ("arguments", "parameters", "args", "input", "tool_input", "action_input", "kwargs", "params")
WRAPPERS = ("tool_calls", "tool_call", "function_call", "function", "calls")
BESIDE = frozenset({"id", "type", "index", "tool_call_id", "call_id"})
KEYS = frozenset({*NAMES, *ARGUMENTS, *WRAPPERS, *BESIDE})


def calls_of(value: Any, mender: Mender, *, strict: bool = False) -> list[Written] | None:
    """The calls that a value stands for; None if it is something else.

    `strict`: it has all that a call has and nothing that a call has not, for a description of a tool looks much alike.
    """
    if isinstance(value, list):
        calls: list[Written] = []
        for item in value:
            more = calls_of(item, mender, strict=strict) if isinstance(item, dict) else None
            if more is None:
                return None
            calls += more
        return calls or None
    if not isinstance(value, dict):
        return None
    for key in WRAPPERS:
        if isinstance(inner := value.get(key), dict | list):
            if strict and not value.keys() <= {key, *BESIDE}:
                return None
            return calls_of(inner, mender, strict=strict)
    return _one(value, mender, strict)


def _one(value: dict[str, Any], mender: Mender, strict: bool) -> list[Written] | None:
    name_key = next((key for key in NAMES if isinstance(value.get(key), str)), None)
    if name_key is None:
        return None
    key = next((key for key in ARGUMENTS if key in value), None)
    if strict and (key is None or not value.keys() <= {name_key, key, *BESIDE}):
        return None
    arguments = value.get(key) if key is not None else {}
    if isinstance(arguments, str):
        arguments = mender.read(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if arguments is BROKEN or not isinstance(arguments, dict):
        return [Written(value[name_key], problem=UNREADABLE)]
    if strict and arguments.get("type") == "object" and isinstance(arguments.get("properties"), dict):
        return None  # the description of a tool
    return [Written(value[name_key], arguments)]

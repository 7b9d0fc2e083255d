"""Calls as a model wrote them: the result of reading a text, calls as JSON objects, and the tools that were offered."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base import ToolCallRequest
from .json_values import JsonReader

MAX_CALLS = 512


@dataclass(slots=True, frozen=True)
class TextPart:
    """A part of an answer that may be shown now."""

    text: str
    reasoning: bool = False


@dataclass(slots=True)
class Reading:
    """A complete answer: its text, calls and reasoning, and the parts not shown yet."""

    content: str
    calls: list[ToolCallRequest] = field(default_factory=list)
    reasoning: str = ""
    pieces: list[TextPart] = field(default_factory=list)


@dataclass(slots=True)
class WrittenCall:
    """A call as written in a dialect; `problem` says why its arguments cannot be read."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    positional: list[Any] = field(default_factory=list)
    problem: str = ""


@dataclass(slots=True)
class CallBlock:
    """A part of a text that contains calls: where it ends, and its content."""

    end: int
    calls: list[ToolCallRequest]
    source: str  # without marks or fences; compared with untrusted content to find quotations


CUT_OFF = "the answer ended before the call was complete; make the whole call again"
UNREADABLE = "the arguments are not valid JSON; make the whole call again, with its arguments as one JSON object"

NAMES = ("name", "tool_name", "function_name", "tool", "function", "action", "recipient_name")
ARGUMENTS = ("arguments", "parameters", "args", "input", "tool_input", "action_input", "kwargs", "params")
WRAPPERS = ("tool_calls", "tool_call", "function_call", "function", "calls")
BESIDE = frozenset({"id", "type", "index", "tool_call_id", "call_id"})
KEYS = frozenset({*NAMES, *ARGUMENTS, *WRAPPERS, *BESIDE})


def calls_of(value: Any, json_reader: JsonReader, *, strict: bool = False) -> list[WrittenCall] | None:
    """Return the calls that a JSON value represents; None if it is something else.

    `strict`: it must have all keys of a call and no others, since the definition of a tool looks similar.
    """
    if isinstance(value, list):
        calls = [calls_of(item, json_reader, strict=strict) if isinstance(item, dict) else None for item in value]
        return None if None in calls else [call for more in calls for call in more or ()] or None
    if not isinstance(value, dict):
        return None
    for key in WRAPPERS:
        if isinstance(inner := value.get(key), dict | list):
            other = strict and not value.keys() <= {key, *BESIDE}
            return None if other else calls_of(inner, json_reader, strict=strict)
    name_key = next((key for key in NAMES if isinstance(value.get(key), str)), None)
    given = next((key for key in ARGUMENTS if key in value), None)
    if name_key is None or (strict and not (given and value.keys() <= {name_key, given, *BESIDE})):
        return None
    arguments = value.get(given)
    if isinstance(arguments, str):
        arguments = json_reader.read(arguments) if arguments.strip() else None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return [WrittenCall(value[name_key], problem=UNREADABLE)]
    if strict and arguments.get("type") == "object" and isinstance(arguments.get("properties"), dict):
        return None  # the definition of a tool
    return [WrittenCall(value[name_key], arguments)]


_ADDED = re.compile(r"\A(?:functions?\.|tools\.|default_api\.)+|:\d+\Z")


class OfferedTools:
    """The offered tools by name. A schema is compiled on first use."""

    def __init__(self, tools: Sequence[Any] | None) -> None:
        self._schemas: dict[str, Any] = {}
        self._checks: dict[str, Callable[[Any], Any]] = {}
        for tool in tools or ():
            function = tool.get("function", tool) if isinstance(tool, dict) else None
            if isinstance(function, dict) and isinstance(name := function.get("name"), str):
                self._schemas[name] = function.get("parameters") or {}

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def __contains__(self, name: str) -> bool:
        return self.known(name) in self._schemas

    def known(self, name: str) -> str:
        """Return a tool's name without the prefix or index that dialects add."""
        name = name.strip()
        return name if name in self._schemas else _ADDED.sub("", name)

    def request(self, written: WrittenCall) -> ToolCallRequest:
        """Return a call in a dialect with marks. An error in it is reported to the model when it is run."""
        name = self.known(written.name) or "unknown"
        if written.problem or name not in self._schemas:
            return ToolCallRequest("", name, written.arguments, written.problem or None)
        arguments = self._named(name, written)
        fitting = self._fit(name, arguments)
        return ToolCallRequest("", name, arguments if fitting is None else fitting)

    def fitting_request(self, written: WrittenCall) -> ToolCallRequest | None:
        """Return a call in plain JSON if an offered tool has its name and its arguments fit; else it may be data."""
        name = self.known(written.name)
        if written.problem or name not in self._schemas:
            return None
        fitting = self._fit(name, self._named(name, written))
        return None if fitting is None else ToolCallRequest("", name, fitting)

    def _named(self, name: str, written: WrittenCall) -> dict[str, Any]:
        """Return the arguments by name; positional ones get the names of the schema's first properties."""
        if not written.positional:
            return written.arguments
        schema = self._schemas[name]
        names = list(schema.get("properties") or {}) if isinstance(schema, dict) else []
        by_place = dict(zip(names, written.positional, strict=False))
        if len(by_place) < len(written.positional) or by_place.keys() & written.arguments.keys():
            return {**written.arguments, "": written.positional}  # fits no schema, so validation reports it
        return {**by_place, **written.arguments}

    def _fit(self, name: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        from ...tools.schema import InvalidArguments, compile_schema

        if name not in self._checks:
            self._checks[name] = compile_schema(self._schemas[name], closed=True)
        try:
            fitting = self._checks[name](arguments)
        except InvalidArguments:
            return None
        return fitting if isinstance(fitting, dict) else None

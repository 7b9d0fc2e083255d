"""The tools that a model was offered, and whether a call that it wrote is one of theirs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..base import ToolCallRequest
from .shapes import Written

_INDEX = re.compile(r":\d+$")
_PREFIXES = ("functions.", "function.", "tools.", "default_api.")


class Offered:
    """Tools by name, each with its schema; a schema is compiled when it is first needed."""

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
        """A name without what dialects put around it."""
        name = name.strip()
        if name in self._schemas:
            return name
        bare = _INDEX.sub("", name)
        for prefix in _PREFIXES:
            bare = bare.removeprefix(prefix)
        return bare

    def told(self, written: Written) -> ToolCallRequest:
        """The call of a dialect that leaves no doubt. What is wrong with it, the model hears when it is run."""
        name = self.known(written.name) or "unknown"
        if written.problem:
            return ToolCallRequest("", name, {}, written.problem)
        if name not in self._schemas:
            return ToolCallRequest("", name, written.arguments)
        arguments = self._named(name, written)
        fitting = self._fit(name, arguments)
        return ToolCallRequest("", name, arguments if fitting is None else fitting)

    def taken(self, written: Written) -> ToolCallRequest | None:
        """The call of JSON that may as well be an example or data: only if a tool is called so and it fits."""
        name = self.known(written.name)
        if written.problem or name not in self._schemas:
            return None
        fitting = self._fit(name, self._named(name, written))
        return None if fitting is None else ToolCallRequest("", name, fitting)

    def _named(self, name: str, written: Written) -> dict[str, Any]:
        """The arguments by name; those without one are the schema's first ones."""
        if not written.positional:
            return written.arguments
        schema = self._schemas[name]
        names = list(schema.get("properties") or {}) if isinstance(schema, dict) else []
        by_place = dict(zip(names, written.positional, strict=False))
        if len(by_place) < len(written.positional) or by_place.keys() & written.arguments.keys():
            return {**written.arguments, "": written.positional}  # fits nothing, and says so
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

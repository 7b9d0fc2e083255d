"""Validate values against a JSON schema, and coerce what models get slightly wrong.

A schema is compiled once into nested functions. A valid value is returned unchanged; a value that is valid after an
unambiguous repair ("5" for 5, a JSON text for an object) is returned repaired; all problems are reported at once.
Defaults are not filled in. Unknown keywords are ignored, so that a schema from outside never disables a tool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

from . import checks
from .checks import Check, Run, TooComplex
from .values import STRICT, WRAP

_MAX_PROBLEMS = 20


class InvalidArguments(ValueError):
    """A value that does not fit its schema; `problems` are lines like `items[2].count: must be an integer`."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        shown = problems[:_MAX_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more")
        super().__init__("; ".join(shown))


def validate(schema: Any, value: Any) -> Any:
    """Return the value, repaired where that is unambiguous; raises InvalidArguments with every problem otherwise."""
    return compile_schema(schema)(value)


def compile_schema(schema: Any, *, closed: bool = False) -> Callable[[Any], Any]:
    """Return a function that validates values against `schema`.

    `closed`: where the outermost object does not say whether it takes further properties, it takes none.
    """
    if closed and isinstance(schema, dict) and "additionalProperties" not in schema:
        schema = {**schema, "additionalProperties": False}
    try:
        check = _Compiler(schema).compile(schema)
    except RecursionError:  # too deeply nested to be meant
        check = checks.accept

    def run(value: Any) -> Any:
        try:
            fitting, problems = _attempt(check, value, STRICT)
            if not problems:
                return fitting
            bent, problems = _attempt(check, value, WRAP)
            if not problems:  # one keyword may have coerced what another had accepted: check again
                fitting, problems = _attempt(check, bent, STRICT)
        except (TooComplex, RecursionError):
            raise InvalidArguments(["the value is nested too deeply or is too complex to check"]) from None
        if problems:
            raise InvalidArguments([checks.render(at, problem) for at, problem in problems])
        return fitting

    return run


def _attempt(check: Check, value: Any, level: int) -> tuple[Any, list[checks.Problem]]:
    run = Run(level)
    return check(value, None, run), run.problems


class _Compiler:
    """Compiles a schema document into check functions, each sub-schema once, recursive ones included."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._done: dict[int, list[Check]] = {}

    def compile(self, schema: Any) -> Check:
        if schema is False:
            return checks.refuse
        if not isinstance(schema, dict) or not schema:
            return checks.accept
        known = self._done.get(id(schema))
        if known is not None:
            return known[0] if known else checks.later(known)
        slot = self._done[id(schema)] = []
        slot.append(checks.sequence(list(self._parts(schema))))
        return slot[0]

    def _parts(self, schema: dict[str, Any]) -> Iterable[Check]:
        """Return the checks of one schema, in the order in which they may change the value."""
        if isinstance(reference := schema.get("$ref"), str):
            yield self.compile(self._resolve(reference))
        for part in _list(schema.get("allOf")):
            yield self.compile(part)
        if check := checks.type_check(schema.get("type")):
            yield check
        for keyword in ("anyOf", "oneOf"):
            if branches := _list(schema.get(keyword)):
                yield checks.union(
                    [self.compile(branch) for branch in branches], [_is_null(branch) for branch in branches]
                )
        if "const" in schema:
            yield checks.one_of([schema["const"]])
        if isinstance(schema.get("enum"), list):
            yield checks.one_of(schema["enum"])
        yield from self._objects(schema)
        if (items := schema.get("items")) is not None and not isinstance(items, list):
            yield checks.items_of(self.compile(items))
        yield from checks.limits(schema)

    def _objects(self, schema: dict[str, Any]) -> Iterable[Check]:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        extra = schema.get("additionalProperties", True)
        if "patternProperties" in schema:
            extra = True
        if properties or required or extra is False or isinstance(extra, dict):
            known = {name: self.compile(part) for name, part in properties.items()}
            yield checks.properties_of(known, required, None if extra is False else self.compile(extra))

    def _resolve(self, reference: str) -> Any:
        """Resolve a reference inside this document. A reference to another document allows any value."""
        if not reference.startswith("#"):
            return True
        target = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                return True
        return target


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_null(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "null"

"""Checks of the JSON schemas in a definition, which a person wrote."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from ..tools.schema.values import KINDS

DEEPEST = 30
# Keywords at the top of the schema of inputs. Anything else there is an input in the wrong place.
AT_THE_TOP = frozenset({
    "$comment", "$defs", "$id", "$ref", "$schema", "additionalProperties", "allOf", "anyOf", "default", "definitions",
    "dependencies", "dependentRequired", "dependentSchemas", "description", "else", "examples", "if", "maxProperties",
    "minProperties", "not", "oneOf", "patternProperties", "properties", "propertyNames", "required", "then", "title",
    "type", "unevaluatedProperties",
})  # fmt: skip

Problem = tuple[tuple[str, ...], str]  # (path of keys, what is wrong)


def schema_problems(schema: Any, path: tuple[str, ...] = ()) -> Iterator[Problem]:
    """Yield what is wrong with a schema. Unknown keywords are ignored, as JSON Schema prescribes."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield path, "must be a JSON schema, a mapping"
        return
    if len(path) > DEEPEST:
        yield path, f"is nested more than {DEEPEST} levels deep"
        return
    yield from _keyword_problems(schema, path)
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(parts := schema.get(keyword), dict):
            for name, part in parts.items():
                yield from schema_problems(part, (*path, keyword, str(name)))
    for keyword in ("items", "additionalProperties", "not"):
        if keyword in schema and not isinstance(schema[keyword], list):
            yield from schema_problems(schema[keyword], (*path, keyword))
    for keyword in ("allOf", "anyOf", "oneOf"):
        for part in schema[keyword] if isinstance(schema.get(keyword), list) else ():
            yield from schema_problems(part, (*path, keyword))


def _keyword_problems(schema: dict[str, Any], path: tuple[str, ...]) -> Iterator[Problem]:
    if "type" in schema:
        declared = schema["type"]
        for kind in declared if isinstance(declared, list) else [declared]:
            if not isinstance(kind, str) or kind not in KINDS:
                close = get_close_matches(str(kind), KINDS, n=1, cutoff=0.5)
                hint = f'did you mean "{close[0]}"?' if close else f"there are: {', '.join(KINDS)}"
                yield (*path, "type"), f'"{str(kind)[:60]}" is not a type ({hint})'
    for keyword, kind, words in (
        ("properties", dict, "a mapping of names to schemas"),
        ("required", list, "a list of names"),
        ("enum", list, "a list of values"),
        ("allOf", list, "a list of schemas"),
        ("anyOf", list, "a list of schemas"),
        ("oneOf", list, "a list of schemas"),
    ):
        if keyword in schema and not isinstance(schema[keyword], kind):
            yield (*path, keyword), f"must be {words}"
    required = schema.get("required")
    if isinstance(required, list) and not all(isinstance(name, str) for name in required):
        yield (*path, "required"), "must be a list of names"


def input_problems(schema: Any) -> Iterator[Problem]:
    """Yield what is wrong with the schema of an agent's inputs, which must describe an object."""
    if not isinstance(schema, dict):
        yield (), "must be a JSON schema of type object, a mapping"
        return
    if schema.get("type", "object") != "object":
        yield ("type",), 'must be "object": inputs have names'
        return
    for key in schema:
        if key not in AT_THE_TOP:
            yield (str(key),), f'unknown key "{str(key)[:60]}" (inputs belong under properties)'
            return
    yield from schema_problems(schema)
    properties = schema.get("properties")
    declared = properties if isinstance(properties, dict) else {}
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str) and name not in declared:
            yield ("required",), f'"{name[:60]}" is required but not declared under properties'

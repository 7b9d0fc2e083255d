"""Arguments for all schemas and values."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from everloop.tools.schema import InvalidArguments, compile_schema, validate
from everloop.tools.schema.values import same

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars | st.sampled_from(["5", "true", "null", "[1]", '{"a": 1}', "{", "1e5", " 7"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc") | st.text(max_size=3), inner),
    max_leaves=8,
)
types = st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null", "nonsense"])


def schemas_over(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {},
        optional={
            "type": types | st.lists(types, max_size=3),
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            "required": st.lists(st.sampled_from("abc"), max_size=2),
            "additionalProperties": st.booleans() | inner,
            "items": inner,
            "enum": st.lists(values, max_size=3),
            "const": values,
            "anyOf": st.lists(inner, max_size=3),
            "oneOf": st.lists(inner, max_size=3),
            "allOf": st.lists(inner, max_size=2),
            "minimum": st.integers(-5, 5) | values,
            "maximum": st.integers(-5, 5) | values,
            "minLength": st.integers(0, 3) | values,
            "pattern": st.sampled_from(["^a", "[", "\\p{L}", "."]) | values,
            "$ref": st.sampled_from(
                ["#", "#/properties/a", "#/items", "#/nowhere", "https://example.com", "#/anyOf/0"]
            ),
        },
    )


schemas = st.recursive(st.booleans() | values | schemas_over(st.booleans()), schemas_over, max_leaves=5)


@settings(max_examples=150, deadline=None)
@given(schemas, values)
def test_whatever_the_schema_and_the_value_only_our_own_error_is_raised(schema, value):
    try:
        check = compile_schema(schema)
        first = check(value)
    except InvalidArguments:
        return
    assert same_or_nan(check(first), first), "repairing twice changes the value again"


def same_or_nan(left: Any, right: Any) -> bool:
    return json.dumps(left) == json.dumps(right) or same(left, right)


def fitting(depth: int = 2) -> st.SearchStrategy[tuple[dict[str, Any], Any]]:
    """Schemas, each with a value that matches it unchanged."""
    leaves = [
        st.tuples(st.just({"type": "string"}), st.text() | st.sampled_from(["5", "true", "null", "[1]", "{}"])),
        st.tuples(st.just({"type": "integer"}), st.integers()),
        st.tuples(st.just({"type": "number"}), st.integers() | st.floats(allow_nan=False, allow_infinity=False)),
        st.tuples(st.just({"type": "boolean"}), st.booleans()),
        st.tuples(st.just({"type": "null"}), st.none()),
        st.tuples(st.just({"type": ["string", "integer"]}), st.text() | st.integers()),
        values.map(lambda value: ({"const": value}, value)),
        st.tuples(st.just({}), values),
    ]
    if not depth:
        return st.one_of(leaves)
    inner = fitting(depth - 1)
    return st.one_of(
        *leaves,
        inner.map(lambda pair: ({"type": "array", "items": pair[0]}, [pair[1], pair[1]])),
        inner.map(lambda pair: ({"type": "array"}, [pair[1]])),
        st.tuples(schemas, inner).map(lambda both: ({"anyOf": [both[1][0], both[0]]}, both[1][1])),
        st.tuples(inner, inner).map(
            lambda pairs: (
                {
                    "type": "object",
                    "properties": {"a": pairs[0][0], "b": pairs[1][0]},
                    "required": ["a"],
                    "additionalProperties": False,
                },
                {"a": pairs[0][1], "b": pairs[1][1]},
            )
        ),
    )


@settings(max_examples=150, deadline=None)
@given(fitting())
def test_a_valid_value_is_returned_unchanged(pair):
    schema, value = pair
    assert validate(schema, value) is value or same_or_nan(validate(schema, value), value)

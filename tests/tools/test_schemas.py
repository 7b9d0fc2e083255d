"""Arguments before a tool runs: repaired, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from everloop.tools.schema import InvalidArguments, compile_schema, validate
from everloop.tools.schema.values import same


@pytest.mark.parametrize(
    ("schema", "sent", "taken"),
    [
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " -5 ", -5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, 5.0, 5),
        ({"type": "number"}, "5.5", 5.5),
        ({"type": "number"}, "1e3", 1000),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, 1, True),
        ({"type": "string"}, 5, "5"),
        ({"type": "string"}, True, "true"),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "array"}, (1, 2), [1, 2]),
        ({"type": "array", "items": {"type": "string"}}, "one", ["one"]),
        ({"type": "array", "items": {"type": "integer"}}, "7", [7]),
        ({"type": "array", "items": {"type": "object"}}, {"a": 1}, [{"a": 1}]),
        ({"type": ["integer", "null"]}, "5", 5),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "integer"}]}, "5", 5),
        ({"oneOf": [{"type": "object"}, {"type": "array"}]}, "[]", []),
        ({"enum": ["add", "remove"]}, "Add ", "add"),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": "x"}, "X", "x"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, "5", 5),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "5", 5),
        ({"properties": {"a": {"type": "string"}}}, {"a": None}, {}),
        ({"properties": {"a": {"type": ["string", "null"]}}}, {"a": None}, {"a": None}),
        ({"properties": {"a": {"type": "string", "default": "x"}}}, {}, {}),
        ({"additionalProperties": {"type": "integer"}}, {"a": "1"}, {"a": 1}),
        ({"patternProperties": {"^x-": {"type": "integer"}}}, {"x-a": "1", "b": "2"}, {"x-a": 1, "b": "2"}),
        ({"patternProperties": {"(": {"type": "integer"}}, "additionalProperties": False}, {"a": "1"}, {"a": 1}),
    ],
)
def test_small_mistakes_of_models_are_repaired(schema, sent, taken):
    before = repr(sent)
    result = validate(schema, sent)
    assert same(result, taken)
    assert type(result) is type(taken)
    assert repr(sent) == before


@pytest.mark.parametrize(
    ("schema", "sent", "problem"),
    [
        ({"type": "integer"}, "five", 'must be an integer, got "five"'),
        ({"type": "integer"}, 5.5, "must be an integer, got 5.5"),
        ({"type": "integer"}, True, "must be an integer, got true"),
        ({"type": "integer"}, "1_000", "must be an integer"),
        ({"type": "number"}, float("nan"), "must be a number"),
        ({"type": "number"}, "1e999", "must be a number"),
        ({"type": "boolean"}, "maybe", "must be true or false"),
        ({"type": "string"}, None, "must be a string, got null"),
        ({"type": "string"}, {"a": 1}, "must be a string, got an object"),
        ({"type": "object"}, '{"a": ', "not valid JSON"),
        ({"type": "array"}, "[1,", "not valid JSON"),
        ({"enum": ["a", "A"]}, " a", 'must be one of "a", "A"'),
        ({"minimum": 3}, 2, "must be at least 3, got 2"),
        ({"exclusiveMaximum": 3}, 3, "must be less than 3"),
        ({"minLength": 2}, "a", "length of at least 2"),
        ({"maxItems": 1}, [1, 2], "items of at most 1"),
        ({"pattern": "^[a-z]+$"}, "A1", r"must match ^[a-z]+$"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "x", 'must be an integer, got "x"'),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "x", "fits none of the allowed forms"),
        ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "5", "must be an integer"),
        (False, 1, "is not allowed"),
        (
            {"properties": {"path": {}}, "additionalProperties": False},
            {"pth": 1},
            'unknown argument "pth" (did you mean "path"?)',
        ),
        ({"additionalProperties": False}, {"a": 1}, 'unknown argument "a" (there are none)'),
        ({"patternProperties": {"^x-": {}}, "additionalProperties": False}, {"a": 1}, 'unknown argument "a"'),
        ({"patternProperties": {"^x-": {"type": "integer"}}}, {"x-a": "one"}, "x-a: must be an integer"),
        ({"required": ["path"]}, {}, "path: is required, but missing"),
    ],
)
def test_unrepairable_arguments_are_explained(schema, sent, problem):
    with pytest.raises(InvalidArguments) as caught:
        validate(schema, sent)
    assert problem in str(caught.value)


def test_all_problems_are_reported_at_once_each_with_its_path():
    schema = {
        "type": "object",
        "properties": {
            "items": {"type": "array", "items": {"properties": {"count": {"type": "integer"}}, "required": ["count"]}},
            "name": {"type": "string"},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    sent = {"items": [{"count": 1}, {}, {"count": "many"}], "nmae": "x"}
    with pytest.raises(InvalidArguments) as caught:
        validate(schema, sent)
    assert caught.value.problems == [
        "items[1].count: is required, but missing",
        'items[2].count: must be an integer, got "many"',
        'unknown argument "nmae" (did you mean "name"?)',
        "name: is required, but missing",
    ]


def test_an_error_message_stays_short_however_much_is_wrong():
    with pytest.raises(InvalidArguments) as caught:
        validate({"items": {"type": "integer"}}, ["x" * 1000] * 1000)
    assert len(caught.value.problems) == 1000
    assert len(str(caught.value)) < 5000


def test_a_recursive_schema_is_followed_as_deep_as_the_value():
    schema: dict[str, Any] = {
        "$defs": {"node": {"properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    }
    assert validate(schema, {"n": "1", "next": {"n": "2"}}) == {"n": 1, "next": {"n": 2}}
    with pytest.raises(InvalidArguments, match=r"next\.next\.n: must be an integer"):
        validate(schema, {"next": {"next": {"n": "x"}}})


def test_depth_and_work_are_bounded():
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    endless: dict[str, Any] = {"$defs": {"t": {"anyOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/t"}]}}}
    endless["$ref"] = "#/$defs/t"
    tree: dict[str, Any] = {"items": {"$ref": "#"}}
    twins = {"$defs": {"t": {"anyOf": [{"items": {"$ref": "#/$defs/t"}, "type": "array"}] * 4}}, "$ref": "#/$defs/t"}
    thirty: Any = "x"
    for _ in range(30):
        thirty = [thirty]
    for schema, value in ((tree, deep), (endless, 1), (twins, thirty)):
        with pytest.raises(InvalidArguments, match="too deeply"):
            validate(schema, value)
    knot: dict[str, Any] = {"type": "object"}
    knot["properties"] = {"a": knot, "b": knot}
    assert validate(knot, {"a": {"b": {}}}) == {"a": {"b": {}}}
    nest: dict[str, Any] = {}
    for _ in range(5000):
        nest = {"items": nest}
    assert validate(nest, [[1]]) == [[1]]


def test_an_ambiguous_value_is_refused():
    with pytest.raises(InvalidArguments, match='is ambiguous, could be "1" or true'):
        validate({"anyOf": [{"type": "string", "enum": ["1"]}, {"type": "boolean"}]}, 1)
    assert validate({"anyOf": [{"type": "integer"}, {"type": "number"}]}, "5") == 5


def test_a_closed_schema_accepts_only_the_properties_it_names():
    open_schema: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
    assert compile_schema(open_schema)({"b": 1}) == {"b": 1}
    with pytest.raises(InvalidArguments):
        compile_schema(open_schema, closed=True)({"b": 1})
    assert compile_schema({**open_schema, "additionalProperties": True}, closed=True)({"b": 1}) == {"b": 1}


def test_huge_numbers_break_nothing():
    with pytest.raises(InvalidArguments):
        validate({"type": "string"}, 10**5000)
    with pytest.raises(InvalidArguments):
        validate({"type": "integer"}, "9" * 5000)
    with pytest.raises(InvalidArguments):
        validate({"enum": [1]}, 10**5000)
    assert validate({"type": "integer"}, 10**5000) == 10**5000

"""Definitions in code and in Markdown: their contents, and how errors in them are reported."""

from __future__ import annotations

import dataclasses

import pytest

from everloop.errors import EverloopError
from everloop.goals.definitions import AgentDefinition, DefinitionError

from ..support.cases import each
from .goals import definition

FILE = """\
---
name: reader
description: Reads.
query: Read ${what}.
inputs:
  type: object
  properties:
    what: {type: string}
  required: [what]
model: small
tools: [read_file, grep]
max_turns: 4
max_time_minutes: 1.5
output_description: A list for ${what}.
output_schema:
  type: array
  items: {type: string}
---

You read ${what}.

Well.
"""


def test_a_definition_has_the_documented_defaults():
    made = AgentDefinition("a", "Does a.", "You do a.")
    assert (made.query, made.inputs, made.model, made.tools, made.max_turns, made.max_time_minutes) == (
        "", {}, None, [], 30, 10,
    )  # fmt: skip
    assert (made.output_description, made.output_schema) == (None, None)


def test_a_definition_is_immutable_even_through_the_objects_it_was_built_from():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = ["grep"]
    made = definition(output_schema=schema, inputs=schema, tools=tools)
    schema["type"] = "nonsense"
    schema["properties"]["n"]["type"] = "nonsense"  # type: ignore[index]
    tools.append("exec")
    assert made.output_schema == made.inputs == {"type": "object", "properties": {"n": {"type": "integer"}}}
    assert made.tools == ["grep"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "other"  # type: ignore[misc]


@each(
    ("options", "named"),
    [
        ({"name": ""}, "name"),
        ({"name": "../x"}, "name"),
        ({"name": None}, "name"),
        ({"description": " "}, "description"),
        ({"description": 5}, "description"),
        ({"description": "x" * 1025}, "description"),
        ({"system_prompt": ""}, "system_prompt"),
        ({"query": None}, "query"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"output_description": ""}, "output_description"),
        ({"tools": "grep"}, "tools"),
        ({"tools": None}, "tools"),
        ({"tools": ["grep", "grep"]}, "tools"),
        ({"tools": ["no tool!"]}, "tools"),
        ({"tools": [5]}, "tools"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_turns": True}, "max_turns"),
        ({"max_turns": 2.5}, "max_turns"),
        ({"max_turns": 1001}, "max_turns"),
        ({"max_time_minutes": 0}, "max_time_minutes"),
        ({"max_time_minutes": float("nan")}, "max_time_minutes"),
        ({"max_time_minutes": float("inf")}, "max_time_minutes"),
        ({"max_time_minutes": 1441}, "max_time_minutes"),
        ({"max_time_minutes": "5"}, "max_time_minutes"),
        ({"max_time_minutes": True}, "max_time_minutes"),
        ({"inputs": None}, "inputs"),
        ({"inputs": {"type": "array"}}, "inputs.type"),
        ({"inputs": {"what": {"type": "string"}}}, "inputs.what"),
        ({"inputs": {"properties": {"what": {"type": "text"}}}}, "inputs.properties.what.type"),
        ({"inputs": {"properties": []}}, "inputs.properties"),
        ({"inputs": {"properties": {}, "required": ["what"]}}, "inputs.required"),
        ({"inputs": {"properties": {"what": {}}, "required": "what"}}, "inputs.required"),
        ({"inputs": {"properties": {"what": "string"}}}, "inputs.properties.what"),
        ({"output_schema": True}, "output_schema"),
        ({"output_schema": {"type": ["string", "nil"]}}, "output_schema.type"),
        ({"output_schema": {"type": {"a": 1}}}, "output_schema.type"),
        ({"output_schema": {"items": {"enum": 5}}}, "output_schema.items.enum"),
        ({"output_schema": {"anyOf": [{"type": "x"}]}}, "output_schema.anyOf.type"),
        ({"output_schema": {"required": [1]}}, "output_schema.required"),
        ({"output_schema": {"$defs": {"a": {"type": "x"}}}}, "output_schema.$defs.a.type"),
        ({"output_schema": {"additionalProperties": "no"}}, "output_schema.additionalProperties"),
    ],
)
def test_errors_are_one_line(options, named):
    with pytest.raises(DefinitionError) as caught:
        definition(**options)
    assert isinstance(caught.value, EverloopError)
    assert ".".join(caught.value.path) == named
    assert f" {named}: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recursive_or_endlessly_nested_schema_is_handled():
    looped: dict[str, object] = {"type": "array"}
    looped["items"] = looped
    with pytest.raises(DefinitionError, match="levels deep"):
        definition(output_schema=looped)
    definition(output_schema={"$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"})


def test_a_markdown_file_is_equivalent_to_code():
    assert AgentDefinition.from_markdown(FILE, "agents/reader.md") == AgentDefinition(
        "reader",
        "Reads.",
        "You read ${what}.\n\nWell.",
        query="Read ${what}.",
        inputs={"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
        model="small",
        tools=["read_file", "grep"],
        max_turns=4,
        max_time_minutes=1.5,
        output_description="A list for ${what}.",
        output_schema={"type": "array", "items": {"type": "string"}},
    )


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("max_turns: 4", "max_turn: 4", 12, 'unknown key "max_turn" (did you mean "max_turns"?)'),
        ("model: small", "colour: red", 10, 'unknown key "colour" (there are: name, '),
        ("max_turns: 4", "max_turns: lots", 12, "max_turns"),
        ("    what: {type: string}", "    what: {type: strng}", 8, 'did you mean "string"?'),
        ("tools: [read_file, grep]", "tools: read_file", 11, "tools"),
        ("  items: {type: string}", "  items: [string", 17, "YAML"),
        ("name: reader\n", "", 1, "name is missing"),
        ("description: Reads.\n", "", 1, "description is missing"),
        ("query: Read", "system_prompt: Read", 4, "below the front matter"),
        ("You read ${what}.\n\nWell.\n", "", 1, "no text below"),
        ("---\nname", "name", 1, "---"),
        ("max_time_minutes: 1.5", "max_time_minutes: -1", 13, "max_time_minutes"),
    ],
)
def test_errors_in_a_file_name_the_line(old, new, line, words):
    assert old in FILE
    with pytest.raises(DefinitionError) as caught:
        AgentDefinition.from_markdown(FILE.replace(old, new, 1), "agents/reader.md")
    assert str(caught.value).startswith(f"agents/reader.md:{line}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)

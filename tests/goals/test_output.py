"""How the result is requested, and how it is parsed from an answer."""

from __future__ import annotations

import json
import time

import pytest

from everloop.goals.extraction import extraction_message, grace_message, read_output, retry_message, work_message

from .goals import NUMBER, definition

numbered = definition(output_schema=NUMBER)


@pytest.mark.parametrize(
    "text",
    [
        '{"n": 3}',
        ' \n{"n":3}\n',
        '```json\n{"n": 3}\n```',
        '```\n{"n": 3}\n```',
        'Here it is:\n```json\n{"n": 3}\n```\nI hope that helps.',
        'The result is {"n": 3}, as you see.',
        'I looked at {x} and [1]: {"n": 3}',
        '{"n": "3"}',
    ],
)
def test_a_value_is_found_with_or_without_surrounding_text(text):
    assert read_output(numbered, text) == ({"n": 3}, "")


@pytest.mark.parametrize(
    "text",
    ['{"n": 1} {"n": 2}', '{"n": 1}\n```json\n{"n": 2}\n```', '```json\n{"n": 1}\n```\nor\n```json\n{"n": 2}\n```'],
)
def test_of_two_results_the_first_wins(text):
    assert read_output(numbered, text) == ({"n": 1}, "")


def test_a_value_that_does_not_match_the_schema_is_skipped_for_one_that_does():
    assert read_output(numbered, 'not {"m": 1} but {"n": 2}') == ({"n": 2}, "")


@pytest.mark.parametrize("text", ["", "  \n", "seven", '{"n": 1', '{"n": NaN}', "{" * 5000, '{"n": ' + "[" * 5000])
def test_invalid_json_is_reported_to_the_model(text):
    result, problem = read_output(numbered, text)
    assert result is None
    assert problem


def test_mismatches_are_reported_by_name():
    result, problem = read_output(numbered, 'I have [1] sources: {"n": "many", "m": 1}')
    assert result is None
    assert "n: must be an integer" in problem
    assert "m" in problem


def test_of_several_invalid_values_the_longest_is_reported():
    for text in ('[1] and {"n": "many", "m": 1}', '{"n": "many", "m": 1} and [1]'):
        assert "n: must be an integer" in read_output(numbered, text)[1]


def test_the_items_of_a_list_are_not_searched_for_a_match():
    assert read_output(numbered, '[{"m": 1}, {"n": 2}]')[0] is None


@pytest.mark.parametrize(
    ("schema", "text", "result"),
    [
        ({"type": "string"}, "just words", "just words"),
        ({"type": "string"}, '"quoted"', "quoted"),
        ({"type": "array", "items": {"type": "integer"}}, "so: [1, 2]", [1, 2]),
        ({"type": "integer"}, "```\n5\n```", 5),
        ({"type": "boolean"}, "true", True),
        ({}, "null", None),
    ],
)
def test_a_result_can_be_any_json(schema, text, result):
    assert read_output(definition(output_schema=schema), text) == (result, "")


def test_without_a_schema_the_text_is_the_result():
    assert read_output(definition(), ' {"n": 1} \n') == ('{"n": 1}', "")
    assert read_output(definition(), " ")[1]


def test_a_huge_answer_is_parsed_quickly():
    started = time.process_time()
    for text in ("{" * 300_000, '{"a":' * 100_000, '["' * 100_000, "x" * 3_000_000):
        assert read_output(numbered, text)[0] is None
    assert time.process_time() - started < 10


def test_the_extraction_message_contains_description_and_schema():
    made = definition(
        output_description="A number for ${topic}.",
        output_schema=NUMBER,
        inputs={"properties": {"topic": {"type": "string"}}},
    )
    for message in (extraction_message(made, {"topic": "tea"}), grace_message(made, "timeout", {"topic": "tea"})):
        assert "A number for tea." in message
        assert json.dumps(NUMBER, indent=2) in message
    assert "json" not in extraction_message(definition()).lower()
    assert grace_message(made, "timeout") != grace_message(made, "max_turns")
    assert "the problem" in retry_message("the problem")


def test_without_a_query_the_prompt_consists_of_the_inputs():
    made = definition(query=" ")
    assert "topic: tea" in work_message(made, {"topic": "tea"})
    assert work_message(made, {}).strip()
    assert work_message(definition(query="Look at ${topic}"), {"topic": "tea"}) == "Look at tea"

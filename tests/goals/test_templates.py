"""`${input}`: only declared inputs are substituted, once, and all required ones must be present."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.goals.templates import InputError, check_inputs, fill

SCHEMA = {
    "type": "object",
    "properties": {
        "topic": {"type": "string"},
        "depth": {"type": "integer", "minimum": 1},
        "tone": {"type": "string", "default": "dry"},
    },
    "required": ["topic"],
}


def check(inputs: Any, *texts: str) -> dict[str, Any]:
    return check_inputs("worker", SCHEMA, inputs, texts)


def test_declared_inputs_are_substituted_and_everything_else_stays():
    text = "${topic} ${ topic} $topic ${other} ${} $${topic} ${HOME} {topic}"
    assert fill(text, {"topic": "tea"}) == "tea ${ topic} $topic ${other} ${} $tea ${HOME} {topic}"


def test_values_are_not_substituted_recursively():
    assert fill("${a}${b}", {"a": "${b}", "b": "${a}"}) == "${b}${a}"
    assert fill("${a}{b}", {"a": "$", "b": "secret"}) == "${b}"


def test_values_that_are_not_text_are_substituted_as_json():
    assert fill("${a} ${b} ${c}", {"a": {"x": [1, None]}, "b": True, "c": "é"}) == '{"x": [1, null]} true é'
    assert fill("${a}", {"a": ["é\ud800"]}).encode()


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text(alphabet="ab${}c \\1", max_size=12)), st.data())
def test_each_placeholder_becomes_exactly_its_value(values, data):
    names = data.draw(st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=6))
    expected = "|".join(values.get(name, f"${{{name}}}") for name in names)
    assert fill("|".join(f"${{{name}}}" for name in names), values) == expected


def test_missing_inputs_are_listed_with_the_present_ones():
    with pytest.raises(InputError) as caught:
        check({"depth": 2, "colour": "red"})
    assert str(caught.value) == "agent worker: missing inputs: topic; given: depth, colour"
    with pytest.raises(InputError, match="missing inputs: topic; given: none"):
        check(None)


def test_an_input_that_a_prompt_uses_must_be_present_even_if_optional():
    with pytest.raises(InputError, match="missing inputs: topic, depth; given: none"):
        check({}, "how deep: ${depth}", "${colour}")
    assert check({"topic": "tea"}, "${tone}") == {"topic": "tea", "tone": "dry"}


def test_inputs_are_validated_and_small_mistakes_repaired():
    assert check({"topic": "tea", "depth": "3"})["depth"] == 3
    with pytest.raises(InputError, match="depth"):
        check({"topic": "tea", "depth": 0})
    with pytest.raises(InputError, match="topic"):
        check({"topic": ["tea"]})


def test_texts_that_cannot_be_stored_are_repaired():
    assert check({"topic": "tea\ud800"}) == {"topic": "tea?", "tone": "dry"}


def test_undeclared_inputs_are_never_substituted():
    values = check({"topic": "tea", "secret": "canary-77"}, "${secret}")
    assert fill("${topic} ${secret}", values) == "tea ${secret}"


@pytest.mark.parametrize("inputs", [["topic"], "topic", {5: "x", "topic": "tea"}])
def test_inputs_that_are_not_a_mapping_of_names_are_an_error(inputs):
    with pytest.raises(InputError, match="mapping of names"):
        check(inputs)

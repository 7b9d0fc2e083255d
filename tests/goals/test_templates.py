"""`${input}`: declared inputs only, once, and all that are needed."""

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


def test_declared_inputs_are_put_in_and_all_else_stays():
    text = "${topic} ${ topic} $topic ${other} ${} $${topic} ${HOME} {topic}"
    assert fill(text, {"topic": "tea"}) == "tea ${ topic} $topic ${other} ${} $tea ${HOME} {topic}"


def test_a_value_is_never_looked_into():
    assert fill("${a}${b}", {"a": "${b}", "b": "${a}"}) == "${b}${a}"
    assert fill("${a}{b}", {"a": "$", "b": "secret"}) == "${b}"


def test_what_is_no_text_is_put_in_as_json():
    assert fill("${a} ${b} ${c}", {"a": {"x": [1, None]}, "b": True, "c": "é"}) == '{"x": [1, null]} true é'
    assert fill("${a}", {"a": ["é\ud800"]}).encode()


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text(alphabet="ab${}c \\1", max_size=12)), st.data())
def test_each_place_has_just_its_value(values, data):
    names = data.draw(st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=6))
    expected = "|".join(values.get(name, f"${{{name}}}") for name in names)
    assert fill("|".join(f"${{{name}}}" for name in names), values) == expected


def test_missing_inputs_are_listed_beside_those_that_are_there():
    with pytest.raises(InputError) as caught:
        check({"depth": 2, "colour": "red"})
    assert str(caught.value) == "agent worker: missing inputs: topic; given: depth, colour"
    with pytest.raises(InputError, match="missing inputs: topic; given: none"):
        check(None)


def test_an_input_that_a_prompt_uses_is_needed_even_where_it_is_not_required():
    with pytest.raises(InputError, match="missing inputs: topic, depth; given: none"):
        check({}, "how deep: ${depth}", "${colour}")
    assert check({"topic": "tea"}, "${tone}") == {"topic": "tea", "tone": "dry"}


def test_inputs_are_checked_and_slips_are_mended():
    assert check({"topic": "tea", "depth": "3"})["depth"] == 3
    with pytest.raises(InputError, match="depth"):
        check({"topic": "tea", "depth": 0})
    with pytest.raises(InputError, match="topic"):
        check({"topic": ["tea"]})


def test_what_is_not_declared_is_never_put_in():
    values = check({"topic": "tea", "secret": "canary-77"}, "${secret}")
    assert fill("${topic} ${secret}", values) == "tea ${secret}"


@pytest.mark.parametrize("inputs", [["topic"], "topic", {5: "x", "topic": "tea"}])
def test_inputs_that_are_no_mapping_of_names_are_an_error(inputs):
    with pytest.raises(InputError, match="mapping of names"):
        check(inputs)

"""Patterns in foreign schemas: none can keep the process busy, and common ones are checked."""

from __future__ import annotations

import time

import pytest

from everloop.tools.schema import InvalidArguments, compile_schema, read_pattern


def fits(pattern: str, value: object) -> bool:
    """Return whether a value matches a pattern, and check that matching ended quickly."""
    check = compile_schema({"type": "object", "properties": {"x": {"pattern": pattern}}})
    began = time.process_time()
    try:
        check({"x": value})
    except InvalidArguments:
        return False
    finally:
        assert time.process_time() - began < 1.0
    return True


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r"^[a-z]+$", "beans", "b3ans"),
        (r"^\d{4}-\d{2}-\d{2}$", "2026-11-15", "15.11.2026"),
        (r"^[\w.+-]+@[\w-]+\.[\w.]+$", "ada.lovelace+news@mail.example.org", "ada"),
        (r"^https?://.+", "https://example.org/" + "a" * 5_000, "ftp://example.org"),
        (r"^(red|green|blue)$", "red", "grey"),
        (r"^#?([0-9a-f]{3}){1,2}$", "#00ff00", "#00ff0"),
        (r"^[a-z0-9]+(?:-[a-z0-9]+)*$", "a-slug", "A slug"),
        (r"\S", "x" * 100_000, " " * 900),
        (r"^.*?x++$", "ax", "b"),
        (r"^\(\d+\)?$", "(1)", "1"),
        (r"^[^]*?]+$", "abc", "a]"),
    ],
)
def test_a_common_pattern_is_checked(pattern, right, wrong):
    assert fits(pattern, right)
    assert not fits(pattern, wrong)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^(a+)+$", "a" * 40 + "!"),
        (r"^(?:a+)+$", "a" * 40 + "!"),
        (r"^(?P<x>a*)*$", "a" * 40 + "!"),
        (r"^(a|aa)+$", "a" * 60 + "!"),
        (r"^(a?){60}$", "a" * 60 + "!"),
        (r"^((a|aa){2}){40}$", "a" * 120 + "!"),
        ("a?" * 60 + "a" * 60 + "!", "a" * 60),
        (r"(a*)(a*)(a*)(a*)(a*)(a*)b", "a" * 300),
        (r"a+a+a+a+b", "a" * 2_000),
        (r"\s+$", " " * 100_000 + "x"),
        (r"(.*)\1(.*)\2x", "a" * 400),
        (r"(?i)^(a+)+$", "a" * 40 + "!"),
        (r"(?x)^(a+)+$", "a" * 40 + "!"),
        (r"^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 60),
        (r"^(a{1,20}){1,20}$", "a" * 60 + "!"),
    ],
)
def test_a_catastrophic_pattern_is_not_searched(pattern, text):
    assert fits(pattern, text)
    read = read_pattern(pattern)
    assert read is not None
    assert read.cost(text) > 1_000_000


def test_many_texts_share_the_time_of_one():
    check = compile_schema({"type": "array", "items": {"pattern": r"^(a+)+$"}})
    began = time.process_time()
    with pytest.raises(InvalidArguments):
        check(["a" * 9 + "!"] * 5_000)
    assert time.process_time() - began < 2.0


def test_an_overlong_or_foreign_pattern_is_ignored():
    assert read_pattern("a" * 1_001) is None
    assert read_pattern(r"\p{L}") is None
    assert read_pattern("(") is None


def test_many_names_that_do_not_exist_are_not_all_compared():
    names: dict[str, object] = {f"parameter_number_{number}": {} for number in range(1_000)}
    check = compile_schema({"type": "object", "properties": names, "additionalProperties": False})
    began = time.process_time()
    with pytest.raises(InvalidArguments):
        check({f"paramter_number_{number}": 1 for number in range(1_000)})
    assert time.process_time() - began < 2.0
    few = compile_schema({"type": "object", "properties": {"path": {}}, "additionalProperties": False})
    with pytest.raises(InvalidArguments, match="path"):
        few({"pth": 1})

"""Output of models of each family, read whole and split at every position; and lookalikes, which stay unchanged."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from everloop.providers.text_calls import read
from everloop.providers.text_calls.dialects import OPENINGS

from ...support.cases import each
from ...support.places import DOCS
from .tools import TOOLS, fed, plain

FILES = sorted((Path(__file__).parent / "corpus").glob("*.toml"))


def cases(kind: str) -> list[Any]:
    return [
        {"place": f"{path.stem}-{number}", **case}
        for path in FILES
        for number, case in enumerate(tomllib.loads(path.read_text()).get(kind, ()), start=1)
    ]


def expected(case: dict[str, Any]) -> tuple[str, list[tuple[str, Any, bool]], str]:
    calls = [(call["name"], restored(call.get("arguments", {})), call.get("error", False)) for call in case["calls"]]
    return case.get("content", ""), calls, case.get("reasoning", "")


def restored(value: Any) -> Any:
    """TOML has no null."""
    if isinstance(value, dict):
        return {key: restored(inner) for key, inner in value.items()}
    return None if value == "NULL" else value


@each("case", cases("call"))
def test_a_models_output_is_read_whole_and_at_every_split(case):
    text = case["text"]
    reading = read(text, TOOLS)
    assert plain(reading) == expected(case)
    for at in range(len(text) + 1):
        again, said, _ = fed([text[:at], text[at:]])
        assert plain(again) == expected(case)
        if "</think>" not in text and "<|close|>think" not in text:  # whose opening the model may have omitted
            assert said.strip() == case.get("content", "")
    assert plain(fed(list(text))[0]) == expected(case)


@each("case", cases("text"))
def test_text_that_only_looks_like_a_call_stays_text_byte_for_byte(case):
    text = case["text"]
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text) + 1))):
        reading, said, thought = fed(pieces)
        assert (reading.content, reading.calls, reading.reasoning) == (text, [], "")
        assert (said, thought) == (text, "")


def test_each_mark_opens_a_call_of_the_corpus_and_is_text_where_it_is_only_mentioned():
    calls = [case["text"] for case in cases("call")]
    assert [opening for opening in OPENINGS if not any(opening in text for text in calls)] == []
    for opening in OPENINGS:
        mark = opening.removesuffix("{")
        text = f"The mark {mark} comes first.\n{mark} comes first, and\n{mark}"
        for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
            reading, said, _ = fed(pieces)
            assert (reading.content, reading.calls, said) == (text, [], text)


def test_the_models_page_says_for_each_family_what_was_tried_and_which_templates_are_missing():
    page = (DOCS / "models.md").read_text()
    table = page.partition("| family |")[2].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table if line.startswith("|")]
    assert len(rows) >= 30
    assert {tried for *_, tried in rows[:-1]} == {"published", "parser"}
    listed = page.partition("this is so for ")[2].partition(". Each format")[0]
    named = re.split(r",\s|\sand\s", listed)
    assert sorted(named) == sorted(family for family, _, tried in rows if tried == "parser")


def test_each_dialect_has_calls_and_texts_that_only_look_like_them():
    for path in FILES:
        found = tomllib.loads(path.read_text())
        assert len(found["call"]) >= 4, path.name
        assert len(found["text"]) >= 4, path.name
    assert len(cases("call")) >= 90
    assert len(cases("text")) >= 90

"""Thoughts in an answer's text are parted from it, whole or in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.agents.goals.thoughts import ThoughtStream, part_thoughts

CASES = [
    ("plain answer", "plain answer", ""),
    ("<think>hm</think>yes", "yes", "hm"),
    ("<think>\nhm\n</think>\n\nyes", "yes", "hm"),
    ("  <THINK>hm</Think> yes", "yes", "hm"),
    ("<thinking>hm</thinking>yes", "yes", "hm"),
    ("so <think>hm</think>yes", "so yes", "hm"),
    ("<think>a</think>one <think>b</think>two", "one two", "a\n\nb"),
    ("<think>cut off", "", "cut off"),
    ("the <think> tag is a word here", "the <think> tag is a word here", ""),
    (
        'it looks for `<think>` and "<think>", then `</think>`',
        'it looks for `<think>` and "<think>", then `</think>`',
        "",
    ),
    ("begun in thoughts\n</think>\nyes", "yes", "begun in thoughts"),
    ("a </think> b", "a </think> b", ""),
    ("<think></think>yes", "yes", ""),
    ("<thinking>a <think>b</think></thinking>yes", "yes", "a <think>b</think>"),
    ("", "", ""),
]


@pytest.mark.parametrize(("text", "answer", "thoughts"), CASES)
def test_a_whole_text_is_parted(text, answer, thoughts):
    assert part_thoughts(text) == (answer, thoughts)


def streamed(pieces: list[str]) -> tuple[str, str]:
    stream = ThoughtStream()
    told = [part for piece in pieces for part in stream.feed(piece)] + list(stream.rest())
    return "".join(text for is_thought, text in told if not is_thought), "".join(
        text for is_thought, text in told if is_thought
    )


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<thi", "nk>", "x", " ", "`", "<", "</", "th", "\n"]), max_size=12
    ),
    st.data(),
)
def test_a_stream_is_parted_the_same_wherever_it_is_cut(words, data):
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert streamed(pieces) == streamed([text])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_tags_over_the_borders_of_pieces_are_seen(size):
    text = "<think>hm <b></think>yes <i> `<think>`"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert streamed(pieces) == ("yes <i> `<think>`", "hm <b>")


def test_text_is_passed_on_as_soon_as_it_cannot_be_a_tag():
    stream = ThoughtStream()
    assert list(stream.feed("a <")) == [(False, "a ")]
    assert list(stream.feed("b")) == [(False, "<b")]
    assert list(stream.feed("<think>h")) == [(True, "h")]

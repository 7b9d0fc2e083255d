"""Reasoning in an answer's text is separated from it, whether it arrives whole or in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.providers.text_calls import Reader, TextPart, read

from ...support.cases import each

CASES = [
    ("plain answer", "plain answer", ""),
    ("<think>hm</think>yes", "yes", "hm"),
    ("<think>\nhm\n</think>\n\nyes", "yes", "hm"),
    ("  <THINK>hm</Think> yes", "yes", "hm"),
    ("<thinking>hm</thinking>yes", "yes", "hm"),
    ("[THINK]hm[/THINK]yes", "yes", "hm"),
    ("<seed:think>hm</seed:think>yes", "yes", "hm"),
    ("<|START_THINKING|>hm<|END_THINKING|>yes", "yes", "hm"),
    ("so <think>hm</think>yes", "so yes", "hm"),
    ("<think>a</think>one <think>b</think>two", "one two", "a\n\nb"),
    ("<think>cut off", "", "cut off"),
    ("the <think> tag is a word here", "the <think> tag is a word here", ""),
    (
        'it looks for `<think>` and "<think>", then `</think>`',
        'it looks for `<think>` and "<think>", then `</think>`',
        "",
    ),
    ("```xml\n<think>in a fence</think>\n```\n", "```xml\n<think>in a fence</think>\n```\n", ""),
    ("begun in thoughts\n</think>\nyes", "yes", "begun in thoughts"),
    ("a </think> b", "a </think> b", ""),
    ("begun in thoughts.</think>\n\nyes", "yes", "begun in thoughts."),
    ("begun in thoughts</think>yes", "yes", "begun in thoughts"),
    ("begun in thoughts. </think> Yes.", "Yes.", "begun in thoughts."),
    ("begun in thoughts</mm:think>yes", "yes", "begun in thoughts"),
    ("begun in thoughts<|inner_suffix|>yes", "yes", "begun in thoughts"),
    ("begun in thoughts◁/think▷yes", "yes", "begun in thoughts"),
    ("begun in thoughts[/THINK]yes", "yes", "begun in thoughts"),
    (
        "begun in thoughts<|close|>think<|sep|><|open|>response<|sep|>yes<|close|>response<|sep|>",
        "yes",
        "begun in thoughts",
    ),
    ("the tag </think>, which ends it", "the tag </think>, which ends it", ""),
    ("between <i> and </think>.", "between <i> and </think>.", ""),
    ("(</think>)", "(</think>)", ""),
    ("<mm:think>hm</mm:think>yes", "yes", "hm"),
    ("<|inner_prefix|>hm<|inner_suffix|>yes", "yes", "hm"),
    ("◁think▷hm◁/think▷yes", "yes", "hm"),
    ("<|channel>thought\nhm\n<channel|>yes", "yes", "hm"),
    ("<longcat_think>hm</longcat_think>yes", "yes", "hm"),
    ("<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>", "yes", "hm"),
    ("<think>hm</think>\n<answer>\nyes\n</answer>", "yes", "hm"),
    ("<think>hm</think><response>yes</response>", "yes", "hm"),
    ("<think>hm</think>It is <answer>yes</answer>", "It is <answer>yes</answer>", "hm"),
    ("<answer>yes</answer>", "<answer>yes</answer>", ""),
    ("<response>yes</response>", "<response>yes</response>", ""),
    ("<|start|>assistant to=user<|message|>yes<|eot|>", "yes", ""),
    ("<think></think>yes", "yes", ""),
    ("<thinking>a <think>b</think></thinking>yes", "yes", "a <think>b</think>"),
    ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>", "yes", "hm"),
    ("<|channel|>final<|message|>yes", "yes", ""),
    ("<|channel|>commentary<|message|>I look.<|end|>", "I look.", ""),
    ("see <|channel|> and <|end|> in the text", "see <|channel|> and <|end|> in the text", ""),
    ("", "", ""),
]


@each(("text", "answer", "thoughts"), CASES)
def test_thoughts_in_a_whole_text_are_separated(text, answer, thoughts):
    reading = read(text)
    assert (reading.content, reading.reasoning, reading.calls) == (answer, thoughts, [])


def streamed(pieces: list[str]) -> tuple[str, str, str, str]:
    """Return (content, reasoning) at the end, and as they were shown."""
    reader = Reader()
    told = [part for piece in pieces for part in reader.feed(piece)]
    reading = reader.finish()
    told += reading.pieces
    return (
        reading.content,
        reading.reasoning,
        "".join(piece.text for piece in told if not piece.reasoning),
        "".join(piece.text for piece in told if piece.reasoning),
    )


@given(
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<thi", "nk>", "x", " ", "`", "<", "</", "th", "\n", "```", "<|end|>",
             "<|channel|>", "analysis", "<|message|>", "[THINK]", "[/TH", "INK]", "◁think▷", "◁/think▷", "<answer>",
             "</answer>", "<|close|>", "think<|sep|>", "<|START_RESPONSE|>", "to=user", "to=self", ". ", "<|eom|>"]
        ),
        max_size=12,
    ),
    st.data(),
)  # fmt: skip
def test_a_stream_is_separated_the_same_wherever_it_is_split(words, data):
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert streamed(pieces) == streamed([text])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_tags_across_the_borders_of_pieces_are_seen(size):
    text = "<think>hm <b></think>yes <i> `<think>`"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert streamed(pieces) == ("yes <i> `<think>`", "hm <b>", "yes <i> `<think>`", "hm <b>")


def test_text_is_passed_on_as_soon_as_it_cannot_be_a_tag():
    reader = Reader()
    assert reader.feed("a <") == [TextPart("a ")]
    assert reader.feed("b") == [TextPart("<b")]
    assert reader.feed("<think>h") == [TextPart("h", True)]
    assert reader.feed("m <") == [TextPart("m ", True)]
    assert reader.feed("i> ") == [TextPart("<i> ", True)]


def test_a_tag_that_turns_out_to_be_a_word_is_shown_as_text_in_the_end():
    reader = Reader()
    shown = reader.feed("the <think> tag")
    assert (
        "".join(piece.text for piece in (*shown, *reader.finish().pieces) if not piece.reasoning) == "the <think> tag"
    )

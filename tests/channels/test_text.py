"""Answers split into parts and converted into a network's own form."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.channels.base import Can
from everloop.channels.text import length, render, split, without_name

MARKDOWN = st.text(st.sampled_from("ab *_`~#>-[]()\n.<&é👍🏽"), max_size=300)


@given(MARKDOWN, st.sampled_from(["characters", "utf16", "bytes"]), st.sampled_from(["plain", "telegram"]))
def test_every_part_fits_and_no_character_is_lost(text, unit, form):
    can = Can(text=80, unit=unit, form=form)
    pieces = list(split(text, can))
    assert all(length(piece.text, unit) <= can.text for piece in pieces)
    kept = "".join(letter for piece in pieces for letter in piece.text if not letter.isspace() and letter not in "`~")
    assert kept.endswith("".join(letter for letter in text if not letter.isspace() and letter not in "`~")[-20:])
    assert len(kept) >= len([letter for letter in text if not letter.isspace() and letter not in "`~"])


@given(MARKDOWN, st.integers(0, 5))
def test_an_interrupted_delivery_continues_with_the_same_parts(text, done):
    can = Can(text=80, form="telegram")
    pieces = list(split(text, can))
    if done < len(pieces):
        assert list(split(text, can, pieces[done].end)) == pieces[done + 1 :]


@given(MARKDOWN)
def test_a_network_of_single_lines_gets_no_line_ends(text):
    assert all("\n" not in piece.text for piece in split(text, Can(text=80, lines=False)))


def test_a_long_text_is_split_at_paragraphs_then_lines_then_sentences():
    can = Can(text=60)
    assert [piece.text for piece in split("first paragraph\n\nsecond paragraph\n\n" + "third " * 5, can)] == [
        "first paragraph\n\nsecond paragraph",
        "third third third third third",
    ]
    assert [piece.text for piece in split("A sentence here. Another sentence there. And one.", can)] == [
        "A sentence here. Another sentence there.",
        "And one.",
    ]


def test_a_code_block_that_is_split_is_closed_and_reopened():
    text = "```python\n" + "\n".join(f"line {number}" for number in range(12)) + "\n```"
    pieces = [piece.text for piece in split(text, Can(text=90, form="telegram"))]
    assert len(pieces) > 1
    for piece in pieces:
        assert piece.startswith("```python\n")
        assert piece.endswith("\n```")
    assert "".join(pieces).count("line 11") == 1


@pytest.mark.parametrize(
    ("markdown", "plain", "telegram"),
    [
        ("**a** *b* _c_ ~~d~~", "a b c d", "<b>a</b> <i>b</i> <i>c</i> <s>d</s>"),
        ("snake_case_name 2*3*4", "snake_case_name 2*3*4", "snake_case_name 2*3*4"),
        ("`**x**`", "**x**", "<code>**x**</code>"),
        ("# Title #", "Title", "<b>Title</b>"),
        ("1. one\n- two", "1. one\n• two", "1. one\n• two"),
        ("[a](javascript:x)", "[a](javascript:x)", "[a](javascript:x)"),
        ("[a](https://b.c/d_(e))", "a (https://b.c/d_(e))", '<a href="https://b.c/d_(e)">a</a>'),
        ("<script>", "<script>", "&lt;script&gt;"),
        ("> said\n> twice", "> said\n> twice", "<blockquote>said\ntwice</blockquote>"),
        ("a \\* b", "a * b", "a * b"),
    ],
)
def test_markdown_is_converted_to_what_the_network_shows(markdown, plain, telegram):
    assert render(markdown, "plain") == plain
    assert render(markdown, "telegram") == telegram


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        assert tag in {"b", "i", "s", "code", "pre", "a", "blockquote"}
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@given(MARKDOWN)
def test_the_html_is_balanced_whatever_the_model_writes(text):
    reader = Tags()  # type: ignore[no-untyped-call]
    reader.feed(render(text, "telegram"))
    reader.close()
    assert reader.open == []


@pytest.mark.parametrize(
    ("text", "left", "is_mentioned"),
    [
        ("bot: hello", "hello", True),
        ("@BOT hello", "hello", True),
        ("@bot:example.org hello", "hello", True),
        ("hello, Bot", "hello, Bot", True),
        ("hello botanist", "hello botanist", False),
        ("robot hello", "robot hello", False),
    ],
)
def test_a_name_counts_only_as_a_whole_word_and_is_cut_only_from_the_start(text, left, is_mentioned):
    assert without_name(text, "@bot:example.org", "bot") == (left, is_mentioned)

"""Makes text visible."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from everloop.text import cut_inline, one_line, revealed, visible


def test_ordinary_text_is_unchanged():
    for text in ("ls -l 'a b'", "if a; then\n\tb\nfi", "Grüße, 你好", "a  b", "def f():\n        return 1", ""):
        assert visible(text) == text


def test_a_gap_that_would_push_text_out_of_sight_is_counted():
    assert visible("a" + " " * 500 + "; rm b") == "a‹500 spaces›; rm b"
    assert visible("a" + "\n" * 300 + "rm b") == "a‹300 line ends›rm b"


def test_spaces_at_the_end_and_tabs_inside_a_line_are_visible():
    assert visible("a \nb") == "a‹U+0020›\nb"
    assert visible("a\tb") == "a‹U+0009›b"


@given(st.text())
def test_nothing_stays_hidden(text):
    hidden = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert not [c for c in visible(text) if unicodedata.category(c) in hidden and c not in "\n\t"]


READABLE = (
    "شروع می\u200cخواهم",
    "שלום, עולם",
    "👩\u200d🚀 ❤\ufe0f\u200d🔥 1\ufe0f\u20e3",
    "क्\u200dष",
    "a  b\n\tc\u3000",
)
DISGUISED = {
    "rm \u202etxt.exe\u202c": "rm ‹U+202E›txt.exe‹U+202C›",
    "\u2067a\u2069\u200e\u200f\u061c": "‹U+2067›a‹U+2069›‹U+200E›‹U+200F›‹U+061C›",
    "pass\u200bword\ufeff\u2060": "pass‹U+200B›word‹U+FEFF›‹U+2060›",
    "a\u200db\u200d": "a‹U+200D›b‹U+200D›",
    "é\u200c\u200cé a\ufe0f": "é‹U+200C›‹U+200C›é a‹U+FE0F›",
    "hi\U000e0041": "hi‹U+E0041›",
}


def test_what_disguises_a_text_is_written_out_and_words_and_emoji_stay_readable():
    assert [revealed(text) for text in READABLE] == list(READABLE)
    assert [revealed(text) for text in DISGUISED] == list(DISGUISED.values())


@given(st.text(), st.integers(2, 50))
def test_a_shortened_text_keeps_both_ends_and_counts_the_rest(text, limit):
    short = cut_inline(text, limit)
    assert short == text if len(text) <= limit else (short.startswith(text[: limit // 2]) and str(len(text)) in short)


def test_one_line_is_one_line_without_control_characters():
    assert one_line("a\n b\t\x1b[31mc\u2028d\u202ee") == "a b ␛[31mc d�e"
    assert one_line(b"a\xff\nb") == "a� b"
    assert one_line("x" * 1000, 10) == "x" * 9 + "…"
    assert one_line("x" * 10, 10) == "x" * 10
    assert one_line(" " * 100 + "x", 10) == "…"  # only the beginning is inspected
    assert len(one_line("y" * 1000, None)) == 1000
    assert one_line("می‌خواهم") == "می‌خواهم"  # a combining mark of the word

"""Excerpts: the part of a text that contains the words, short and cut at word boundaries."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everloop.text import excerpt

FILLER = "Lorem ipsum dolor sit amet, consetetur sadipscing elitr. " * 40


@pytest.mark.parametrize(
    ("said", "query"),
    [
        ("the saffron is in the blue box", "saffron"),
        ("the saffron is in the blue box", "saffrons boxes"),
        ("das Café an der Ecke", "cafe"),
        ("Ｆｕｌｌ width", "full"),
        ("会议在东京举行", "东京"),
        ("我们讨论了预算的问题", "昨天的预算是多少"),
        ("다음 회의는 세 시", "회의"),
        ("สวัสดีครับ", "สวัสดี"),
    ],
)
def test_an_excerpt_is_the_part_that_contains_the_words(said, query):
    for text in (FILLER + said, said + " " + FILLER, f"{FILLER}{said} {FILLER}", f"{'한국어 ﬃ ' * 200}{said} {FILLER}"):
        part = excerpt(text, query)
        assert said in part
        assert len(part) <= 300
        assert part.startswith("…") == (not text.startswith(said))
        assert part.endswith("…") == (not text.endswith(said))


def test_an_excerpt_shows_where_most_of_the_words_are_close_together():
    text = f"beans {FILLER} peas {FILLER} beans and peas {FILLER} beans {FILLER}"
    assert "beans and peas" in excerpt(text, "peas beans")


def test_a_short_text_is_shown_in_full_on_one_line():
    assert excerpt("one\n\ttwo\r\n  three", "nothing") == "one two three"
    assert excerpt("x" * 300, "x") == "x" * 300


def test_an_excerpt_is_cut_at_word_boundaries():
    part = excerpt(f"{FILLER} needle {FILLER}", "needle").strip("…")
    assert set(part.split()) <= {*FILLER.split(), "needle"}


@given(text=st.text(max_size=40).map(lambda part: part * 20), query=st.text(max_size=30), most=st.integers(20, 400))
def test_an_excerpt_is_never_too_long_and_comes_from_the_text(text, query, most):
    part = excerpt(text, query, most)
    assert len(part) <= most
    assert part.removeprefix("…").removesuffix("…") in " ".join(text.split()) or "…" in text


def test_excerpts_of_long_texts_are_quick():
    start = time.process_time()
    excerpt("é " * 2_000_000, "é " * 1_000)
    excerpt("a" * 4_000_000, "aa " * 1_000)
    excerpt("東京" * 1_000_000, "京東" * 500)
    assert time.process_time() - start < 5

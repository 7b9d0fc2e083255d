from __future__ import annotations

import pytest

from everloop.cli.live_output import wrap
from everloop.cli.markdown import MarkdownRenderer, split_finished
from everloop.config import Price
from everloop.config.prices import cost_of, price_of

TEXT = (
    "# Title\n\nA paragraph\nof two lines.\n\n- one\n  more\n- two\n\n```py\ncode\n\nmore\n```\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\nEnd\n"
)


def test_streamed_text_gives_the_same_blocks_as_whole_text():
    whole, rest = split_finished(TEXT)
    blocks, pending = [], ""
    for letter in TEXT:
        done, pending = split_finished(pending + letter)
        blocks += done
    assert (blocks, pending) == (whole, rest)
    assert "".join(blocks) + pending == TEXT
    first = [block.split("\n")[0] for block in blocks]
    assert first == ["# Title", "A paragraph", "- one", "- two", "```py", "| a | b |"]


@pytest.mark.parametrize("width", [12, 40, 80])
def test_no_row_is_wider_than_the_terminal(width):
    for row in MarkdownRenderer().render(TEXT, width):
        assert len(_plain(row)) <= width


def _plain(row: str) -> str:
    from rich.text import Text

    return Text.from_ansi(row).plain


def test_lines_are_broken_between_words_and_between_wide_characters():
    rows = ["".join(text for _, text in row) for row in wrap([("bold", "hello "), ("", "wide world 日本語日本語")], 10)]
    assert rows == ["hello wide", "world 日本", "語日本語"]
    assert ["".join(text for _, text in row) for row in wrap([("", "x" * 25)], 10)] == ["x" * 10, "x" * 10, "x" * 5]


def test_a_price_is_found_despite_a_vendor_prefix_or_date_and_configured_prices_win():
    assert price_of("anthropic/claude-sonnet-4-5-20250929") == price_of("claude-sonnet-4-5")
    own = Price(model="claude-*", input=1.0, output=2.0)
    assert price_of("claude-sonnet-4-5", [own]) is own
    assert price_of("unheard-of") is None
    usage = {"prompt_tokens": 1_000_000, "cached_tokens": 400_000, "completion_tokens": 1_000_000}
    assert cost_of(Price(model="m", input=1.0, output=2.0, cached=0.5), usage) == pytest.approx(0.6 + 0.2 + 2.0)

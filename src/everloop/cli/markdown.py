"""Markdown for the terminal: which blocks of a streamed text are complete, and how they look.

Rich is slow to import, so the chat loads this module once its prompt is on the screen.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar, Literal

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import box, markdown
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.syntax import ANSI_DARK, ANSI_LIGHT, ANSISyntaxTheme, Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

Background = Literal["dark", "light"]
RESET = "\x1b[0m"

_ACCENT = {"dark": "bright_cyan", "light": "blue"}
_CODE = {"dark": "bright_yellow", "light": "magenta"}
# Tags stay visible: an answer may be about them.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")
_PADDING = re.compile(r"(?: |\x1b\[[0-9;]*m)+$")
_ITEM = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])(?:[ \t]|$)")


def split_finished(text: str) -> tuple[list[str], str]:
    """Split streamed Markdown into the blocks that further text cannot change, and the rest.

    A block is a paragraph, a heading, a quote, a table, a code block, or a list item. The line that is still being
    written may continue the previous block, so it starts none.
    """
    whole = text[: text.rfind("\n") + 1]
    lines = whole.split("\n")
    starts = list(_starts(_PARSER.parse(whole)))
    if len(starts) < 2:
        return [], text
    blocks = ["\n".join([*lines[start:end], ""]) for start, end in pairwise(starts)]
    return blocks, "\n".join(lines[starts[-1] :]) + text[len(whole) :]


def is_code(block: str) -> bool:
    """Return whether a block is code between fences: its lines stay as they are, whatever follows."""
    return block.lstrip(" \n")[:3] in ("```", "~~~")


def is_item(block: str) -> bool:
    """Return whether a block is a list item."""
    return _ITEM.match(block) is not None


def _starts(tokens: list[Token]) -> Iterator[int]:
    """Return the lines on which blocks start."""
    seen = -1
    for token in tokens:
        top = token.level == 0 and token.nesting >= 0 and token.type not in ("bullet_list_open", "ordered_list_open")
        item = token.level == 1 and token.type == "list_item_open"
        if (top or item) and token.map is not None and token.map[0] > seen:
            seen = token.map[0]
            yield seen


class MarkdownRenderer:
    """Renders Markdown as rows with escape sequences, for a terminal with a dark or light background."""

    def __init__(self, background: Background = "dark") -> None:
        self._background = background
        self._theme = Theme(_styles(background))

    def render(self, text: str, width: int) -> list[str]:
        """Return the text as rows of at most this width. A word is broken only if it alone is wider than that."""
        stream = io.StringIO()
        console = Console(
            file=stream,
            width=max(width, 10),
            force_terminal=True,
            color_system="256",
            theme=self._theme,
            legacy_windows=False,
            highlight=False,
            emoji=False,
            markup=False,
            _environ={},
        )
        console.print(_Markdown(text, self._background))
        rows = [_PADDING.sub(_reset, row) for row in stream.getvalue().split("\n")]
        filled = [number for number, row in enumerate(rows) if row not in ("", RESET)]
        return rows[filled[0] : filled[-1] + 1] if filled else []


def _reset(padding: re.Match[str]) -> str:
    return RESET if "\x1b" in padding[0] else ""


class _Heading(markdown.Heading):
    LEVEL_ALIGN: ClassVar[dict[str, Any]] = dict.fromkeys(("h1", "h2", "h3", "h4", "h5", "h6"), "left")


class _CodeBlock(markdown.CodeBlock):
    """Code in colours, indented, without a background."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        theme = ANSISyntaxTheme(ANSI_LIGHT if self.theme == "light" else ANSI_DARK)
        code = str(self.text).rstrip()
        yield Syntax(code, self.lexer_name, theme=theme, word_wrap=True, padding=(0, 2), background_color="default")


class _TableElement(markdown.TableElement):
    """A table; if its longest words do not fit next to each other, its records are shown one below the other."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heads = [cell.content for cell in self.header.row.cells] if self.header and self.header.row else []
        rows = [[cell.content for cell in row.cells] for row in (self.body.rows if self.body else ())]
        columns = [[row[place] for row in (heads, *rows) if place < len(row)] for place in range(len(heads))]
        least = sum(max(Measurement.get(console, options, cell).minimum for cell in column) for column in columns)
        if least + 3 * len(heads) <= options.max_width:
            yield _table(heads, rows)
            return
        for number, row in enumerate(rows):
            if number:
                yield Text()
            for head, cell in zip(heads, row, strict=False):
                yield Text.assemble(_title(head), ": ", cell)


def _table(heads: list[Text], rows: list[list[Text]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, style="markdown.table.border", show_edge=False)
    for head in heads:
        table.add_column(_title(head), justify=head.justify or "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _title(head: Text) -> Text:
    title = head.copy()
    title.stylize("markdown.table.header")
    return title


class _Markdown(markdown.Markdown):
    elements: ClassVar[dict[str, Any]] = {
        **markdown.Markdown.elements,
        "heading_open": _Heading,
        "fence": _CodeBlock,
        "code_block": _CodeBlock,
        "table_open": _TableElement,
    }

    def __init__(self, text: str, background: Background) -> None:
        super().__init__("", code_theme=background, hyperlinks=False)
        self.markup, self.parsed = text, _PARSER.parse(text)


def _styles(background: Background) -> dict[str, str]:
    accent, code, quiet = _ACCENT[background], _CODE[background], "bright_black"
    return {
        "markdown.h1": f"bold underline {accent}",
        **dict.fromkeys(("markdown.h2", "markdown.h3", "markdown.h4"), f"bold {accent}"),
        **dict.fromkeys(("markdown.h5", "markdown.h6"), accent),
        "markdown.code": code,
        "markdown.code_block": "none",
        "markdown.block_quote": f"italic {quiet}",
        "markdown.item.bullet": f"bold {accent}",
        "markdown.item.number": f"bold {accent}",
        "markdown.hr": quiet,
        "markdown.link": f"underline {accent}",
        "markdown.link_url": f"underline {accent}",
        "markdown.table.border": quiet,
        "markdown.table.header": f"bold {accent}",
    }

"""Output above the prompt of the chat: finished lines and blocks scroll by, unfinished ones stay below."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from prompt_toolkit.application import Application, get_app
from prompt_toolkit.formatted_text import ANSI, StyleAndTextTuples, to_formatted_text
from prompt_toolkit.utils import get_cwidth

from ..text import printable
from .output import Output, Style

if TYPE_CHECKING:
    from .markdown import MarkdownRenderer

LIVE_ROWS = 12  # of an unfinished line or block that are shown
STYLES: dict[Style, str] = {"": "", "dim": "ansibrightblack", "bold": "bold", "good": "ansigreen", "bad": "ansired"}
Background = Literal["dark", "light"]
Pieces = list[tuple[Style, str]]
_WORDS = re.compile(r"\s+|\S+")
# Terminals that know these draw everything between them at once; the others ignore them.
_BEGIN_UPDATE, _END_UPDATE = "\x1b[?2026h", "\x1b[?2026l"


class Block(msgspec.Struct):
    """A block of Markdown to print. `rows` of it are on the screen already, at that `width`."""

    text: str
    gap: bool  # preceded by a blank line
    rows: int = 0
    width: int = 0


class LiveOutput(Output):
    """Prints finished lines and blocks above the prompt; the rest is part of the prompt until it is finished.

    Markdown is rendered if there are colours; without them, an answer stays as it was written.
    """

    def __init__(self, app: Application[Any] | None = None) -> None:
        super().__init__(sys.__stdout__ or sys.stdout)
        self._background: Background = "light" if _is_light(os.environ.get("COLORFGBG", "")) else "dark"
        self._app = app or get_app()
        self._unfinished: Pieces = []
        self._finished: list[str | Pieces | Block] = []
        self._more = asyncio.Event()
        self._answer = ""  # unfinished Markdown
        self._block: Block | None = None  # the printed part of its first block
        self._last = ""  # the previous block
        self._live: tuple[tuple[str, int, int], StyleAndTextTuples] | None = None
        self._renderer: MarkdownRenderer | None = None

    @property
    def width(self) -> int:
        return self._app.output.get_size().columns

    # ------------------------------------------------------------------------------------------ writing

    def answer(self, text: str) -> None:
        """Continue an answer in Markdown."""
        if not self.colour:
            return self.put(text)
        self._answer += printable(text)
        self._at_start = False
        if "\n" in text:
            self._more.set()

    def fresh(self) -> None:
        if self._answer:
            self._finished.append(self._take(self._answer))
            self._answer = ""
            self._last = ""
            self._at_start = True
            self._more.set()
        super().fresh()
        self._last = ""

    def _take(self, text: str) -> Block:
        from_list = bool(self._last) and _is_item(self._last) and _is_item(text) and not self._last.endswith("\n\n")
        block, self._block = self._block or Block("", bool(self._last) and not from_list), None
        block.text, self._last = text, text
        return block

    def _write(self, text: str, style: Style) -> None:
        *lines, rest = text.split("\n")
        for line in lines:
            self._finished.append([*self._unfinished, (style, line)])
            self._unfinished = []
            self._more.set()
        if rest and self._unfinished and self._unfinished[-1][0] == style:
            self._unfinished[-1] = (style, self._unfinished[-1][1] + rest)
        elif rest:
            self._unfinished.append((style, rest))

    # ------------------------------------------------------------------------------------------ printing

    async def keep_printing(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            await self.print()

    def set_background(self, background: Background) -> None:
        """Choose the colours for a dark or light terminal, from the next block on."""
        if background != self._background:
            self._background = background
            self._renderer = None

    async def load(self) -> MarkdownRenderer:
        """Load the Markdown renderer in a thread, since that takes a while."""
        if self._renderer is None:
            self._renderer = await asyncio.to_thread(_make_renderer, self._background)
        return self._renderer

    async def print(self) -> None:
        """Print all finished lines above the prompt.

        The terminal stays in raw mode meanwhile: in cooked mode, which `run_in_terminal` would use, a key pressed at
        that moment is lost (Ctrl-D) or becomes a signal.
        """
        if self._answer or any(isinstance(one, Block) for one in self._finished):
            await self.load()
            self._split()
        app = self._app
        if app.is_running:
            await app.renderer.wait_for_cpr_responses()  # so that the prompt's position is known when it is erased
        rows, self._finished = [row for one in self._finished for row in self._rows(one)], []
        if not rows:
            return
        if not app.is_running:
            self._put_on_screen(rows)
            return
        app.output.write_raw(_BEGIN_UPDATE)
        app.renderer.erase()
        self._put_on_screen(rows)
        app.renderer.render(app, app.layout)
        app.output.write_raw(_END_UPDATE)
        app.output.flush()
        app.invalidate()

    def _put_on_screen(self, rows: list[str]) -> None:
        self._stream.write("".join(f"{row}\n" for row in rows))
        self._stream.flush()

    def _split(self) -> None:
        """Take the finished blocks of the answer, and the lines of an unfinished one that cannot change."""
        from .markdown import is_code, split_finished

        blocks, rest = split_finished(self._answer)
        self._finished += [self._take(block) for block in blocks]
        whole = rest[: rest.rfind("\n") + 1]
        if is_code(whole) and "\n" in whole.strip():
            last = self._last
            self._block = self._take(whole)
            self._last = last
            self._finished.append(self._block)
        self._answer = rest

    def _rows(self, one: str | Pieces | Block) -> list[str]:
        if isinstance(one, str):
            return [one]
        if isinstance(one, Block):
            return self._rows_of_block(one)
        wrapped = wrap(one, self.width)
        return ["".join(self.painted(text, style) for style, text in row) for row in wrapped] or [""]

    def _rows_of_block(self, block: Block) -> list[str]:
        assert self._renderer is not None
        block.width = block.width if block.rows else self.width
        rows = self._renderer.render(block.text, block.width)
        new = rows[block.rows :]
        gap = [""] if new and block.gap and not block.rows else []
        block.rows = max(block.rows, len(rows))
        return gap + new

    # ------------------------------------------------------------------------------------------ the live part

    def live(self, height: int) -> StyleAndTextTuples:
        """Return the unfinished output as the last rows above the prompt, each with a line end."""
        width = self.width
        most = max(1, min(LIVE_ROWS, height - 6))
        if self._answer.strip():
            return self._live_answer(width, most)
        look = STYLES if self.colour else dict.fromkeys(STYLES, "")
        parts: StyleAndTextTuples = []
        for row in wrap(_tail(self._unfinished, width * most), width)[-most:]:
            parts += [*((look[style], text) for style, text in row), ("", "\n")]
        return parts

    def _live_answer(self, width: int, most: int) -> StyleAndTextTuples:
        key = (self._answer, width, most)
        if self._live is not None and self._live[0] == key:
            return self._live[1]
        if self._renderer is None:
            rows = ["".join(text for _, text in row) for row in wrap(_tail([("", self._answer)], width * most), width)]
        elif self._block is not None:
            rows = self._renderer.render(self._answer, self._block.width or width)[self._block.rows :]
        else:
            rows = self._renderer.render(self._answer, width)
        gap = [""] if self._last and self._block is None and not _is_item(self._answer) else []
        shown = to_formatted_text(ANSI("".join(f"{row}\n" for row in [*gap, *rows][-most:])))
        self._live = (key, shown)
        return shown


def _is_light(colours: str) -> bool:
    """Return whether COLORFGBG, which some terminals set, indicates a light background."""
    return colours.rpartition(";")[2] in ("7", "15")


def _make_renderer(background: Background) -> MarkdownRenderer:
    from .markdown import MarkdownRenderer

    return MarkdownRenderer(background)


def _is_item(block: str) -> bool:
    from .markdown import is_item

    return is_item(block)


def _tail(pieces: Pieces, most: int) -> Pieces:
    """Return the end of a line, so that a redraw costs no more than a screenful, however long the line is.

    The omitted part is a whole number of screenfuls, so that the rows do not move with each new word.
    """
    return [(style, text[max(0, len(text) // most - 1) * most :]) for style, text in pieces]


def wrap(pieces: Pieces, width: int) -> list[Pieces]:
    """Break a line into rows between words. A word is broken only if it alone is wider than a row; wide characters,
    which are written without spaces, count as separate words."""
    rows: list[Pieces] = []
    room = 0
    for word in _words(pieces):
        blank = word[0][1].isspace()
        size = sum(get_cwidth(character) for _, character in word)
        if size <= room or not rows:
            if not rows:
                rows, room = [[]], width
            if size <= room:
                rows[-1] += word
                room -= size
                continue
        if blank:
            room = 0  # the line breaks here
            continue
        if rows[-1] and size <= width:
            rows.append([])
            room = width
        for piece in word:
            size = get_cwidth(piece[1])
            if size > room:
                rows.append([])
                room = width
            rows[-1].append(piece)
            room -= size
    return [_joined(row) for row in rows]


def _words(pieces: Pieces) -> list[Pieces]:
    letters = [(style, letter) for style, text in pieces for letter in text.expandtabs(4).replace("\n", " ")]
    plain = "".join(letter for _, letter in letters)
    found: list[Pieces] = []
    for match in _WORDS.finditer(plain):
        word = letters[match.start() : match.end()]
        wide = [get_cwidth(letter) == 2 for _, letter in word]
        if not any(wide):
            found.append(word)
            continue
        start = 0
        for place in range(1, len(word) + 1):
            if place == len(word) or wide[place] or wide[place - 1]:
                found.append(word[start:place])
                start = place
    return found


def _joined(row: Pieces) -> Pieces:
    return [(style, "".join(letter for _, letter in letters)) for style, letters in groupby(row, lambda one: one[0])]

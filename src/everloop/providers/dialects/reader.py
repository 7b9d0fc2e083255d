"""Reads an answer as it comes: what may be shown now, what was thought, and which tools are called.

Text is held back only while it may still become a call. The same text gives the same reading however it is cut up:
every decision waits until nothing that follows can change it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ..base import ToolCallRequest
from . import harmony, thoughts
from .blocks import Answer, bare_block, fenced_block, marked_block, python_block
from .families import NOISE, NOISES, OPENINGS
from .mending import Mender, value_end
from .offered import Offered
from .shapes import MAX_CALLS, Block, Piece, Reading
from .tokens import with_arguments

_FENCE = re.compile(r"[ \t]*(`{3,})[ \t]*([\w+-]*)[ \t]*\r?\n")
_CALL_LANGUAGES = frozenset({"", "json", "jsonc", "json5", "xml", "text", "plaintext"})
_PYTHON_LANGUAGES = frozenset({"tool_code", "tool_call", "tool_calls", "function_call"})
# Words with which a text shows something and does not do it.
_EXAMPLE = re.compile(r"\b(?:examples?|e\.g\.|for instance|could|sample|schemas?|illustrat\w+|template)", re.IGNORECASE)

_MARKS = "|".join(re.escape(opening) for opening in OPENINGS)
_HARMONY = "|".join(re.escape(token) for token in harmony.TOKENS)
_THOUGHT_TOKENS = (
    rf"(?P<think>{thoughts.OPEN})|(?P<stray>{thoughts.STRAY})|(?P<harmony>(?<![`\"'\\])(?:{_HARMONY}))"
    r"|(?P<fence>^[ \t]{0,80}```)"
)
_THOUGHTS = re.compile(_THOUGHT_TOKENS, re.M)
_ALL = re.compile(
    rf"{_THOUGHT_TOKENS}|(?P<mark>(?<![`\"'\\])(?:{_MARKS}))|(?P<tools>^[ \t]{{0,80}}<tools>)"
    r"|(?P<bare>^[ \t]{0,80}(?:\{|\[(?!TOOL_|(?i:THINK\]))))",
    re.M,
)
_LITERALS = (*OPENINGS, *harmony.TOKENS, *thoughts.TAGS, "</think>", "</thinking>", "<tools>", *NOISES)
_LOWER = tuple(literal.lower() for literal in _LITERALS)
_CLOSERS = (*thoughts.TAGS.values(), *harmony.TOKENS)
_LONGEST = max(map(len, _LITERALS))
_LINE_START = re.compile(r"^[ \t]{0,80}`{0,2}\Z", re.M)
_STRAY = re.compile(thoughts.STRAY, re.M)
_SPACE = re.compile(r"\s*")


def read(
    text: str, tools: Sequence[dict[str, Any]] | None = None, quoted: Callable[[str], bool] | None = None
) -> Reading:
    """A whole answer read at once; its pieces are all of it."""
    reader = Reader(tools, quoted)
    shown = reader.feed(text)
    reading = reader.finish()
    reading.pieces = shown + reading.pieces
    return reading


class Reader:
    """Reads one answer. Without tools only thoughts are parted from it."""

    def __init__(
        self, tools: Sequence[dict[str, Any]] | None = None, quoted: Callable[[str], bool] | None = None
    ) -> None:
        """`quoted`: whether a text stands word for word in something that came from outside. It is then no call."""
        self._offered = Offered(tools)
        self._tokens = _ALL if self._offered else _THOUGHTS
        self._quoted = quoted
        self._mender = Mender()
        self._text = ""  # not yet decided, with one character before it
        self._at = 0
        self._coming: list[str] = []
        self._size = 0  # of what is coming
        self._total = self._work = self._tried = 0
        self._step = self._in_text
        self._pieces: list[Piece] = []  # to be shown
        self._said: list[str] = []
        self._thought: list[str] = []  # each whole
        self._thinking: list[str] = []  # the one that is open
        self._tag = ""  # that opened it
        self._close = thoughts.CLOSE["<think>"]
        self._spoken = False  # something was said that is more than space
        self._inline = False  # something stands before on the same line
        self._recent = ""  # the end of what was said
        self._opened = False  # a thought began with a tag
        self._harmony = False
        self._shows = False  # what looked like a call was followed by words: this answer shows examples
        self._fence = re.compile("")
        self._group: list[Block] = []
        self._cursor = 0  # behind the group, counted from _at
        self._marked = False  # the group's calls have marks
        self._calls: list[ToolCallRequest] = []

    def feed(self, text: str) -> list[Piece]:
        """Take in the next piece; what may be shown now."""
        self._coming.append(text)
        self._size += len(text)
        self._total += len(text)
        # What is held is looked at again and again as it grows: that work is kept in proportion to the text.
        held = len(self._text) - self._at + self._size
        if self._work + held > 64 * self._total + (1 << 16) and 4 * held < 5 * self._tried:
            return []
        self._run(False)
        self._tried = len(self._text) - self._at
        self._work += self._tried
        return self._take()

    def finish(self) -> Reading:
        """The answer is over: all that it says, and what is still to be shown of it."""
        self._run(True)
        if self._tag or self._thinking:
            self._end_thought(closed=False)
        content = "".join(self._said)
        if self._thought:
            content = content.strip()
        elif self._calls:
            content = content.rstrip()
        reasoning = "\n\n".join(filter(None, (thought.strip() for thought in self._thought)))
        return Reading(content, self._calls, reasoning, self._take())

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _run(self, final: bool) -> None:
        keep = min(self._at, 1)
        self._text = self._text[self._at - keep :] + "".join(self._coming)
        self._at = keep
        self._coming.clear()
        self._size = 0
        while self._step(final):
            pass

    # ------------------------------------------------------------------------------------------ what is said

    def _say(self, end: int) -> None:
        """The text up to here is part of the answer."""
        text = self._text[self._at : end]
        self._at = end
        if not text:
            return
        line = text.rfind("\n")
        self._inline = bool(text[line + 1 :].strip()) or (line < 0 and self._inline)
        self._recent = (self._recent + text[-400:])[-400:]
        self._said.append(text)
        shown = text.lstrip() if self._thought and not self._spoken else text
        self._spoken = self._spoken or not text.isspace()
        if shown:
            self._pieces.append(Piece(shown))

    def _think(self, end: int) -> None:
        text = self._text[self._at : end]
        self._at = end
        if text:
            self._thinking.append(text)
            self._pieces.append(Piece(text, True))

    def _end_thought(self, closed: bool = True) -> None:
        thought = "".join(self._thinking)
        if not closed and self._spoken and self._tag:
            # Nothing ends it, and there is an answer before it: then it is no thought but a word.
            self._said.append(self._tag + thought)
            self._pieces.append(Piece(self._tag + thought))
        else:
            self._thought.append(thought)
        self._thinking, self._tag = [], ""

    # ------------------------------------------------------------------------------------------ text

    def _in_text(self, final: bool) -> bool:
        found = self._tokens.search(self._text, self._at)
        if found is None:
            self._say(len(self._text) - (0 if final else self._tail()))
            return False
        self._say(found.start())
        kind = found.lastgroup
        if kind == "think":
            self._opened, self._tag = True, found[0]
            self._close = thoughts.CLOSE[found[0].lower()]
            self._at = found.end()
            self._step = self._in_thought
            return True
        if kind == "stray":
            return self._stray(found, final)
        if kind == "harmony":
            return self._message(found[0], final)
        if kind == "fence":
            return self._in_fence_line(final)
        if self._shows and kind != "mark":
            self._say(found.end())
            return True
        return self._candidate(found, final)

    def _tail(self) -> int:
        """How many characters at the end may be the beginning of something that is more than text."""
        length = len(self._text)
        start = length - self._begun(_LOWER)
        line = _LINE_START.search(self._text, max(self._at, length - 84))
        return length - (min(start, line.start()) if line else start)

    def _begun(self, literals: Sequence[str]) -> int:
        """How many characters at the end may be the beginning of one of these."""
        text, length = self._text, len(self._text)
        start = length
        for bracket in "<[":
            place = text.rfind(bracket, max(self._at, length - _LONGEST))
            if place >= 0 and any(literal.startswith(text[place:].lower()) for literal in literals):
                start = min(start, place)
        return length - start

    def _in_thought(self, final: bool) -> bool:
        found = self._close.search(self._text, self._at)
        if found is None:
            self._think(len(self._text) - (0 if final else self._begun(_CLOSERS)))
            return False
        self._think(found.start())
        self._at = found.end()
        self._end_thought()
        self._step = self._in_text
        return True

    def _stray(self, found: re.Match[str], final: bool) -> bool:
        """The end of a thought that no tag has opened: all before it was thought."""
        if found.end() == len(self._text) and not final:
            return False
        if self._opened or self._harmony:
            self._say(found.end())
            return True
        self._opened = True
        self._at = found.end()
        self._thought.append("".join(self._said))
        self._said, self._calls, self._spoken, self._inline, self._recent = [], [], False, False, ""
        self._step = self._in_text
        return True

    def _in_fence_line(self, final: bool) -> bool:
        """A fence opens: it may hold calls, and nothing in any other is looked at."""
        line = _FENCE.match(self._text, self._at)
        if line is None:
            end = self._text.find("\n", self._at)
            if end < 0 and not final and len(self._text) - self._at < 200:
                return False
            self._say(len(self._text) if end < 0 else end)
            return True
        language, found = line[2].lower(), None
        if self._offered and not self._shows:
            if language in _PYTHON_LANGUAGES and self._text[line.end() : line.end() + 1] not in ("{", "[", "<", ""):
                found = python_block(self._text, line.end(), final, self._offered)
            elif language in _CALL_LANGUAGES or language in _PYTHON_LANGUAGES:
                found = fenced_block(self._text, line.end(), final, self._offered, self._mender)
            else:
                found = False
        else:
            found = False
        if found is None:
            return False
        if found and self._accepts(found, marked=False):
            return True
        self._fence = re.compile(rf"^[ \t]*`{{{len(line[1])},}}[ \t]*(?:\n|\Z)", re.M)
        self._say(line.end())
        self._step = self._in_fence
        return True

    def _in_fence(self, final: bool) -> bool:
        found = self._fence.search(self._text, self._at)
        if found is None:
            line = None if final else _FENCE_MAY.search(self._text, max(self._at, len(self._text) - 84))
            self._say(line.start() if line else len(self._text))
            return False
        if found.end() == len(self._text) and not final:
            self._say(found.start())
            return False
        self._say(found.end())
        self._step = self._in_text
        return True

    # ------------------------------------------------------------------------------------------ harmony

    def _message(self, token: str, final: bool) -> bool:
        if token not in harmony.BEGIN:
            if self._harmony:
                self._at += len(token)
            else:
                self._say(self._at + len(token))
            return True
        header = harmony.header(self._text, self._at, final)
        if header is None:
            return False
        if isinstance(header, bool):
            self._say(self._at + len(token))
            return True
        if header.to and self._offered:
            return self._called(header, final)
        self._harmony = True
        self._at = header.end
        if header.thought or header.to:
            self._close, self._tag = harmony.END, ""
            self._step = self._in_thought
        return True

    def _called(self, header: harmony.Header, final: bool) -> bool:
        start = header.end
        closed = value_end(self._text, start) if self._text[start : start + 8].lstrip()[:1] == "{" else None
        end = harmony.END.search(self._text, closed[0] if closed else start)
        if end is None and not final:
            return False
        stop = end.start() if end else len(self._text)
        written = with_arguments(header.to, self._text[start:stop], self._mender, end is not None)
        self._harmony = True
        block = Block(end.end() if end else stop, [self._offered.told(written)], self._text[start:stop])
        if not self._accepts(block, marked=True):
            self._say(block.end)
        return True

    # ------------------------------------------------------------------------------------------ calls

    def _candidate(self, found: re.Match[str], final: bool) -> bool:
        kind, text, at = found.lastgroup, self._text, found.end()
        block: Answer
        if kind == "mark":
            block = marked_block(text, found.start(), found[0], final, self._offered, self._mender)
        elif kind == "tools":
            block = fenced_block(text, at, final, self._offered, self._mender, tools=True)
        else:
            block = bare_block(text, at - 1, final, self._offered, self._mender)
        if block is None:
            return False
        if not block or not self._accepts(block, marked=kind == "mark"):
            self._say(block.end if block else at)
        return True

    def _accepts(self, block: Block, marked: bool) -> bool:
        """Begin a group of calls with this one, unless it is a quotation or an example."""
        if self._quoted is not None and self._quoted(block.source):
            return False
        if not marked and self._spoken and _EXAMPLE.search(self._recent.strip().rpartition("\n")[2]):
            return False
        self._group, self._marked = [block], marked
        self._cursor = block.end - self._at
        self._step = self._in_group
        return True

    def _in_group(self, final: bool) -> bool:
        """Behind a call: another one, the end, or words. Words decide what the calls were."""
        text = self._text
        end = self._at + self._cursor
        noise = NOISE.match(text, end)
        place = noise.end() if noise else end
        ahead = text[place : place + _LONGEST]
        if not final and (not ahead or any(literal.startswith(ahead) for literal in (*_LITERALS, "```"))):
            return False
        block = self._next(place, final) if ahead and self._count() < MAX_CALLS else False
        if block is None:
            return False
        if block:
            if self._quoted is not None and self._quoted(block.source):
                return self._let_go()
            self._group.append(block)
            self._cursor = block.end - self._at
            return True
        same_line = bool(ahead) and "\n" not in text[end:place]
        if self._marked and not (same_line and self._inline):
            return self._call()
        if not self._marked and (not ahead or (not self._spoken and not same_line)):
            return self._call()
        return self._let_go()

    def _count(self) -> int:
        return sum(len(block.calls) for block in self._group)

    def _next(self, place: int, final: bool) -> Answer:
        """A further call of the same kind."""
        text = self._text
        if self._marked:
            if any(text.startswith(token, place) for token in harmony.BEGIN):
                return self._next_message(place, final)
            opening = next((one for one in OPENINGS if text.startswith(one, place)), None)
            if opening is None:
                return False
            return marked_block(text, place, opening, final, self._offered, self._mender)
        if text[place] in "{[":
            return bare_block(text, place, final, self._offered, self._mender)
        if text.startswith("```", place):
            line = _FENCE.match(text, place)
            if line is None:
                return None if not final and "\n" not in text[place:] and len(text) - place < 200 else False
            if line[2].lower() in _CALL_LANGUAGES:
                return fenced_block(text, line.end(), final, self._offered, self._mender)
        return False

    def _next_message(self, place: int, final: bool) -> Answer:
        header = harmony.header(text := self._text, place, final)
        if header is None or isinstance(header, bool) or not header.to:
            return None if header is None else False
        closed = value_end(text, header.end) if text[header.end : header.end + 8].lstrip()[:1] == "{" else None
        end = harmony.END.search(text, closed[0] if closed else header.end)
        if end is None and not final:
            return None
        stop = end.start() if end else len(text)
        written = with_arguments(header.to, text[header.end : stop], self._mender, end is not None)
        return Block(end.end() if end else stop, [self._offered.told(written)], text[header.end : stop])

    def _call(self) -> bool:
        """The calls count, and what follows them is invented: it is cut."""
        self._calls = [call for block in self._group for call in block.calls][:MAX_CALLS]
        self._at += self._cursor
        self._step = self._over
        return True

    def _let_go(self) -> bool:
        """They were examples: text like any other, and so is all that looks like them further on."""
        self._shows = True
        self._say(self._at + self._cursor)
        self._step = self._in_text
        return True

    def _over(self, final: bool) -> bool:
        """Behind the calls. Only the end of a thought that began unseen would change what they were."""
        found = None if self._opened or self._harmony else _STRAY.search(self._text, self._at)
        if found is not None and (final or found.end() < len(self._text)):
            return self._stray(found, final)
        line = self._text.rfind("\n", self._at)
        self._at = len(self._text) if final or line < 0 else found.start() if found else line
        return False


_FENCE_MAY = re.compile(r"^[ \t]*`*\Z", re.M)

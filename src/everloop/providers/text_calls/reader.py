"""Read an answer as it arrives: the text that may be shown now, the model's reasoning, and its tool calls.

Text is held back only while it may still become a call. The same text gives the same reading however it is split: every
decision waits until nothing that follows can change it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base import ToolCallRequest
from . import dialects, prose
from .blocks import MAX_LINE, CallFinder, MoreText
from .calls import MAX_CALLS, CallBlock, Reading, TextPart
from .dialects import HARMONY_BEGIN, HARMONY_END, KINDS, Family
from .json_values import after

_FENCE_MAY = re.compile(r"^[ \t]*`*[ \t\r]*\Z", re.M)
_PROSE = 80  # characters without brackets that may announce a call within a line; bounds the cost of hostile texts
_INDENT = 80  # maximum characters
_TOO_MANY = re.compile(r"\}*")  # small models close more brackets than they opened
_STRAY_LINE = re.compile(rf"^[ \t]{{0,80}}(?i:{'|'.join(map(re.escape, dialects.STRAY_ENDS))})[ \t\r]*(?:\n|\Z)", re.M)

Quoted = Callable[[str], bool]


def read(text: str, tools: Sequence[dict[str, Any]] | None = None, quoted: Quoted | None = None) -> Reading:
    """Read a whole answer; `pieces` has everything that may be shown."""
    reader = Reader(tools, quoted)
    shown = reader.feed(text)
    reading = reader.finish()
    reading.pieces = shown + reading.pieces
    return reading


class Reader:
    """Reads one answer as it arrives. Without tools, only the reasoning is separated from it."""

    def __init__(self, tools: Sequence[dict[str, Any]] | None = None, quoted: Quoted | None = None) -> None:
        """`quoted` returns whether a text is copied from untrusted content, and so not a call."""
        self._tools = tools
        self._quoted = quoted or (lambda source: False)
        self._finder = CallFinder(tools)
        self._answer = AnswerText()
        self._text = ""  # still undecided, preceded by one character
        self._at = 0
        self._incoming: list[str] = []
        self._size = 0  # of the incoming text
        self._step = self._in_text
        self._close = HARMONY_END  # ends the open reasoning or fence
        self._opened = False  # reasoning began with a tag
        self._harmony = False
        self._wrapper = ""  # ends the answer
        self._shows_examples = False  # what looked like a call was an example, so later plain JSON is one, too
        self._calls: list[ToolCallRequest] = []
        self._cursor = 0  # the end of the calls, relative to _at
        self._family: Family | None = None  # the family whose marks enclose the calls
        self._cut = False  # prose followed the calls

    @property
    def held(self) -> int:
        """Return how many characters are held back until it is certain what they are."""
        return len(self._text) - self._at + self._size

    def feed(self, text: str) -> list[TextPart]:
        """Add the next part of the text; return what may be shown now."""
        self._incoming.append(text)
        self._size += len(text)
        # Held text is scanned again as it grows, but rarely enough to keep the total work proportional to the text.
        if 32 * self._size >= len(self._text) - self._at:
            self._run(False)
        return self._answer.take()

    def finish(self) -> Reading:
        """End the answer, and return the whole reading, with the parts not shown yet."""
        self._run(True)
        if self._finder.offered and (thought := self._answer.unfinished()):
            # Some models make calls inside reasoning that they never end. Only a call at the very end counts.
            inner = Reader(self._tools, self._quoted)
            inner.feed(thought)
            inner._run(True)
            if inner._calls and inner._family is not None and not inner._cut:
                self._calls = inner._calls
                self._answer.end_thought(inner._answer.whole(inner._calls).content)
        return self._answer.whole(self._calls)

    def _run(self, final: bool) -> None:
        keep = min(self._at, 1)
        self._text = self._text[self._at - keep :] + "".join(self._incoming)
        self._at = keep
        self._incoming.clear()
        self._size = 0
        self._finder.text, self._finder.final = self._text, final
        try:
            while self._step(final):
                pass
        except MoreText:
            pass

    def _add_text(self, end: int) -> None:
        """Add the text up to `end` to the answer."""
        self._answer.say(self._text[self._at : end])
        self._at = end

    # ------------------------------------------------------------------------------------------ text

    def _in_text(self, final: bool) -> bool:
        text, place = self._text, self._at
        while (found := dialects.TOKENS.search(text, place)) is not None:
            place = found.end()
            try:
                if self._take(found):
                    return True
            except MoreText:
                self._add_text(found.start())
                return False
        self._add_text(len(text) if final else self._held_from())
        return False

    def _held_from(self) -> int:
        """Return where a tag may begin at the end of the text; the end of the text if nowhere."""
        text = self._text
        for found in dialects.FIRSTS.finditer(text, max(self._at, len(text) - dialects.MAX_LITERAL)):
            place = found.start()
            if text[place:].lower() in dialects.BEGINNINGS and (not found[0].isalpha() or self._begins_line(place)):
                return place
        return len(text)

    def _begins_line(self, place: int) -> bool:
        """Return whether only white space precedes this place on its line."""
        text, at = self._text, self._at
        line = text.rfind("\n", max(at, place - _INDENT - 1), place)
        if line >= 0:
            return line + 1 == place or text[line + 1 : place].isspace()
        return place - at <= _INDENT and not self._answer.inline and (place == at or text[at:place].isspace())

    def _take(self, found: re.Match[str]) -> bool:
        """Read what begins with a token; return False if the token is just text."""
        at, token = found.start(), found[0]
        kind = found.lastgroup or KINDS.get(token) or KINDS[token.lower()]
        if kind in dialects.CALL_KINDS and not self._finder.offered:
            return False
        inline = kind in dialects.LINE_KINDS and not self._begins_line(at)
        if inline and not self._is_announced(kind, at):
            return False
        match kind:
            case "mark" | "line_mark":
                return self._take_block(at, self._finder.marked(at), dialects.BY_OPENING[token])
            case "tools" | "list" | "object":
                if self._shows_examples:
                    return False
                block = self._finder.tools(found.end()) if kind == "tools" else self._finder.bare(at)
                return self._take_block(at, block)
            case "fence":
                return self._take_fence(at, inline)
            case "harmony" if token in HARMONY_BEGIN:
                return self._take_message(at)
            case "harmony" if not self._harmony:  # just mentioned, as below
                return False
            case "stray" if not self._is_stray(found):
                return False
            case "wrapper" if token in dialects.WRAPPERS and not self._is_wrapper(found):
                return False
        self._add_text(at)
        self._at = found.end()
        if kind == "thought":
            self._begin_thought(dialects.THOUGHT_ENDS[token.lower()], token)
        elif kind == "stray":
            self._end_untagged_thought()
        return True

    def _is_announced(self, kind: str, place: int) -> bool:
        """Return whether a call may begin here, within a line: only if the prose before it announces it."""
        if self._shows_examples or not self._finder.offered or kind not in ("object", "list", "fence"):
            return False
        before = self._before(place)
        nearby = before[-_PROSE:]
        interrupted = "```" in nearby if kind == "fence" else set(nearby) & set("{}[]")
        return before[-1:].isspace() and not interrupted and prose.introduces_call(before)

    def _before(self, place: int) -> str:
        """Return the end of the answer's text before this place."""
        said = self._text[max(self._at, place - prose.WINDOW) : place]
        return said if len(said) >= prose.WINDOW else (self._answer.recent + said)[-prose.WINDOW :]

    # ------------------------------------------------------------------------------------------ thoughts

    def _begin_thought(self, close: re.Pattern[str], tag: str = "") -> None:
        self._close = close
        self._opened = self._opened or bool(tag)
        self._answer.begin_thought(tag)
        self._step = self._in_thought

    def _in_thought(self, final: bool) -> bool:
        found = self._close.search(self._text, self._at)
        end = found.start() if found else len(self._text) if final else self._held_from()
        self._answer.think(self._text[self._at : end])
        self._at = found.end() if found else end
        if found is not None:
            self._answer.end_thought()
            self._step = self._in_text
        return found is not None

    def _is_stray(self, found: re.Match[str]) -> bool:
        """Return whether this tag ends reasoning that no tag opened, and is not just mentioned."""
        if self._opened or self._harmony:
            return False
        if found[0][:2] in ("<|", "◁/") or self._begins_line(found.start()):
            return True
        rest = self._text[found.end() : found.end() + _INDENT]
        following = rest.lstrip(" \t\r")[:1]
        self._finder.wait_if(not following and len(rest) < _INDENT)
        if rest.startswith((" ", "\t", "\r")) and following not in ("", "\n"):
            return prose.ends_sentence(self._before(found.start()))
        return following.isalnum() or following in "\n<[{*#"

    def _end_untagged_thought(self) -> None:
        """Treat all text so far as reasoning that no tag opened."""
        self._opened = True
        self._calls = []
        self._answer.all_was_thought()
        self._step = self._in_text

    def _is_wrapper(self, found: re.Match[str]) -> bool:
        """Return whether a tag encloses the answer after reasoning, and is not part of the answer."""
        if found[0].startswith("</"):
            return self._wrapper == found[0]
        if not self._opened or self._answer.spoken or self._text[self._at : found.start()].strip():
            return False
        self._wrapper = f"</{found[0][1:]}"
        return True

    def _take_message(self, at: int) -> bool:
        """Read a Harmony message: a call, reasoning or an answer."""
        message = self._finder.message(at)
        if message is None:
            return False
        self._harmony = True
        if message.call is not None:
            return self._take_block(at, message.call, Family("<|start|>"))
        self._add_text(at)
        self._at = message.start
        if message.is_thought:
            self._begin_thought(HARMONY_END)
        return True

    # ------------------------------------------------------------------------------------------ fences

    def _take_fence(self, at: int, inline: bool) -> bool:
        """Read a fence, which may contain calls; otherwise its content is plain text."""
        line = self._finder.fence(at)
        if line and self._finder.offered and not self._shows_examples and (block := self._finder.fenced(line)):
            return self._take_block(at, block)
        if inline:
            return False
        if line is None:
            end = self._text.find("\n", at, at + MAX_LINE)
            self._add_text(end if end >= 0 else min(len(self._text), at + MAX_LINE))
            return True
        self._close = re.compile(rf"^[ \t]*`{{{len(line[1])},}}[ \t\r]*(?:\n|\Z)", re.M)
        self._add_text(line.end())
        self._step = self._in_fence
        return True

    def _in_fence(self, final: bool) -> bool:
        found = self._close.search(self._text, self._at)
        if found is not None and (final or found[0].endswith("\n")):
            self._add_text(found.end())
            self._step = self._in_text
            return True
        line = None if final else _FENCE_MAY.search(self._text, max(self._at, len(self._text) - 84))
        self._add_text(line.start() if line else len(self._text))
        return False

    # ------------------------------------------------------------------------------------------ calls

    def _take_block(self, at: int, block: CallBlock | None, family: Family | None = None) -> bool:
        """Begin a group of calls with this block, unless it is data, a quotation or an example."""
        if block is None:
            return False
        self._add_text(at)
        is_example = family is None and prose.lead_of(self._answer.recent) == "example"
        if not block.calls or self._quoted(block.source) or is_example:
            self._add_text(block.end)
            return True
        self._calls, self._family = block.calls, family
        self._cursor = block.end - self._at
        self._step = self._behind_call
        return True

    def _behind_call(self, final: bool) -> bool:
        """Read what follows a call: another call, the end, or prose, which decides whether the calls were made."""
        text, end = self._text, self._at + self._cursor
        if self._family is None and (not self._answer.spoken or prose.lead_of(self._answer.recent) == "intent"):
            end = after(_TOO_MANY, text, end)
        place = after(dialects.NOISE, text, end)
        ahead = text[place : place + dialects.MAX_LITERAL]
        self._finder.wait_if(ahead.lower() in dialects.BEGINNINGS)
        block = self._next(place) if ahead and len(self._calls) < MAX_CALLS else None
        if block and block.calls and not self._quoted(block.source):
            self._calls = [*self._calls, *block.calls][:MAX_CALLS]
            self._cursor = block.end - self._at
            return True
        same_line = bool(ahead) and "\n" not in text[end:place]
        if self._family is not None:
            counts = self._family.opening.startswith(dialects.SPECIAL) or not (same_line and self._answer.inline)
        else:
            line, newline, _ = text[place : place + prose.WINDOW].partition("\n")
            self._finder.wait_if(not newline and len(line) < prose.WINDOW)
            counts = prose.is_made(self._answer.recent, line.strip(), same_line=same_line)
        self._cut = bool(ahead)
        if counts:  # what follows them is made up by the model, so it is dropped
            self._at += self._cursor
            self._step = self._after_calls
        else:  # they were examples: plain text, like everything that looks like them later
            self._calls, self._shows_examples = [], True
            self._add_text(self._at + self._cursor)
            self._step = self._in_text
        return True

    def _next(self, place: int) -> CallBlock | None:
        """Read a further call of the same kind."""
        if self._family is not None:
            if not self._text.startswith(HARMONY_BEGIN, place):
                return self._finder.marked(place)
            message = self._finder.message(place)
            return message.call if message is not None else None
        if self._text[place] in "{[":
            return self._finder.bare(place)
        line = self._finder.fence(place) if self._text.startswith("```", place) else None
        return self._finder.fenced(line) if line is not None else None

    def _after_calls(self, final: bool) -> bool:
        """Drop the text after the calls. Only the end of untagged reasoning would cancel them."""
        found = None if self._opened or self._harmony else _STRAY_LINE.search(self._text, self._at)
        if found is not None and (final or found[0].endswith("\n")):
            self._at = found.end()
            self._end_untagged_thought()
            return True
        line = self._text.rfind("\n", max(self._at, len(self._text) - MAX_LINE))
        self._at = len(self._text) if final or line < 0 else found.start() if found else line
        return False


@dataclass(slots=True)
class AnswerText:
    """Collects an answer in order: its text, its reasoning, and the parts of both to show."""

    spoken: bool = False  # there is text other than white space
    inline: bool = False  # there is text on the current line
    recent: str = ""  # the end of the text
    _pieces: list[TextPart] = field(default_factory=list)  # to be shown
    _said: list[str] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)  # complete ones
    _thinking: list[str] | None = None  # the open one
    _tag: str = ""  # that opened it

    def say(self, text: str) -> None:
        if not text:
            return
        line = text.rfind("\n")
        self.inline = bool(text[line + 1 :].strip()) or (line < 0 and self.inline)
        self.recent = (self.recent + text[-400:])[-400:]
        self._said.append(text)
        shown = text.lstrip() if self._thoughts and not self.spoken else text
        self.spoken = self.spoken or not text.isspace()
        if shown:
            self._pieces.append(TextPart(shown))

    def begin_thought(self, tag: str) -> None:
        self._thinking, self._tag = [], tag

    def think(self, text: str) -> None:
        if text and self._thinking is not None:
            self._thinking.append(text)
            self._pieces.append(TextPart(text, True))

    def end_thought(self, thought: str | None = None) -> None:
        """End the open reasoning, as it is or replaced by this text."""
        self._thoughts.append("".join(self._thinking or ()) if thought is None else thought)
        self._thinking = None

    def unfinished(self) -> str:
        """Return the reasoning that a tag began and nothing ended."""
        return "".join(self._thinking) if self._thinking and self._tag else ""

    def all_was_thought(self) -> None:
        """Treat all text so far as reasoning that no tag opened."""
        self._thoughts.append("".join(self._said))
        self._said, self.spoken, self.inline, self.recent = [], False, False, ""

    def take(self) -> list[TextPart]:
        """Return the parts to show since the last call of this method."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def whole(self, calls: list[ToolCallRequest]) -> Reading:
        """Return the reading of the complete answer."""
        if self._thinking is not None and self.spoken and self._tag:
            # It never ended, and text precedes it: the tag was only mentioned.
            self.say(self._tag + "".join(self._thinking))
        elif self._thinking is not None:
            self.end_thought()
        content = "".join(self._said)
        if self._thoughts:
            content = content.strip()
        elif calls:
            content = content.rstrip()
        reasoning = "\n\n".join(filter(None, (thought.strip() for thought in self._thoughts)))
        return Reading(content, calls, reasoning, self.take())

"""Reads an answer as it arrives: what may be shown now, what the model thought, and which tools it calls.

Text is held back only while it may still become a call. The same text gives the same reading however it is split: every
decision waits until nothing that follows can change it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..base import ToolCallRequest
from . import channels, prose
from .blocks import Found, bare_block, fenced_block, marked_block, may_be_call, python_block
from .calls import MAX_CALLS, CallBlock, OfferedTools, Reading, TextPart
from .dialects import BY_OPENING, NOISE, NOISES, OPENINGS, Family, after
from .json_values import JsonReader

_FENCE = re.compile(r"(`{3,})[ \t]*([\w+-]*)[ \t]*\r?\n")
_FENCE_MAY = re.compile(r"^[ \t]*`*[ \t\r]*\Z", re.M)
_FENCE_LINE = 200  # characters, at most
_CALL_LANGUAGES = frozenset({"", "json", "jsonc", "json5", "xml", "text", "plaintext"})
_PYTHON_LANGUAGES = frozenset({"tool_code", "tool_call", "tool_calls", "function_call"})
_STRUCTURE = re.compile(r"[{}\[\]]")
_FENCE_MARK = re.compile(r"```")
_PROSE = 80  # characters without brackets that announce a call in the middle of a line; keeps hostile texts cheap
_LINE = re.compile(rf"[^\n]{{0,{prose.WINDOW}}}")
_TOO_MANY = re.compile(r"\}*")  # small models close more brackets than they opened
_STRAY_LINE = re.compile(rf"^[ \t]{{0,80}}(?i:{'|'.join(map(re.escape, channels.STRAY_ENDS))})[ \t\r]*(?:\n|\Z)", re.M)
_BEHIND_STRAY = re.compile(r"[ \t\r]{0,80}")

Quoted = Callable[[str], bool]


def read(text: str, tools: Sequence[dict[str, Any]] | None = None, quoted: Quoted | None = None) -> Reading:
    """Read a whole answer; its `pieces` are all that may be shown."""
    reader = Reader(tools, quoted)
    shown = reader.feed(text)
    reading = reader.finish()
    reading.pieces = shown + reading.pieces
    return reading


class Reader:
    """Reads one answer as it arrives. Without tools only reasoning is separated from it."""

    def __init__(self, tools: Sequence[dict[str, Any]] | None = None, quoted: Quoted | None = None) -> None:
        """`quoted` says whether a text is copied from untrusted content: then it is not a call."""
        self._tools = tools
        self._offered = OfferedTools(tools)
        self._tokens = ALL_TOKENS if self._offered else THOUGHT_TOKENS
        self._quoted = quoted
        self._json_reader = JsonReader()
        self._answer = AnswerText()
        self._text = ""  # not decided yet, with one character before it
        self._at = 0
        self._incoming: list[str] = []
        self._size = 0  # of the incoming text
        self._total = self._work = self._tried = 0
        self._step = self._in_text
        self._close = channels.HARMONY_END  # ends the open thought
        self._fence = channels.HARMONY_END  # ends the open fence
        self._opened = False  # a thought began with a tag
        self._harmony = False
        self._wrapper = ""  # ends the answer
        self._shows_examples = False  # something that looked like a call was an example: so is later plain JSON
        self._blocks: list[CallBlock] = []
        self._cursor = 0  # the end of the blocks, relative to _at
        self._last_lead: tuple[str, prose.Lead] = ("", "neutral")
        self._lead: prose.Lead = "neutral"  # what the prose before the blocks announces
        self._marked = False  # the blocks' calls have marks
        self._special = False  # which are special tokens
        self._calls: list[ToolCallRequest] = []
        self._cut = False  # prose followed the calls
        self._outermost = True  # False for the reader of an unfinished thought

    @property
    def held(self) -> int:
        """How many characters are held back until it is certain what they are."""
        return len(self._text) - self._at + self._size

    def feed(self, text: str) -> list[TextPart]:
        """Add the next part of the text; return what may be shown now."""
        self._incoming.append(text)
        self._size += len(text)
        self._total += len(text)
        # Held text is scanned again as it grows: keep that work proportional to the whole text.
        held = self.held
        if self._work + held > 64 * self._total + (1 << 16) and 4 * held < 5 * self._tried:
            return []
        self._run(False)
        self._tried = len(self._text) - self._at
        self._work += self._tried
        return self._answer.take()

    def finish(self) -> Reading:
        """The answer is complete: return the whole reading, with what is still to be shown."""
        self._run(True)
        if self._offered and self._outermost and (thought := self._answer.unfinished()):
            # Some models call inside a thought and never end it. Only a call at the very end counts.
            inner = Reader(self._tools, self._quoted)
            inner._outermost = False
            inner.feed(thought)
            reading = inner.finish()
            if reading.calls and inner._marked and not inner._cut:
                self._calls = reading.calls
                self._answer.shorten(reading.content)
        return self._answer.whole(self._calls)

    def _run(self, final: bool) -> None:
        keep = min(self._at, 1)
        self._text = self._text[self._at - keep :] + "".join(self._incoming)
        self._at = keep
        self._incoming.clear()
        self._size = 0
        while self._step(final):
            pass

    def _add_text(self, end: int) -> None:
        """Add the text up to `end` to the answer."""
        self._answer.say(self._text[self._at : end])
        self._at = end

    # ------------------------------------------------------------------------------------------ text

    def _in_text(self, final: bool) -> bool:
        text, place = self._text, self._at
        while (found := self._tokens.search(text, place)) is not None:
            kind = found.lastgroup or KINDS[found[0].lower()]
            place = found.end()
            inline = kind in LINE_TOKENS and not self._begins_line(found.start())
            if inline and not self._is_announced(found, kind, final):
                continue
            if kind in ("mark", "line_mark", "tools", "list", "object"):
                if self._shows_examples and kind not in ("mark", "line_mark"):
                    continue
                block = self._block(found, kind, final)
                if block is False:
                    continue
                if block is not None and not block.calls:
                    place = block.end
                    continue
                self._add_text(found.start())
                return block is not None and self._accept(block, BY_OPENING.get(found[0]))
            stray = self._is_stray(found, final) if kind == "stray" else True
            if stray is False:
                continue
            if kind == "harmony" and not self._is_message(found, final):
                continue
            if kind == "wrapper" and found[0] in channels.WRAPPERS and not self._is_wrapper(found):
                continue
            self._add_text(found.start())
            return stray is not None and self._open(kind, found, final, inline)
        self._add_text(len(text) if final else held_from(text, self._at, self._answer.inline))
        return False

    def _is_stray(self, found: re.Match[str], final: bool) -> bool | None:
        """Whether this ends a thought that no tag opened, and is not a mention; None while more text is needed."""
        if self._opened or self._harmony:
            return False
        if found[0][:2] in ("<|", "◁/") or self._begins_line(found.start()):
            return True
        behind = after(_BEHIND_STRAY, self._text, found.end())
        if behind >= len(self._text):
            return True if final else None
        if self._text[behind] == "\n":
            return True
        if behind == found.end():
            return self._text[behind].isalnum() or self._text[behind] in "<[{*#"
        return prose.ends_sentence(self._before(found.start()))

    def _is_wrapper(self, found: re.Match[str]) -> bool:
        """Whether a tag is put around the answer behind a thought, and is not part of it."""
        if found[0].startswith("</"):
            return self._wrapper == found[0]
        if not self._opened or self._answer.spoken or self._text[self._at : found.start()].strip():
            return False
        self._wrapper = f"</{found[0][1:]}"
        return True

    def _begins_line(self, place: int) -> bool:
        return begins_line(self._text, place, self._at, self._answer.inline)

    def _is_announced(self, found: re.Match[str], kind: str, final: bool) -> bool:
        """Whether a call may begin here, in the middle of a line: only if the prose before announces it."""
        place = found.start()
        if self._shows_examples or not self._offered or kind not in ("object", "list", "fence"):
            return False
        before = self._before(place)
        structure = _FENCE_MARK if kind == "fence" else _STRUCTURE
        if not before[-1:].isspace() or structure.search(before, max(0, len(before) - _PROSE)):
            return False
        if kind != "fence" and may_be_call(self._text, place, final, self._offered) is False:
            return False
        return prose.introduces_call(before) and self._lead_of(before) == "intent"

    def _lead_of(self, before: str) -> prose.Lead:
        """What the prose before a place announces; asked again for the same place while more text arrives."""
        if self._last_lead[0] != before:
            self._last_lead = (before, prose.lead_of(before))
        return self._last_lead[1]

    def _before(self, place: int) -> str:
        """The end of the answer's text before this place."""
        said = self._text[max(self._at, place - prose.WINDOW) : place]
        return said if len(said) >= prose.WINDOW else (self._answer.recent + said)[-prose.WINDOW :]

    def _block(self, found: re.Match[str], kind: str, final: bool) -> Found:
        """The call, if any, at a place where one may begin."""
        text = self._text
        if kind in ("mark", "line_mark"):
            return marked_block(text, found.start(), found[0], final, self._offered, self._json_reader)
        if kind == "tools":
            return fenced_block(text, found.end(), final, self._offered, self._json_reader, tools=True)
        return bare_block(text, found.start(), final, self._offered, self._json_reader)

    def _open(self, kind: str, found: re.Match[str], final: bool, inline: bool) -> bool:
        """Open a thought, a fence or a channel."""
        if kind == "wrapper":
            self._at = found.end()
            return True
        if kind == "thought":
            self._opened = True
            self._answer.begin_thought(found[0])
            self._close = channels.THOUGHT_ENDS[found[0].lower()]
            self._at = found.end()
            self._step = self._in_thought
            return True
        if kind == "stray":
            return self._end_untagged_thought(found)
        if kind == "harmony":
            return self._message(found[0], final)
        return self._open_fence(found[0], inline, final)

    def _in_thought(self, final: bool) -> bool:
        found = self._close.search(self._text, self._at)
        end = found.start() if found else len(self._text) if final else held_from(self._text, self._at, thought=True)
        self._answer.think(self._text[self._at : end])
        self._at = found.end() if found else end
        if found is None:
            return False
        self._answer.end_thought()
        self._step = self._in_text
        return True

    def _end_untagged_thought(self, found: re.Match[str]) -> bool:
        """End a thought that no tag opened: everything before was reasoning."""
        self._opened = True
        self._at = found.end()
        self._calls = []
        self._answer.all_was_thought()
        self._step = self._in_text
        return True

    # ------------------------------------------------------------------------------------------ fences

    def _open_fence(self, mark: str, inline: bool, final: bool) -> bool:
        """Open a fence: it may hold calls; the content of any other one is plain text."""
        line = _FENCE.match(self._text, self._at)
        end = self._text.find("\n", self._at, self._at + _FENCE_LINE)
        if line is None and end < 0 and not final and len(self._text) - self._at < _FENCE_LINE:
            return False
        may_call = line is not None and self._offered and not self._shows_examples
        block = self._fenced(line, final) if line is not None and may_call else False
        if block is None:
            return False
        if block:
            return self._accept(block, None)
        if inline:
            self._add_text(self._at + len(mark))
        elif line is None:
            self._add_text(end if end >= 0 else min(len(self._text), self._at + _FENCE_LINE))
        else:
            self._skip_fence(line)
        return True

    def _fenced(self, line: re.Match[str], final: bool) -> Found:
        language, inside = line[2].lower(), line.end()
        if language in _PYTHON_LANGUAGES and self._text[inside : inside + 1] not in ("{", "[", "<"):
            return python_block(self._text, inside, final, self._offered)
        if language in _CALL_LANGUAGES or language in _PYTHON_LANGUAGES:
            block = fenced_block(self._text, inside, final, self._offered, self._json_reader)
            return block if block is None or (block and block.calls) else False
        return False

    def _skip_fence(self, line: re.Match[str]) -> None:
        self._fence = re.compile(rf"^[ \t]*`{{{len(line[1])},}}[ \t\r]*(?:\n|\Z)", re.M)
        self._add_text(line.end())
        self._step = self._in_fence

    def _in_fence(self, final: bool) -> bool:
        found = self._fence.search(self._text, self._at)
        if found is not None and (final or found[0].endswith("\n")):
            self._add_text(found.end())
            self._step = self._in_text
            return True
        line = None if final else _FENCE_MAY.search(self._text, max(self._at, len(self._text) - 84))
        self._add_text(line.start() if line else len(self._text))
        return False

    # ------------------------------------------------------------------------------------------ channels

    def _is_message(self, found: re.Match[str], final: bool) -> bool:
        """Whether a token belongs to a message and is not just mentioned in the text."""
        if found[0] in channels.HARMONY_BEGIN:
            return channels.harmony_header(self._text, found.start(), final) is not False
        return self._harmony

    def _message(self, token: str, final: bool) -> bool:
        if token not in channels.HARMONY_BEGIN:
            self._at += len(token)
            return True
        header = channels.harmony_header(self._text, self._at, final)
        if not isinstance(header, channels.HarmonyHeader):
            return False
        if header.to and self._offered:
            block = channels.harmony_call(self._text, header, final, self._offered, self._json_reader)
            if block is None:
                return False
            self._harmony = True
            return self._accept(block, BY_OPENING["<|tool_call|>"])
        self._harmony = True
        self._at = header.end
        if header.thought or header.to:
            self._close = channels.HARMONY_END
            self._answer.begin_thought()
            self._step = self._in_thought
        return True

    # ------------------------------------------------------------------------------------------ calls

    def _accept(self, block: CallBlock, family: Family | None) -> bool:
        """Begin a group of calls with this block, unless it is a quotation or an example."""
        marked = family is not None
        lead = prose.lead_of(self._answer.recent) if self._answer.spoken and not marked else "neutral"
        if self._is_quoted(block) or lead == "example":
            self._add_text(block.end)
            return True
        self._lead = lead
        self._blocks, self._marked, self._special = [block], marked, family is not None and family.is_special
        self._cursor = block.end - self._at
        self._step = self._behind_call
        return True

    def _is_quoted(self, block: CallBlock) -> bool:
        return self._quoted is not None and self._quoted(block.source)

    def _behind_call(self, final: bool) -> bool:
        """After a call: another call, the end, or prose, which decides whether the calls were made."""
        text, end = self._text, self._at + self._cursor
        if not self._marked and (not self._answer.spoken or self._lead == "intent"):
            end = after(_TOO_MANY, text, end)
        place = after(NOISE, text, end)
        ahead = text[place : place + LONGEST_LITERAL]
        if not final and (not ahead or ahead.lower() in BEGINNINGS):
            return False
        full = sum(len(block.calls) for block in self._blocks) >= MAX_CALLS
        block = self._next(place, final) if ahead and not full else False
        if block is None:
            return False
        if block and block.calls and not self._is_quoted(block):
            self._blocks.append(block)
            self._cursor = block.end - self._at
            return True
        same_line = bool(ahead) and "\n" not in text[end:place]
        if self._marked:
            counts = self._special or not (same_line and self._answer.inline)
        else:
            line = _LINE.match(text, place)
            if not final and (line is None or line.end() == len(text)) and len(text) - place < prose.WINDOW:
                return False
            counts = self._counts(line[0].strip() if line else "", same_line)
        self._cut = bool(ahead)
        return self._accept_group() if counts else self._keep_as_text()

    def _counts(self, behind: str, same_line: bool) -> bool:
        """Whether JSON calls were made and not shown, by the prose before them and by the line behind them."""
        if prose.is_only_punctuation(behind):
            return True
        if prose.is_retracted(behind):
            return False
        if (same_line or self._answer.spoken) and prose.is_continued(behind):
            return False
        if same_line and not self._before_ends_sentence():
            return False
        if not self._answer.spoken and not same_line:
            return True
        return self._lead == "intent" or prose.is_announced(behind)

    def _before_ends_sentence(self) -> bool:
        return not self._answer.inline or prose.ends_sentence(self._answer.recent)

    def _next(self, place: int, final: bool) -> Found:
        """A further call of the same kind."""
        text = self._text
        if self._marked:
            if text.startswith(channels.HARMONY_BEGIN, place):
                header = channels.harmony_header(text, place, final)
                if isinstance(header, channels.HarmonyHeader) and header.to:
                    return channels.harmony_call(text, header, final, self._offered, self._json_reader)
                return None if header is None else False
            opening = next((one for one in OPENINGS if text.startswith(one, place)), None)
            return opening is not None and marked_block(text, place, opening, final, self._offered, self._json_reader)
        if text[place] in "{[":
            return bare_block(text, place, final, self._offered, self._json_reader)
        if text.startswith("```", place):
            line = _FENCE.match(text, place)
            if line is not None:
                return self._fenced(line, final)
            return None if not final and text.find("\n", place) < 0 and len(text) - place < _FENCE_LINE else False
        return False

    def _accept_group(self) -> bool:
        """The calls count; what follows them is invented and dropped."""
        self._calls = [call for block in self._blocks for call in block.calls][:MAX_CALLS]
        self._at += self._cursor
        self._step = self._after_calls
        return True

    def _keep_as_text(self) -> bool:
        """They were examples: plain text, like everything that looks like them later."""
        self._shows_examples = True
        self._add_text(self._at + self._cursor)
        self._step = self._in_text
        return True

    def _after_calls(self, final: bool) -> bool:
        """Drop the text after the calls. Only the end of an untagged thought would cancel them."""
        found = None if self._opened or self._harmony else _STRAY_LINE.search(self._text, self._at)
        if found is not None and (final or found[0].endswith("\n")):
            return self._end_untagged_thought(found)
        line = self._text.rfind("\n", max(self._at, len(self._text) - _FENCE_LINE))
        self._at = len(self._text) if final or line < 0 else found.start() if found else line
        return False


# ------------------------------------------------ where something may begin that is more than text

_QUOTES = "[`\"'\\\\]"  # a tag behind one of these is only mentioned
MAY_INDENT = 80
_LINE_MARKS = tuple(one for one in OPENINGS if one[0].isalpha())
_MARKS = tuple(one for one in OPENINGS if not one[0].isalpha())
KINDS = {
    **dict.fromkeys((one.lower() for one in _MARKS), "mark"),
    **dict.fromkeys((one.lower() for one in _LINE_MARKS), "line_mark"),
    **dict.fromkeys(channels.HARMONY_TOKENS, "harmony"),
    **dict.fromkeys(channels.THOUGHT_TAGS, "thought"),
    **dict.fromkeys(channels.STRAY_ENDS, "stray"),
    **dict.fromkeys((one.lower() for one in (*channels.WRAPPERS, *channels.WRAPPER_TOKENS)), "wrapper"),
    "<tools>": "tools",
}
LINE_TOKENS = frozenset({"tools", "line_mark", "list", "object", "fence"})  # that count only where a line begins


def _tokens(calls: bool) -> re.Pattern[str]:
    """Every alternative begins with a literal character, which keeps the search fast."""
    exact = (
        *channels.HARMONY_TOKENS,
        *channels.WRAPPERS,
        *channels.WRAPPER_TOKENS,
        *((*OPENINGS, "<tools>") if calls else ()),
    )
    literals = [(one, re.escape(one[1:])) for one in exact]
    literals += [(one, f"(?i:{re.escape(one[1:])})") for one in (*channels.THOUGHT_TAGS, *channels.STRAY_ENDS)]
    alternatives = []
    for first in sorted({one[0] for one, _ in literals}):
        tails = "|".join(tail for one, tail in sorted(literals, key=lambda one: -len(one[0])) if one[0] == first)
        begin = re.escape(first)
        alternatives.append(rf"{begin}(?<!{_QUOTES}{begin})(?:{tails})")
    if calls:
        alternatives += [r"\[(?P<list>(?=\s*(?:[{A-Za-z_]|\Z)))", r"\{(?P<object>(?=\{?\s*(?:[\"']|\Z)))"]
    return re.compile("|".join((*alternatives, "`(?P<fence>`{2,})")))


ALL_TOKENS = _tokens(True)
THOUGHT_TOKENS = _tokens(False)


def _beginnings(literals: Iterable[str]) -> frozenset[str]:
    return frozenset(one[:size].lower() for one in literals for size in range(1, len(one)))


LONGEST_LITERAL = max(map(len, (*KINDS, *NOISES)))
BEGINNINGS = _beginnings((*KINDS, *NOISES, "```"))
_TEXT_BEGINNINGS = _beginnings((*(one for one in KINDS if KINDS[one] != "line_mark"), *NOISES, "```"))
_THOUGHT_BEGINNINGS = _beginnings((*channels.THOUGHT_TAGS.values(), *channels.HARMONY_TOKENS))
_LINE_BEGINNINGS = frozenset(one[:size] for one in _LINE_MARKS for size in range(1, len(one)))


def held_from(text: str, at: int, inline: bool = False, *, thought: bool = False) -> int:
    """Where a tag may begin at the end of a text that is still arriving; the text's end if nowhere."""
    beginnings = _THOUGHT_BEGINNINGS if thought else _TEXT_BEGINNINGS
    for place in range(max(at, len(text) - LONGEST_LITERAL), len(text)):
        tail = text[place:]
        if tail.lower() in beginnings:
            return place
        if not thought and tail in _LINE_BEGINNINGS and begins_line(text, place, at, inline):
            return place
    return len(text)


def begins_line(text: str, place: int, at: int, inline: bool) -> bool:
    """Whether only white space precedes this place on its line; `inline` says so for the text before `at`."""
    line = text.rfind("\n", max(at, place - MAY_INDENT - 1), place)
    if line >= 0:
        return line + 1 == place or text[line + 1 : place].isspace()
    return place - at <= MAY_INDENT and not inline and (place == at or text[at:place].isspace())


# -------------------------------------------------------------- what was said and what was thought


class AnswerText:
    """Collects an answer in order: its text, its reasoning, and what is to be shown of them."""

    def __init__(self) -> None:
        self.spoken = False  # there is text other than white space
        self.inline = False  # there is text on the current line
        self.recent = ""  # the end of the text
        self._pieces: list[TextPart] = []  # to be shown
        self._said: list[str] = []
        self._thoughts: list[str] = []  # complete ones
        self._thinking: list[str] | None = None  # the open one
        self._tag = ""  # that opened it

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

    def begin_thought(self, tag: str = "") -> None:
        self._thinking, self._tag = [], tag

    def think(self, text: str) -> None:
        if text and self._thinking is not None:
            self._thinking.append(text)
            self._pieces.append(TextPart(text, True))

    def end_thought(self) -> None:
        self._thoughts.append("".join(self._thinking or ()))
        self._thinking = None

    def unfinished(self) -> str:
        """The thought that a tag opened and nothing ended."""
        return "".join(self._thinking) if self._thinking and self._tag else ""

    def shorten(self, thought: str) -> None:
        """Replace the open thought and end it."""
        self._thinking = [thought]
        self.end_thought()

    def all_was_thought(self) -> None:
        """All text so far was a thought that no tag opened."""
        self._thoughts.append("".join(self._said))
        self._said, self.spoken, self.inline, self.recent = [], False, False, ""

    def take(self) -> list[TextPart]:
        """What is to be shown since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def whole(self, calls: list[ToolCallRequest]) -> Reading:
        """The reading of the complete answer."""
        if self._thinking is not None and self.spoken and self._tag:
            # Never ended, and text precedes it: the tag was only mentioned.
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

"""Find where calls begin and end in a text that is still arriving.

A `CallFinder` decides about one place in the text: it returns a `CallBlock`, or None for "no call", and raises
`MoreText` if the decision needs more text. More text never changes a decision, so a text reads the same however it is
split.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..base import ToolCallRequest
from . import dialects
from .bodies import NAMED_JSON, PYTHON_LIST, read_body, read_python, sniff_name, with_arguments
from .calls import ARGUMENTS, CUT_OFF, KEYS, MAX_CALLS, NAMES, CallBlock, OfferedTools, WrittenCall, calls_of
from .json_values import BETWEEN, MAX_VALUE, STRUCTURE, JsonReader, after, is_cut_off, stop_pattern, value_end

_OPENING = re.compile("|".join(map(re.escape, dialects.OPENINGS)))
_INNER = re.compile("|".join(map(re.escape, dialects.INNER)))
_BODY_NAME = re.compile(r"(?:call:\s*)?[\w.:-]{1,120}")

# Small Qwen models double the braces, as the source of their template does.
_KEY = re.compile(r"\[?\s*\{\{?\s*([\"'])(\w{1,24})\1\s*:\s*")
_KEY_MAY = re.compile(r"\[?\s*(?:\{\{?\s*(?:[\"'](?:\w{0,24}(?:[\"']\s*)?)?)?)?\Z")
_NAME = re.compile(r"([\"'])([^\"'\n]{1,160})\1")
_NAME_MAY = re.compile(r"(?:[\"'][^\"'\n]{0,160})?\Z")
_CALL_MAY = re.compile(r"\[\s*(?:[A-Za-z_][\w.]{0,160}\s*)?\Z")

_CALL_LANGUAGES = frozenset({"", "json", "jsonc", "json5", "xml", "text", "plaintext"})
_PYTHON_LANGUAGES = frozenset({"tool_code", "tool_call", "tool_calls", "function_call"})
_PYTHON_BEGINS = re.compile(r"\s*(?:\w{1,60}\s*=\s*)?(?:print\(\s*)?([A-Za-z_][\w.]{0,120})\(")
_PYTHON_MAY_BEGIN = re.compile(r"\s*(?:\w{1,60}\s*|(?:\w{1,60}\s*=\s*)?(?:print\(?\s*)?[\w.]{0,120})\Z")
MAX_LINE = 200  # characters of the first line of a fence
_FENCE = re.compile(r"(`{3,})[ \t]*([\w+-]*)[ \t]*\r?\n")
_FENCE_END = re.compile(r"^[ \t]*`{3,}[ \t\r]*$", re.M)
_FENCE_CLOSE = re.compile(r"`{3,}[ \t\r]*$", re.M)  # also right after the last bracket, as Command R writes it
_FENCE_STOP = stop_pattern(r"(?<=\n)[ \t]*`{3,}[ \t\r]*(?=\n)")
_FENCE_STOP_LAST = stop_pattern(r"(?<=\n)[ \t]*`{3,}[ \t\r]*(?=\n|\Z)")
_TOOLS_END = re.compile(r"</tools>")

_LOOKAHEAD = 48  # characters; no closing mark is longer
_BETWEEN_MARKED = re.compile(r"[}\]]*[\s,;]*")  # small models close more brackets than they opened
_SPACE = re.compile(r"\s*")

_HEADER = 240  # maximum characters of a Harmony header
_TO = re.compile(r"\bto=([\w.:-]{1,160})")
_TAGS = "<atem:"  # Muse writes calls as tags in a message to a tool


class MoreText(Exception):
    """The decision about this place needs more text."""


@dataclass(slots=True, frozen=True)
class Message:
    """A Harmony message: where its content starts, and what it is, if not an answer."""

    start: int
    is_thought: bool
    call: CallBlock | None


class CallFinder:
    """Finds calls in the part of an answer that has arrived and is still undecided."""

    def __init__(self, tools: Sequence[dict[str, Any]] | None) -> None:
        self.offered = OfferedTools(tools)
        self.text = ""
        self.final = False  # the answer is complete
        self._json_reader = JsonReader()

    def wait_if(self, uncertain: object) -> None:
        """Raise MoreText unless the answer is complete."""
        if uncertain and not self.final:
            raise MoreText

    def _ahead(self, at: int) -> str:
        return self.text[at : at + _LOOKAHEAD]

    def marked(self, at: int) -> CallBlock | None:
        """Return the calls after a mark at this place."""
        opening = _OPENING.match(self.text, at)
        if opening is None:
            self.wait_if(self._ahead(at).lower() in dialects.BEGINNINGS)
            return None
        family = dialects.BY_OPENING[opening[0]]
        first = after(_SPACE, self.text, opening.end() - len(family.body))
        if not self._begins_call(first, family):
            return None
        named = NAMED_JSON.match(self.text, first)
        stop, last, complete = self._extent(named.end() if named else first, dialects.ENDS[opening[0]])
        body = self.text[first:stop]
        written = read_body(body, self._json_reader, complete, exact=family.exact)
        return CallBlock(last, [self.offered.request(call) for call in written], body)

    def _begins_call(self, place: int, family: dialects.Family) -> bool:
        """Return whether a mark is followed by a call, and not merely mentioned in prose."""
        text = self.text
        self.wait_if(place >= len(text))
        if not family.argument:
            if inner := _INNER.match(text, place):
                self.wait_if(len(text) < inner.end() + 2)
                return inner[0][-1] != "=" or text[inner.end() : inner.end() + 2].lstrip("\"'")[:1].isidentifier()
            self.wait_if(self._ahead(place) in dialects.INNER_BEGINNINGS)
        name = _BODY_NAME.match(text, place)
        if name is None:
            return False
        rest = after(_SPACE, text, name.end())
        if not family.argument:
            if text.startswith(dialects.AFTER_NAME, rest):
                return True
            self.wait_if(self._ahead(rest) in dialects.AFTER_NAME_BEGINNINGS)
            return name[0] in self.offered and (rest >= len(text) or text.startswith(dialects.CLOSERS, rest))
        self.wait_if(rest >= len(text))
        if name[0] not in self.offered or "\n" not in text[name.end() : rest]:  # on the line after the name
            return False
        self.wait_if(family.argument.startswith(self._ahead(rest)))
        return text.startswith(family.argument, rest)

    def _extent(self, at: int, end: re.Pattern[str]) -> tuple[int, int, bool]:
        """Return where a body stops, where its block ends, and whether a mark ended it.

        The body consists of JSON values, or else of everything up to the mark.
        """
        text, place = self.text, at
        is_json = text[at : at + 1] in ("{", "[")
        while is_json and (closed := value_end(text, place, stop_pattern(end.pattern))):
            stop, whole = closed
            if not whole:
                return stop, after(end, text, stop), True
            place = after(_BETWEEN_MARKED, text, stop)
            ahead = self._ahead(place)
            self.wait_if(len(ahead) < _LOOKAHEAD and (not ahead or ahead[0] in "<[("))
            if found := end.match(text, place):
                return stop, found.end(), True
            if not ahead or ahead[0] not in "{[" or ahead.startswith("[TOOL_"):
                return stop, stop, True
        self.wait_if(is_json and len(text) - place < MAX_VALUE)  # an unbalanced quote: the first mark ends it
        if found := end.search(text, place, place + MAX_VALUE):
            return found.start(), found.end(), True
        self.wait_if(len(text) - place < MAX_VALUE)
        last = min(len(text), place + MAX_VALUE)
        return last, last, False

    def message(self, at: int) -> Message | None:
        """Return the message whose header begins here."""
        words, token, _ = self.text[at : at + _HEADER].partition("<|message|>")
        if not token:
            self.wait_if(len(words) < _HEADER)
            return None
        start = at + len(words) + len(token)
        to = found[1] if (found := _TO.search(words)) else ""
        body = self.text[start : start + 40].lstrip()[: len(_TAGS)]
        self.wait_if(to and body != _TAGS and _TAGS.startswith(body))
        is_call = to not in ("", "user", "self", "all")
        is_thought = "analysis" in words or to == "self" or is_call
        return Message(start, is_thought, self._message_call(to, start) if is_call and self.offered else None)

    def _message_call(self, name: str, at: int) -> CallBlock | None:
        first = after(_SPACE, self.text, at)
        if self.text.startswith(_TAGS, first):
            return self.marked(first)
        stop, end, complete = self._extent(first, dialects.HARMONY_END)
        source = self.text[at:stop]
        written = with_arguments(name, source, self._json_reader, complete)
        return CallBlock(end, [self.offered.request(written)], source)

    def may_be_call(self, at: int) -> bool:
        """Return whether the bracket here may open a call, judging by its first key."""
        text = self.text
        if key := _KEY.match(text, at):
            if key[2] not in NAMES:
                return key[2] in KEYS
            if name := _NAME.match(text, key.end()):
                return name[2] in self.offered
            self.wait_if(_NAME_MAY.match(text, key.end()))
            return text[key.end() : key.end() + 1] in ("{", "[")
        if call := PYTHON_LIST.match(text, at):
            return self._is_offered(call[1])
        self.wait_if(_KEY_MAY.match(text, at) or _CALL_MAY.match(text, at))
        return False

    def _is_offered(self, name: str) -> bool:
        """Return whether a Python call has the name of a tool, or the form `name.call(…)`."""
        return name in self.offered or name.rpartition(".")[0] in self.offered

    def bare(self, at: int, structure: re.Pattern[str] = STRUCTURE) -> CallBlock | None:
        """Return the calls in the object or list at this place; a block without calls is data."""
        if not self.may_be_call(at):
            return None
        if found := value_end(self.text, at, structure):
            source = self.text[at : found[0]]
            return CallBlock(found[0], self._calls(source), source)
        self.wait_if(len(self.text) - at < MAX_VALUE)
        end = min(len(self.text), at + MAX_VALUE)
        source = self.text[at:end].rstrip()
        return CallBlock(end, self._cut_off(source), source)

    def _cut_off(self, source: str) -> list[ToolCallRequest]:
        """Return the call in a truncated object; if it was meant for an offered tool, a call with an error."""
        if not is_cut_off(source):  # only the last bracket is missing
            return self._calls(source)
        name = sniff_name(source)
        if name not in self.offered or not any(f'"{key}"' in source[:4096] for key in ARGUMENTS):
            return []
        return [self.offered.request(WrittenCall(name, problem=CUT_OFF))]

    def _calls(self, source: str) -> list[ToolCallRequest]:
        if PYTHON_LIST.match(source):
            return self._fitting(read_python(source))
        try:
            return self._fitting(calls_of(self._json_reader.read(source), self._json_reader, strict=True))
        except RecursionError:
            return []

    def _fitting(self, written: list[WrittenCall] | None) -> list[ToolCallRequest]:
        """Return all of them as calls, or none: a list with an item that is not a call is data."""
        calls = [self.offered.fitting_request(call) for call in (written or ())[:MAX_CALLS]]
        return [call for call in calls if call is not None] if None not in calls else []

    def fence(self, at: int) -> re.Match[str] | None:
        """Match the first line of a fence that begins here."""
        line = _FENCE.match(self.text, at)
        self.wait_if(line is None and "\n" not in (rest := self.text[at : at + MAX_LINE]) and len(rest) < MAX_LINE)
        return line

    def fenced(self, fence: re.Match[str]) -> CallBlock | None:
        """Return the calls in a fence, whose language must allow them."""
        language, inside = fence[2].lower(), fence.end()
        if language in _PYTHON_LANGUAGES and self.text[inside : inside + 1] not in ("{", "[", "<"):
            return self._python(inside)
        if language not in _CALL_LANGUAGES and language not in _PYTHON_LANGUAGES:
            return None
        return self._listed(inside, _FENCE_STOP_LAST if self.final else _FENCE_STOP, _FENCE_CLOSE)

    def tools(self, at: int) -> CallBlock | None:
        """Return the calls after <tools>, as small Qwen models write them."""
        return self._listed(at, stop_pattern(_TOOLS_END.pattern), _TOOLS_END)

    def _listed(self, at: int, structure: re.Pattern[str], ending: re.Pattern[str]) -> CallBlock | None:
        """Return the calls that begin here, if nothing else precedes the ending or the end of the answer."""
        text, calls = self.text, list[ToolCallRequest]()
        place = first = after(_SPACE, text, at)
        while text[place : place + 1] in ("{", "[", "<") and not text.startswith("</", place):
            block = self.marked(place) if text[place] == "<" else self.bare(place, structure)
            if block is None or not block.calls or len(calls) > MAX_CALLS:
                return None
            calls += block.calls
            place = after(BETWEEN, text, block.end)
        closed = ending.match(text, place)
        self.wait_if(place >= len(text) or (calls and (closed.end() if closed else place + 8) >= len(text)))
        if not calls or (closed is None and place < len(text)):
            return None
        return CallBlock(closed.end() if closed else place, calls, text[first:place])

    def _python(self, at: int) -> CallBlock | None:
        """Return the calls, written in Python, in a fence whose language announces calls."""
        head = _PYTHON_BEGINS.match(self.text, at)
        if head is None:
            self.wait_if(len(self.text) - at < 240 and _PYTHON_MAY_BEGIN.match(self.text, at))
            return None
        if not self._is_offered(head[1]) and head[1] != "print":
            return None
        found = _FENCE_END.search(self.text, at)
        self.wait_if(found is None or found.end() == len(self.text))
        stop, end = found.span() if found else (len(self.text), len(self.text))
        source = self.text[at:stop]
        calls = self._fitting(read_python(source))
        return CallBlock(end, calls, source) if calls else None

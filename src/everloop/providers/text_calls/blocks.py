"""Where calls begin and end in a text that is still arriving.

Each function answers for one place in the text: a `CallBlock`, False for "no call", or None for "more text will tell".
A block without calls is a stretch of data in which none need be looked for. More text never changes an answer that was
given once: that is why a text reads the same however it is split.
"""

from __future__ import annotations

import re
from typing import Literal

from ..base import ToolCallRequest
from . import dialects
from .calls import ARGUMENTS, CUT_OFF, KEYS, MAX_CALLS, NAMES, CallBlock, OfferedTools, WrittenCall, calls_of
from .json_values import BROKEN, LONGEST, JsonReader, open_brackets, stop_pattern, value_end

_LOOKAHEAD = 48  # no closing mark is longer

Found = CallBlock | Literal[False] | None

_BETWEEN = re.compile(r"[\s,;]*")
_BETWEEN_MARKED = re.compile(r"[}\]]*[\s,;]*")  # small models close more brackets than they opened
FENCE_END = re.compile(r"^[ \t]*`{3,}[ \t\r]*$", re.M)
_FENCE_CLOSE = re.compile(r"`{3,}[ \t\r]*$", re.M)  # also behind the last bracket, as Command R writes it
_FENCE_STOP = stop_pattern(r"(?<=\n)[ \t]*`{3,}[ \t\r]*(?=\n)")
_FENCE_STOP_LAST = stop_pattern(r"(?<=\n)[ \t]*`{3,}[ \t\r]*(?=\n|\Z)")
_TOOLS_END = re.compile(r"</tools>")
_TOOLS_STOP = stop_pattern(r"</tools>")


# ---------------------------------------------------------------------------------------------- calls that are marked


def marked_block(
    text: str, at: int, opening: str, final: bool, offered: OfferedTools, json_reader: JsonReader
) -> Found:
    """The calls after a mark at this place."""
    family = dialects.BY_OPENING[opening]
    start = at + len(opening) - len(family.body)
    begins = dialects.begins_call(text, start, family, final, offered)
    if not begins:
        return begins
    first = dialects.after(_SPACE, text, start)
    named = dialects.NAMED_JSON.match(text, first)
    values = named.end() if named else first
    extent = _json_extent if text[values : values + 1] in ("{", "[") else _tagged_extent
    found = extent(text, values, dialects.ENDS[opening], final)
    if found is None:
        return None
    stop, end, complete = found
    written = dialects.read_body(text[first:stop], json_reader, complete, exact=opening == "<seed:tool_call>")
    return CallBlock(end, [offered.request(call) for call in written[:MAX_CALLS]], text[first:stop])


_SPACE = re.compile(r"\s*")
Extent = tuple[int, int, bool]  # where the body stops, where the block ends, whether a mark ended it


def _json_extent(text: str, at: int, end: re.Pattern[str], final: bool) -> Extent | None:
    """One or more JSON values, then perhaps the mark that ends them."""
    ending = stop_pattern(end.pattern)
    place = at
    while True:
        closed = value_end(text, place, ending)
        if closed is None:
            if not final and len(text) - place < LONGEST:
                return None
            found = end.search(text, place)  # an unbalanced quote: the first mark ends it
            last = min(len(text), place + LONGEST)
            return (found.start(), found.end(), True) if found else (last, last, False)
        stop, whole = closed
        if not whole:
            return stop, dialects.after(end, text, stop), True
        place = dialects.after(_BETWEEN_MARKED, text, stop)
        ahead = text[place : place + _LOOKAHEAD]
        if not final and len(ahead) < _LOOKAHEAD and (not ahead or ahead[0] in "<[("):
            return None
        if found := end.match(text, place):
            return stop, found.end(), True
        if not ahead or ahead[0] not in "{[" or ahead.startswith("[TOOL_"):
            return stop, stop, True


def _tagged_extent(text: str, at: int, end: re.Pattern[str], final: bool) -> Extent | None:
    last = at + LONGEST
    if (found := end.search(text, at, last)) is not None:
        return found.start(), found.end(), True
    if len(text) >= last:
        return last, last, False
    return (len(text), len(text), False) if final else None


# ---------------------------------------------------------------------------------------------- calls in plain JSON

# Small models of Qwen's double the braces, as their template's source does.
_KEY = re.compile(r"\[?\s*\{\{?\s*([\"'])(\w{1,24})\1\s*:\s*")
_KEY_MAY = re.compile(r"\[?\s*(?:\{\{?\s*(?:[\"'](?:\w{0,24}(?:[\"']\s*)?)?)?)?\Z")
_NAME = re.compile(r"([\"'])([^\"'\n]{1,160})\1")
_NAME_MAY = re.compile(r"(?:[\"'][^\"'\n]{0,160})?\Z")
_CALL = re.compile(r"\[\s*([A-Za-z_][\w.]{0,160})\s*\(")
_CALL_MAY = re.compile(r"\[\s*(?:[A-Za-z_][\w.]{0,160}\s*)?\Z")
_BRACKETS = tuple(opening for opening in (*dialects.OPENINGS, "[THINK]") if opening[0] == "[")


def may_be_call(text: str, at: int, final: bool, offered: OfferedTools) -> bool | None:
    """Whether the bracket here may open a call, by its first key; None while more text is needed."""
    if key := _KEY.match(text, at):
        if key[2] not in KEYS:
            return False
        if key[2] not in NAMES:
            return True
        if name := _NAME.match(text, key.end()):
            return name[2] in offered
        if text[key.end() : key.end() + 1] in ("{", "["):
            return True
        return None if not final and _NAME_MAY.match(text, key.end()) else False
    if call := _CALL.match(text, at):
        return call[1] in offered or call[1].rpartition(".")[0] in offered
    if final:
        return False
    head = text[at : at + 16]
    if any(opening.startswith(head) for opening in _BRACKETS):
        return None
    return None if _KEY_MAY.match(text, at) or _CALL_MAY.match(text, at) else False


def bare_block(text: str, at: int, final: bool, offered: OfferedTools, json_reader: JsonReader) -> Found:
    """The call or calls of the object or list at this place."""
    may = may_be_call(text, at, final, offered)
    if not may:
        return may
    found = value_end(text, at)
    if found is None:
        return _cut_off(text, at, offered, final)
    source = text[at : found[0]]
    return CallBlock(found[0], _calls(source, offered, json_reader), source)


def fenced_block(
    text: str, at: int, final: bool, offered: OfferedTools, json_reader: JsonReader, *, tools: bool = False
) -> Found:
    """The calls of a fence (or of <tools>) whose content begins here; it may hold nothing else."""
    place = first = dialects.after(_SPACE, text, at)
    if place >= len(text):
        return False if final else None
    stopping = _TOOLS_STOP if tools else _FENCE_STOP_LAST if final else _FENCE_STOP
    calls: list[ToolCallRequest] = []
    while text[place : place + 1] in ("{", "[", "<") and not text.startswith("</", place):
        if text[place] == "<":
            block = _own_marks(text, place, final, offered, json_reader)
        elif not (may := may_be_call(text, place, final, offered)):
            return may
        elif (found := value_end(text, place, stopping)) is None:
            return _cut_off(text, place, offered, final)
        else:
            block = CallBlock(found[0], _calls(text[place : found[0]], offered, json_reader), "")
        if not block:
            return block
        if not block.calls or len(calls) > MAX_CALLS:
            return False
        calls += block.calls
        place = dialects.after(_BETWEEN, text, block.end)
        if not final and place >= len(text):
            return None
    end = _fence_end(text, place, _TOOLS_END if tools else _FENCE_CLOSE, final)
    if not calls or not end:
        return None if calls and end is None else False
    return CallBlock(end, calls, text[first:place])


def _own_marks(text: str, place: int, final: bool, offered: OfferedTools, json_reader: JsonReader) -> Found:
    """Calls inside a fence that have their own marks."""
    opening = next((one for one in dialects.OPENINGS if text.startswith(one, place)), None)
    if opening is not None:
        return marked_block(text, place, opening, final, offered, json_reader)
    return None if not final and any(one.startswith(text[place : place + 40]) for one in dialects.OPENINGS) else False


def python_block(text: str, at: int, final: bool, offered: OfferedTools) -> Found:
    """The calls, written as Python, of a fence whose language announces calls."""
    head = dialects.PYTHON_BEGINS.match(text, at)
    if head is None:
        return None if not final and len(text) - at < 240 and dialects.PYTHON_MAY_BEGIN.match(text, at) else False
    if head[1] not in offered and head[1].rpartition(".")[0] not in offered and head[1] != "print":
        return False
    found = FENCE_END.search(text, at)
    if found is None or (not final and found.end() == len(text)):
        if not final:
            return None
        end = stop = len(text)
    else:
        stop, end = found.start(), found.end()
    calls = _taken(dialects.read_python(text[at:stop]), offered)
    return CallBlock(end, calls, text[at:stop]) if calls else False


def _fence_end(text: str, place: int, ending: re.Pattern[str], final: bool) -> int | Literal[False] | None:
    """Where the fence that must close here ends; the end of the answer closes it too."""
    found = ending.match(text, place)
    if found is not None:
        return None if not final and found.end() == len(text) and ending is _FENCE_CLOSE else found.end()
    if place >= len(text):
        return place if final else None
    if final or len(text) - place >= 8:
        return False
    return None if text[place] in "`<" else False


def _cut_off(text: str, at: int, offered: OfferedTools, final: bool) -> Found:
    """An object that is cut off: a call with an error if it was meant for an offered tool."""
    if not final and len(text) - at < LONGEST:
        return None
    end = min(len(text), at + LONGEST)
    source = text[at:end].rstrip()
    depth, open_string = open_brackets(source)
    if depth == 1 and not open_string and source.endswith("}"):  # only the last bracket is missing
        return CallBlock(end, _calls(source, offered, JsonReader()), source)
    name = dialects.sniff_name(source)
    if name not in offered or not any(f'"{key}"' in source[:4096] for key in ARGUMENTS):
        return CallBlock(end, [], source)
    return CallBlock(end, [offered.request(WrittenCall(name, problem=CUT_OFF))], source)


def _calls(source: str, offered: OfferedTools, json_reader: JsonReader) -> list[ToolCallRequest]:
    if _CALL.match(source):
        return _taken(dialects.read_python(source), offered)
    try:
        value = json_reader.read(source)
        return _taken(None if value is BROKEN else calls_of(value, json_reader, strict=True), offered)
    except RecursionError:
        return []


def _taken(written: list[WrittenCall] | None, offered: OfferedTools) -> list[ToolCallRequest]:
    """All of them as calls, or none: a list with one item that is not a call is data."""
    calls = [offered.fitting_request(call) for call in (written or ())[:MAX_CALLS]]
    return [call for call in calls if call is not None] if None not in calls else []

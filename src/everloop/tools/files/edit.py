"""The replacement of `edit_file`: find the old text in a file's text, and put the new one in its place.

The old text is searched in tiers: exactly; ignoring trailing spaces; ignoring indentation; with look-alike quotes,
dashes and spaces. A tier must find it exactly once. Text that is merely similar is never changed.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ..base import ToolError

_MAX_COMPARED = 5_000  # lines that are compared by similarity, which is slow
_MAX_LINE_LENGTH = 400
_MAX_SHOWN = 12
_MAX_MATCHES = 50  # matches to look for when only one is wanted
_ALIKE = str.maketrans(
    dict.fromkeys("‘’‚‛′ʼ", "'")
    | dict.fromkeys("“”„‟″", '"')
    | dict.fromkeys("‐‑‒–—―−", "-")
    | dict.fromkeys(
        "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "
    )
)


class Span(msgspec.Struct, frozen=True):
    """A part of a text and its replacement."""

    start: int
    end: int
    new: str


class Edited(msgspec.Struct, frozen=True):
    """The result of an edit."""

    text: str
    lines: list[int]  # line numbers of the changes, in the old text
    ignored: str  # the difference that was ignored to find the old text


def replace_text(text: str, old: str, new: str, everywhere: bool = False, newline: str = "\n") -> Edited:
    """Replace `old` by `new` in a text. Raises a helpful ToolError if `old` occurs nowhere or more than once."""
    plain, old, new = (each.replace("\r\n", "\n") for each in (text, old, new))
    if not old:
        raise ToolError("old_text is empty: give the text to replace, or write the whole file with write_file.")
    if old == new:
        raise ToolError("old_text and new_text are the same: there is nothing to change.")
    ignored, spans = _first_tier(plain, old, new, everywhere)
    if not spans:
        raise ToolError(f"old_text is not in the file. {_closest_text(plain, old)}")
    lines = _line_numbers(plain, spans)
    if len(spans) > 1 and not everywhere:
        numbers = ", ".join(map(str, lines[:10])) + (", …" if len(lines) > 10 else "")
        more = "Add surrounding lines to make it unique, or set replace_all."
        raise ToolError(f"old_text occurs more than once, at lines {numbers}. {more}")
    return Edited(_applied(text, spans, newline), lines, ignored)


def _first_tier(text: str, old: str, new: str, everywhere: bool) -> tuple[str, list[Span]]:
    for apart_from, find in _TIERS:
        if spans := find(text, old, new, everywhere):
            return apart_from, spans
    return "", []


def _line_numbers(text: str, spans: list[Span]) -> list[int]:
    numbers, number, end = [], 1, 0
    for span in spans:
        number, end = number + text.count("\n", end, span.start), span.start
        numbers.append(number)
    return numbers


def _applied(text: str, spans: list[Span], newline: str) -> str:
    """Apply spans to a text; their positions count "\\r\\n" as one character."""
    doubled = [found.start() - index for index, found in enumerate(re.finditer("\r\n", text))]
    parts, end = [], 0
    for span in spans:
        parts += [text[end : span.start + bisect_left(doubled, span.start)], span.new.replace("\n", newline)]
        end = span.end + bisect_left(doubled, span.end)
    return "".join([*parts, text[end:]])


def _positions(text: str, old: str, everywhere: bool, shared: int = 0) -> Iterator[int]:
    """Yield the positions of `old`: non-overlapping ones for `everywhere`, otherwise the first ones."""
    at, count = text.find(old), 0
    while at >= 0 and (everywhere or count < _MAX_MATCHES):
        yield at
        at, count = text.find(old, at + (len(old) - shared if everywhere else 1)), count + 1


def _exactly(text: str, old: str, new: str, everywhere: bool) -> list[Span]:
    return [Span(at, at + len(old), new) for at in _positions(text, old, everywhere)]


def _alike(text: str, old: str, new: str, everywhere: bool) -> list[Span]:
    """Find text that looks the same. The part that old and new have in common keeps the file's characters."""
    if old.isascii() and text.isascii():
        return []
    plain = "\n".join(line if line.isascii() else line.translate(_ALIKE) for line in text.split("\n"))
    head, tail = _in_common(old, new)
    found = _positions(plain, old.translate(_ALIKE), everywhere)
    return [Span(at + head, at + len(old) - tail, new[head : len(new) - tail]) for at in found]


def _in_common(one: Sequence[str], other: Sequence[str]) -> tuple[int, int]:
    """Return the lengths of the common prefix and, after it, the common suffix of two sequences."""
    most, head, tail = min(len(one), len(other)), 0, 0
    while head < most and one[head] == other[head]:
        head += 1
    while tail < most - head and one[-1 - tail] == other[-1 - tail]:
        tail += 1
    return head, tail


Adapt = Callable[[list[str], list[str], list[str]], list[str] | None]


def _by_lines(strip: Callable[[str], str], adapt: Adapt) -> Callable[[str, str, str, bool], list[Span]]:
    """Return a tier that compares lines after `strip`; `adapt` fits the new lines to those in the file."""

    def find(text: str, old: str, new: str, everywhere: bool) -> list[Span]:
        if not old.strip():
            return []
        whole = old.endswith("\n") and not new.endswith("\n")  # the final newline is replaced as well
        if old.endswith("\n"):
            old, new = old[:-1], new.removesuffix("\n")
        lines, old_lines, new_lines = text.split("\n"), old.split("\n"), new.split("\n")
        heap, needle = ("\n".join(["", *map(strip, each), ""]) for each in (lines, old_lines))
        starts = _starts(lines)
        spans, line, counted = [], 0, 0
        for at in _positions(heap, needle, everywhere, shared=1):
            line, counted = line + heap.count("\n", counted, at), at
            there = lines[line : line + len(old_lines)]
            adapted = adapt(there, old_lines, new_lines)
            if adapted is not None:
                end = min(starts[line + len(there)] - (not whole), len(text))
                spans.append(Span(starts[line], end, "\n".join(adapted)))
        return spans

    return find


def _starts(lines: list[str]) -> list[int]:
    """Return the start positions of all lines, and of the one after the last."""
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _as_it_is(there: list[str], old: list[str], new: list[str]) -> list[str]:
    """Return the new lines. Unchanged lines at either end stay as they are in the file."""
    head, tail = _in_common(old, new)
    return [*there[:head], *new[head : len(new) - tail], *there[len(there) - tail :]]


def _indented(there: list[str], old: list[str], new: list[str]) -> list[str] | None:
    """Return the new lines with the file's indentation, if the old lines determine it; otherwise None."""
    pairs = {(_indent(mine), _indent(its)) for mine, its in zip(old, there, strict=True) if mine.strip()}
    known = dict(pairs)
    widths = [len(its) for _, its in sorted(pairs, key=lambda pair: len(pair[0]))]
    if len(known) != len(pairs) or widths != sorted(set(widths)):  # the nesting of the two differs
        return None
    added = {its.removesuffix(mine) if its.endswith(mine) else None for mine, its in pairs}
    taken = {mine.removesuffix(its) if mine.endswith(its) else None for mine, its in pairs}
    more = added.pop() if len(added) == 1 else None
    less = taken.pop() if len(taken) == 1 else None
    head, tail = _in_common(old, new)
    result = there[:head]
    for line in new[head : len(new) - tail]:
        indent = _indent(line)
        if not line.strip():
            result.append(line)
        elif indent in known:
            result.append(known[indent] + line[len(indent) :])
        elif more is not None:
            result.append(more + line)
        elif less is not None and indent.startswith(less):
            result.append(line[len(less) :])
        else:
            return None
    return result + there[len(there) - tail :]


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _closest_text(text: str, wanted: str) -> str:
    """Show the most similar lines with their numbers, or say that there are none."""
    lines, wanted_lines = text.split("\n"), wanted.strip("\n").split("\n")
    start = _closest_line(lines, wanted_lines)
    if start is None:
        return "Nothing in it is similar: read the file again."
    end = min(start + len(wanted_lines), len(lines))
    shown = [
        f"{number + 1:>6}\t{lines[number][:_MAX_LINE_LENGTH]}" for number in range(start, min(end, start + _MAX_SHOWN))
    ]
    where = f"line {start + 1}" if end == start + 1 else f"lines {start + 1} to {end}"
    return "\n".join([f"The closest text is at {where}:", *shown])


def _closest_line(lines: list[str], wanted: list[str]) -> int | None:
    """Return where the most similar lines begin: candidates by the longest wanted line, ranked by all lines."""
    anchor = max(range(len(wanted)), key=lambda index: len(wanted[index].strip()))
    places: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        places.setdefault(line.strip()[:_MAX_LINE_LENGTH], []).append(number)
    sought = wanted[anchor].strip()[:_MAX_LINE_LENGTH]
    if not sought:
        return None
    similar = [sought] if sought in places else []
    if not similar:
        similar = difflib.get_close_matches(sought, list(places)[:_MAX_COMPARED], 3, 0.6)
    starts = [max(number - anchor, 0) for line in similar for number in places[line][:5]]
    whole = "\n".join(wanted)[: _MAX_LINE_LENGTH * 5]

    def likeness(start: int) -> float:
        part = "\n".join(lines[start : start + len(wanted)])[: _MAX_LINE_LENGTH * 5]
        return difflib.SequenceMatcher(None, part, whole, autojunk=False).quick_ratio()

    return max(starts, key=likeness, default=None)


_TIERS: tuple[tuple[str, Callable[[str, str, str, bool], list[Span]]], ...] = (
    ("", _exactly),
    ("spaces at the ends of lines", _by_lines(str.rstrip, _as_it_is)),
    ("indentation", _by_lines(str.strip, _indented)),
    ("look-alikes of quotes, dashes or spaces", _alike),
)

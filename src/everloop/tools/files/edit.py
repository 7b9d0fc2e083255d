"""Edit a file by saying which text is to become which.

A text is looked for exactly; then with other spaces at the ends of lines; then with other indentation; then with
look-alikes of quotes, dashes and spaces. Each tier must find it exactly once. Nothing that is only similar is changed.
"""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from ...sandbox.reach import READ
from ...text import clean
from ...threads import in_thread
from ..base import Tool, ToolError
from ..context import current_call
from ..trust import mark_written
from .closest import closest
from .paths import (
    Seen,
    alone,
    changed_meanwhile,
    check_kind,
    explained,
    opened_target,
    path_tool,
    reach,
    replace,
    state_of,
)
from .texts import BINARY_HEAD, form_of, is_binary

MAX_EDIT_BYTES = 8 * 1024 * 1024
_MOST = 50  # places that are looked for when only one is wanted
_ALIKE = str.maketrans(
    dict.fromkeys("‘’‚‛′ʼ", "'")
    | dict.fromkeys("“”„‟″", '"')
    | dict.fromkeys("‐‑‒–—―−", "-")
    | dict.fromkeys(
        "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "
    )
)


@dataclass(slots=True, frozen=True)
class Span:
    """A part of a text and what is to stand there instead."""

    start: int
    end: int
    new: str


@dataclass(slots=True, frozen=True)
class Edited:
    """A text after an edit."""

    text: str
    lines: list[int]  # where the changes begin, in the old text
    apart_from: str  # what was overlooked to find the old text


def edit_tool(seen: Seen) -> Tool:
    """The tool, which refuses to edit what has changed since its session saw it."""

    # Not safe to repeat: after an edit that was cut off, the old text is gone, or is found inside the new one.
    @path_tool(replay="never", parallel=False, writes=True)
    async def edit_file(
        path: Annotated[str, "The file, relative to the workspace."],
        old_text: Annotated[str, "The text to replace, as it stands in the file, without line numbers."],
        new_text: Annotated[str, "What is to stand there instead."],
        replace_all: Annotated[bool, "Replace it wherever it stands, rather than in its only place."] = False,
    ) -> str:
        """Replace a text in a file. It must stand there exactly once, unless replace_all is set."""
        real, info, old, data, edited = await in_thread(_edited, seen, path, old_text, new_text, replace_all)
        # Before the content is there for others to read.
        await mark_written(hashlib.sha256(data).hexdigest(), real, current_call(), old)
        await in_thread(_written, seen, path, info, data)
        places = f"{len(edited.lines)} places, lines" if len(edited.lines) > 1 else "line"
        numbers = ", ".join(map(str, edited.lines[:20])) + (", …" if len(edited.lines) > 20 else "")
        overlooked = f" The old text was found apart from {edited.apart_from}." if edited.apart_from else ""
        return f"Edited {path} in {places} {numbers}.{overlooked}"

    return edit_file


def _edited(
    seen: Seen, path: str, old_text: str, new_text: str, replace_all: bool
) -> tuple[str, os.stat_result, str, bytes, Edited]:
    """The real path of a file, how it stands, the digest of its content, and the new content."""
    with explained(path):
        real, info, data = _load(seen, path)
    digest = hashlib.sha256(data).hexdigest()
    form = form_of(data)
    try:
        text = form.decode(data)
    except UnicodeDecodeError:
        raise ToolError(f"{path} is not valid {form.encoding.upper()}: it cannot be edited.") from None
    try:
        edited = replace_text(text, clean(old_text), clean(new_text), replace_all, form.newline)
    except ToolError as error:  # it may show lines of the file
        raise ToolError(str(error), error.advice, contents=(digest,)) from None
    return real, info, digest, form.encode(edited.text), edited


def _written(seen: Seen, path: str, info: os.stat_result, data: bytes) -> None:
    with explained(path), opened_target(path) as target, alone(target):
        now = os.stat(target.name, dir_fd=target.folder, follow_symlinks=False)
        if state_of(now) != state_of(info):
            raise changed_meanwhile(path)
        seen.note(target.real, replace(target, data))


def _load(seen: Seen, path: str) -> tuple[str, os.stat_result, bytes]:
    with reach().open(path, READ) as opened:
        info = os.fstat(opened.descriptor)
        check_kind(info, path, MAX_EDIT_BYTES)
        if seen.changed(opened.real, info):
            raise ToolError(f"{path} has changed since you last saw it: read it again, then edit it.")
        with open(opened.descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_EDIT_BYTES + 1)
    if is_binary(data[:BINARY_HEAD]):
        raise ToolError(f"{path} is a binary file: only text can be edited.")
    return opened.real, info, data


def replace_text(text: str, old: str, new: str, everywhere: bool = False, newline: str = "\n") -> Edited:
    """The text with `old` replaced by `new`; a ToolError that helps if there is no place, or more than one."""
    plain, old, new = (each.replace("\r\n", "\n") for each in (text, old, new))
    if not old:
        raise ToolError("old_text is empty: give the text to replace, or write the whole file with write_file.")
    if old == new:
        raise ToolError("old_text and new_text are the same: there is nothing to change.")
    apart_from, spans = _first_tier(plain, old, new, everywhere)
    if not spans:
        raise ToolError(f"old_text does not stand in the file. {closest(plain, old)}")
    lines = _line_numbers(plain, spans)
    if len(spans) > 1 and not everywhere:
        numbers = ", ".join(map(str, lines[:10])) + (", …" if len(lines) > 10 else "")
        more = "Add lines around it to say which one is meant, or set replace_all."
        raise ToolError(f"old_text stands in the file more than once, at lines {numbers}. {more}")
    return Edited(_applied(text, spans, newline), lines, apart_from)


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
    """Put the new parts into a text whose spans count "\\r\\n" as one character."""
    doubled = [found.start() - index for index, found in enumerate(re.finditer("\r\n", text))]
    parts, end = [], 0
    for span in spans:
        parts += [text[end : span.start + bisect_left(doubled, span.start)], span.new.replace("\n", newline)]
        end = span.end + bisect_left(doubled, span.end)
    return "".join([*parts, text[end:]])


def _positions(text: str, old: str, everywhere: bool, shared: int = 0) -> Iterator[int]:
    """Where `old` begins: places that do not overlap if all are wanted, otherwise the first of all there are."""
    at, count = text.find(old), 0
    while at >= 0 and (everywhere or count < _MOST):
        yield at
        at, count = text.find(old, at + (len(old) - shared if everywhere else 1)), count + 1


def _exactly(text: str, old: str, new: str, everywhere: bool) -> list[Span]:
    return [Span(at, at + len(old), new) for at in _positions(text, old, everywhere)]


def _alike(text: str, old: str, new: str, everywhere: bool) -> list[Span]:
    """Places that look the same. What old and new have in common keeps the characters that it has in the file."""
    if old.isascii() and text.isascii():
        return []
    plain = "\n".join(line if line.isascii() else line.translate(_ALIKE) for line in text.split("\n"))
    head, tail = _in_common(old, new)
    found = _positions(plain, old.translate(_ALIKE), everywhere)
    return [Span(at + head, at + len(old) - tail, new[head : len(new) - tail]) for at in found]


def _in_common(one: Sequence[str], other: Sequence[str]) -> tuple[int, int]:
    """How much two texts, or two lists of lines, have in common at the beginning, and after that at the end."""
    most, head, tail = min(len(one), len(other)), 0, 0
    while head < most and one[head] == other[head]:
        head += 1
    while tail < most - head and one[-1 - tail] == other[-1 - tail]:
        tail += 1
    return head, tail


Adapt = Callable[[list[str], list[str], list[str]], list[str] | None]


def _by_lines(strip: Callable[[str], str], adapt: Adapt) -> Callable[[str, str, str, bool], list[Span]]:
    """A tier that compares whole lines after `strip`; `adapt` fits the new lines to those that are in the file."""

    def find(text: str, old: str, new: str, everywhere: bool) -> list[Span]:
        if not old.strip():
            return []
        whole = old.endswith("\n") and not new.endswith("\n")  # the last line's end goes as well
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
    """Where each line begins, and where one more would."""
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _as_it_is(there: list[str], old: list[str], new: list[str]) -> list[str]:
    """The new lines. Those at either end that do not change stay as they are in the file."""
    head, tail = _in_common(old, new)
    return [*there[:head], *new[head : len(new) - tail], *there[len(there) - tail :]]


def _indented(there: list[str], old: list[str], new: list[str]) -> list[str] | None:
    """The new lines with the file's indentation, if it follows from that of the old ones; otherwise None."""
    pairs = {(_indent(mine), _indent(its)) for mine, its in zip(old, there, strict=True) if mine.strip()}
    known = dict(pairs)
    widths = [len(its) for _, its in sorted(pairs, key=lambda pair: len(pair[0]))]
    if len(known) != len(pairs) or widths != sorted(set(widths)):  # what is deeper in one is not deeper in the other
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


_TIERS: tuple[tuple[str, Callable[[str, str, str, bool], list[Span]]], ...] = (
    ("", _exactly),
    ("spaces at the ends of lines", _by_lines(str.rstrip, _as_it_is)),
    ("indentation", _by_lines(str.strip, _indented)),
    ("look-alikes of quotes, dashes or spaces", _alike),
)

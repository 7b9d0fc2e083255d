"""The part of a text that is most like a text which was looked for in vain."""

from __future__ import annotations

import difflib

_MAX_LINES = 5_000  # that are compared by likeness, which is slow
_MAX_LENGTH = 400
_SHOWN = 12


def closest(text: str, wanted: str) -> str:
    """A sentence that shows the closest lines with their numbers, or says that there are none."""
    lines, wanted_lines = text.split("\n"), wanted.strip("\n").split("\n")
    start = _closest_line(lines, wanted_lines)
    if start is None:
        return "Nothing in it is similar: read the file again."
    end = min(start + len(wanted_lines), len(lines))
    shown = [f"{number + 1:>6}\t{lines[number][:_MAX_LENGTH]}" for number in range(start, min(end, start + _SHOWN))]
    where = f"line {start + 1}" if end == start + 1 else f"lines {start + 1} to {end}"
    return "\n".join([f"The closest text is at {where}:", *shown])


def _closest_line(lines: list[str], wanted: list[str]) -> int | None:
    """Where the part begins that is most like the wanted lines; judged from the longest one, then by all."""
    anchor = max(range(len(wanted)), key=lambda index: len(wanted[index].strip()))
    places: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        places.setdefault(line.strip()[:_MAX_LENGTH], []).append(number)
    sought = wanted[anchor].strip()[:_MAX_LENGTH]
    if not sought:
        return None
    similar = [sought] if sought in places else []
    if not similar:
        similar = difflib.get_close_matches(sought, list(places)[:_MAX_LINES], 3, 0.6)
    starts = [max(number - anchor, 0) for line in similar for number in places[line][:5]]
    whole = "\n".join(wanted)[: _MAX_LENGTH * 5]

    def likeness(start: int) -> float:
        part = "\n".join(lines[start : start + len(wanted)])[: _MAX_LENGTH * 5]
        return difflib.SequenceMatcher(None, part, whole, autojunk=False).quick_ratio()

    return max(starts, key=likeness, default=None)

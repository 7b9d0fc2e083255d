"""Finds, in a text, the places where something may begin that is more than text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from . import harmony, thoughts
from .families import NOISES, OPENINGS

_QUOTES = "[`\"'\\\\]"  # a tag behind one of these is one that the text speaks of
MAY_INDENT = 80


def _tails(literals: Sequence[str], first: str) -> str:
    return "|".join(re.escape(literal[1:]) for literal in literals if literal[0] == first)


def _tokens(calls: bool) -> re.Pattern[str]:
    """All alternatives begin with a plain character: then the search runs at the speed of a search for characters."""
    tags = tuple(thoughts.TAGS)
    marks = (rf"(?P<mark>{_tails(OPENINGS, '<')})|", rf"(?P<bracket>{_tails(OPENINGS, '[')})|") if calls else ("", "")
    channels, tag = _tails(harmony.TOKENS, "<"), _tails(tags, "<")
    angle = (
        rf"<(?:(?<!{_QUOTES}<)(?:{marks[0]}(?P<harmony>{channels})|(?P<think>(?i:{tag})))"
        rf"|(?P<stray>(?i:{thoughts.STRAY[1:]}))" + ("|(?P<tools>tools>)" if calls else "") + ")"
    )
    square = rf"\[(?:(?<!{_QUOTES}\[)(?:{marks[1]}(?P<thought>(?i:{_tails(tags, '[')})))"
    square += r"|(?P<list>(?=\s*(?:[{A-Za-z_]|\Z))))" if calls else ")"
    brace = r"|\{(?P<object>(?=\s*(?:[\"']|\Z)))" if calls else ""
    return re.compile(rf"{angle}|{square}|`(?P<fence>`{{2,}}){brace}")


ALL = _tokens(True)
THOUGHTS = _tokens(False)
LINE_TOKENS = frozenset({"stray", "tools", "list", "object", "fence"})  # that count only where a line begins

LITERALS = (*OPENINGS, *harmony.TOKENS, *thoughts.TAGS, "</think>", "</thinking>", "<tools>", *NOISES)
_LOWER = tuple(literal.lower() for literal in LITERALS)
_CLOSERS = (*thoughts.TAGS.values(), *harmony.TOKENS)
LONGEST = max(map(len, LITERALS))
_TICKS = re.compile(r"`{1,2}\Z")


def begun(text: str, at: int, *, thought: bool = False) -> int:
    """Where, at the end of a text, a tag may have begun; the text's end if nowhere."""
    start = len(text)
    first = max(at, start - LONGEST)
    for bracket in "<[":
        place = text.rfind(bracket, first)
        if place >= 0:
            beginning = text[place:].lower()
            if any(literal.startswith(beginning) for literal in (_CLOSERS if thought else _LOWER)):
                start = min(start, place)
    if not thought and (ticks := _TICKS.search(text, max(at, len(text) - 2))):
        start = min(start, ticks.start())
    return start


def begins_line(text: str, place: int, at: int, inline: bool) -> bool:
    """Whether only spaces stand before this place on its line; `inline` says it of what was there before `at`."""
    line = text.rfind("\n", max(at, place - MAY_INDENT - 1), place)
    if line >= 0:
        return line + 1 == place or text[line + 1 : place].isspace()
    return place - at <= MAY_INDENT and not inline and (place == at or text[at:place].isspace())

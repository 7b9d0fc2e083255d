"""Patterns of schemas from outside, searched for only where that cannot take long.

Python's regular expressions try every way to match, and hold up the whole process while they do. So what a search may
cost is reckoned beforehand, from how the pattern is written and from the length of the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST = 1_000  # characters of a pattern; a longer one counts as not known
ENDLESS = 1 << 62

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P<\w+>|\(\?<?[:=!>]|\{\d*,?\d*\}|.", re.S)
# What refers back to a group, and flags or conditions that change how the rest is read.
_ODD = re.compile(r"\\[1-9]|\(\?(?!P<|<?[:=!>])")


@dataclass(slots=True, frozen=True)
class Pattern:
    """A pattern that Python understands, and how many ways a search for it may have to try."""

    compiled: re.Pattern[str]
    loops: int = 0  # each may end at any character
    choices: int = 0  # each has two ways
    nested: bool = False  # ways within ways: every character may double them
    anchored: bool = False  # it can only begin where the text does

    def cost(self, text: str) -> int:
        """At most about so many steps."""
        powers = self.loops + (0 if self.anchored else 1)
        doublings = self.choices + (len(text) if self.nested else 0)
        if powers > 10 or doublings > 40:
            return ENDLESS
        return int((len(text) + 1) ** powers << doublings)


def read_pattern(text: str) -> Pattern | None:
    """The pattern; None where it is another dialect's, or too long."""
    if len(text) > LONGEST:
        return None
    try:
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return None
    loops = choices = 0
    nested = _ODD.search(text) is not None
    groups = [False]  # of all that are open: whether there are ways to choose from inside
    ways = False  # whether there are any in what was read last
    repeated = False  # it was a sign of repetition
    for token in _TOKEN.findall(text):
        if token in ("?", "+") and repeated:  # lazy or possessive
            repeated = False
            continue
        repeated = token in ("*", "+", "?") or (token[0] == "{" and len(token) > 1)
        if token[0] == "(":
            groups.append(False)
        elif token == ")" and len(groups) > 1:
            ways = groups.pop()
            groups[-1] |= ways
            continue
        elif token in ("|", "?"):
            choices += 1
            groups[-1] = True
        elif repeated:
            nested |= ways
            if token[0] != "{" or "," in token:
                loops += 1
                groups[-1] = True
        ways = False
    return Pattern(compiled, loops, choices, nested, text.startswith(("^", r"\A")) and "|" not in text)

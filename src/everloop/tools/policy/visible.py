"""Texts made visible: what a person reads before approving must be what runs."""

from __future__ import annotations

import re
import unicodedata

# Drawn as nothing, or as an empty space, though their categories are those of letters and marks.
_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0") | frozenset(
    chr(code) for code in (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
)
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
_LONG_GAP = re.compile(r"(?<=[^ \n]) {9,}|\n{4,}")
_TRAILING = re.compile(r" +(?=\n|\Z)")


def visible(text: str) -> str:
    """The text with everything that cannot be seen written out, as ‹U+001B›.

    Line ends and the tabs that indent a line stay. Long gaps, which would push text out of sight, are counted.
    """
    if text.isascii() and text.isprintable() and "  " not in text and not text.endswith(" "):
        return text
    text = _LONG_GAP.sub(lambda found: f"‹{len(found[0])} {'spaces' if found[0][0] == ' ' else 'line ends'}›", text)
    text = _TRAILING.sub(lambda found: _code(" ") * len(found[0]), text)
    lines = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip("\t"))
        lines.append(line[:indent] + "".join(_code(c) if _hidden(c) else c for c in line[indent:]))
    return "\n".join(lines)


def _hidden(character: str) -> bool:
    if " " <= character <= "~":
        return False
    return character in _BLANK or unicodedata.category(character) in _HIDDEN


def _code(character: str) -> str:
    return f"‹U+{ord(character):04X}›"


def shortened(text: str, limit: int) -> str:
    """The text with its middle left out and counted, if it is longer than `limit`."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ‹… {len(text) - 2 * half} of {len(text)} characters left out …› {text[-half:]}"

"""Names of skills in a message: `$name` in the text that a person wrote, and not in code that they quote."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .skill import LONGEST_NAME

MOST = 50  # names in one message

# Letters of other scripts may stand right beside a name, as Korean and Chinese are written; Latin ones may not.
_NAME = re.compile(
    r"(?<![A-Za-z0-9_$\\/.\-À-ɏ])\$([a-z0-9]++(?:-[a-z0-9]++)*+)(?![A-Za-z0-9_À-ɏ]|[./:=(\[][A-Za-z0-9_])"
)
_FENCED = re.compile(
    r"^ {0,3}(?:(`{3,}+)[^`\n]*|(~{3,}+)[^\n]*)\n(?:.*?^ {0,3}(?:\1`*|\2~*)[ \t]*$|.*)", re.MULTILINE | re.DOTALL
)
_PARAGRAPHS = re.compile(r"\n[ \t]*\n")
_TICKS = re.compile("`+")


def named(text: str) -> list[str]:
    """The names in the form `$name`, each once, in order. Whether there are such skills is not known here."""
    if "$" not in text:
        return []
    found: dict[str, None] = {}
    for paragraph in _PARAGRAPHS.split(_FENCED.sub("\n\n", text.replace("\r\n", "\n"))):
        for prose in _prose(paragraph):
            for name in _NAME.findall(prose):
                if len(name) <= LONGEST_NAME and not name.replace("-", "").isdecimal():
                    found[name] = None
                    if len(found) == MOST:
                        return list(found)
    return list(found)


def _prose(paragraph: str) -> Iterator[str]:
    """What is not between backticks. As many must close a piece of code as opened it."""
    ticks = list(_TICKS.finditer(paragraph))
    closing: dict[int, int] = {}  # for each run of backticks the next of the same length
    last: dict[int, int] = {}
    for number in range(len(ticks) - 1, -1, -1):
        length = len(ticks[number][0])
        if length in last:
            closing[number] = last[length]
        last[length] = number
    start, number = 0, 0
    while number < len(ticks):
        if number in closing:
            yield paragraph[start : ticks[number].start()]
            number = closing[number]
            start = ticks[number].end()
        number += 1
    yield paragraph[start:]

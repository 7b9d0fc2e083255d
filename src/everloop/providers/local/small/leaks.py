"""Leaks: whether something of the worked examples stands in what a model wrote, though nothing of it was said."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from .examples import all_examples
from .words import paths_in

SHORTEST = 4  # characters of a value that cannot be a chance
_VALUES = ("content", "text", "message", "query", "pattern", "old_text", "new_text", "command")


def leak(written: Iterable[str], seen: Iterable[str]) -> str:
    """A name, value or sentence of the examples that was written and does not stand in what was `seen`, or ""."""
    text = "\n".join(written).casefold()
    known = "\n".join(seen).casefold()
    found = (term for term, pattern in _terms() if term in text and pattern.search(text) and term not in known)
    return next(found, "")


@cache
def _terms() -> list[tuple[str, re.Pattern[str]]]:
    found: dict[str, None] = {}
    for example in all_examples():
        for step in example.steps:
            values = [str(value) for key, value in step.arguments.items() if key in _VALUES]
            for text in (example.request, *map(str, step.arguments.values())):
                found.update((path, None) for path in paths_in(text) if "." in path.strip("./"))
            found.update((value.strip(), None) for value in values if len(value.strip()) >= SHORTEST)
    return [(term.casefold(), re.compile(rf"(?<!\w){re.escape(term.casefold())}(?!\w)")) for term in found]

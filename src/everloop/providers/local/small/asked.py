"""What kind of request it is: a question or an order, about a file, about the person, or about the world."""

from __future__ import annotations

import re

from .meanings import pattern, word_set
from .words import WORK, is_file, means, paths_in, without_files, words

_EVERY = pattern("every")
_ELSEWHERE = ("before", "told", "show", "count", "here", "read", "say", "mention", "line", "every", "when")
_MARK = re.compile("[?\uff1f]")
_OWN = word_set("own")
_QUESTION = pattern("question")
_POLITE = pattern("polite")
_LOOKS_FOR = pattern("looks_for")
_BETWEEN = pattern("between")
_SHOULD = pattern("should")


def is_question(text: str) -> bool:
    """Whether something is asked, and not only politely asked for."""
    return _QUESTION.search(text) is not None or (_MARK.search(text) is not None and _POLITE.search(text) is None)


def parts_of(text: str) -> list[str]:
    """The parts of what is said, between commas and joining words."""
    return [part for part in _BETWEEN.split(text) if part.strip()]


def orders(text: str) -> str:
    """The text without the parts that ask."""
    return " ".join(part for part in _BETWEEN.split(text) if not is_question(part))


def runs_then(text: str) -> bool:
    """Whether something is to be run once the rest is done: `… and run it`."""
    return any(means(" ".join(part.split()[:2]), "run") for part in _BETWEEN.split(text)[1:])


def asks_for_a_change(text: str) -> bool:
    """Whether it says what one file should say, and is no question about it, nor an order to do something else."""
    if len([path for path in paths_in(text) if is_file(path)]) != 1 or is_question(text):
        return False
    if means(text, "delete", "run", "command", "add", "remind", "remember", "copy", "move"):
        return False
    return means(text, "change") or (bool(_SHOULD.search(text)) and not means(text, "create", "write"))


def asks_how_many_there_are(text: str) -> bool:
    """Whether a number is asked for that stands in no file of the person's, as far as one can tell."""
    here = means(text, *WORK, *(meaning for meaning in _ELSEWHERE if meaning not in ("count", "when")))
    return means(text, "count") and not here and not _OWN & {*words(text)} and not paths_in(text)


def looks_for_a_file(text: str) -> bool:
    """Whether it asks where a file is that it names."""
    return _LOOKS_FOR.search(text) is not None


def in_every_place(text: str) -> bool:
    """Whether what is to be changed may stand in several places."""
    return _EVERY.search(without_files(text)) is not None

"""A short piece of a long text, around the words that somebody looked for."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from itertools import islice

MAX_LOOKED_AT = 100_000  # characters of a text
MAX_WORDS = 16
MAX_PLACES = 10  # of one word
LEAD = 60  # characters before the first word
_ENDS = ".,;:!?\"'()[]{}<>*`…“”„‘’«»。、！？「」"


def excerpt(text: str, query: str, most: int = 300) -> str:
    """One line of at most so many characters, cut at words where there are any; "…" marks what was left out."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    place = _best_place(line[:MAX_LOOKED_AT], query, most - LEAD)
    start = 0 if place <= LEAD else place - LEAD
    if start and (space := line.find(" ", start, place)) >= 0:
        start = space + 1
    end = start + most - 2
    if end >= len(line):
        end = len(line)
    elif (space := line.rfind(" ", place + 1, end + 1)) > start + most // 2:
        end = space
    return f"{'…' if start else ''}{line[start:end].strip()}{'…' if end < len(line) else ''}"


def _best_place(text: str, query: str, span: int) -> int:
    """Where the part of a text begins that has the most of the words."""
    folded, places = _folded(text)
    words = dict.fromkeys(word for part in _folded(query)[0].split() if (word := part.strip(_ENDS)))
    hits = sorted((at, word) for word in islice(words, MAX_WORDS) for at in _hits(folded, word))
    best, most = 0, 0
    for number, (at, _) in enumerate(hits):
        here = len({word for other, word in hits[number:] if other < at + span})
        if here > most:
            best, most = at, here
    return places[best] if places else best


def _hits(text: str, word: str) -> list[int]:
    """Where a word stands; if it stands nowhere, then its stem, or pairs of characters where words have no ends."""
    tries = [word, *(word[:-cut] for cut in (1, 2, 3) if len(word) - cut >= 3)]
    for each in tries:
        if found := _places(text, each):
            return found
    pairs = [] if word.isascii() else [word[at : at + 2] for at in range(min(len(word) - 1, MAX_WORDS))]
    return [at for pair in pairs for at in _places(text, pair)[:2]]


def _places(text: str, word: str) -> list[int]:
    found: list[int] = []
    at = text.find(word)
    while at >= 0 and len(found) < MAX_PLACES:
        if not at or not word[0].isascii() or not text[at - 1].isalnum():
            found.append(at)
        at = text.find(word, at + len(word))
    return found


def _folded(text: str) -> tuple[str, list[int]]:
    """A text without case, accents and widths, and for each of its characters where it stands in the first one."""
    if text.isascii():
        return text.lower(), []
    plain = list(map(_plain, text))
    return "".join(plain), [at for at, each in enumerate(plain) for _ in each]


@lru_cache(4_096)
def _plain(character: str) -> str:
    parts = unicodedata.normalize("NFKD", character).casefold()
    return "".join(part for part in parts if not "\u0300" <= part <= "\u036f")

"""The text that the search index holds, and the expression that a query becomes.

Scripts without spaces between words, and Korean with its endings, are cut into overlapping pairs of characters.
"""

from __future__ import annotations

import re
import unicodedata
from itertools import islice

from ..text import clean

MAX_QUERY = 1_000  # characters of a query that count
MAX_TERMS = 64

_UNSPACED = (
    "\u0e01-\u0e3a\u0e40-\u0e4e"  # Thai
    "\u0e81-\u0ece"  # Lao
    "\u1000-\u103f\u1050-\u109d"  # Myanmar
    "\u1780-\u17d3"  # Khmer
    "\u1100-\u11ff\ua960-\ua97f\uac00-\ud7ff"  # Hangul
    "\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"  # Hiragana and Katakana
    "\u3005-\u3007\u3105-\u312f\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"  # Han and Bopomofo
)
_RUN = re.compile(f"[{_UNSPACED}]+")
_PART = re.compile(f"([{_UNSPACED}]+)|[^{_UNSPACED}\\s]+")


def indexed(text: str) -> str:
    """A text as it is indexed."""
    text = _folded(text)
    return text if text.isascii() else _RUN.sub(lambda run: f" {' '.join(_pairs(run[0]))} ", text)


class Query:
    """The words of a query. Nothing in it is syntax: what FTS5 would read as syntax is quoted."""

    def __init__(self, text: str) -> None:
        folded = _folded(clean(text[:MAX_QUERY])).replace("\0", " ")
        # Each with whether it is a run of characters to be cut into pairs.
        found = (part for part in _PART.finditer(folded) if any(map(_is_word, part[0])))
        self.parts = [(part[0], part[1] is not None) for part in islice(found, MAX_TERMS)]

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def all(self) -> str:
        """The FTS5 expression for texts with all the words. A run of characters is searched as a phrase."""
        return " AND ".join(_as_it_stands(part) if unspaced else _quoted(part) for part, unspaced in self.parts)

    @property
    def any(self) -> str:
        """The same for texts with any of the words, or any pair of characters."""
        terms = (term for part, unspaced in self.parts for term in (_loosened(part) if unspaced else _words(part)))
        return " OR ".join(islice(dict.fromkeys(terms), MAX_TERMS))


def _folded(text: str) -> str:
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()


def _pairs(run: str) -> list[str]:
    """All pairs of adjacent characters, and the last one alone, so that each character begins a term."""
    return [run[at : at + 2] for at in range(len(run))]


def _as_it_stands(run: str) -> str:
    return f"{_quoted(run)} *" if len(run) == 1 else _quoted(" ".join(_pairs(run)[:-1]))


def _loosened(run: str) -> list[str]:
    return [_as_it_stands(pair) for pair in _pairs(run)[:-1] or [run]]


def _words(part: str) -> list[str]:
    """The words of a part without spaces, such as those of an address."""
    return [_quoted(word) for word in "".join(one if _is_word(one) else " " for one in part).split()]


def _quoted(words: str) -> str:
    return f'"{words.replace(chr(34), " ")}"'


def _is_word(character: str) -> bool:
    return unicodedata.category(character)[0] in "LMN"

"""Search logic shared by both stores: which text is indexed, whether it is trusted, and how a query is translated.

Scripts without spaces between words, and Korean with its inflections, are split into overlapping character pairs.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec

from ..text import clean
from .base import Found

Role = Literal["user", "assistant"]
BATCH_ENTRIES = 256  # read per transaction
BATCH_CHARACTERS = 200_000
MAX_INDEXED = 100_000  # characters per message

Entries = Callable[["Lag", int], Iterable[tuple[int, float, str, str]]]  # (seq, at, kind, data), limited in number
MAX_QUERY = 1_000  # characters of a query that are used
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


# ---------------------------------------------------------------------------------------------- what is indexed


class Lag(NamedTuple):
    """A session whose log has entries, up to `last`, that are not in the index."""

    session: int
    seq: int
    untrusted: bool  # the conversation up to here contains untrusted text
    last: int


class Text(NamedTuple):
    seq: int
    at: float
    data: str
    text: str
    untrusted: bool


class Batch(msgspec.Struct):
    """A section of a session's log to be indexed."""

    session: int
    after: int
    until: int
    untrusted: bool  # at its end
    texts: list[Text] = []


def next_batches(entries_of: Entries, behind: deque[Lag]) -> list[Batch]:
    """Read as much as one transaction should index, and advance the queue of lagging sessions."""
    batches, entries, characters = [], BATCH_ENTRIES, BATCH_CHARACTERS
    while behind and entries > 0 and characters > 0:
        lag = behind.popleft()
        batch = Batch(lag.session, lag.seq, lag.seq, lag.untrusted)
        for seq, at, kind, data in entries_of(lag, entries):
            characters -= _take(batch, seq, at, kind, data)
            entries -= 1
            if characters <= 0:
                break
        batches.append(batch)
        if lag.seq < batch.until < lag.last:
            behind.appendleft(Lag(lag.session, batch.until, batch.untrusted, lag.last))
    return batches


def _take(batch: Batch, seq: int, at: float, kind: str, data: str) -> int:
    """Add an entry to a batch, and return how many of its characters are indexed."""
    batch.until = seq
    if kind == "new":
        batch.untrusted = False
    message = said(kind, data)
    if message is None or kind in ("user", "answer"):
        batch.untrusted = batch.untrusted or _came_from_outside(data)
    if message is None:
        return 0
    role, text = message
    if text:
        words = indexed(text[:MAX_INDEXED])
        batch.texts.append(Text(seq, at, data, words, role == "assistant" and batch.untrusted))
    return len(text[:MAX_INDEXED])


# ---------------------------------------------------------------------------------------------- reading entries


class _Content(msgspec.Struct):
    content: Any = None
    message: dict[str, Any] = {}
    inside: bool = False


class _Origin(msgspec.Struct):
    untrusted: bool = False


_decode_content = msgspec.json.Decoder(_Content).decode
_decode_origin = msgspec.json.Decoder(_Origin).decode


def said(kind: str, data: str) -> tuple[Role, str] | None:
    """Return the role and text of an entry; None if it is not a message, or is damaged."""
    if kind not in ("user", "answer", "note"):
        return None
    try:
        entry = _decode_content(data)
    except msgspec.MsgspecError:
        return None
    if kind == "note":
        role, content = entry.message.get("role"), entry.message.get("content")
    else:
        # Messages from inside the system, such as a sub-agent's result, were not said by the user.
        role, content = "user" if kind == "user" and not entry.inside else "assistant", entry.content
    return (role, _text_of(content)) if role == "user" or role == "assistant" else None


def found_of(row: Sequence[Any]) -> Found:
    """Return the message of a row (session's key, turn, at, kind, data, untrusted, seq)."""
    key, turn, at, kind, data, untrusted, seq = row
    role, text = said(kind, data) or ("assistant", "")
    return Found(key, turn, at, role, text, bool(untrusted), seq)


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _came_from_outside(data: str) -> bool:
    try:
        return _decode_origin(data).untrusted
    except msgspec.MsgspecError:
        return True  # unknown


# ---------------------------------------------------------------------------------------------- texts and queries


def indexed(text: str) -> str:
    """Return the form of a text that is indexed."""
    text = _folded(text)
    return text if text.isascii() else _RUN.sub(lambda run: f" {' '.join(_pairs(run[0]))} ", text)


class Query:
    """The words of a query. A query has no syntax: what FTS5 would parse as syntax is quoted."""

    def __init__(self, text: str) -> None:
        folded = _folded(clean(text[:MAX_QUERY])).replace("\0", " ")
        # Each with a flag: is it a run of characters to be split into pairs?
        found = (part for part in _PART.finditer(folded) if any(map(_is_word, part[0])))
        self.parts = [(part[0], part[1] is not None) for part in islice(found, MAX_TERMS)]

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def all(self) -> str:
        """The FTS5 expression for texts with all the words. A run of unspaced characters is searched as a phrase."""
        return " AND ".join(_as_it_stands(part) if unspaced else _quoted(part) for part, unspaced in self.parts)

    @property
    def any(self) -> str:
        """The FTS5 expression for texts with any of the words, or any character pair."""
        terms = (term for part, unspaced in self.parts for term in (_loosened(part) if unspaced else _words(part)))
        return " OR ".join(islice(dict.fromkeys(terms), MAX_TERMS))


def _folded(text: str) -> str:
    return text.lower() if text.isascii() else unicodedata.normalize("NFKC", text).casefold()


def _pairs(run: str) -> list[str]:
    """Return all pairs of adjacent characters, and the last character alone, so that each character starts a term."""
    return [run[at : at + 2] for at in range(len(run))]


def _as_it_stands(run: str) -> str:
    return f"{_quoted(run)} *" if len(run) == 1 else _quoted(" ".join(_pairs(run)[:-1]))


def _loosened(run: str) -> list[str]:
    return [_as_it_stands(pair) for pair in _pairs(run)[:-1] or [run]]


def _words(part: str) -> list[str]:
    """Return the words of a part without spaces, such as those of an address."""
    return [_quoted(word) for word in "".join(one if _is_word(one) else " " for one in part).split()]


def _quoted(words: str) -> str:
    return f'"{words.replace(chr(34), " ")}"'


def _is_word(character: str) -> bool:
    return unicodedata.category(character)[0] in "LMN"

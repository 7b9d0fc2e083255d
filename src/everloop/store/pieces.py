"""What of a session's log goes into a search index, whatever database keeps it: who said what, and on what."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from .words import indexed

Role = Literal["user", "assistant"]
BATCH_ENTRIES = 256  # read for one transaction
BATCH_CHARACTERS = 200_000
MAX_INDEXED = 100_000  # characters of one message

Entries = Callable[["Lag", int], Iterable[tuple[int, float, str, str]]]  # (seq, at, kind, data), at most so many


class Lag(NamedTuple):
    """A session whose log has entries, up to `last`, that are not in the index."""

    session: int
    seq: int
    untrusted: bool  # something in the conversation up to here came from outside
    last: int


class Text(NamedTuple):
    seq: int
    at: float
    data: str
    text: str
    untrusted: bool


@dataclass(slots=True)
class Piece:
    """A part of a session's log, read to be indexed."""

    session: int
    after: int
    until: int
    untrusted: bool  # at its end
    texts: list[Text] = field(default_factory=list)


def next_pieces(entries_of: Entries, behind: deque[Lag]) -> list[Piece]:
    """Read as much as one transaction takes, and move on in the list of what is behind."""
    pieces, entries, characters = [], BATCH_ENTRIES, BATCH_CHARACTERS
    while behind and entries > 0 and characters > 0:
        lag = behind.popleft()
        piece = Piece(lag.session, lag.seq, lag.seq, lag.untrusted)
        for seq, at, kind, data in entries_of(lag, entries):
            characters -= _take(piece, seq, at, kind, data)
            entries -= 1
            if characters <= 0:
                break
        pieces.append(piece)
        if lag.seq < piece.until < lag.last:
            behind.appendleft(Lag(lag.session, piece.until, piece.untrusted, lag.last))
    return pieces


def _take(piece: Piece, seq: int, at: float, kind: str, data: str) -> int:
    """Add an entry to a piece; how many characters of it go into the index."""
    piece.until = seq
    if kind == "new":
        piece.untrusted = False
    word = said(kind, data)
    if word is None or kind == "user":
        piece.untrusted = piece.untrusted or _came_from_outside(data)
    if word is None:
        return 0
    role, text = word
    if text:
        words = indexed(text[:MAX_INDEXED])
        piece.texts.append(Text(seq, at, data, words, role == "assistant" and piece.untrusted))
    return len(text[:MAX_INDEXED])


# ---------------------------------------------------------------------------------------------- what entries say


class _Words(msgspec.Struct):
    content: Any = None
    message: dict[str, Any] = {}
    inside: bool = False


class _Origin(msgspec.Struct):
    untrusted: bool = False


_decode_words = msgspec.json.Decoder(_Words).decode
_decode_origin = msgspec.json.Decoder(_Origin).decode


def said(kind: str, data: str) -> tuple[Role, str] | None:
    """Who said what by an entry; None where it is nobody's word. One that is damaged says nothing."""
    if kind not in ("user", "answer", "note"):
        return None
    try:
        words = _decode_words(data)
    except msgspec.MsgspecError:
        return None
    if kind == "note":
        role, content = words.message.get("role"), words.message.get("content")
    else:
        # What came from inside the system, a sub-agent's result say, is no person's word.
        role, content = "user" if kind == "user" and not words.inside else "assistant", words.content
    return (role, _text_of(content)) if role == "user" or role == "assistant" else None


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _came_from_outside(data: str) -> bool:
    try:
        return _decode_origin(data).untrusted
    except msgspec.MsgspecError:
        return True  # nobody can tell any more

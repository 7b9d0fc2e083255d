"""What of a session's log goes into the search index of either store: who said what, and whether it can be trusted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from .search_text import indexed

Role = Literal["user", "assistant"]
BATCH_ENTRIES = 256  # read for one transaction
BATCH_CHARACTERS = 200_000
MAX_INDEXED = 100_000  # characters of one message

Entries = Callable[["Lag", int], Iterable[tuple[int, float, str, str]]]  # (seq, at, kind, data), at most so many


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


@dataclass(slots=True)
class Batch:
    """A part of a session's log, to be indexed."""

    session: int
    after: int
    until: int
    untrusted: bool  # at its end
    texts: list[Text] = field(default_factory=list)


def next_batches(entries_of: Entries, behind: deque[Lag]) -> list[Batch]:
    """Read as much as one transaction should index, and advance the list of sessions that are behind."""
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
    """The role and text of an entry; None for one that is no message, or is damaged."""
    if kind not in ("user", "answer", "note"):
        return None
    try:
        entry = _decode_content(data)
    except msgspec.MsgspecError:
        return None
    if kind == "note":
        role, content = entry.message.get("role"), entry.message.get("content")
    else:
        # What came from inside the system, such as a sub-agent's result, was not said by the user.
        role, content = "user" if kind == "user" and not entry.inside else "assistant", entry.content
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
        return True  # it is unknown

"""Search over what was said, in SQLite: an FTS5 index beside the log.

A turn writes nothing here. The index is brought up to date when somebody searches, for that owner's sessions only, in
short transactions with a cursor for each session: a kill in between loses nothing and leaves nothing twice.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

from ..errors import StoreError
from .base import Found
from .pieces import Lag, Piece, Text, next_pieces, said
from .words import Query

T = TypeVar("T")

# Contentless: the texts stand in the log already. The second column is a term that stands for the owner, which keeps
# the search from looking through what is others'; whose a row is, the tables beside it say.
CREATE = """CREATE VIRTUAL TABLE IF NOT EXISTS search USING fts5(
    text, owner, content='', tokenize="porter unicode61 remove_diacritics 2 categories 'L* N* Co M*'")"""
EXISTS = "SELECT 1 FROM sqlite_master WHERE name = 'search'"
BEHIND = """SELECT * FROM (
        SELECT s.id, coalesce(c.seq, 0) AS seq, coalesce(c.untrusted, 0),
            (SELECT max(seq) FROM entry WHERE session = s.id) AS last
        FROM session s LEFT JOIN search_cursor c ON c.session = s.id WHERE s.owner = ?)
    WHERE last > seq ORDER BY id"""  # a fork has a higher id than what it was copied from, and so comes later
ENTRIES = "SELECT seq, at, kind, data FROM entry WHERE session = ? AND seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
# A fork's copies have the place, time and data of what they were copied from.
COPY = """SELECT 1 FROM search_entry f JOIN entry e ON e.session = f.session AND e.seq = f.seq
    WHERE f.owner = ? AND f.at = ? AND f.seq = ? AND e.data = ?"""
# The better a text fits, the lower is its bm25. What is new counts up to a fourth more, and half of that after a month.
RANKED = """SELECT f.id FROM search JOIN search_entry f ON f.id = search.rowid
    WHERE search MATCH ? AND f.owner = ?
    ORDER BY bm25(search, 1.0, 0.0) * (1 + 0.25 / (1 + max(0, ? - f.at) / 2592000.0)), f.at DESC, f.id DESC LIMIT ?"""
WHOLE = """SELECT s.key, e.turn, e.at, e.kind, e.data, f.untrusted, f.seq FROM search_entry f
    JOIN session s ON s.id = f.session JOIN entry e ON e.session = f.session AND e.seq = f.seq
    WHERE f.id = ? AND s.owner = ?"""


class Runs(Protocol):
    """Runs work on a connection, off the event loop."""

    def __call__(self, work: Callable[[sqlite3.Connection], T], /) -> Awaitable[T]: ...


async def search(read: Runs, write: Runs, owner: str, query: str, limit: int) -> list[Found]:
    """What was said to and by the agent in all sessions of an owner, best first."""
    words = Query(query)
    if limit < 1 or not words:
        return []
    if not await read(lambda db: db.execute(EXISTS).fetchone()):
        await write(_create)
    while not await _caught_up(read, write, owner):
        pass  # somebody else is at it too
    return await read(lambda db: list(_find(db, owner, words, limit)))


@contextmanager
def _needs_fts5() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if "no such module" not in str(error):
            raise
        raise StoreError(
            f"past conversations cannot be searched: SQLite {sqlite3.sqlite_version} of this Python has no FTS5; "
            "use a Python whose SQLite has it"
        ) from None


def _create(db: sqlite3.Connection) -> None:
    with _needs_fts5():
        db.execute(CREATE)


# ---------------------------------------------------------------------------------------------- what is found


def _find(db: sqlite3.Connection, owner: str, words: Query, limit: int) -> Iterator[Found]:
    """Texts with all the words, then texts with any of them."""
    ids: dict[int, None] = {}
    with _needs_fts5():
        for expression in (words.all, words.any):
            if len(ids) < limit:
                match = f'owner : "{_term(owner)}" AND text : ({expression})'
                ids |= dict.fromkeys(id for (id,) in db.execute(RANKED, (match, owner, time.time(), limit)))
    for id in list(ids)[:limit]:
        for key, turn, at, kind, data, untrusted, seq in db.execute(WHOLE, (id, owner)):
            role, text = said(kind, data) or ("assistant", "")
            yield Found(key, turn, at, role, text, bool(untrusted), seq)


def _term(owner: str) -> str:
    return "o" + hashlib.sha256(owner.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- what is indexed


async def _caught_up(read: Runs, write: Runs, owner: str) -> bool:
    """Index what is new. False when another search did some of it at the same time: then look again."""
    behind = deque(await read(lambda db: [Lag(*row) for row in db.execute(BEHIND, (owner,))]))
    while behind:
        pieces = await read(partial(_read_pieces, behind=behind))
        if not await write(partial(_add, owner=owner, pieces=pieces)):
            return False
    return True


def _read_pieces(db: sqlite3.Connection, behind: deque[Lag]) -> list[Piece]:
    def entries_of(lag: Lag, most: int) -> sqlite3.Cursor:
        return db.execute(ENTRIES, (lag.session, lag.seq, lag.last, most))

    return next_pieces(entries_of, behind)


def _add(db: sqlite3.Connection, owner: str, pieces: list[Piece]) -> bool:
    """Put what was read into the index, unless somebody has done it since."""
    for piece in pieces:
        cursor = db.execute("SELECT seq FROM search_cursor WHERE session = ?", (piece.session,)).fetchone()
        if (cursor[0] if cursor else 0) != piece.after:
            return False
        with _needs_fts5():
            for text in piece.texts:
                _add_text(db, owner, piece.session, text)
        db.execute(
            "INSERT OR REPLACE INTO search_cursor (session, seq, untrusted) VALUES (?, ?, ?)",
            (piece.session, piece.until, piece.untrusted),
        )
    return True


def _add_text(db: sqlite3.Connection, owner: str, session: int, text: Text) -> None:
    if db.execute(COPY, (owner, text.at, text.seq, text.data)).fetchone():
        return
    new = db.execute(
        "INSERT INTO search_entry (owner, session, seq, at, untrusted) VALUES (?, ?, ?, ?, ?)",
        (owner, session, text.seq, text.at, text.untrusted),
    )
    db.execute("INSERT INTO search (rowid, text, owner) VALUES (?, ?, ?)", (new.lastrowid, text.text, _term(owner)))

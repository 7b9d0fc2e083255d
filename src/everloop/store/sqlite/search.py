"""Search over past conversations in SQLite: an FTS5 index next to the log.

Turns write nothing here. A search first indexes new entries in its owner's sessions, in short transactions with a
cursor per session: a kill in between loses nothing and indexes nothing twice.
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

from ...errors import StoreError
from ..base import Found
from ..search import MAX_INDEXED, Batch, Lag, Query, Text, found_of, indexed, next_batches, said

T = TypeVar("T")

# Contentless: the texts are in the log already. The second column is a term for the owner, which keeps a search from
# reading rows of others; the owner of a row is determined by the table next to it.
CREATE = """CREATE VIRTUAL TABLE IF NOT EXISTS search USING fts5(
    text, owner, content='', tokenize="porter unicode61 remove_diacritics 2 categories 'L* N* Co M*'")"""
EXISTS = "SELECT 1 FROM sqlite_master WHERE name = 'search'"
BEHIND = """SELECT * FROM (
        SELECT s.id, coalesce(c.seq, 0) AS seq, coalesce(c.untrusted, 0),
            (SELECT max(seq) FROM entry WHERE session = s.id) AS last
        FROM session s LEFT JOIN search_cursor c ON c.session = s.id WHERE s.owner = ?)
    WHERE last > seq ORDER BY id"""  # a fork has a higher id than its source, and so comes later
ENTRIES = "SELECT seq, at, kind, data FROM entry WHERE session = ? AND seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
# The entries of a fork have the position, time and data of their source.
COPY = """SELECT 1 FROM search_entry f JOIN entry e ON e.session = f.session AND e.seq = f.seq
    WHERE f.owner = ? AND f.at = ? AND f.seq = ? AND e.data = ?"""
# The better a match, the lower its bm25. A new text scores up to a quarter higher, and half of that after a month.
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
    """Find messages in all sessions of an owner, best match first."""
    words = Query(query)
    if limit < 1 or not words:
        return []
    if not await read(lambda db: db.execute(EXISTS).fetchone()):
        await write(_create)
    while not await _caught_up(read, write, owner):
        pass  # another search is indexing concurrently
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


# ---------------------------------------------------------------------------------------------- finding


def _find(db: sqlite3.Connection, owner: str, words: Query, limit: int) -> Iterator[Found]:
    """Find texts with all the words, then texts with any of them."""
    ids: dict[int, None] = {}
    with _needs_fts5():
        for expression in (words.all, words.any):
            if len(ids) < limit:
                match = f'owner : "{_term(owner)}" AND text : ({expression})'
                ids |= dict.fromkeys(id for (id,) in db.execute(RANKED, (match, owner, time.time(), limit)))
    for id in list(ids)[:limit]:
        yield from map(found_of, db.execute(WHOLE, (id, owner)))


def _term(owner: str) -> str:
    return "o" + hashlib.sha256(owner.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- indexing


async def _caught_up(read: Runs, write: Runs, owner: str) -> bool:
    """Index new entries. Return False if another search has indexed some of them in the meantime."""
    behind = deque(await read(lambda db: [Lag(*row) for row in db.execute(BEHIND, (owner,))]))
    while behind:
        batches = await read(partial(_read_batches, behind=behind))
        if not await write(partial(_add, owner=owner, batches=batches)):
            return False
    return True


def _read_batches(db: sqlite3.Connection, behind: deque[Lag]) -> list[Batch]:
    def entries_of(lag: Lag, most: int) -> sqlite3.Cursor:
        return db.execute(ENTRIES, (lag.session, lag.seq, lag.last, most))

    return next_batches(entries_of, behind)


def _add(db: sqlite3.Connection, owner: str, batches: list[Batch]) -> bool:
    """Index a batch, unless another search has done so in the meantime."""
    for batch in batches:
        if not db.execute("SELECT 1 FROM session WHERE id = ? AND owner = ?", (batch.session, owner)).fetchone():
            continue  # it was deleted in the meantime
        cursor = db.execute("SELECT seq FROM search_cursor WHERE session = ?", (batch.session,)).fetchone()
        if (cursor[0] if cursor else 0) != batch.after:
            return False
        with _needs_fts5():
            for text in batch.texts:
                _add_text(db, owner, batch.session, text)
        db.execute(
            "INSERT OR REPLACE INTO search_cursor (session, seq, untrusted) VALUES (?, ?, ?)",
            (batch.session, batch.until, batch.untrusted),
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


INDEXED = """SELECT f.id, f.owner, e.kind, e.data FROM search_entry f
    JOIN entry e ON e.session = f.session AND e.seq = f.seq WHERE f.session = ?"""


def unindex(db: sqlite3.Connection, session: int) -> None:
    """Remove a session from the index, while its log still exists."""
    if not db.execute(EXISTS).fetchone():
        return
    with _needs_fts5():
        for id, owner, kind, data in db.execute(INDEXED, (session,)).fetchall():
            _, text = said(kind, data) or ("", "")
            # A contentless FTS5 table must be told which words to delete.
            forget = "INSERT INTO search (search, rowid, text, owner) VALUES ('delete', ?, ?, ?)"
            db.execute(forget, (id, indexed(text[:MAX_INDEXED]), _term(owner)))
    db.execute("DELETE FROM search_entry WHERE session = ?", (session,))
    db.execute("DELETE FROM search_cursor WHERE session = ?", (session,))

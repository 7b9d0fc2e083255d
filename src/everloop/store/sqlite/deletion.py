"""Deletion of sessions in SQLite.

Ids of sessions and of incoming and outgoing messages are never reused, because other processes may still refer to them:
if the row with the highest id is deleted, it is blanked and kept until there is a higher id.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial

from .. import claims
from ..base import Removed
from ..claims import Held
from ..deletion import API, STEP_SESSIONS, SUBAGENT, OldRequests, family, parent_of, prunable
from ..peers import alive
from .transactions import REVOKE_GRANTS_OF, session_id

# Blanked sessions are only kept if they have the highest id, or a message that has it.
FORGET_BLANK = """DELETE FROM session WHERE owner = '' AND id < (SELECT max(id) FROM session)
    AND id NOT IN (SELECT session FROM inbox WHERE id = (SELECT max(id) FROM inbox))
    AND id NOT IN (SELECT session FROM outbox WHERE id = (SELECT max(id) FROM outbox))"""
FORGET_REQUEST_TEXTS = """DELETE FROM request_text
    WHERE key <> '' AND (owner, key) = (SELECT owner, key FROM session WHERE id = ?)"""
FIRST_MESSAGE = "(SELECT CAST(data AS BLOB) FROM inbox WHERE session = s.id ORDER BY id LIMIT 1)"
SUBAGENTS = f"SELECT s.id, s.key, {FIRST_MESSAGE} FROM session s WHERE s.owner = ? AND s.key >= ? AND s.key < ?"
HOLDERS = """WITH deleted AS (SELECT value FROM json_each(?1))
    SELECT worker FROM session WHERE id IN deleted AND worker IS NOT NULL
    UNION SELECT worker FROM outbox WHERE session IN deleted AND sent_at IS NULL AND worker IS NOT NULL"""
FORKS = """SELECT s.id FROM entry f, session s JOIN entry e ON e.session = s.id AND e.seq = 1
    WHERE f.session = ?1 AND f.seq = 1 AND s.owner = ?2 AND s.id <> ?1 AND e.at = f.at AND e.data = f.data"""
COUNTS = """WITH deleted AS (SELECT value FROM json_each(?1))
    SELECT (SELECT count(*) FROM entry WHERE session IN deleted),
        (SELECT count(*) FROM inbox WHERE session IN deleted AND opened),
        (SELECT count(*) FROM inbox WHERE session IN deleted)
            + (SELECT count(*) FROM outbox WHERE session IN deleted)"""
BLANK_SESSION = """UPDATE session SET owner = '', key = 'deleted ' || id, title = '', named_by = '', naming_usage = '',
    worker = NULL, fence = fence + 1 WHERE id = ?"""
BLANK_INBOX = """UPDATE inbox SET owner = '', message_id = NULL, kind = 'urgent', state = 'done', data = '',
    turn = NULL, opened = 0, damaged = NULL WHERE session = ?"""
BLANK_OUTBOX = """UPDATE outbox SET owner = '', turn = NULL, data = '', key = NULL, channel = '', chat_id = '',
    damaged = NULL, sent_at = coalesce(sent_at, at) WHERE session = ?"""
IS_OLD = """s.updated_at < ? AND s.worker IS NULL
    AND NOT EXISTS (SELECT 1 FROM inbox WHERE session = s.id AND state <> 'done')
    AND NOT EXISTS (SELECT 1 FROM outbox WHERE session = s.id AND sent_at IS NULL)"""
FIRST_ENTRY = "(SELECT data FROM entry WHERE session = s.id ORDER BY seq LIMIT 1)"
SOME = f"""SELECT s.id, s.owner, s.key, {FIRST_ENTRY}, {FIRST_MESSAGE}
    FROM session s WHERE s.id > ? AND s.id <= ? AND {IS_OLD} AND substr(s.key, 1, 4) IN ('{API}', '{SUBAGENT}')
    ORDER BY s.id"""
STILL_OLD = f"SELECT s.owner, s.key FROM session s WHERE s.id = ? AND {IS_OLD}"


def delete(db: sqlite3.Connection, owner: str, key: str) -> Removed | Held | None:
    """Delete a session and its sub-agents' sessions, unless a live worker is active there."""
    if (root := session_id(db, owner, key)) is None:
        return None
    rows = db.execute(SUBAGENTS, (owner, SUBAGENT, "sub;"))
    sessions = family((root, key), ((id, name, parent_of(data)) for id, name, data in rows))
    ids = [id for id, _ in sessions]
    listed = claims.encode(ids).decode()
    for (worker,) in db.execute(HOLDERS, (listed,)).fetchall():
        if alive(worker):
            return Held(worker, None)
    for (fork,) in db.execute(FORKS, (root, owner)).fetchall():
        _unindex(db, fork)  # entries shared with this session are only indexed here: the next search indexes them there
    counts = db.execute(COUNTS, (listed,)).fetchone()
    _delete(db, ids)
    return Removed(tuple(name for _, name in sessions), *counts)


def old_requests(db: sqlite3.Connection, before: float, position: int) -> OldRequests:
    """Find old requests among the next sessions."""
    (last,) = db.execute("SELECT coalesce(max(id), 0) FROM session").fetchone()
    rows = db.execute(SOME, (position, position + STEP_SESSIONS, before))
    return prunable(rows, position, last, partial(_exists, db))


def _exists(db: sqlite3.Connection, owner: str, key: str) -> bool:
    return session_id(db, owner, key) is not None


def delete_old(db: sqlite3.Connection, sessions: Sequence[int], before: float) -> tuple[tuple[str, str], ...]:
    """Delete these sessions, except those in which something has happened in the meantime."""
    still = [(id, *row) for id in sessions if (row := db.execute(STILL_OLD, (id, before)).fetchone()) is not None]
    _delete(db, [id for id, _, _ in still])
    return tuple((owner, key) for _, owner, key in still)


def _unindex(db: sqlite3.Connection, session: int) -> None:
    from .search import unindex  # compiles large regular expressions

    unindex(db, session)


def _delete(db: sqlite3.Connection, sessions: Sequence[int]) -> None:
    for id in sessions:
        _unindex(db, id)
        db.execute("DELETE FROM entry WHERE session = ?", (id,))
        db.execute(REVOKE_GRANTS_OF, (id,))
        db.execute(FORGET_REQUEST_TEXTS, (id,))
        for blank in (BLANK_INBOX, BLANK_OUTBOX, BLANK_SESSION):
            db.execute(blank, (id,))
    db.execute("UPDATE deletion SET sessions = sessions + ?", (len(sessions),))
    for (id,) in db.execute("SELECT id FROM session WHERE owner = ''").fetchall():
        for table in ("inbox", "outbox"):
            db.execute(f"DELETE FROM {table} WHERE session = ? AND id < (SELECT max(id) FROM {table})", (id,))
    db.execute(FORGET_BLANK)

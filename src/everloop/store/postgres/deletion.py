"""Deletion of sessions in PostgreSQL.

A session is locked before it is deleted. A message that arrives for it waits, and then finds no session.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..base import Removed
from ..claims import Held
from ..deletion import API, STEP_SESSIONS, SUBAGENT, OldRequests, family, parent_of, prunable
from .transactions import is_alive

if TYPE_CHECKING:
    from .connect import Connection

FIRST_MESSAGE = "(SELECT data FROM inbox WHERE session = s.id ORDER BY id LIMIT 1)"
LOCK = "SELECT id FROM session WHERE owner = %s AND key = %s FOR UPDATE"
SUBAGENTS = f"SELECT s.id, s.key, {FIRST_MESSAGE} FROM session s WHERE s.owner = %s AND starts_with(s.key, %s)"
LOCK_ALL = "SELECT id FROM session WHERE id = ANY(%s) ORDER BY id FOR UPDATE"
HOLDERS = """SELECT worker FROM session WHERE id = ANY(%(ids)s) AND worker IS NOT NULL
    UNION SELECT worker FROM outbox WHERE session = ANY(%(ids)s) AND sent_at IS NULL AND worker IS NOT NULL"""
# Entries shared with a fork's source are only indexed there: the next search indexes them in the fork.
FORKS = """SELECT s.id FROM entry f, session s JOIN entry e ON e.session = s.id AND e.seq = 1
    WHERE f.session = %s AND f.seq = 1 AND s.owner = %s AND s.id <> f.session AND e.at = f.at AND e.data = f.data"""
COUNTS = """SELECT (SELECT count(*) FROM entry WHERE session = ANY(%(ids)s)),
    (SELECT count(*) FROM inbox WHERE session = ANY(%(ids)s) AND opened),
    (SELECT count(*) FROM inbox WHERE session = ANY(%(ids)s))
        + (SELECT count(*) FROM outbox WHERE session = ANY(%(ids)s))"""
DELETE = (
    "DELETE FROM search_entry WHERE session = ANY(%s)",
    "DELETE FROM search_cursor WHERE session = ANY(%s)",
    "DELETE FROM outbox WHERE session = ANY(%s)",
    "DELETE FROM inbox WHERE session = ANY(%s)",
    "DELETE FROM entry WHERE session = ANY(%s)",
    "DELETE FROM session_grant g USING session s WHERE s.id = ANY(%s) AND (g.owner, g.key) = (s.owner, s.key)",
    """DELETE FROM request_text t USING session s
        WHERE s.id = ANY(%s) AND t.key <> '' AND (t.owner, t.key) = (s.owner, s.key)""",
    "DELETE FROM session WHERE id = ANY(%s)",
)
IS_OLD = """s.updated_at < %s AND s.worker IS NULL
    AND NOT EXISTS (SELECT 1 FROM inbox WHERE session = s.id AND state <> 'done')
    AND NOT EXISTS (SELECT 1 FROM outbox WHERE session = s.id AND sent_at IS NULL)"""
FIRST_ENTRY = "(SELECT data FROM entry WHERE session = s.id ORDER BY seq LIMIT 1)"
SOME = f"""SELECT s.id, s.owner, s.key, {FIRST_ENTRY}, {FIRST_MESSAGE}
    FROM session s WHERE s.id > %s AND s.id <= %s AND {IS_OLD}
        AND (starts_with(s.key, '{API}') OR starts_with(s.key, '{SUBAGENT}'))
    ORDER BY s.id"""
STILL_OLD = f"SELECT s.id, s.owner, s.key FROM session s WHERE s.id = ANY(%s) AND {IS_OLD}"
LOCK_FREE = "SELECT id FROM session WHERE id = ANY(%s) ORDER BY id FOR UPDATE SKIP LOCKED"


def delete(db: Connection, owner: str, key: str, lease: float) -> Removed | Held | None:
    """Delete a session and its sub-agents' sessions, unless a live worker is active there."""
    row = db.execute(LOCK, (owner, key)).fetchone()
    if row is None:
        return None
    rows = db.execute(SUBAGENTS, (owner, SUBAGENT)).fetchall()
    sessions = family((row[0], key), ((id, name, parent_of(data)) for id, name, data in rows))
    ids = [id for id, _ in sessions]
    db.execute(LOCK_ALL, (ids,))
    for (worker,) in db.execute(HOLDERS, {"ids": ids}).fetchall():
        if is_alive(db, worker, lease):
            return Held(worker, None)
    forks = [id for (id,) in db.execute(FORKS, (row[0], owner)).fetchall()]
    for query in DELETE[:2]:
        db.execute(query, (forks,))
    counts: Any = db.execute(COUNTS, {"ids": ids}).fetchone()
    _delete(db, ids)
    return Removed(tuple(name for _, name in sessions), *counts)


def old_requests(db: Connection, before: float, position: int) -> OldRequests:
    """Find old requests among the next sessions."""
    row: Any = db.execute("SELECT coalesce(max(id), 0) FROM session").fetchone()
    rows = db.execute(SOME, (position, position + STEP_SESSIONS, before)).fetchall()
    return prunable(rows, position, row[0], partial(_exists, db))


def _exists(db: Connection, owner: str, key: str) -> bool:
    return db.execute("SELECT 1 FROM session WHERE owner = %s AND key = %s", (owner, key)).fetchone() is not None


def delete_old(db: Connection, sessions: Sequence[int], before: float) -> tuple[tuple[str, str], ...]:
    """Delete these sessions, except those in which something has happened in the meantime."""
    free = [id for (id,) in db.execute(LOCK_FREE, (list(sessions),)).fetchall()]
    still = db.execute(STILL_OLD, (free, before)).fetchall()
    _delete(db, [id for id, _, _ in still])
    return tuple((owner, key) for _, owner, key in still)


def _delete(db: Connection, ids: Sequence[int]) -> None:
    for query in DELETE:
        db.execute(query, (list(ids),))

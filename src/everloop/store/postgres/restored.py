"""Marks a database that PostgreSQL's own tools have restored, as `sqlite/backup.py` marks a restored file.

Since the backup, calls may have run and answers may have been sent of which the database knows nothing, and Matrix keys
may have been used. The next start treats them as it treats what a killed process left behind.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ...config.sources import DSN
from ...errors import StoreError
from ...log import CallsBegun, decode_entry, encode_entry, kind_of
from ..claims import Restored, may_have_run
from .connect import connect, explain, is_same_database
from .heartbeat import RENEWALS
from .move_owner import delete_owner, has_any
from .schema import migrate
from .transactions import FRESH, NOW

if TYPE_CHECKING:
    from .connect import Connection

SEEM_ALIVE = f"SELECT id, at FROM worker w WHERE {FRESH}"
RENEWED = "SELECT w.id FROM worker w JOIN unnest(%s::text[], %s::float8[]) AS o (id, at) ON w.id = o.id AND w.at > o.at"
OPEN_TURNS = "SELECT session, turn, first_seq FROM inbox WHERE opened AND state <> 'done' AND turn IS NOT NULL"
LOG = "SELECT data FROM entry WHERE session = %s AND seq >= %s AND turn = %s ORDER BY seq"
ADD_ENTRY = f"""INSERT INTO entry (session, seq, turn, kind, data, at)
    SELECT %(session)s, max(seq) + 1, %(turn)s, %(kind)s, %(data)s, {NOW} FROM entry WHERE session = %(session)s"""
MARKS = (
    "UPDATE session SET worker = NULL, fence = fence + 1",
    "DELETE FROM worker",
    "DELETE FROM channel_lease",
    # A text, not a JSON value: PostgreSQL's own reads no \\u0000.
    """UPDATE inbox SET data = '{"restored":true,' || substr(data, 2) WHERE state <> 'done' AND data LIKE '{"%'""",
    # A state of an Olm session that is behind what was sent must not encrypt again.
    """UPDATE channel_state SET value = replace(value, '"encrypts":true', '"encrypts":false')
        WHERE channel LIKE '%:keys' AND key LIKE 'olm:%'""",
)
UNSENT = "UPDATE outbox SET worker = NULL, tries = tries + 1 WHERE sent_at IS NULL"


def mark_restored(dsn: DSN, lease: float, places: Mapping[str, DSN] | None = None) -> Restored:
    """Write down what may have happened since the backup, in one transaction. No worker may be at work.

    `places` are the databases of owners, from the directory. Those who have moved since the backup are deleted here.
    """
    with closing(connect(dsn)) as db:
        try:
            migrate(db, dsn)
            _refuse_workers(db, dsn, lease)
            moved = _moved(db, places or {})
            with db.transaction():
                db.execute("LOCK TABLE session, inbox, outbox, worker IN EXCLUSIVE MODE")
                for owner, place in moved.items():
                    delete_owner(db, owner, place, time.time())
                return replace(_mark(db), moved=tuple(moved))
        except StoreError:
            raise
        except Exception as error:
            raise explain(dsn, error) from error


def _refuse_workers(db: Connection, dsn: DSN, lease: float) -> None:
    """Raise a StoreError if a worker renews its lease. What the backup has of workers is not renewed."""
    seen = db.execute(SEEM_ALIVE, (lease,)).fetchall()
    if seen:
        time.sleep(1.2 * lease / RENEWALS)
    if seen and db.execute(RENEWED, ([id for id, _ in seen], [at for _, at in seen])).fetchone() is not None:
        raise StoreError(f"{dsn} is in use: stop all servers and workers first (`everloop status` shows what runs)")


def _moved(db: Connection, places: Mapping[str, DSN]) -> dict[str, DSN]:
    """Return those who are in another database, and have something both there and here."""
    found = {}
    with ExitStack() as stack:
        others: dict[DSN, Connection | None] = {}  # None for this database itself
        for owner, place in places.items():
            if not has_any(db, owner):
                continue
            if place not in others:
                other = stack.enter_context(closing(connect(place)))
                others[place] = None if is_same_database(db, other) else other
            if (there := others[place]) is not None and has_any(there, owner):
                found[owner] = place
    return found


def _mark(db: Connection) -> Restored:
    for query in MARKS:
        db.execute(query)
    unsent = db.execute(UNSENT).rowcount
    cut_off = 0
    open_turns = db.execute(OPEN_TURNS).fetchall()
    for session, turn, first in open_turns:
        log = [decode_entry(data) for (data,) in db.execute(LOG, (session, first or 0, turn))]
        if calls := may_have_run(log):
            begun, cut_off = CallsBegun(calls), cut_off + len(calls)
            values = {"session": session, "turn": turn, "kind": kind_of(begun), "data": encode_entry(begun)}
            db.execute(ADD_ENTRY, values)
    sessions, entries = (_count(db, table) for table in ("session", "entry"))
    return Restored(sessions, entries, len(open_turns), unsent, cut_off)


def _count(db: Connection, table: str) -> int:
    row = db.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(row[0]) if row is not None else 0

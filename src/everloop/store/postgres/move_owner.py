"""Moves one owner from one PostgreSQL database to another: completely and verified, or not at all.

The log, which only grows, is copied while work continues. Then the owner's sessions are locked in the old database, the
rest is copied, and the new database commits: from then on the owner can work there. Finally everything is deleted from
the old one, and a mark is left there that refuses late arrivals. A move that is interrupted before that leaves the
owner in both, and is completed by running it again.

With an owner directory, servers hold back the owner's requests from before the lock until the directory names the new
database.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from ...config.sources import DSN
from ...errors import StoreError
from . import deleting
from .connections import connect, explain
from .directory import Entry, check_password, entry_of
from .import_sqlite import TABLES
from .schema import migrate
from .transactions import NOW, is_alive

if TYPE_CHECKING:
    from .connections import Connection

WAIT_SECONDS = 30.0  # for running turns, and for answers that are being sent
HOLD_SECONDS = 90.0  # additional time for the copy: requests held back for longer go to the old database again
OF_OWNER = ("timer", "spent", "token", "file_mark", "session_grant", "request_text")
BEGIN = "BEGIN; SET LOCAL idle_in_transaction_session_timeout = 0"
HELD = """SELECT worker, key FROM session WHERE owner = %(owner)s AND worker IS NOT NULL
    UNION SELECT o.worker, s.key FROM outbox o JOIN session s ON s.id = o.session
    WHERE o.owner = %(owner)s AND o.sent_at IS NULL AND o.worker IS NOT NULL"""
LOCK = (
    "SELECT 1 FROM session WHERE owner = %(owner)s ORDER BY id FOR UPDATE",
    "SELECT 1 FROM outbox WHERE owner = %(owner)s AND sent_at IS NULL ORDER BY id FOR UPDATE",
    "SELECT 1 FROM timer WHERE owner = %(owner)s ORDER BY id FOR UPDATE",
)
# The same lock as in `everloop_refuse_moved`: new rows of the owner wait, and find the mark.
LOCK_OUT = "SELECT pg_advisory_xact_lock(1163284301, hashtext(%(owner)s))"
MARK = f"""INSERT INTO moved_owner (owner, store, at) VALUES (%s, %s, {NOW})
    ON CONFLICT (owner) DO UPDATE SET store = excluded.store, at = excluded.at"""
QUEUED = """SELECT count(*) FROM inbox i WHERE i.owner = %s AND i.state = 'new' AND i.kind <> 'urgent'
    AND NOT EXISTS (SELECT 1 FROM inbox o WHERE o.session = i.session AND o.state = 'parked')"""
NUMBERS = "SELECT nextval(pg_get_serial_sequence(%s, 'id')) FROM generate_series(1, %s)"
PLACES = "unnest(%s::bigint[], %s::bigint[])"  # a row's old and new number
LENGTHS = """SELECT s.id, coalesce((SELECT max(seq) FROM entry e WHERE e.session = s.id), 0) FROM session s
    WHERE s.id = ANY(%s)"""
LOG = """COPY (SELECT p.place, e.seq, e.turn, e.kind, e.data, e.at
    FROM entry e JOIN unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[]) AS p (id, place, after, until)
        ON p.id = e.session AND e.seq > p.after AND e.seq <= p.until
    ORDER BY p.place, e.seq) TO STDOUT"""
TAKEN_NAME = "SELECT name FROM token WHERE name = ANY(%s) AND revoked_at IS NULL AND hash <> ALL(%s)"


class Part(NamedTuple):
    """A section of a session's log, and the session's number in both databases."""

    id: int
    place: int
    after: int
    until: int


@dataclass(slots=True)
class MovedOwner:
    """What was moved: rows by table, compared logs, and how long the owner's work waited."""

    rows: dict[str, int] = field(default_factory=dict)
    logs: int = 0
    pause: float = 0.0  # seconds from the lock until the owner can work in the new database


def move_owner(
    owner: str,
    source: DSN,
    target: DSN,
    before_commit: Callable[[], None] = lambda: None,
    wait: float = WAIT_SECONDS,
    lease: float = 15.0,
    directory: DSN | None = None,
) -> MovedOwner:
    """Move the owner. `before_commit` is called between the copy and the commits; if it raises, nothing is moved."""
    with ExitStack() as stack:
        entry = stack.enter_context(entry_of(owner, directory)) if directory is not None else None
        if entry is not None and directory is not None:
            check_password(target, directory)
            if (known := entry.place()) not in (None, source.without_password, target.without_password):
                raise StoreError(f"the directory says that {owner} is in {known}: move them from there")
        old, new = stack.enter_context(closing(connect(source))), stack.enter_context(closing(connect(target)))
        try:
            migrate(old, source)
            migrate(new, target)
            if _is_same(old, new):
                raise StoreError(f"{target} is the database that {owner} is in: name another one")
            return _Move(owner, old, new, source, target, lease, entry).run(before_commit, wait)
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{explain(source, error)} Run it again: data in both databases is compared.") from error


def _is_same(old: Connection, new: Connection) -> bool:
    """Return whether both are the same database: an advisory lock belongs to one database of one server."""
    key = secrets.randbits(62)
    old.execute("SELECT pg_advisory_lock(%s)", (key,))
    try:
        row = new.execute("SELECT pg_try_advisory_xact_lock(%s)", (key,)).fetchone()
    finally:
        old.execute("SELECT pg_advisory_unlock(%s)", (key,))
    return row == (False,)


class _Move:
    """One move. Closing a connection rolls its transaction back."""

    def __init__(
        self,
        owner: str,
        old: Connection,
        new: Connection,
        source: DSN,
        target: DSN,
        lease: float,
        entry: Entry | None,
    ) -> None:
        self._owner = owner
        self._old, self._new = old, new
        self._source, self._target = source, target
        self._lease = lease
        self._entry = entry  # the owner's row in the directory
        self._places: dict[int, int] = {}  # copied sessions, and their numbers in the new database
        self._lengths: dict[int, int] = {}  # lengths of their logs, as far as they are copied
        self._moved = MovedOwner(rows={"session": 0, "entry": 0})

    def run(self, before_commit: Callable[[], None], wait: float) -> MovedOwner:
        if self._was_moved():
            if self._entry is None:
                raise StoreError(f"{self._owner} has already moved to {self._target}")
            self._entry.put(self._target)
            return self._moved
        try:
            self._copy_and_commit(before_commit, wait)
        except BaseException:
            if self._entry is not None:
                with contextlib.suppress(Exception):  # the hold expires by itself
                    self._entry.unhold()
            raise
        if self._entry is not None:
            self._entry.put(self._target)
        return self._moved

    def _was_moved(self) -> bool:
        """Return whether an earlier move is complete except for the directory."""
        row = self._old.execute("SELECT store FROM moved_owner WHERE owner = %s", (self._owner,)).fetchone()
        return row is not None and row[0] == self._target.without_password

    def _copy_and_commit(self, before_commit: Callable[[], None], wait: float) -> None:
        self._new.execute(BEGIN)
        self._new.execute("DELETE FROM moved_owner WHERE owner = %s", (self._owner,))  # the owner may be coming back
        there: dict[str, int] = dict(
            self._new.execute("SELECT key, id FROM session WHERE owner = %s", (self._owner,)).fetchall()
        )
        known = {id: there[key] for id, key in self._sessions().items() if key in there}  # by an interrupted move
        self._copy_log(known)
        if self._entry is not None:
            self._entry.hold(self._source, 2 * wait + HOLD_SECONDS)
            self._wait_for_queue(wait)
        began = self._lock_out(wait)
        sessions = self._sessions()
        if not sessions and not any(self._count(table) for table in OF_OWNER):
            raise StoreError(f"{self._source} has nothing of {self._owner}: `everloop token list` names owners")
        if self._places.keys() - sessions.keys():
            raise StoreError("a session was deleted in the meantime: try again")
        lengths = self._lengths_of(known)
        changed = f"{self._target} has a session of the same name with a different log"
        self._compare((Part(id, known[id], 0, length) for id, length in lengths.items()), changed)
        self._update_sessions()
        self._copy_log(known)
        self._copy_rest()
        before_commit()
        if self._entry is not None:
            self._entry.keep_held()
        self._new.execute("COMMIT")
        self._moved.pause = time.monotonic() - began
        self._delete(list(sessions))
        self._old.execute(MARK, (self._owner, self._target.without_password))
        self._old.execute("COMMIT")
        self._moved.logs = len(sessions)

    # ------------------------------------------------------------------------------------------ waiting

    def _lock_out(self, wait: float) -> float:
        """Lock the owner's rows while no worker is active on them; return the time from which on work waits."""
        give_up = time.monotonic() + wait
        while True:
            self._wait_until_idle(give_up)
            self._old.execute(BEGIN)
            began = time.monotonic()
            for query in (*LOCK, LOCK_OUT, *LOCK):  # the second time for sessions created before LOCK_OUT
                self._old.execute(query, {"owner": self._owner})
            if not self._busy():
                return began
            self._old.execute("ROLLBACK")  # a worker has just started

    def _wait_until_idle(self, give_up: float) -> None:
        while busy := self._busy():
            if time.monotonic() > give_up:
                raise StoreError(f"a worker is working on {', '.join(busy[:3])}: try again once its turn has ended")
            time.sleep(0.1)

    def _wait_for_queue(self, wait: float) -> None:
        """Let workers answer pending messages: their clients are connected to servers that read the old database.

        Messages that no worker answers are moved unanswered.
        """
        give_up = time.monotonic() + wait
        while time.monotonic() < give_up and self._old.execute(QUEUED, (self._owner,)).fetchone() != (0,):
            takers = self._old.execute("SELECT id FROM worker WHERE address = 'work'").fetchall()
            if not any(is_alive(self._old, worker, self._lease) for (worker,) in takers):
                return
            time.sleep(0.1)

    def _busy(self) -> list[str]:
        """Return the sessions that a live worker holds, or whose answers it is sending."""
        held = self._old.execute(HELD, {"owner": self._owner}).fetchall()
        return sorted({key for worker, key in held if is_alive(self._old, worker, self._lease)})

    # ------------------------------------------------------------------------------------------ copying

    def _sessions(self) -> dict[int, str]:
        return dict(self._old.execute("SELECT id, key FROM session WHERE owner = %s", (self._owner,)).fetchall())

    def _count(self, table: str) -> int:
        row = self._old.execute(f"SELECT count(*) FROM {table} WHERE owner = %s", (self._owner,)).fetchone()
        return int(row[0]) if row is not None else 0

    def _lengths_of(self, sessions: Iterable[int]) -> dict[int, int]:
        return dict(self._old.execute(LENGTHS, (list(sessions),)).fetchall())

    def _copy_log(self, known: dict[int, int]) -> None:
        """Copy sessions and entries that are not copied yet, and compare these entry by entry."""
        fresh = self._numbered("session", sorted(self._sessions().keys() - known.keys() - self._places.keys()))
        self._moved.rows["session"] += self._stream("session", {}, fresh)
        self._places |= fresh
        lengths = self._lengths_of(self._places)
        parts = [Part(id, self._places[id], self._lengths.get(id, 0), length) for id, length in lengths.items()]
        columns = ", ".join(TABLES["entry"])
        with (
            self._old.cursor().copy(LOG, _values(parts)) as out,
            self._new.cursor().copy(f"COPY entry ({columns}) FROM STDIN") as into,
        ):
            for row in out:
                into.write(row)
                self._moved.rows["entry"] += 1
        self._compare(parts, f"the log arrived changed in {self._target}: nothing was moved")
        self._lengths = lengths

    def _compare(self, parts: Iterable[Part], wrong: str) -> None:
        """Compare logs entry by entry, in the servers' COPY format."""
        parts = list(parts)
        there = [part._replace(id=part.place) for part in parts]
        with (
            self._old.cursor().copy(LOG, _values(parts)) as mine,
            self._new.cursor().copy(LOG, _values(there)) as theirs,
        ):
            if any(one != other for one, other in zip_longest(mine, theirs)):
                raise StoreError(wrong)

    def _update_sessions(self) -> None:
        """Copy the changes to sessions since their logs were copied."""
        columns = [name for name in TABLES["session"] if name not in ("id", "owner", "key")]
        query = f"SELECT id, {', '.join(columns)} FROM session WHERE id = ANY(%s)"
        rows = self._old.execute(query, (list(self._places),)).fetchall()
        update = f"UPDATE session SET {', '.join(f'{name} = %s' for name in columns)} WHERE id = %s"
        self._new.cursor().executemany(update, [(*row[1:], self._places[row[0]]) for row in rows])

    def _copy_rest(self) -> None:
        tokens = self._old.execute("SELECT name, hash FROM token WHERE owner = %s", (self._owner,)).fetchall()
        names, sums = [name for name, _ in tokens], [one for _, one in tokens]
        if taken := self._new.execute(TAKEN_NAME, (names, sums)).fetchone():
            raise StoreError(f'{self._target} has another token named "{taken[0]}": revoke one of the two first')
        for table in ("inbox", "outbox"):
            query = f"SELECT id FROM {table} WHERE session = ANY(%s) ORDER BY id"
            ids = [id for (id,) in self._old.execute(query, (list(self._places),)).fetchall()]
            self._moved.rows[table] = self._stream(table, self._places, self._numbered(table, ids))
        for table in OF_OWNER:
            columns = ", ".join(TABLES[table])
            rows = self._old.execute(f"SELECT {columns} FROM {table} WHERE owner = %s", (self._owner,)).fetchall()
            values = ", ".join(["%s"] * len(TABLES[table]))
            insert = f"INSERT INTO {table} ({columns}) VALUES ({values}) ON CONFLICT DO NOTHING"
            self._new.cursor().executemany(insert, rows)
            self._moved.rows[table] = len(rows)

    def _numbered(self, table: str, ids: list[int]) -> dict[int, int]:
        """Assign each row its number in the other database, in the same order."""
        numbers = sorted(number for (number,) in self._new.execute(NUMBERS, (table, len(ids))).fetchall())
        return dict(zip(ids, numbers, strict=True))

    def _stream(self, table: str, sessions: dict[int, int], rows: dict[int, int]) -> int:
        """Copy these rows in the server's COPY format, with new numbers; `sessions` are those that they belong to."""
        named = {"id": "r.place", "session": "s.place"}
        columns = ", ".join(named.get(name, f"t.{name}") for name in TABLES[table])
        joined = f"{table} t JOIN {PLACES} AS r (id, place) ON r.id = t.id"
        values = [list(rows), list(rows.values())]
        if table != "session":
            joined += f" JOIN {PLACES} AS s (id, place) ON s.id = t.session"
            values += [list(sessions), list(sessions.values())]
        count = 0
        with (
            self._old.cursor().copy(f"COPY (SELECT {columns} FROM {joined}) TO STDOUT", values) as out,
            self._new.cursor().copy(f"COPY {table} ({', '.join(TABLES[table])}) FROM STDIN") as into,
        ):
            for row in out:
                into.write(row)
                count += 1
        return count

    def _delete(self, sessions: list[int]) -> None:
        for query in deleting.DELETE:
            self._old.execute(query, (sessions,))
        for table in (*OF_OWNER, "rate"):
            self._old.execute(f"DELETE FROM {table} WHERE owner = %s", (self._owner,))


def _values(parts: list[Part]) -> list[list[int]]:
    return [list(column) for column in zip(*parts, strict=True)] or [[], [], [], []]

"""Moves one owner from one PostgreSQL database to another: completely and verified, or not at all.

The log, which only grows, is copied while work continues. Then the owner's sessions are locked in the old database, the
rest is copied, and there are three commits:

1. The new database has everything, but no worker finds it: the sessions belong to a placeholder, `arriving:OWNER`, and
   all other rows are staged in tables of their own.
2. The old database deletes everything, and leaves a mark that refuses late arrivals.
3. The new database takes everything over from the staging tables.

So at most one of the databases works for the owner, wherever a move is interrupted, and running it again starts over
(after 1) or completes it (after 2). Both databases keep the time of the move, which identifies it.

With an owner directory, servers hold back the owner's requests from before the lock until the directory names the new
database.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from ...config.sources import DSN
from ...errors import StoreError
from . import deletion
from .connect import connect, explain, is_same_database
from .directory import OwnerRow, check_password, owner_row
from .import_sqlite import TABLES
from .schema import Migration
from .transactions import NOW, is_alive

if TYPE_CHECKING:
    from .connect import Connection

WAIT_SECONDS = 30.0  # for running turns, and for answers that are being sent
HOLD_SECONDS = 90.0  # additional time for the copy: requests held back for longer go to the old database again
OF_OWNER = ("timer", "spent", "token", "file_mark", "session_grant", "request_text")
STAGED = ("inbox", "outbox", *OF_OWNER)
ARRIVING = "arriving:"  # prefix of the placeholder; no owner has a colon
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
MARK = """INSERT INTO moved_owner (owner, store, at) VALUES (%s, %s, %s)
    ON CONFLICT (owner) DO UPDATE SET store = excluded.store, at = excluded.at"""
MARKED = "SELECT store, at FROM moved_owner WHERE owner = %s"
ONLY_MOVE = "SELECT pg_try_advisory_lock(hashtext('everloop move'), hashtext(%s))"
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
# What a row of the owner that is there already would keep out.
TAKEN_SESSION = """SELECT s.key FROM session s JOIN session a ON a.key = s.key
    WHERE s.owner = %(owner)s AND a.owner = %(arriving)s LIMIT 1"""
TAKEN_NAME = """SELECT t.name FROM {token} a JOIN token t ON t.name = a.name AND t.hash <> a.hash
    WHERE a.revoked_at IS NULL AND t.revoked_at IS NULL LIMIT 1"""
TAKEN_MESSAGE = """SELECT a.message_id FROM {inbox} a JOIN inbox i ON (i.owner, i.message_id) = (a.owner, a.message_id)
    LIMIT 1"""
TAKEN_ANSWER = "SELECT a.key FROM {outbox} a JOIN outbox o ON (o.owner, o.key) = (a.owner, a.key) LIMIT 1"
TAKEN_JOB = "SELECT a.id FROM {timer} a JOIN timer t ON (t.owner, t.id) = (a.owner, a.id) LIMIT 1"


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
        row = stack.enter_context(owner_row(owner, directory)) if directory is not None else None
        if row is not None and directory is not None:
            check_password(target, directory)
            if (known := row.place()) not in (None, source.without_password, target.without_password):
                raise StoreError(f"the directory says that {owner} is in {known}: move them from there")
        old, new = stack.enter_context(closing(connect(source))), stack.enter_context(closing(connect(target)))
        Migration(source).through(old)
        Migration(target).through(new)
        try:
            if is_same_database(old, new):
                raise StoreError(f"{target} is the database that {owner} is in: name another one")
            return _Move(owner, old, new, source, target, lease, row).run(before_commit, wait)
        except StoreError:
            raise
        except Exception as error:
            failed = _failed_database((source, old), (target, new))
            raise StoreError(f"{explain(failed, error)} Run the same command again to complete the move.") from error


def _failed_database(*databases: tuple[DSN, Connection]) -> DSN:
    """Return the database that an error came from. A copy that fails in one of them is aborted in the other, too."""
    from psycopg.pq import TransactionStatus

    states = {db.info.transaction_status: dsn for dsn, db in reversed(databases)}
    return states.get(TransactionStatus.UNKNOWN) or states.get(TransactionStatus.INERROR) or databases[0][0]


def delete_owner(db: Connection, owner: str, target: DSN, at: float) -> None:
    """Delete everything of an owner who is in another database, and leave the mark that refuses late arrivals."""
    ids = [id for (id,) in db.execute("SELECT id FROM session WHERE owner = %s", (owner,)).fetchall()]
    for query in deletion.DELETE:
        db.execute(query, (ids,))
    for table in (*OF_OWNER, "rate"):
        db.execute(f"DELETE FROM {table} WHERE owner = %s", (owner,))
    db.execute(MARK, (owner, target.without_password, at))


def has_any(db: Connection, owner: str) -> bool:
    """Return whether a database has anything of the owner."""
    tables = [table for table in ("session", *OF_OWNER) if table != "spent"]  # which may arrive late
    queries = (f"SELECT 1 FROM {table} WHERE owner = %s LIMIT 1" for table in tables)
    return any(db.execute(query, (owner,)).fetchone() for query in queries)


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
        row: OwnerRow | None,
    ) -> None:
        self._owner = owner
        self._old, self._new = old, new
        self._source, self._target = source, target
        self._lease = lease
        self._row = row  # the owner's row in the directory
        self._staged = {table: f'"arriving_{table}:{owner}"' for table in STAGED}
        self._places: dict[int, int] = {}  # copied sessions, and their numbers in the new database
        self._lengths: dict[int, int] = {}  # lengths of their logs, as far as they are copied
        self._moved = MovedOwner(rows={"session": 0, "entry": 0})

    def run(self, before_commit: Callable[[], None], wait: float) -> MovedOwner:
        for connection in (self._old, self._new):
            if connection.execute(ONLY_MOVE, (self._owner,)).fetchone() != (True,):
                raise StoreError(f"another command is currently moving {self._owner}: wait until it ends")
        if not self._was_moved(before_commit):
            try:
                self._copy_and_leave(before_commit, wait)
            except BaseException:
                if self._row is not None:
                    with contextlib.suppress(Exception):  # the hold expires by itself
                        self._row.unhold()
                raise
        if self._row is not None:
            self._row.put(self._target)
        return self._moved

    def _was_moved(self, before_commit: Callable[[], None]) -> bool:
        """Complete an earlier move that was interrupted; return whether there is nothing else to do."""
        gone, come = (db.execute(MARKED, (self._owner,)).fetchone() for db in (self._old, self._new))
        staged = self._new.execute("SELECT to_regclass(%s)", (self._staged["inbox"],)).fetchone() != (None,)
        if staged and come is not None and come[0] != self._source.without_password:
            raise StoreError(
                f"{self._owner} is on the way to {self._target} from {come[0]}: complete that move first, with "
                f"`everloop move {self._owner} {come[0]} {self._target.without_password}`"
            )
        if staged and gone is not None and come is not None and gone[1] == come[1]:
            began = time.monotonic()
            entries = "SELECT count(*) FROM entry e JOIN session s ON s.id = e.session WHERE s.owner = %s"
            before_commit()  # it may not have been asked for in the earlier run
            (self._moved.rows["entry"],) = self._new.execute(entries, (ARRIVING + self._owner,)).fetchone() or (0,)
            self._arrive()
            self._moved.pause = time.monotonic() - began
            return True
        if gone is None or has_any(self._old, self._owner):
            return False
        if staged:  # by a move that was interrupted before the owner moved elsewhere
            self._new.execute(BEGIN)
            self._remove_staged()
            self._new.execute("DELETE FROM moved_owner WHERE owner = %s", (self._owner,))
            self._new.execute("COMMIT")
        if gone[0] == self._target.without_password and self._row is not None:
            return True  # except for the directory
        raise StoreError(f"{self._owner} has already moved to {DSN(gone[0])}")

    def _copy_and_leave(self, before_commit: Callable[[], None], wait: float) -> None:
        self._new.execute(BEGIN)
        self._remove_staged()  # by a move that was interrupted before the second commit
        self._copy_log()
        if self._row is not None:
            self._row.hold(self._source, 2 * wait + HOLD_SECONDS)
            self._wait_for_queue(wait)
        began = self._lock_out(wait)
        sessions = self._sessions()
        if not has_any(self._old, self._owner):
            raise StoreError(f"{self._source} has nothing of {self._owner}: `everloop token list` names owners")
        if self._places.keys() - sessions.keys():
            raise StoreError("a session was deleted in the meantime: try again")
        self._copy_log()
        self._update_sessions()
        self._stage()
        before_commit()
        self._new.execute(LOCK_OUT, {"owner": self._owner})
        self._check_free()
        (at,) = self._new.execute(f"SELECT {NOW}").fetchone() or (0.0,)
        self._new.execute(MARK, (self._owner, self._source.without_password, at))
        delete_owner(self._old, self._owner, self._target, at)
        self._new.execute("COMMIT")
        if self._row is not None:
            self._row.keep_held()
        self._old.execute("COMMIT")
        self._arrive()
        self._moved.pause = time.monotonic() - began
        self._moved.logs = len(sessions)

    # ------------------------------------------------------------------------------------------ staging

    def _stage(self) -> None:
        """Copy everything but sessions and their logs to tables where no worker looks."""
        for table, staged in self._staged.items():
            self._new.execute(f"CREATE TABLE {staged} (LIKE {table} INCLUDING DEFAULTS)")
        for table in ("inbox", "outbox"):
            query = f"SELECT id FROM {table} WHERE session = ANY(%s) ORDER BY id"
            ids = [id for (id,) in self._old.execute(query, (list(self._places),)).fetchall()]
            self._moved.rows[table] = self._stream(table, self._staged[table], self._numbered(table, ids))
        for table in OF_OWNER:
            columns = ", ".join(TABLES[table])
            rows = self._old.execute(f"SELECT {columns} FROM {table} WHERE owner = %s", (self._owner,)).fetchall()
            values = ", ".join(["%s"] * len(TABLES[table]))
            self._new.cursor().executemany(f"INSERT INTO {self._staged[table]} ({columns}) VALUES ({values})", rows)
            self._moved.rows[table] = len(rows)

    def _check_free(self) -> None:
        """Raise a StoreError if the new database has rows in place of the staged ones."""
        owners = {"owner": self._owner, "arriving": ARRIVING + self._owner}
        if taken := self._new.execute(TAKEN_SESSION, owners).fetchone():
            raise StoreError(f"{self._target} has another session {taken[0]} of {self._owner}: delete one of the two")
        for query, what in (
            (TAKEN_MESSAGE, "has another message with the id {}: delete its session in one of the two databases"),
            (TAKEN_ANSWER, "has another answer with the key {}: delete its session in one of the two databases"),
            (TAKEN_JOB, "has another job {}: remove one of the two first"),
            (TAKEN_NAME, 'has another token named "{}": revoke one of the two first'),
        ):
            if taken := self._new.execute(query.format(**self._staged)).fetchone():
                raise StoreError(f"{self._target} {what.format(taken[0])}")

    def _arrive(self) -> None:
        """Take over what is staged."""
        self._new.execute(BEGIN)
        self._check_free()  # the name of a token may have been taken since
        self._new.execute("DELETE FROM moved_owner WHERE owner = %s", (self._owner,))
        arrive = "UPDATE session SET owner = %s, worker = NULL WHERE owner = %s"
        sessions = self._new.execute(arrive, (self._owner, ARRIVING + self._owner)).rowcount
        self._moved.rows["session"] = self._moved.logs = sessions
        for table, staged in self._staged.items():
            columns = ", ".join(TABLES[table])
            insert = f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {staged}"
            if table in OF_OWNER:
                insert += " ON CONFLICT DO NOTHING"
            self._moved.rows[table] = self._new.execute(insert).rowcount
            self._new.execute(f"DROP TABLE {staged}")
        self._new.execute("COMMIT")

    def _remove_staged(self) -> None:
        query = "SELECT id FROM session WHERE owner = %s"
        ids = [id for (id,) in self._new.execute(query, (ARRIVING + self._owner,)).fetchall()]
        for delete in deletion.DELETE:
            self._new.execute(delete, (ids,))
        self._new.execute(f"DROP TABLE IF EXISTS {', '.join(self._staged.values())}")

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

    def _lengths_of(self, sessions: Iterable[int]) -> dict[int, int]:
        return dict(self._old.execute(LENGTHS, (list(sessions),)).fetchall())

    def _copy_log(self) -> None:
        """Copy sessions and entries that are not copied yet, and compare these entry by entry."""
        fresh = self._numbered("session", sorted(self._sessions().keys() - self._places.keys()))
        self._moved.rows["session"] += self._stream("session", "session", fresh)
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
        """Copy the changes to sessions since their logs were copied. A holder keeps them from being pruned."""
        columns = [name for name in TABLES["session"] if name not in ("id", "owner", "key")]
        query = f"SELECT id, {', '.join(columns)} FROM session WHERE id = ANY(%s)"
        rows = self._old.execute(query, (list(self._places),)).fetchall()
        update = f"UPDATE session SET worker = 'move', {', '.join(f'{name} = %s' for name in columns)} WHERE id = %s"
        self._new.cursor().executemany(update, [(*row[1:], self._places[row[0]]) for row in rows])

    def _numbered(self, table: str, ids: list[int]) -> dict[int, int]:
        """Assign each row its number in the other database, in the same order."""
        numbers = sorted(number for (number,) in self._new.execute(NUMBERS, (table, len(ids))).fetchall())
        return dict(zip(ids, numbers, strict=True))

    def _stream(self, table: str, into: str, rows: dict[int, int]) -> int:
        """Copy these rows in the server's COPY format, with new numbers."""
        named = {"id": "r.place", "session": "s.place"}
        if table == "session":
            named["owner"] = f"'{ARRIVING}' || t.owner"
        columns = ", ".join(named.get(name, f"t.{name}") for name in TABLES[table])
        joined = f"{table} t JOIN {PLACES} AS r (id, place) ON r.id = t.id"
        values = [list(rows), list(rows.values())]
        if table != "session":
            joined += f" JOIN {PLACES} AS s (id, place) ON s.id = t.session"
            values += [list(self._places), list(self._places.values())]
        count = 0
        with (
            self._old.cursor().copy(f"COPY (SELECT {columns} FROM {joined}) TO STDOUT", values) as out,
            self._new.cursor().copy(f"COPY {into} ({', '.join(TABLES[table])}) FROM STDIN") as copy,
        ):
            for row in out:
                copy.write(row)
                count += 1
        return count


def _values(parts: list[Part]) -> list[list[int]]:
    return [list(column) for column in zip(*parts, strict=True)] or [[], [], [], []]

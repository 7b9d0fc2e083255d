"""Moves one owner from a PostgreSQL database to another: all of it, compared, or nothing.

The owner's sessions are locked in the old database from the first row that is read until everything is deleted there.
What arrives is committed in the new database first: a move that is cut off in between leaves the owner in both, and is
completed when it is run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...config.sources import DSN
from ...errors import StoreError
from . import deleting
from .connections import connect, explain
from .import_sqlite import CHUNK, LOG, TABLES, hashes
from .schema import migrate
from .transactions import is_alive

if TYPE_CHECKING:
    from .connections import Connection

WAIT_SECONDS = 30.0  # for turns that run, and answers that are being sent
OF_SESSIONS = ("inbox", "outbox")  # whose rows get new numbers, in the same order
OF_OWNER = ("timer", "spent", "token", "file_mark", "session_grant")
OWN = {"session": "owner = %(owner)s", **dict.fromkeys((*OF_SESSIONS, *OF_OWNER), "owner = %(owner)s")}
HELD = """SELECT worker, key FROM session WHERE owner = %(owner)s AND worker IS NOT NULL
    UNION SELECT o.worker, s.key FROM outbox o JOIN session s ON s.id = o.session
    WHERE o.owner = %(owner)s AND o.sent_at IS NULL AND o.worker IS NOT NULL"""
LOCK = (
    "SELECT 1 FROM session WHERE owner = %(owner)s ORDER BY id FOR UPDATE",
    "SELECT 1 FROM outbox WHERE owner = %(owner)s AND sent_at IS NULL ORDER BY id FOR UPDATE",
    "SELECT 1 FROM timer WHERE owner = %(owner)s ORDER BY id FOR UPDATE",
)
NUMBERS = "SELECT nextval(pg_get_serial_sequence(%s, 'id')) FROM generate_series(1, %s)"
LOG_OF = LOG.replace("FROM entry", "FROM entry WHERE session = ANY(%s)")
TAKEN_NAME = "SELECT name FROM token WHERE name = ANY(%s) AND revoked_at IS NULL AND hash <> ALL(%s)"


@dataclass(slots=True)
class MovedOwner:
    """What was moved: rows by table, sessions whose logs were compared, and how long the owner's work waited."""

    rows: dict[str, int] = field(default_factory=dict)
    logs: int = 0
    pause: float = 0.0  # seconds
    left: int = 0  # sessions that came into being in the old database meanwhile


def move_owner(
    owner: str,
    source: DSN,
    target: DSN,
    before_commit: Callable[[], None] = lambda: None,
    wait: float = WAIT_SECONDS,
    lease: float = 15.0,
) -> MovedOwner:
    """Move the owner. `before_commit` is called between the copy and the commits; if it raises, nothing is moved."""
    with closing(connect(source)) as old, closing(connect(target)) as new:
        try:
            migrate(old, source)
            migrate(new, target)
            if _same_tables(old, new):
                raise StoreError(f"{target} is the database that {owner} is in: name another one")
            _wait_until_idle(old, owner, wait, lease)
            began = time.monotonic()
            with old.transaction():
                old.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
                with new.transaction():
                    new.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
                    moved, sessions = _copy(owner, old, new, source, target, lease)
                    before_commit()
                _delete(owner, old, sessions)
            moved.pause = time.monotonic() - began
            row = old.execute("SELECT count(*) FROM session WHERE owner = %s", (owner,)).fetchone()
            moved.left = row[0] if row is not None else 0
            return moved
        except StoreError:
            raise
        except Exception as error:
            where = source if old.info.transaction_status or old.closed else target
            raise StoreError(f"{explain(where, error)} Run it again: what is there twice is compared.") from error


def _same_tables(old: Connection, new: Connection) -> bool:
    """Whether both are one database: an advisory lock is held in one database of one server."""
    key = 4_611_686_018_427_387_903 & hash((old.info.backend_pid, time.monotonic_ns()))
    old.execute("SELECT pg_advisory_lock(%s)", (key,))
    try:
        row = new.execute("SELECT pg_try_advisory_xact_lock(%s)", (key,)).fetchone()
    finally:
        old.execute("SELECT pg_advisory_unlock(%s)", (key,))
    return row == (False,)


def _wait_until_idle(old: Connection, owner: str, wait: float, lease: float) -> None:
    give_up = time.monotonic() + wait
    while busy := _busy(old, owner, lease):
        if time.monotonic() > give_up:
            raise StoreError(f"a worker is at work on {', '.join(busy[:3])}: try again when its turn has ended")
        time.sleep(0.1)


def _busy(old: Connection, owner: str, lease: float) -> list[str]:
    """The sessions that a living worker holds, or sends answers of."""
    held = old.execute(HELD, {"owner": owner}).fetchall()
    return sorted({key for worker, key in held if is_alive(old, worker, lease)})


def _copy(
    owner: str, old: Connection, new: Connection, source: DSN, target: DSN, lease: float
) -> tuple[MovedOwner, list[int]]:
    for query in LOCK:
        old.execute(query, {"owner": owner})
    if busy := _busy(old, owner, lease):
        raise StoreError(f"a worker has just begun to work on {', '.join(busy[:3])}: try again")
    columns, keys = TABLES["session"], {"owner": owner}
    sessions = _read(old, "session", columns, keys)
    if not sessions and not any(_read(old, table, ("owner",), keys) for table in OF_OWNER):
        raise StoreError(f"{source} has nothing of {owner}: `everloop token list` and `everloop sessions` name owners")
    moved = MovedOwner()
    there: dict[str, int] = dict(new.execute("SELECT key, id FROM session WHERE owner = %(owner)s", keys).fetchall())
    places = {row[0]: there[row[2]] for row in sessions if row[2] in there}  # moved before, by a run that was cut off
    fresh = [row for row in sessions if row[2] not in there]
    for row, id in zip(fresh, _numbers(new, "session", len(fresh)), strict=True):
        places[row[0]] = id
    _write(new, "session", columns, ((places[row[0]], *row[1:]) for row in fresh))
    moved.rows["session"] = len(sessions)
    ids = [row[0] for row in fresh]
    moved.rows["entry"] = _copy_log(old, new, ids, places)
    for table in OF_SESSIONS:
        columns = TABLES[table]
        rows = [row for row in _read(old, table, columns, keys) if row[2] in set(ids)]
        numbers = _numbers(new, table, len(rows))
        _write(
            new, table, columns,
            ((n, row[1], places[row[2]], *row[3:]) for n, row in zip(numbers, rows, strict=True)),
        )  # fmt: skip
        moved.rows[table] = len(rows)
    _check_tokens(old, new, keys, target)
    for table in OF_OWNER:
        columns = TABLES[table]
        rows = _read(old, table, columns, keys)
        values = ", ".join(["%s"] * len(columns))
        insert = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({values}) ON CONFLICT DO NOTHING"
        new.cursor().executemany(insert, rows)
        moved.rows[table] = len(rows)
    moved.logs = _compare(old, new, places, [row[0] for row in sessions], {row[0] for row in fresh}, target)
    return moved, [row[0] for row in sessions]


def _read(db: Connection, table: str, columns: Sequence[str], keys: dict[str, str]) -> list[tuple[Any, ...]]:
    order = " ORDER BY id" if "id" in columns else ""
    return db.execute(f"SELECT {', '.join(columns)} FROM {table} WHERE {OWN[table]}{order}", keys).fetchall()


def _numbers(db: Connection, table: str, count: int) -> list[int]:
    return sorted(number for (number,) in db.execute(NUMBERS, (table, count)).fetchall())


def _write(db: Connection, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with db.cursor().copy(f"COPY {table} ({', '.join(columns)}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def _copy_log(old: Connection, new: Connection, sessions: list[int], places: dict[int, int]) -> int:
    count = 0
    columns = TABLES["entry"]
    with old.cursor(name="log") as cursor, new.cursor().copy(f"COPY entry ({', '.join(columns)}) FROM STDIN") as copy:
        cursor.itersize = CHUNK
        for session, *row in cursor.execute(LOG_OF, (sessions,)):
            copy.write_row((places[session], *row))
            count += 1
    return count


def _check_tokens(old: Connection, new: Connection, keys: dict[str, str], target: DSN) -> None:
    """A name is one token's in a whole database."""
    tokens = _read(old, "token", ("name", "hash"), keys)
    names, sums = [name for name, _ in tokens], [one for _, one in tokens]
    if taken := new.execute(TAKEN_NAME, (names, sums)).fetchone():
        raise StoreError(f'{target} has another token named "{taken[0]}": revoke one of the two first')


def _compare(
    old: Connection, new: Connection, places: dict[int, int], sessions: list[int], fresh: set[int], target: DSN
) -> int:
    """Compare all logs entry by entry, and return how many there are. One that was moved before may have gone on."""
    here = {places[session]: digest for session, digest in _hashes(old, sessions).items()}
    there = _hashes(new, list(places.values()))
    for session in sessions:
        place = places[session]
        if here.get(place) == there.get(place):
            continue
        if session in fresh:
            raise StoreError(f"the log of session {session} arrived changed in {target}: nothing was moved")
        length = old.execute("SELECT max(seq) FROM entry WHERE session = %s", (session,)).fetchone()
        begun = new.execute(LOG_OF.replace("ORDER BY", "AND seq <= %s ORDER BY"), ([place], length and length[0] or 0))
        if hashes(begun.fetchall()).get(place) != here.get(place):
            raise StoreError(f"{target} has a session of the same name as session {session} with another log")
    return len(here)


def _hashes(db: Connection, sessions: list[int]) -> dict[int, str]:
    with db.cursor(name="compared") as cursor:
        cursor.itersize = CHUNK
        return hashes(cursor.execute(LOG_OF, (sessions,)))


def _delete(owner: str, old: Connection, sessions: list[int]) -> None:
    for query in deleting.DELETE:
        old.execute(query, (sessions,))
    for table in (*OF_OWNER, "rate"):
        old.execute(f"DELETE FROM {table} WHERE owner = %s", (owner,))

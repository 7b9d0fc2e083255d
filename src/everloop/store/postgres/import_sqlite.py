"""Imports a SQLite store into an empty PostgreSQL database: completely and verified, or not at all."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config.sources import DSN
from ...errors import StoreError
from ..peers import alive
from ..sqlite.schema import NewerSchema
from ..sqlite.schema import migrate as migrate_file
from .connect import connect, explain
from .schema import migrate

if TYPE_CHECKING:
    from .connect import Connection

CHUNK = 500  # rows per batch
# Leases and sending marks are not imported: no worker is running, and the next one takes up everything.
TABLES: dict[str, tuple[str, ...]] = {
    "session": ("id", "owner", "key", "fence", "history_from", "compacted", "created_at", "updated_at",
                "title", "named_by", "naming_usage", "archived_at"),
    "entry": ("session", "seq", "turn", "kind", "data", "at"),
    "inbox": ("id", "owner", "session", "message_id", "kind", "state", "data", "at", "turn", "first_seq", "opened",
              "ended_at", "reason", "damaged", "hidden", "flushed"),
    "outbox": ("id", "owner", "session", "turn", "data", "tries", "at", "sent_at", "key", "channel", "chat_id",
               "damaged", "parts", "failed"),
    "timer": ("owner", "id", "due_at", "data"),
    "spent": ("owner", "scope", "tokens", "cost"),
    "token": ("id", "hash", "name", "owner", "created_at", "last_used_at", "revoked_at", "rights", "agent"),
    "file_mark": ("owner", "digest", "tainted", "path", "at"),
    "session_grant": ("owner", "key", "name", "at"),
    "request_text": ("owner", "hash", "key", "data", "at"),
    "channel_state": ("channel", "key", "value"),
}  # fmt: skip
NUMBERED = ("session", "inbox", "outbox")
HELD = "SELECT worker FROM session WHERE worker IS NOT NULL UNION SELECT id FROM worker"
LOG = "SELECT session, seq, turn, kind, data, at FROM entry ORDER BY session, seq"


@dataclass(slots=True)
class Imported:
    """What was imported: rows by table, and the number of sessions whose logs were compared."""

    rows: dict[str, int] = field(default_factory=dict)
    logs: int = 0


def import_store(source: Path, target: DSN, tell: Callable[[str, int], None] = lambda table, rows: None) -> Imported:
    """Copy everything in one transaction, count it, compare every session's log, and commit."""
    with closing(_file(source)) as file, closing(connect(target)) as database:
        try:
            migrate(database, target)
            with database.transaction():
                return _copy(file, database, source, target, tell)
        except StoreError:
            raise
        except sqlite3.Error as error:
            raise StoreError(f"{source} cannot be read ({error}): nothing was moved") from error
        except Exception as error:
            raise StoreError(f"{explain(target, error)} Nothing was moved.") from error


def _file(source: Path) -> sqlite3.Connection:
    """Open the file, migrated, in a single read transaction."""
    if not source.is_file():
        raise StoreError(f"there is no SQLite store at {source}: name the file to move")
    try:
        file = sqlite3.connect(source, isolation_level=None)
        if not file.execute("SELECT 1 FROM sqlite_master WHERE name = 'session'").fetchone():
            raise StoreError(f"{source} is not an Everloop store")
        migrate_file(file)
        file.execute("BEGIN")
        held = file.execute(HELD).fetchall()
    except NewerSchema:
        raise StoreError(f"{source} was written by a newer Everloop: update this one") from None
    except sqlite3.Error as error:
        raise StoreError(f"{source} cannot be read ({error}): it must be a SQLite store of Everloop") from None
    if any(alive(worker) for (worker,) in held):
        raise StoreError(f"{source} is in use: stop `everloop serve`, `everloop worker` and chats on it first")
    return file


def _copy(
    file: sqlite3.Connection, database: Connection, source: Path, target: DSN, tell: Callable[[str, int], None]
) -> Imported:
    moved = Imported()
    names = ", ".join(TABLES)
    database.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
    database.execute(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE")
    for table in TABLES:
        if database.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone():
            raise StoreError(f"{target} is not empty (it has rows in {table}): name an empty database")
    for table, columns in TABLES.items():
        listed = ", ".join(columns)
        with database.cursor().copy(f"COPY {table} ({listed}) FROM STDIN") as copy:
            for row in _rows(file.execute(f"SELECT {listed} FROM {table}")):
                copy.write_row([_fits(table, columns, row, value, n) for n, value in enumerate(row)])
        moved.rows[table] = _counted(file, database, table, source)
        tell(table, moved.rows[table])
    for table in NUMBERED:
        number = f"pg_get_serial_sequence('{table}', 'id')"
        database.execute(f"SELECT setval({number}, (SELECT coalesce(max(id), 0) + 1 FROM {table}), false)")
    moved.logs = _compared(file, database, source)
    return moved


def _fits(table: str, columns: tuple[str, ...], row: tuple[Any, ...], value: Any, n: int) -> Any:
    """Convert a value to PostgreSQL's representation."""
    if columns[n] in ("opened", "tainted", "hidden"):
        return bool(value)
    if isinstance(value, str) and "\0" in value:
        raise StoreError(f"{table} {row[0]}: its {columns[n]} contains a NUL, which PostgreSQL cannot store")
    return value


def _counted(file: sqlite3.Connection, database: Connection, table: str, source: Path) -> int:
    count = f"SELECT count(*) FROM {table}"
    there, here = file.execute(count).fetchone()[0], database.execute(count).fetchone()
    if here is None or there != here[0]:
        raise StoreError(f"{source}: {table} has {there} rows and {here and here[0]} arrived: nothing was moved")
    return int(there)


def _compared(file: sqlite3.Connection, database: Connection, source: Path) -> int:
    """Compare all logs entry by entry, and return their number."""
    there = _hashes(_rows(file.execute(LOG)))
    with database.cursor(name="log") as cursor:
        cursor.itersize = CHUNK
        here = _hashes(cursor.execute(LOG))
    if different := [session for session in there.keys() | here.keys() if there.get(session) != here.get(session)]:
        raise StoreError(f"{source}: the log of session {min(different)} arrived changed: nothing was moved")
    return len(there)


def _hashes(log: Iterable[tuple[Any, ...]]) -> dict[int, str]:
    found: dict[int, Any] = {}
    for session, *row in log:
        if session not in found:
            found[session] = hashlib.sha256()
        found[session].update(repr(row).encode("utf-8", "surrogatepass"))
    return {session: sum.hexdigest() for session, sum in found.items()}


def _rows(cursor: sqlite3.Cursor) -> Iterator[tuple[Any, ...]]:
    while rows := cursor.fetchmany(CHUNK):
        yield from rows

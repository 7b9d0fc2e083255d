"""Connecting to PostgreSQL: to one server, to the primary of several, or through a pooler."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ...config.sources import DSN
from ...errors import EverloopError, OwnerMoved, StoreError

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]
    Result = psycopg.Cursor[tuple[Any, ...]]  # of a statement that may still be in flight

CONNECT_SECONDS = 10
# A client that freezes inside a transaction must not lock a session's row for longer than this.
IDLE_SECONDS = 10
LOCK_SECONDS = 10
SETTINGS = {
    "idle_in_transaction_session_timeout": f"{IDLE_SECONDS}s",
    "lock_timeout": f"{LOCK_SECONDS}s",
    "client_min_messages": "warning",
    "synchronous_commit": "on",
    # Statements look up a few rows by key: no plan depends on the values, and planning costs more than running.
    "plan_cache_mode": "force_generic_plan",
    # A plan made while a table is small or not yet analyzed would read all of it, and is kept as the table grows.
    # Servers before PostgreSQL 18 rate disabled plan types as very expensive, and so consider JIT compilation
    # worthwhile.
    "enable_seqscan": "off",
    "jit": "off",
}
# A vanished peer is detected within seconds instead of minutes.
KEEPALIVE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
# For an address with several servers: connect to the primary, and give up quickly on a machine that does not answer.
FAILOVER = {
    "target_session_attrs": "read-write",
    "connect_timeout": 3,
    "keepalives_idle": 4,
    "keepalives_interval": 2,
    "keepalives_count": 2,
    "tcp_user_timeout": 8_000,
}
MISSING = "a PostgreSQL store needs the extra `postgres`: pip install 'everloop[postgres]'"
SLOW_SECONDS = 1.5  # a failed attempt that took this long marks its server as silent: others are tried first
SILENT_SECONDS = 5.0  # delay before a silent server is tried again
BROKEN_OFF_SECONDS = 1.0  # the same for one that was connected: it may only have been slow
MOVED = "EL002"  # raised for an owner who has moved to another database
READ_ONLY = "25006"  # a standby, or a former primary
SCHEMA_LOCK = 7_301_188_205_114_006_529  # held by the process that migrates, or changes the role's settings
# The timeline of a primary, which a promotion raises: the first eight digits of the name of a WAL file.
TIMELINE = "SELECT substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"


class Unreachable(StoreError):
    """No connection is possible now; there may be one later."""


def connect(dsn: DSN, *, pooled: bool = False, number: int | None = None) -> Connection:
    """Open a connection in autocommit mode, or raise a one-line StoreError.

    With a `number`, only that server of the address is tried. A `pooled` connection goes through a pooler, which may
    run each transaction in a different server process, so no statements are prepared on it.
    """
    given = parts_of(dsn)
    import psycopg

    logging.getLogger("psycopg").setLevel(logging.ERROR)  # broken connections are reported by this module
    defaults = {"connect_timeout": CONNECT_SECONDS, "application_name": "everloop", **KEEPALIVE}
    if dsn.has_several_hosts:
        defaults |= FAILOVER
    options: dict[str, Any] = {name: value for name, value in defaults.items() if name not in given}
    if number is not None:
        options |= _only(given, number)
    try:
        connection = psycopg.connect(dsn.secret, autocommit=True, **options)
        if pooled:
            connection.prepare_threshold = None
    except psycopg.Error as error:
        raise Unreachable(
            f"cannot open the store {dsn} ({one_line(dsn, error)}): check that the server runs, and the address, the "
            "user and the password"
        ) from None
    try:
        sets = ", ".join(["set_config(%s, %s, false)"] * len(SETTINGS))
        connection.execute(f"SELECT {sets}", list(chain(*SETTINGS.items())))
    except psycopg.Error as error:
        connection.close()
        raise Unreachable(f"cannot use the store {dsn}: {one_line(dsn, error)}") from None
    return connection


def parts_of(dsn: DSN) -> dict[str, Any]:
    """Return the parts of an address by libpq's names, or raise a one-line StoreError."""
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
    except ImportError as error:
        raise StoreError(MISSING) from error
    with contextlib.suppress(psycopg.Error):  # its text may quote the address, and so the password
        if dsn.well_formed:
            return conninfo_to_dict(dsn.secret)
    raise StoreError(
        f"{dsn} is not the address of a PostgreSQL database: write postgresql://USER:PASSWORD@HOST/DATABASE, with "
        "special characters as in web addresses (@ is %40)"
    )


def _only(given: Mapping[str, Any], number: int) -> dict[str, str]:
    """Return the part of an address that names one of its servers. A single port applies to all of them."""
    found = {}
    for name in ("host", "hostaddr", "port"):
        values = str(given.get(name) or "").split(",")
        if values != [""]:
            found[name] = values[number if len(values) > 1 else 0]
    return found


def is_same_database(one: Connection, other: Connection) -> bool:
    """Return whether both lead to the same database: an advisory lock belongs to one database of one server."""
    key = secrets.randbits(62)
    one.execute("SELECT pg_advisory_lock(%s)", (key,))
    try:
        row = other.execute("SELECT pg_try_advisory_xact_lock(%s)", (key,)).fetchone()
    finally:
        one.execute("SELECT pg_advisory_unlock(%s)", (key,))
    return row == (False,)


# ---------------------------------------------------------------------------------------------- several servers


class Primary:
    """Connects to the primary of several servers.

    A primary that was frozen or disconnected does not know about a failover when it comes back: it accepts connections,
    but commits there wait for a standby that it no longer has. Each failover raises the timeline. So a server with an
    earlier timeline than the latest one seen is skipped, and `break_all` is called when a later one is seen: existing
    connections may be to the old primary.

    A machine that is lost does not answer at all, and each try costs `connect_timeout`. So a server that was silent is
    tried by one thread now and then, while the others look at the rest.
    """

    def __init__(self, dsn: DSN, break_all: Callable[[], None]) -> None:
        self.break_all = break_all
        self._dsn = dsn
        self._latest = ""
        self._lock = threading.Lock()
        self._try_at: dict[int, float] = {}  # when to retry a silent server
        self._servers: weakref.WeakKeyDictionary[Connection, int] = weakref.WeakKeyDictionary()

    def connect(self) -> Connection:
        """Open a connection, or raise a one-line StoreError."""
        failed: Unreachable | None = None
        for number in self._to_try():
            began = time.monotonic()
            try:
                connection = connect(self._dsn, number=number)
            except Unreachable as error:
                if time.monotonic() - began > SLOW_SECONDS:
                    self._try_at[number] = time.monotonic() + SILENT_SECONDS
                else:
                    self._try_at.pop(number, None)
                failed = failed or error
                continue
            self._try_at.pop(number, None)
            if self._is_latest(connection):
                with self._lock:
                    self._servers[connection] = number
                return connection
            connection.close()
            failed = Unreachable(
                f"cannot open the store {self._dsn}: a server that was the primary before a failover is back, and the "
                "primary cannot be reached; stop the old one"
            )
        assert failed is not None
        raise failed

    def give_up(self, connection: Connection | None) -> None:
        """Break all connections, because the server of this one is silent. The others are tried before it."""
        if connection is not None:
            with self._lock:
                number = self._servers.get(connection)
                if number is not None:
                    self._try_at[number] = time.monotonic() + BROKEN_OFF_SECONDS
            break_off(connection)
        self.break_all()

    def _to_try(self) -> list[int]:
        """Return the servers in order, without those that another thread has just found silent."""
        now = time.monotonic()
        with self._lock:
            due = [number for number in range(self._dsn.hosts) if self._try_at.get(number, 0.0) <= now]
            self._try_at |= {number: now + SILENT_SECONDS for number in due if number in self._try_at}
        return due or list(range(self._dsn.hosts))

    def _is_latest(self, connection: Connection) -> bool:
        timeline = _timeline(connection)
        with self._lock:
            latest, self._latest = self._latest, max(self._latest, timeline)
        if latest and timeline > latest:
            self.break_all()
        return timeline >= latest

    def has_changed(self) -> bool:
        """Check every server, and return whether one of them is a later primary."""
        before = self._latest
        for number in range(self._dsn.hosts):
            with contextlib.suppress(Unreachable), contextlib.closing(connect(self._dsn, number=number)) as connection:
                self._is_latest(connection)
        return self._latest > before


def _timeline(connection: Connection) -> str:
    import psycopg

    try:
        row = connection.execute(TIMELINE).fetchone()
    except psycopg.Error as error:
        connection.close()
        raise Unreachable(f"the primary cannot be asked for its timeline ({error})") from None
    return str(row[0]) if row is not None else ""


def break_off(connection: Connection) -> None:
    """Break a connection that another thread may be waiting on: that thread gets an error at once."""
    with contextlib.suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)  # unless it is already closed


# ---------------------------------------------------------------------------------------------- errors in one line


def explain(dsn: DSN, error: Exception) -> Exception:
    """Convert a database error to one line that says what to do."""
    if isinstance(error, EverloopError):
        return error
    state, what = getattr(error, "sqlstate", None) or "", one_line(dsn, error)
    if state == MOVED:
        return OwnerMoved(f"{what}: {dsn} no longer accepts their data")
    if state == "53100":
        what = f"the disk of the store {dsn} is full: free some space and try again"
    elif state == READ_ONLY:
        what = f"the store {dsn} is read-only: use the address of the primary server"
    elif state == "42501":
        what = f"the user of the store {dsn} lacks a privilege ({what}): grant it those of the database's owner"
    elif state == "55P03":
        what = f"the store {dsn} is locked by another worker's write: it will be retried"
    elif state in ("42P01", "42703"):
        what = f"the tables of the store {dsn} were altered ({what}): restore a copy"
    else:
        what = f"the store {dsn}: {what}"
    return StoreError(f"{what}. What was written before is safe.")


def one_line(dsn: DSN, error: Exception) -> str:
    """Return the first line of an error, without the password."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines[0] if lines else type(error).__name__).removesuffix(".")
    for secret in passwords(dsn.secret):
        text = text.replace(secret, "…")
    return text


def passwords(dsn: str) -> list[str]:
    """Return the parts of an address that must not be shown: the password, quoted and unquoted."""
    try:
        written = [urlsplit(dsn).password or ""]
    except ValueError:
        written = []
    written += re.findall(r"[?&\s]password=([^&\s]+)", dsn)
    return [word for secret in written if secret for word in dict.fromkeys((secret, unquote(secret)))]


# ---------------------------------------------------------------------------------------------- poolers

# A pooler in transaction mode assigns a server process to each transaction. LISTEN and SET of a connection are lost
# after its first transaction: through such a pooler everything seems to work, but no worker is ever woken. So the
# address of the store must keep its process (the server itself, or a pooler in session mode), and a pooler in
# transaction mode has an address of its own, for everything but listening.

POOLER_TRIES = 5  # on a pooler with many other clients, a single attempt may detect nothing
PID = "SELECT pg_backend_pid()"
SCHEMA_TABLE = "SELECT to_regclass('everloop_schema')::oid::bigint"
# The settings with which the role of this connection starts each session in this database.
DEFAULTS = """SELECT unnest(s.setconfig) FROM pg_db_role_setting s
    JOIN pg_database d ON d.oid = s.setdatabase JOIN pg_roles r ON r.oid = s.setrole
    WHERE d.datname = current_database() AND r.rolname = current_user"""


def refuse_transaction_mode(connection: Connection, dsn: DSN, connect: Callable[[], Connection]) -> None:
    """Raise a StoreError if a connection does not keep its server process.

    A server announces the id of its process; a pooler announces a number of its own. Only in that case, a second
    connection starts a transaction: if it gets the process that the first one had, the first one has not kept it.
    """
    first = _process(connection)
    if first == connection.info.backend_pid:
        return
    other = connect()
    try:
        for _ in range(POOLER_TRIES):
            other.execute("BEGIN")
            taken, now = _process(other), _process(connection)
            other.execute("ROLLBACK")
            if taken == first or now != first:
                raise StoreError(
                    f"{dsn} is the address of a pooler that gives each transaction another connection: use that of the "
                    "server itself, or a pooler in session mode, and name this one as `store_pool`"
                )
    finally:
        other.close()


def check_pool(pooled: Connection, pool: DSN, direct: Connection, dsn: DSN) -> None:
    """Raise a StoreError unless both connections lead to the same tables of the same server."""
    same = is_same_database(direct, pooled)
    if not same or pooled.execute(SCHEMA_TABLE).fetchone() != direct.execute(SCHEMA_TABLE).fetchone():
        raise StoreError(
            f"the pooler {pool} does not lead to the tables of {dsn}: check its database, server and search_path"
        )


def set_defaults(connection: Connection) -> None:
    """Make every session of this role in this database start with our settings.

    A setting made on a connection would only apply to the server process that it happens to have at that moment.
    """
    from psycopg import sql

    wanted = {f"{name}={value}" for name, value in SETTINGS.items()}
    if wanted <= {found for (found,) in connection.execute(DEFAULTS)}:
        return
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (SCHEMA_LOCK,))  # two at once would be an error
        database = connection.execute("SELECT current_database()").fetchone()
        assert database is not None
        for name, value in SETTINGS.items():
            statement = sql.SQL("ALTER ROLE CURRENT_USER IN DATABASE {} SET {} = {}")
            connection.execute(statement.format(sql.Identifier(database[0]), sql.Identifier(name), sql.Literal(value)))


def _process(connection: Connection) -> int:
    row = connection.execute(PID).fetchone()
    assert row is not None
    return int(row[0])

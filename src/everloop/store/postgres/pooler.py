"""Connection poolers: which address may be one, and what a pooler in transaction mode requires.

A pooler in transaction mode assigns a server process to each transaction. LISTEN and SET of a connection are lost after
its first transaction: through such a pooler everything seems to work, but no worker is ever woken. So the address of
the store must keep its process (the server itself, or a pooler in session mode), and a pooler in transaction mode has
an address of its own, for everything but listening.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...config.sources import DSN
from ...errors import StoreError
from .connections import SETTINGS
from .schema import LOCK

if TYPE_CHECKING:
    from .connections import Connection

TRIES = 5  # on a pooler with many other clients, a single attempt may detect nothing
PID = "SELECT pg_backend_pid()"
TABLES = "SELECT to_regclass('everloop_schema')::oid::bigint"
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
        for _ in range(TRIES):
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
    """Raise a StoreError unless both connections lead to the same tables of the same server.

    An advisory lock belongs to one database of one server: if the pooler leads elsewhere, the lock is free there.
    """
    key = secrets.randbits(62)
    direct.execute("SELECT pg_advisory_lock(%s)", (key,))
    try:
        free = pooled.execute("SELECT pg_try_advisory_xact_lock(%s)", (key,)).fetchone()
    finally:
        direct.execute("SELECT pg_advisory_unlock(%s)", (key,))
    if free != (False,) or pooled.execute(TABLES).fetchone() != direct.execute(TABLES).fetchone():
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
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK,))  # two at once would be an error
        database = connection.execute("SELECT current_database()").fetchone()
        assert database is not None
        for name, value in SETTINGS.items():
            statement = sql.SQL("ALTER ROLE CURRENT_USER IN DATABASE {} SET {} = {}")
            connection.execute(statement.format(sql.Identifier(database[0]), sql.Identifier(name), sql.Literal(value)))


def _process(connection: Connection) -> int:
    row = connection.execute(PID).fetchone()
    assert row is not None
    return int(row[0])

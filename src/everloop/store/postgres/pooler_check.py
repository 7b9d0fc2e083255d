"""Detects a connection pooler in transaction mode.

Behind one everything seems to work, but no worker is ever woken: what a connection listens to and sets is lost with its
first transaction. A pooler in session mode is fine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...config.sources import DSN
from ...errors import StoreError

if TYPE_CHECKING:
    from .connections import Connection

TRIES = 5  # on a pooler with many other clients, one try may see nothing
PID = "SELECT pg_backend_pid()"


def refuse_transaction_mode(connection: Connection, dsn: DSN, connect: Callable[[], Connection]) -> None:
    """Raise a StoreError if a connection does not keep its server process.

    A server announces the id of its process; a pooler announces a number of its own. Only then a second connection
    begins a transaction: if it gets the process that the first one had, the first one has not kept it.
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
                    "server itself, or a pooler in session mode"
                )
    finally:
        other.close()


def _process(connection: Connection) -> int:
    row = connection.execute(PID).fetchone()
    assert row is not None
    return int(row[0])

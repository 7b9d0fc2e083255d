"""Finds out whether there is a pooler before the server that gives every transaction another connection.

Behind such a one everything seems to work, but nobody is ever woken: what a session listens to and sets is lost with
its first transaction. A pooler in session mode is fine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...config.dsn import DSN
from ...errors import StoreError

if TYPE_CHECKING:
    from .connecting import Connection

TRIES = 5  # on a pooler with many other clients, a look may happen to see nothing
PID = "SELECT pg_backend_pid()"


def refuse_transaction_mode(connection: Connection, dsn: DSN, connect: Callable[[], Connection]) -> None:
    """An error in one line where a connection does not keep its process of the server.

    A server names its process as it greets; a pooler greets with a number of its own. Only then it is looked closer: a
    second connection begins a transaction, and if it gets what the first one had, the first one has not kept it.
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

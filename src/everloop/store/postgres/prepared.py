"""Prepared statements through libpq itself, for the few that every turn runs, and writes of one such statement.

Through a pooler nothing is prepared: the next transaction may run in a server process that does not know the name.

psycopg adapts values of any type, and spends several times as long on that as libpq on the rest of a statement. These
statements have values of five types, so they are sent and read here. Everything else is left to psycopg.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from psycopg.pq.abc import PGresult

    from .connect import Connection

T = TypeVar("T")
Rows = list[tuple[Any, ...]]
# After a ROLLBACK, psycopg deallocates all prepared statements of a connection, including these.
GONE = b"26000"
_names: weakref.WeakKeyDictionary[Connection, dict[str, bytes]] = weakref.WeakKeyDictionary()


def run(connection: Connection, query: str, values: Sequence[object] = ()) -> Rows:
    """Run a statement with `%s` placeholders outside of a pipeline, and return its rows.

    It is prepared the first time it runs on a connection, unless the connection goes through a pooler.
    """
    from psycopg import OperationalError
    from psycopg.pq import DiagnosticField, ExecStatus

    arguments: list[Any] = [_encoded(value) for value in values]
    try:
        if connection.prepare_threshold is None:
            result = connection.pgconn.exec_params(_numbered(query), arguments)
        else:
            result = connection.pgconn.exec_prepared(_prepared(connection, query), arguments)
            if result.error_field(DiagnosticField.SQLSTATE) == GONE:  # none of it has run
                del _names[connection]
                result = connection.pgconn.exec_prepared(_prepared(connection, query), arguments)
    except OperationalError:  # libpq has no result at all
        connection.close()
        raise
    if result.status != ExecStatus.TUPLES_OK:
        _check(connection, result)
    decoders = [_DECODERS.get(result.ftype(column), bytes.decode) for column in range(result.nfields)]
    return [
        tuple(
            None if (found := result.get_value(row, column)) is None else decode(found)
            for column, decode in enumerate(decoders)
        )
        for row in range(result.ntuples)
    ]


def _prepared(connection: Connection, query: str) -> bytes:
    """Return the name of a statement, preparing it if necessary."""
    names = _names.setdefault(connection, {})
    if (name := names.get(query)) is None:
        name = b"everloop_%d" % (len(names) + 1)
        _check(connection, connection.pgconn.prepare(name, _numbered(query)))
        names[query] = name
    return name


@lru_cache
def _numbered(query: str) -> bytes:
    """Return the statement with `$1`, `$2` … for its values, as the server requires."""
    first, *others = query.split("%s")
    return "".join([first, *(f"${number}{part}" for number, part in enumerate(others, 1))]).encode()


def _check(connection: Connection, result: PGresult) -> None:
    from psycopg.errors import error_from_result
    from psycopg.pq import DiagnosticField, ExecStatus

    if result.status in (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK):
        return
    if result.error_field(DiagnosticField.SQLSTATE) is None:  # not from the server, which libpq could not reach
        connection.close()
    raise error_from_result(result, encoding="utf-8")


def _encoded(value: object) -> bytes | None:
    match value:
        case None:
            return None
        case str():
            return _text(value)
        case bool():
            return b"t" if value else b"f"
        case int() | float():
            return repr(value).encode()
        case list():
            return b"{%s}" % b",".join(map(_element, value))
        case _:
            raise TypeError(f"no value of a prepared statement: {value!r}")


def _element(value: object) -> bytes:
    if isinstance(value, str):
        return b'"%s"' % _text(value).replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    return _encoded(value) or b"NULL"


def _text(value: str) -> bytes:
    data = value.encode()
    if b"\0" in data:  # libpq would end the text there
        from psycopg import DataError

        raise DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
    return data


def _numbers(text: bytes) -> list[int]:
    return [int(one) for one in text[1:-1].split(b",") if one]


# By PostgreSQL type number; all others are text.
_DECODERS: dict[int, Callable[[bytes], Any]] = {
    16: lambda text: text == b"t",  # boolean
    20: int,  # bigint
    21: int,  # smallint
    23: int,  # integer
    701: float,  # double precision
    1016: _numbers,  # bigint[]
}


# ---------------------------------------------------------------------------------------------- writes of one statement

# Runs a statement with these values after the caller's mark (its row of `lane` and a number), and returns its rows. If
# the connection breaks before they arrive, there is one row: the result that the statement left with the mark.
Call = Callable[..., list[tuple[Any, ...]]]


class MustTransact(Exception):
    """A lone write has written nothing and must be run as a transaction, because its case is not the common one."""


class LoneWrite(Generic[T]):
    """A write with two forms.

    PostgreSQL makes a transaction of a single statement by itself. `alone` gets a connection outside of a transaction.
    It writes only through the `Call`, or with a statement that can be repeated without harm. `in_transaction` does the
    same as part of a transaction. Both may be run again.
    """

    __slots__ = ("alone", "in_transaction")

    def __init__(self, alone: Callable[[Connection, Call], T], in_transaction: Callable[[Connection], T]) -> None:
        self.alone = alone
        self.in_transaction = in_transaction

    def __call__(self, connection: Connection) -> T:
        return self.in_transaction(connection)


def repeatable(query: str, *values: object) -> LoneWrite[None]:
    """A single statement that is idempotent."""

    def alone(db: Connection, _: Call) -> None:
        run(db, query, values)

    def in_transaction(db: Connection) -> None:
        db.execute(query, values)

    return LoneWrite(alone, in_transaction)

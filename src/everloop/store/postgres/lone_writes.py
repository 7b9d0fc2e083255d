"""Writes that are one statement as a rule, and then need no transaction around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from . import prepared

if TYPE_CHECKING:
    from .connections import Connection

T = TypeVar("T")
# Runs a statement with these values behind the caller's mark (its row of `lane` and a number), and returns its rows. If
# the connection breaks before they are here, there is one row: the result that the statement has left with the mark.
Call = Callable[..., list[tuple[Any, ...]]]


class MustTransact(Exception):
    """A lone write has written nothing and must be run as a transaction: its case is not the usual one."""


class LoneWrite(Generic[T]):
    """A write with two forms. PostgreSQL makes a transaction of a single statement by itself.

    `alone` gets a connection that is in no transaction. It writes by the `Call` only, or by a statement that can be
    repeated without harm. `in_transaction` does the same as a part of a transaction. Both may be run again.
    """

    __slots__ = ("alone", "in_transaction")

    def __init__(self, alone: Callable[[Connection, Call], T], in_transaction: Callable[[Connection], T]) -> None:
        self.alone = alone
        self.in_transaction = in_transaction

    def __call__(self, connection: Connection) -> T:
        return self.in_transaction(connection)


def repeatable(query: str, *values: object) -> LoneWrite[None]:
    """One statement that has the same effect when it is run twice."""

    def alone(db: Connection, _: Call) -> None:
        prepared.run(db, query, values)

    def in_transaction(db: Connection) -> None:
        db.execute(query, values)

    return LoneWrite(alone, in_transaction)

"""Skip waiting for the disk in tests: they kill processes, but the machine never loses power.

What a process has written survives its kill, whether or not it is on disk yet. Tests of flushing itself use `flushed`.
A new store is created in one step instead of by many migrations, since thousands are made.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from everloop.store.sqlite import schema, store
from everloop.store.sqlite.writer import SYNCHRONOUS

if TYPE_CHECKING:
    import pytest

_PRODUCT = dict(SYNCHRONOUS)


def leave_out_flushes() -> None:
    """Set this up for this process and those forked from it."""
    SYNCHRONOUS.update(dict.fromkeys(_PRODUCT, "OFF"))
    os.fsync = lambda fd: None
    _make_stores_in_one_step()


def _make_stores_in_one_step() -> None:
    version = len(schema.MIGRATIONS)
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
        schema.migrate(made)
        _, *statements, _ = made.iterdump()  # without BEGIN and COMMIT

    def migrate(db: sqlite3.Connection) -> None:
        if schema._version(db) == 0:
            db.execute("BEGIN IMMEDIATE")
            try:
                if schema._version(db) == 0:
                    for statement in statements:
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {version}")
                db.execute("COMMIT")
            except BaseException:
                db.execute("ROLLBACK")
                raise
        schema.migrate(db)

    vars(store).update(migrate=migrate)


def flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flush for a test as the product does."""
    for flush, value in _PRODUCT.items():
        monkeypatch.setitem(SYNCHRONOUS, flush, value)

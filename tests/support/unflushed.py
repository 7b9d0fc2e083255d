"""Takes the waits for the disk out of the tests: in them processes are killed, and the machine never loses its power.

What a process has written stays when it is killed, whether or not the disk has it yet. That the product does flush is
tested apart, with `flushed`. A new store gets in one step what the migrations make of it in many: thousands are made.
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
    """For this process and those that are forked from it."""
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
    """For a test, flush as the product does."""
    for flush, value in _PRODUCT.items():
        monkeypatch.setitem(SYNCHRONOUS, flush, value)

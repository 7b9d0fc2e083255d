"""Bugs to plant in a program that is killed, to see the checker find them. The product has no such switch."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Any

from everloop.store import sqlite, transactions, writer
from everloop.tools.registry import ToolRegistry


def plant(name: str) -> None:
    if name:
        {"no-fence": _no_fence, "thief": _thief, "early": _settle_early, "rerun": _rerun_unsafe}[name]()


def _thief() -> None:
    """Every other worker is taken for dead."""
    vars(transactions).update(alive=lambda worker: False)
    vars(sqlite).update(_free=lambda holder, worker: True)


def _no_fence() -> None:
    """A thief, and no fence to stop whom it has robbed."""
    _thief()
    insert = "INSERT INTO entry (session, seq, turn, data, at) SELECT ?, ?, ?, ?, ? WHERE ? OR ?"
    # The place in the log is the last guard: without the fence, the stale one takes the next free place.
    vars(transactions).update(APPEND_ENTRY=insert)
    append, finish = transactions.append, transactions.finish

    def renumbered(db: sqlite3.Connection, claim: Any, rows: Any) -> Any:
        last = db.execute("SELECT max(seq) FROM entry WHERE session = ?", (claim.session,)).fetchone()[0]
        return [(row[0], last + n, *row[2:]) for n, row in enumerate(rows, start=1)]

    def any_append(db: sqlite3.Connection, claim: Any, rows: Any, took: Any) -> None:
        append(db, claim, renumbered(db, claim, rows), took)

    def any_finish(db: sqlite3.Connection, claim: Any, rows: Any, *rest: Any) -> Any:
        claim.fence = db.execute("SELECT fence FROM session WHERE id = ?", (claim.session,)).fetchone()[0]
        return finish(db, claim, rows, *rest)

    vars(transactions).update(append=any_append, finish=any_finish)


def _settle_early() -> None:
    """Whoever waits for a write is told before it is on disk."""
    finish: Callable[..., None] = writer.Writer._finish

    def early(self: writer.Writer, connection: sqlite3.Connection, done: Any) -> None:
        writer._settle(done)
        time.sleep(0.02)
        finish(self, connection, done)

    writer.Writer._finish = early  # type: ignore[method-assign]


def _rerun_unsafe() -> None:
    """Every tool is taken for safe to repeat."""
    ToolRegistry.replay_safe = lambda self, name: True  # type: ignore[method-assign]

"""Bugs to plant in a killed program, to verify that the checker finds them. The product has no such switch."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Any

from everloop.store import jobs
from everloop.store.peers import alive
from everloop.store.sqlite import store as sqlite
from everloop.store.sqlite import transactions, writer
from everloop.store.sqlite.transactions import SQLiteTransaction
from everloop.tools.registry import ToolRegistry


def plant(name: str) -> None:
    if name:
        {"no-fence": _no_fence, "thief": _thief, "early": _settle_early, "rerun": _rerun_unsafe}[name]()


def _thief() -> None:
    """Treat every other worker as dead when claiming leases; both still get wake-ups."""
    join = SQLiteTransaction.join

    def honest_join(self: SQLiteTransaction, worker: str, address: str) -> None:
        vars(transactions).update(alive=alive)
        try:
            join(self, worker, address)
        finally:
            vars(transactions).update(alive=lambda worker: False)

    vars(transactions).update(alive=lambda worker: False)
    SQLiteTransaction.join = honest_join  # type: ignore[method-assign]
    vars(sqlite).update(_is_free=lambda holder, worker: True)


def _no_fence() -> None:
    """A thief, and no fence that stops the worker it took over from."""
    _thief()
    append, finish = SQLiteTransaction.append, SQLiteTransaction.finish

    def any_append(self: SQLiteTransaction, claim: Any, rows: Any) -> None:
        claim.fence, last = _now(self.db, claim)
        # The position in the log would be the last guard, so the stale worker takes the next free one.
        append(self, claim, rows._replace(seqs=[last + n for n in range(1, len(rows.seqs) + 1)]))

    def any_finish(self: SQLiteTransaction, claim: Any, *rest: Any) -> Any:
        claim.fence, _ = _now(self.db, claim)
        return finish(self, claim, *rest)

    SQLiteTransaction.append = any_append  # type: ignore[method-assign]
    SQLiteTransaction.finish = any_finish  # type: ignore[assignment, method-assign]


def _now(db: sqlite3.Connection, claim: Any) -> tuple[int, int]:
    """Return the fence and the last position of the claim's session, whichever worker holds it."""
    sql = "SELECT fence, (SELECT coalesce(max(seq), 0) FROM entry WHERE session = s.id) FROM session s WHERE id = ?"
    fence, last = db.execute(sql, (claim.session,)).fetchone()
    return fence, last


def _settle_early() -> None:
    """Notify waiters of a write before it is on disk."""
    finish: Callable[..., None] = writer.Writer._finish

    def early(self: writer.Writer, connection: Any, batch: Any, flush: bool) -> None:
        jobs.settle(batch)
        time.sleep(0.1)
        finish(self, connection, batch, flush)

    settle: Callable[..., None] = jobs.Job.settle
    writer.Writer._finish = early  # type: ignore[method-assign]
    jobs.Job.settle = lambda self: None if self.future.done() else settle(self)  # type: ignore[method-assign]


def _rerun_unsafe() -> None:
    """Treat every tool as replay-safe."""
    ToolRegistry.replay_safe = lambda self, name: True  # type: ignore[method-assign]

"""Bugs to plant in processes that share a PostgreSQL store, to verify that the checker finds them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from everloop.errors import StaleLease
from everloop.store import jobs
from everloop.store.postgres import connections, queries, store, transactions


def plant(name: str) -> None:
    if name:
        {"no-fence": _no_fence, "thief": _thief, "early": _settle_early}[name]()


def _no_fence() -> None:
    """A worker that lost its lease sends its answer anyway, and its writes appear to succeed."""
    _always_in_transactions()
    kept: Callable[..., list[int]] = transactions._kept

    def unfenced(db: Any, query: str, values: Any, appended: Any) -> list[int]:
        try:
            return kept(db, query, values, appended)
        except StaleLease:
            if query != transactions.STEP_FINISH:
                return [1]
        claim, (sender, *messages) = appended.claim, values[-4:]
        given = (claim.owner, claim.session, claim.turn, sender, 1 if sender else 0, None, *messages)
        return [1, *(id for (id,) in db.execute(transactions.SEND, given).fetchall())]

    vars(transactions).update(_kept=unfenced, _check=lambda result, claim: None)


def _thief() -> None:
    """Treat every other worker as dead, and take its lease without a higher fence."""
    for module in (queries, store, transactions):
        vars(module).update(living=lambda holder, fresh: False)
    for name in ("_state", "_state_if_free"):
        vars(transactions)[name] = _lower(vars(transactions)[name])


def _lower(look: Callable[..., Any]) -> Callable[..., Any]:
    """Read a held session with a lower fence, so that the next fence is not higher."""

    def lower(*given: Any, **options: Any) -> Any:
        found = look(*given, **options)
        held = isinstance(found, tuple) and isinstance(found[0], transactions.Locked) and found[0].worker is not None
        return (found[0]._replace(fence=found[0].fence - 1), found[1]) if held else found

    return lower


def _settle_early() -> None:
    """Notify waiters of a write before it is committed."""
    _always_in_transactions()
    attempt: Callable[..., None] = connections.Connections._attempt_all
    settle: Callable[..., None] = jobs.Job.settle

    def early(self: connections.Connections, connection: Any, done: list[Any]) -> None:
        attempt(self, connection, done)
        jobs.settle(done)
        time.sleep(20)  # during which it is killed

    vars(connections)["Connections"]._attempt_all = early
    jobs.Job.settle = lambda self: None if self.future.done() else settle(self)  # type: ignore[method-assign]


def _always_in_transactions() -> None:
    """Run every write in a transaction instead of a single statement that checks in the database."""
    vars(connections)["Connections"]._write_alone = lambda self, state, jobs, give_up: False

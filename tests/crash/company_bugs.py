"""Bugs to plant in processes that share a PostgreSQL store, to verify that the checker finds them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from everloop.errors import StaleLease
from everloop.store import jobs
from everloop.store.claims import SessionState
from everloop.store.postgres import connections, overview, store, transactions
from everloop.store.postgres.transactions import PostgresTransaction


def plant(name: str) -> None:
    if name:
        {"no-fence": _no_fence, "thief": _thief, "early": _settle_early}[name]()


def _no_fence() -> None:
    """A worker that lost its lease sends its answer anyway, and its writes appear to succeed."""
    _always_in_transactions()
    run_step: Callable[..., list[int]] = PostgresTransaction._run_step

    def unfenced(self: PostgresTransaction, query: str, values: Any, appended: Any) -> list[int]:
        try:
            return run_step(self, query, values, appended)
        except StaleLease:
            if query != transactions.STEP_FINISH:
                return [1]
        claim, (sender, *messages) = appended.claim, values[-4:]
        given = (claim.owner, claim.session, claim.turn, sender, 1 if sender else 0, None, *messages)
        return [1, *(id for (id,) in self.db.execute(transactions.SEND, given).fetchall())]

    PostgresTransaction._run_step = unfenced  # type: ignore[method-assign]
    vars(transactions).update(_check=lambda result, claim: None)


def _thief() -> None:
    """Treat every other worker as dead, and take its lease without a higher fence."""
    for module in (overview, store, transactions):
        vars(module).update(living=lambda holder, fresh: False)
    read_state = PostgresTransaction.read_state

    def lower(self: PostgresTransaction, *given: Any, **options: Any) -> Any:
        """Read a held session with a lower fence, so that the next fence is not higher."""
        state = read_state(self, *given, **options)
        if isinstance(state, SessionState) and state.holder is not None:
            return replace(state, fence=state.fence - 1)
        return state

    PostgresTransaction.read_state = lower  # type: ignore[method-assign]


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

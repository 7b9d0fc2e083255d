"""Bugs to plant in processes that share a PostgreSQL store, to see the checker find them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from everloop.store import jobs
from everloop.store.postgres import connections, queries, store, transactions


def plant(name: str) -> None:
    if name:
        {"no-fence": _no_fence, "thief": _thief, "early": _settle_early}[name]()


def _no_fence() -> None:
    """Whoever has lost its lease is told that its writes were kept."""
    vars(transactions).update(_check=lambda result, claim: None)


def _thief() -> None:
    """Every other worker is taken for dead, and its lease taken without a higher fence."""
    for module in (queries, store, transactions):
        vars(module).update(living=lambda holder, fresh: False)
    for name in ("_state", "_state_if_free"):
        vars(transactions)[name] = _lower(vars(transactions)[name])


def _lower(look: Callable[..., Any]) -> Callable[..., Any]:
    """The same look at a session, with a lower fence where somebody holds it: the next one is no higher."""

    def lower(*given: Any, **options: Any) -> Any:
        found = look(*given, **options)
        held = isinstance(found, tuple) and isinstance(found[0], transactions.Locked) and found[0].worker is not None
        return (found[0]._replace(fence=found[0].fence - 1), found[1]) if held else found

    return lower


def _settle_early() -> None:
    """Whoever waits for a write is told before it is committed."""
    attempt: Callable[..., None] = connections.Connections._attempt_all
    settle: Callable[..., None] = jobs.Job.settle

    def early(self: connections.Connections, connection: Any, done: list[Any]) -> None:
        attempt(self, connection, done)
        jobs.settle(done)
        time.sleep(20)  # in which it is killed

    vars(connections)["Connections"]._attempt_all = early
    jobs.Job.settle = lambda self: None if self.future.done() else settle(self)  # type: ignore[method-assign]

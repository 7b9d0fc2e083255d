"""Bugs to plant in processes that share a PostgreSQL store, to see the checker find them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from everloop.store import jobs
from everloop.store.postgres import lanes, rows, store, turns, writes


def plant(name: str) -> None:
    if name:
        {"no-fence": _no_fence, "thief": _thief, "early": _settle_early}[name]()


def _no_fence() -> None:
    """Whoever has lost its lease is told that its writes were kept."""
    vars(turns).update(held=lambda asked, claim: None)


def _thief() -> None:
    """Every other worker is taken for dead, and its lease taken without a higher fence."""
    for module in (rows, store, turns, writes):
        vars(module).update(living=lambda holder, fresh: False)
    for name in ("_look", "_glance"):
        vars(turns)[name] = _lower(vars(turns)[name])


def _lower(look: Callable[..., Any]) -> Callable[..., Any]:
    """The same look at a session, with a lower fence where somebody holds it: the next one is no higher."""

    def lower(*given: Any, **options: Any) -> Any:
        found = look(*given, **options)
        held = isinstance(found, tuple) and isinstance(found[0], rows.Locked) and found[0].worker is not None
        return (found[0]._replace(fence=found[0].fence - 1), found[1]) if held else found

    return lower


def _settle_early() -> None:
    """Whoever waits for a write is told before it is committed."""
    attempt: Callable[..., None] = lanes.Lanes._attempt_all
    settle: Callable[..., None] = jobs.Job.settle

    def early(self: lanes.Lanes, connection: Any, done: list[Any]) -> None:
        attempt(self, connection, done)
        jobs.settle(done)
        time.sleep(20)  # in which it is killed

    vars(lanes)["Lanes"]._attempt_all = early
    jobs.Job.settle = lambda self: None if self.future.done() else settle(self)  # type: ignore[method-assign]

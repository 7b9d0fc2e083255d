"""A piece of work for a store's threads, and whoever waits for it."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

from .waker import Waker
from .write import Write


class Job:
    """A piece of work and whoever waits for it: a coroutine (behind its loop's waker) or a thread."""

    __slots__ = ("error", "future", "kind", "result", "waker", "work")

    def __init__(
        self,
        kind: str,
        work: Callable[..., Any],
        future: Write[Any] | concurrent.futures.Future[Any],
        waker: Waker[Job] | None,
    ) -> None:
        self.kind = kind
        self.work = work
        self.future = future
        self.waker = waker
        self.result: Any = None
        self.error: BaseException | None = None

    def settle(self) -> None:
        if isinstance(self.future, Write):
            self.future.settle(self.result, self.error)
        elif self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


def settle(jobs: Sequence[Job]) -> None:
    """Tell everybody, with one wake-up an event loop."""
    if len(jobs) == 1 and (waker := jobs[0].waker) is not None:
        waker.hand(jobs)
        return
    by_waker: dict[Waker[Job], list[Job]] = {}
    for job in jobs:
        if job.waker is None:
            job.settle()
        else:
            by_waker.setdefault(job.waker, []).append(job)
    for waker, group in by_waker.items():
        waker.hand(group)

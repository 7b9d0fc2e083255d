"""Jobs for a store's threads, and the delivery of their results to the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Write(asyncio.Future[T]):
    """A future that cannot be cancelled: a cancelled task sees the cancellation once the write is done.

    So a writer always knows what is on disk.
    """

    def cancel(self, msg: object = None) -> bool:
        return False

    def settle(self, result: T | None, exception: BaseException | None) -> None:
        if exception is not None:
            self.set_exception(exception)
            self.exception()  # marks it as retrieved: there may be no waiter left
        else:
            self.set_result(result)  # type: ignore[arg-type]


class CommitHooks:
    """Called with "before" and "after" around every commit. Tests use them to fail, delay or observe it."""

    def __init__(self) -> None:
        self._hooks: list[Callable[[str], None]] = []

    def add(self, hook: Callable[[str], None]) -> Callable[[], None]:
        """Call `hook` around every commit, until the returned function is called."""
        self._hooks.append(hook)
        return partial(self._hooks.remove, hook)

    def call(self, when: str) -> None:
        for hook in self._hooks:
            hook(when)


class Job:
    """A job and its future, which a coroutine (through its loop's waker) or a thread awaits."""

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
    """Settle the futures of all jobs, with one wake-up per event loop."""
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


class Waker(Generic[T]):
    """Passes items from another thread to `take` in the loop's thread.

    A dedicated eventfd saves one system call per wake-up compared with the loop's self-pipe, and a durable turn is
    mostly wake-ups.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        self._loop = loop
        self._take = take
        self._items: deque[T] = deque()
        self._lock = threading.Lock()  # the file descriptor may be reused once it is closed
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if hasattr(os, "eventfd") else -1
        if self._fd >= 0:
            loop.add_reader(self._fd, self._woken)

    def hand(self, items: Iterable[T]) -> None:
        """Pass on items. Can be called from any thread; does nothing if the loop is closed."""
        self._items.extend(items)
        with self._lock:
            if self._loop.is_closed():
                return
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)
            else:
                self._loop.call_soon_threadsafe(self._take_all)

    def close(self) -> None:
        """Close the waker. Called in the loop's thread, once nothing more is passed on."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
        self.forget()
        self._loop.call_soon(self._take_all)  # by the loop itself, never from inside a task

    def forget(self) -> None:
        """Close the file descriptor. Can be called from any thread, once the loop is closed."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _woken(self) -> None:
        os.eventfd_read(self._fd)
        self._take_all()

    def _take_all(self) -> None:
        while self._items:
            self._take(self._items.popleft())


class Wakers:
    """The wakers of all event loops that submit jobs to a store."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, Waker[Job]] = {}
        self._lock = threading.Lock()

    def job(self, kind: str, work: Callable[..., T]) -> tuple[Job, Write[T]]:
        """Create a job of the running loop, and the future of its result."""
        loop = asyncio.get_running_loop()
        with self._lock:
            waker = self._by_loop.get(loop)
            if waker is None:
                for closed in [known for known in self._by_loop if known.is_closed()]:
                    self._by_loop.pop(closed).forget()
                waker = self._by_loop[loop] = Waker(loop, Job.settle)
        future: Write[T] = Write(loop=loop)
        return Job(kind, work, future, waker), future

    def pop(self) -> Waker[Job] | None:
        """Remove and return the running loop's waker, which is to be closed: later jobs get another one."""
        with self._lock:
            return self._by_loop.pop(asyncio.get_running_loop(), None)

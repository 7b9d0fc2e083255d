"""One thread that writes, with group commit: many coroutines, one fsync."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], Any]
BATCH = 256  # jobs in one commit

log = logging.getLogger(__name__)


class Write(asyncio.Future[T]):
    """A write under way. It cannot be cancelled: a coroutine that is being cancelled hears of it when the write is
    done, so that what is on disk and what its writer knows never differ."""

    def cancel(self, msg: object = None) -> bool:
        return False


class _Job:
    """A piece of work and whoever waits for it: a coroutine (with its loop) or a thread."""

    __slots__ = ("error", "future", "loop", "result", "work")

    def __init__(
        self,
        work: Work,
        future: asyncio.Future[Any] | concurrent.futures.Future[Any],
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self.work = work
        self.future = future
        self.loop = loop
        self.result: Any = None
        self.error: BaseException | None = None

    def settle(self) -> None:
        if self.future.done():  # whoever waited has gone
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class Writer:
    """Runs jobs on one connection in one thread. A job is on disk when its future is done.

    Jobs that wait together are committed together; one that fails is rolled back to its own savepoint and
    does not touch the others. `hook`, for tests, is called with "before" and "after" around every commit.
    """

    def __init__(
        self, connect: Callable[[], sqlite3.Connection], explain: Callable[[sqlite3.Error], Exception]
    ) -> None:
        self.hook: Callable[[str], None] | None = None
        self.commits = 0
        self._connect = connect
        self._explain = explain
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending: threading.Thread | None = None  # the one before, while it writes what was queued for it
        self._lock = threading.Lock()

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Write[T]:
        """Queue a job from a coroutine."""
        loop = asyncio.get_running_loop()
        future: Write[T] = Write(loop=loop)
        self._put(_Job(work, future, loop))
        return future

    def call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a job from plain code and wait for it."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._put(_Job(work, future, None))
        return future.result()

    def stop(self) -> threading.Thread | None:
        """End the thread once everything queued is on disk; it can be started again by another job."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._jobs.put(None)
                # What comes later is not this thread's: it would wait for it, or never end.
                self._jobs, self._ending = queue.SimpleQueue(), thread
            return thread

    def _put(self, job: _Job) -> None:
        with self._lock:
            if self._thread is None:
                run = partial(self._run, self._jobs, self._ending)
                self._thread = threading.Thread(target=run, name="everloop-writer", daemon=True)
                self._thread.start()
            self._jobs.put(job)

    def _run(self, jobs: queue.SimpleQueue[_Job | None], ending: threading.Thread | None) -> None:
        connection: sqlite3.Connection | None = None
        if ending is not None:
            ending.join()
        while (job := jobs.get()) is not None:
            try:
                connection = connection or self._connect()
            except Exception as error:
                job.error = error
                _settle([job])
                continue
            done, last = self._commit(connection, jobs, job)
            _settle(done)
            if last:
                break
        if connection is not None:
            connection.close()

    def _commit(
        self, connection: sqlite3.Connection, jobs: queue.SimpleQueue[_Job | None], first: _Job
    ) -> tuple[list[_Job], bool]:
        """Run the job and whatever has queued up behind it as one transaction; True when told to end."""
        done: list[_Job] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            first.error = self._explain(error)
            return [first], False
        job: _Job | None = first
        last = False
        while job is not None:
            done.append(job)
            if not self._attempt(connection, job, alone=job is first):
                for other in done:  # SQLite has given up the whole transaction
                    other.error = other.error or job.error
                return done, False
            if len(done) >= BATCH:
                break
            try:
                job = jobs.get_nowait()
                last = job is None
            except queue.Empty:
                job = None
        self._finish(connection, done)
        return done, last

    def _attempt(self, connection: sqlite3.Connection, job: _Job, alone: bool) -> bool:
        """Run one job, undone if it fails. False when the transaction went with it.

        The first job of a batch needs no savepoint: with nothing before it, undoing it is undoing all.
        """
        try:
            if not alone:
                connection.execute("SAVEPOINT job")
            job.result = job.work(connection)
            if not alone:
                connection.execute("RELEASE job")
            return True
        except Exception as error:
            job.error = self._explain(error) if isinstance(error, sqlite3.Error) else error
        try:
            if not connection.in_transaction:
                return False
            if alone:
                connection.execute("ROLLBACK")
                connection.execute("BEGIN IMMEDIATE")
            else:
                connection.execute("ROLLBACK TO job")
                connection.execute("RELEASE job")
            return True
        except sqlite3.Error:
            return False

    def _finish(self, connection: sqlite3.Connection, done: list[_Job]) -> None:
        try:
            if self.hook is not None:
                self.hook("before")
            connection.execute("COMMIT")
            self.commits += 1
            if self.hook is not None:
                self.hook("after")
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):  # the error that matters is the commit's
                connection.execute("ROLLBACK")
            for job in done:
                job.error = job.error or self._explain(error)


def _settle(jobs: Iterable[_Job]) -> None:
    """Tell everybody, with one wake-up an event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
    for job in jobs:
        if job.loop is None:
            job.settle()
        else:
            by_loop.setdefault(job.loop, []).append(job)
    for loop, group in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle_all, group)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("a write finished after its event loop")


def _settle_all(jobs: list[_Job]) -> None:
    for job in jobs:
        job.settle()

"""The SQLite writer: one thread with group commit, so that many coroutines share one flush."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from ...errors import StoreError
from ..jobs import Job, Wakers, Write, settle
from .commit_mark import CommitMark

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], Any]
# How a job is written: flushed to the disk before its future is done; only written, which the death of the process
# survives, in a transaction or as a single statement that is one by itself; or not at all.
Kind = Literal["flushed", "written", "statement", "reads"]
BATCH = 256  # jobs in one commit
SYNCHRONOUS = {True: "FULL", False: "NORMAL"}  # by whether a commit is flushed


class Writer:
    """Runs jobs on one connection in one thread.

    Jobs that wait together are committed together, with one flush if any of them needs it; one that fails is rolled
    back to its own savepoint without affecting the others. `flush_always` flushes every commit. `hook`, for tests, is
    called with "before" and "after" around every commit.
    """

    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection],
        explain: Callable[[sqlite3.Error], Exception],
        mark: Callable[[], CommitMark],
        flush_always: bool = False,
    ) -> None:
        self.hook: Callable[[str], None] | None = None
        self.commits = 0
        self.flushes = 0
        self._connect = connect
        self._explain = explain
        self._new_mark = mark
        self._flush_always = flush_always
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending: threading.Thread | None = None  # the one before, while it writes what was queued for it
        self._wakers = Wakers()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[sqlite3.Connection], T], kind: Kind = "flushed") -> Write[T]:
        """Queue a job from a coroutine."""
        job, future = self._wakers.job(kind, work)
        self._put(job)
        return future

    def call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a job from plain code and wait for it."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._put(Job("flushed", work, future, None))
        return future.result()

    async def close(self) -> None:
        """End the thread once everything queued is on disk. A later job starts it again."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._jobs.put(None)
                # Later jobs are for another thread: this one would have to wait for them, or never end.
                self._jobs, self._ending = queue.SimpleQueue(), thread
            ending = self._ending  # or one that another caller has told to end
        waker = self._wakers.pop()
        if ending is not None and ending.is_alive():
            await asyncio.get_running_loop().run_in_executor(None, ending.join)
        if waker is not None:
            waker.close()

    def _put(self, job: Job) -> None:
        with self._lock:
            if self._thread is None:
                run = partial(self._run, self._jobs, self._ending)
                self._thread = threading.Thread(target=run, name="everloop-writer", daemon=True)
                self._thread.start()
            self._jobs.put(job)

    def _run(self, jobs: queue.SimpleQueue[Job | None], ending: threading.Thread | None) -> None:
        if ending is not None:
            ending.join()
        writing: _Writing | None = None
        file: tuple[str, int] | None = None
        last = False
        while not last and (first := jobs.get()) is not None:
            batch, last = _waiting(jobs, first)
            try:
                writing = writing or _Writing(self._connect(), self._new_mark())
                file = _still_there(writing.db, file)
            except Exception as error:
                for job in batch:
                    job.error = error
                settle(batch)
                continue
            while batch:
                done = self._commit(writing, batch)
                settle(done)
                batch = batch[len(done) :]
        if writing is not None:
            writing.close()

    def _commit(self, writing: _Writing, batch: Sequence[Job]) -> Sequence[Job]:
        """Run the jobs as one transaction; those that are returned are over. The others must be tried again."""
        db = writing.db
        if all(job.kind == "reads" for job in batch):
            for job in batch:
                _attempt_reading(db, job)
            return batch
        flush = self._flush_always or any(job.kind == "flushed" for job in batch)
        try:
            writing.flush(flush)
            if len(batch) == 1 and batch[0].kind == "statement" and not flush:
                self._tell("before")
                batch[0].result = batch[0].work(db)
                self._committed(flush)
                return batch
            db.execute("BEGIN IMMEDIATE")
        except Exception as error:
            for job in batch:  # those that have waited for a locked file do not each wait again
                job.error = self._explained(error)
            return batch
        alone = True  # nothing has been written in this transaction yet
        for number, job in enumerate(batch, 1):
            if job.kind == "reads":
                _attempt_reading(db, job)
            elif self._attempt(db, job, alone):
                alone = False
            else:
                for other in batch[:number]:  # SQLite has rolled back the whole transaction
                    other.error = other.error or job.error
                return batch[:number]
        self._finish(writing, batch, flush)
        return batch

    def _attempt(self, db: sqlite3.Connection, job: Job, alone: bool) -> bool:
        """Run one job, and undo it if it fails. False when the whole transaction is gone.

        The first one of a batch needs no savepoint: with nothing before it, everything is undone.
        """
        try:
            if not alone:
                db.execute("SAVEPOINT job")
            job.result = job.work(db)
            if not alone:
                db.execute("RELEASE job")
            return True
        except Exception as error:
            job.error = self._explained(error)
        try:
            if not db.in_transaction:
                return False
            if alone:
                db.execute("ROLLBACK")
                db.execute("BEGIN IMMEDIATE")
            else:
                db.execute("ROLLBACK TO job")
                db.execute("RELEASE job")
            return True
        except sqlite3.Error:
            with contextlib.suppress(sqlite3.Error):  # left open, it would include the next writes
                db.execute("ROLLBACK")
            return False

    def _finish(self, writing: _Writing, batch: Sequence[Job], flush: bool) -> None:
        db = writing.db
        try:
            if all(job.kind == "reads" or job.error is not None for job in batch):
                db.execute("ROLLBACK")  # nothing was written
                return
            number = writing.mark.advance(db) if flush else 0
            self._tell("before")
            db.execute("COMMIT")
            self._committed(flush)
            if flush:
                writing.mark.note(number)
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):  # the error that matters is the commit's
                db.execute("ROLLBACK")
            for job in batch:
                job.error = job.error or self._explain(error)

    def _committed(self, flush: bool) -> None:
        self.commits += 1
        self.flushes += flush
        self._tell("after")

    def _explained(self, error: Exception) -> Exception:
        return self._explain(error) if isinstance(error, sqlite3.Error) else error

    def _tell(self, when: str) -> None:
        if self.hook is not None:
            self.hook(when)


class _Writing:
    """A writer's connection, whether its commits are flushed, and the mark of those that are."""

    def __init__(self, db: sqlite3.Connection, mark: CommitMark) -> None:
        self.db = db
        self.mark = mark
        self._flushes: bool | None = None

    def flush(self, flush: bool) -> None:
        """Whether the commits from now on are flushed."""
        if flush is not self._flushes:
            # SQLite obeys this pragma when it is compiled, so a statement from the connection's cache would do nothing.
            self.db.executescript(f"PRAGMA synchronous = {SYNCHRONOUS[flush]}")
            self._flushes = flush

    def close(self) -> None:
        self.db.close()
        self.mark.close()


def _waiting(jobs: queue.SimpleQueue[Job | None], first: Job) -> tuple[list[Job], bool]:
    """The job and those queued behind it; True when there will be no more."""
    batch = [first]
    while len(batch) < BATCH:
        try:
            job = jobs.get_nowait()
        except queue.Empty:
            break
        if job is None:
            return batch, True
        batch.append(job)
    return batch, False


def _attempt_reading(db: sqlite3.Connection, job: Job) -> None:
    try:
        job.result = job.work(db)
    except Exception as error:
        job.error = error


def _still_there(connection: sqlite3.Connection, file: tuple[str, int] | None) -> tuple[str, int]:
    """The path of a connection's file, and its inode. SQLite does not notice that the file was removed, and what is
    written to it then is lost."""
    path = file[0] if file is not None else str(connection.execute("PRAGMA database_list").fetchone()[2])
    try:
        found = path, os.stat(path).st_ino
    except OSError:
        found = None
    if found is None or found != (file or found):
        raise StoreError(f"{path} was moved or deleted while it was in use: put it back, or start Everloop again")
    return found

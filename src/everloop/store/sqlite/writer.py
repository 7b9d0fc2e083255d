"""The SQLite writer: one thread with group commit, so that many coroutines share one fsync.

It also detects that a store has lost commits. SQLite reads a write-ahead log up to the first incomplete frame, so a log
that was truncated, or left behind when the database was copied, silently loses its last commits. Every commit therefore
increments a counter in the database, and writes it to a small file beside the database afterwards, without a flush. If
the file has a higher number than the database, commits are missing. After a power loss the file may lag behind, which
can hide a loss but never invents one.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from ...errors import StoreError
from ..jobs import Job, Wakers, Write, settle

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], Any]
Kind = Literal["writes", "reads"]  # what only reads needs no transaction
BATCH = 256  # jobs in one commit


class Writer:
    """Runs jobs on one connection in one thread. A job is on disk when its future is done.

    Jobs that wait together are committed together; one that fails is rolled back to its own savepoint without
    affecting the others. `hook`, for tests, is called with "before" and "after" around every commit.
    """

    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection],
        explain: Callable[[sqlite3.Error], Exception],
        mark: Callable[[], CommitMark],
    ) -> None:
        self.hook: Callable[[str], None] | None = None
        self.commits = 0
        self._connect = connect
        self._explain = explain
        self._new_mark = mark
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending: threading.Thread | None = None  # the one before, while it writes what was queued for it
        self._wakers = Wakers()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[sqlite3.Connection], T], kind: Kind = "writes") -> Write[T]:
        """Queue a job from a coroutine."""
        job, future = self._wakers.job(kind, work)
        self._put(job)
        return future

    def call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a job from plain code and wait for it."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._put(Job("writes", work, future, None))
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
        connection: sqlite3.Connection | None = None
        mark: CommitMark | None = None
        file: tuple[str, int] | None = None
        if ending is not None:
            ending.join()
        while (job := jobs.get()) is not None:
            try:
                connection = connection or self._connect()
                file = _still_there(connection, file)
                mark = mark or self._new_mark()
            except Exception as error:
                job.error = error
                settle([job])
                continue
            if job.kind == "reads" and jobs.empty():
                self._attempt_reading(connection, job)
                done, last = [job], False
            else:
                done, last = self._commit(connection, jobs, job, mark)
            settle(done)
            if last:
                break
        if connection is not None:
            connection.close()
        if mark is not None:
            mark.close()

    def _commit(
        self, connection: sqlite3.Connection, jobs: queue.SimpleQueue[Job | None], first: Job, mark: CommitMark
    ) -> tuple[list[Job], bool]:
        """Run the job and those queued behind it as one transaction; True when told to end."""
        done: list[Job] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            first.error = self._explain(error)
            return [first], False
        job: Job | None = first
        last = False
        alone = True  # nothing has been written in this transaction yet
        while job is not None:
            done.append(job)
            if job.kind == "reads":
                self._attempt_reading(connection, job)
            elif self._attempt(connection, job, alone):
                alone = False
            else:
                for other in done:  # SQLite has rolled back the whole transaction
                    other.error = other.error or job.error
                return done, False
            if len(done) >= BATCH:
                break
            try:
                job = jobs.get_nowait()
                last = job is None
            except queue.Empty:
                job = None
        self._finish(connection, done, mark)
        return done, last

    def _attempt_reading(self, connection: sqlite3.Connection, job: Job) -> None:
        try:
            job.result = job.work(connection)
        except Exception as error:
            job.error = error

    def _attempt(self, connection: sqlite3.Connection, job: Job, alone: bool) -> bool:
        """Run one job, and undo it if it fails. False when the whole transaction is gone.

        The first one of a batch needs no savepoint: with nothing before it, everything is undone.
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
            with contextlib.suppress(sqlite3.Error):  # left open, it would include the next writes
                connection.execute("ROLLBACK")
            return False

    def _finish(self, connection: sqlite3.Connection, done: list[Job], mark: CommitMark) -> None:
        try:
            if all(job.kind == "reads" or job.error is not None for job in done):
                connection.execute("ROLLBACK")  # nothing was written
                return
            number = mark.advance(connection)
            self._tell("before")
            connection.execute("COMMIT")
            self.commits += 1
            self._tell("after")
            mark.note(number)
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):  # the error that matters is the commit's
                connection.execute("ROLLBACK")
            for job in done:
                job.error = job.error or self._explain(error)

    def _tell(self, when: str) -> None:
        if self.hook is not None:
            self.hook(when)


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


# ---------------------------------------------------------------------------------------------- lost commits


log = logging.getLogger(__name__)
DIGITS = 20
ADVANCE = "UPDATE commit_mark SET number = number + 1 RETURNING number"
NUMBER = "SELECT number FROM commit_mark"
# The number goes on from the known one, so that the loss is noted once.
NOTE_LOSS = "UPDATE commit_mark SET lost = ?1 - number, lost_at = ?2, number = ?1 WHERE number < ?1"


def mark_file(database: Path) -> Path:
    return database.with_name(f"{database.name}-commits")


class CommitMark:
    """The file beside a store with the number of its last commit, as a writer keeps it."""

    def __init__(self, database: Path) -> None:
        self._file = -1
        with contextlib.suppress(OSError):  # without the file no loss is detected, but everything works
            self._file = os.open(mark_file(database), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def advance(self, db: sqlite3.Connection) -> int:
        """Count a commit, inside its transaction."""
        return int(db.execute(ADVANCE).fetchone()[0])

    def note(self, number: int) -> None:
        """Remember a commit that is on disk."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, b"%0*d\n" % (DIGITS, number), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def forget_mark(database: Path) -> None:
    """Discard the mark of an earlier database: this one is new."""
    mark_file(database).unlink(missing_ok=True)


def verify_mark(db: sqlite3.Connection, database: Path) -> None:
    """Warn, and note in the store, if commits are missing that were known before."""
    known = _known(database)  # first: a commit in between makes only the database newer
    (number,) = db.execute(NUMBER).fetchone()
    if known <= number:
        return
    try:
        if db.execute(NOTE_LOSS, (known, time.time())).rowcount == 0:
            return  # another process has noted it
    except sqlite3.OperationalError:  # it can only be read
        pass
    log.warning(
        "%s: the last %d commits are missing. Its -wal file was lost or cut off, or an older copy was put in its "
        "place; what was written since then is gone, and calls with effects may run again",
        database,
        known - number,
    )


def _known(database: Path) -> int:
    try:
        return int(mark_file(database).read_bytes()[:DIGITS])
    except (OSError, ValueError):
        return 0

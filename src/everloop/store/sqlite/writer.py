"""The SQLite writer: one thread with group commit, so that many coroutines share one flush. It marks its commits."""

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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from ...errors import StoreError
from ..jobs import CommitHooks, Job, Wakers, Write, settle

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], Any]
# How a job is written: "flushed" to disk before its future is done; "written" in a transaction, which survives the
# death of the process; as a single "statement", which is a transaction by itself and may be "short"; or not at all.
Kind = Literal["flushed", "written", "statement", "short", "reads"]
BATCH = 256  # jobs per commit
SYNCHRONOUS = {True: "FULL", False: "NORMAL"}  # by whether a commit is flushed
# For new files. A commit writes whole pages, and most steps of a turn are shorter than one of these.
PAGE_BYTES = 1024
# A short log is soon overwritten in place, and an fsync that does not grow the file is far cheaper.
CHECKPOINT_PAGES = 1024 * 1024 // PAGE_BYTES
SHORT = 32 * 1024  # maximum bytes of a short statement
SLOW_SECONDS = 0.05  # a short statement that takes longer indicates a slow disk
AFTER_SLOW_SECONDS = 10.0  # how long short statements are queued for the writer's thread after that

DIGITS = 20  # of the number in the file of a commit mark
ADVANCE = "UPDATE commit_mark SET number = number + 1 RETURNING number"
NUMBER = "SELECT number FROM commit_mark"
# Counting continues from the known number, so that the loss is recorded once.
NOTE_LOSS = "UPDATE commit_mark SET lost = ?1 - number, lost_at = ?2, number = ?1 WHERE number < ?1"


class Writer:
    """Runs jobs on one connection in one thread.

    Queued jobs are committed together, with one flush if any of them needs it; a job that fails is rolled back to its
    own savepoint without affecting the others. `flush_always` flushes every commit.

    A short statement that needs no flush only copies a few pages to the kernel's cache, which takes a fraction of the
    time of waking a thread and being woken by it. It runs where it is submitted, on the same connection, if the thread
    is idle, the file is not locked and the disk has not been slow lately; otherwise it is queued like the rest.
    """

    def __init__(
        self,
        connect: Callable[[], tuple[sqlite3.Connection, CommitMark]],
        explain: Callable[[sqlite3.Error], Exception],
        flush_always: bool,
        lock_seconds: float,
    ) -> None:
        self.commit_hooks = CommitHooks()
        self.commits = 0
        self.flushes = 0
        self._connect = connect
        self._explain = explain
        self._flush_always = flush_always
        self._lock_seconds = lock_seconds
        self._connection: _Connection | None = None
        self._in_use = threading.Lock()  # held during every use of the connection
        self._slow_until = 0.0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending: threading.Thread | None = None  # the previous thread, while it writes what was queued for it
        self._wakers = Wakers()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[sqlite3.Connection], T], kind: Kind = "flushed") -> Write[T]:
        """Queue a job from a coroutine, or run it at once if it is short: then it is done when this returns."""
        if kind == "short" and not self._flush_always and (written := self._write_here(work)) is not None:
            return written
        job, future = self._wakers.job(kind, work)
        self._put(job)
        return future

    def call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a job from synchronous code and wait for it."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._put(Job("flushed", work, future, None))
        return future.result()

    async def close(self) -> None:
        """End the thread once everything queued is on disk. A later job starts it again."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._jobs.put(None)
                # Later jobs go to another thread: this one would have to wait for them, or never end.
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

    def _write_here(self, work: Callable[[sqlite3.Connection], T]) -> Write[T] | None:
        """Run a short statement in this thread. Return None if it must be queued."""
        began = time.monotonic()
        if began < self._slow_until or not self._jobs.empty() or not self._in_use.acquire(blocking=False):
            return None
        result, error = None, None
        try:
            connection = self._connection  # the thread closes it when it ends
            if connection is None or not connection.is_at_hand():
                return None
            connection.use(HERE)
            self.commit_hooks.call("before")
            result = work(connection.db)
            self._committed(False)
        except Exception as failed:
            if getattr(failed, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                return None
            error = self._explained(failed)
        finally:
            self._in_use.release()
        if (ended := time.monotonic()) - began > SLOW_SECONDS:
            self._slow_until = ended + AFTER_SLOW_SECONDS
        future: Write[T] = Write()
        future.settle(result, error)
        return future

    def _run(self, jobs: queue.SimpleQueue[Job | None], ending: threading.Thread | None) -> None:
        if ending is not None:
            ending.join()
        connection: _Connection | None = None
        last = False
        while not last and (first := jobs.get()) is not None:
            batch, last = _waiting(jobs, first)
            try:
                if connection is None:
                    connection = _Connection(*self._connect(), self._lock_seconds)
                    self._connection = connection
                connection.check()
            except Exception as error:
                for job in batch:
                    job.error = error
                settle(batch)
                continue
            while batch:
                with self._in_use:
                    done = self._commit(connection, batch)
                settle(done)
                batch = batch[len(done) :]
        if connection is not None:
            with self._in_use:
                self._connection = None
                connection.close()

    def _commit(self, connection: _Connection, batch: Sequence[Job]) -> Sequence[Job]:
        """Run the jobs as one transaction, and return those that are finished. The others must be retried."""
        db = connection.db
        if all(job.kind == "reads" for job in batch):
            for job in batch:
                _attempt_reading(db, job)
            return batch
        flush = self._flush_always or any(job.kind == "flushed" for job in batch)
        try:
            connection.use(FLUSHED if flush else WRITTEN)
            if len(batch) == 1 and batch[0].kind in ("statement", "short") and not flush:
                self.commit_hooks.call("before")
                batch[0].result = batch[0].work(db)
                self._committed(flush)
                return batch
            db.execute("BEGIN IMMEDIATE")
        except Exception as error:
            for job in batch:  # those that waited for a locked file do not each wait again
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
        self._finish(connection, batch, flush)
        return batch

    def _attempt(self, db: sqlite3.Connection, job: Job, alone: bool) -> bool:
        """Run one job, and undo it if it fails. Return False if the whole transaction is gone.

        The first job of a batch needs no savepoint: with nothing before it, the whole transaction is rolled back.
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
            with contextlib.suppress(sqlite3.Error):  # if it stayed open, it would include the next writes
                db.execute("ROLLBACK")
            return False

    def _finish(self, connection: _Connection, batch: Sequence[Job], flush: bool) -> None:
        db = connection.db
        try:
            if all(job.kind == "reads" or job.error is not None for job in batch):
                db.execute("ROLLBACK")  # nothing was written
                return
            number = connection.mark.advance(db) if flush else 0
            self.commit_hooks.call("before")
            db.execute("COMMIT")
            self._committed(flush)
            if flush:
                connection.mark.note(number)
        except sqlite3.Error as error:
            with contextlib.suppress(sqlite3.Error):  # the error that matters is the commit's
                db.execute("ROLLBACK")
            for job in batch:
                job.error = job.error or self._explain(error)

    def _committed(self, flush: bool) -> None:
        self.commits += 1
        self.flushes += flush
        self.commit_hooks.call("after")

    def _explained(self, error: Exception) -> Exception:
        return self._explain(error) if isinstance(error, sqlite3.Error) else error


class _Mode(msgspec.Struct, frozen=True):
    """How commits are made: flushed or not; waiting for locks and running checkpoints, or not."""

    flushes: bool
    waits: bool = True

    def pragmas(self, lock_seconds: float) -> str:
        return (
            f"PRAGMA synchronous = {SYNCHRONOUS[self.flushes]};"
            f"PRAGMA busy_timeout = {lock_seconds * 1000 if self.waits else 0:.0f};"
            f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES if self.waits else 0}"
        )


FLUSHED, WRITTEN, HERE = _Mode(True), _Mode(False), _Mode(False, waits=False)


class _Connection:
    """A writer's connection, its commit mode, and the mark of its flushed commits."""

    def __init__(self, db: sqlite3.Connection, mark: CommitMark, lock_seconds: float) -> None:
        self.db = db
        self.mark = mark
        self._lock_seconds = lock_seconds
        self._mode: _Mode | None = None
        self._path = str(db.execute("PRAGMA database_list").fetchone()[2])
        self._file: os.stat_result | None = None

    def use(self, mode: _Mode) -> None:
        """Use this mode for subsequent commits."""
        if mode is not self._mode:
            # SQLite applies some pragmas when they are compiled, so a cached statement would have no effect.
            self.db.executescript(mode.pragmas(self._lock_seconds))
            self._mode = mode

    def check(self) -> None:
        """Raise an error if the file was moved or deleted: SQLite does not notice, and later writes would be lost."""
        try:
            file = os.stat(self._path)
        except OSError:
            file = None
        if file is None or file.st_ino != (self._file or file).st_ino:
            raise StoreError(
                f"{self._path} was moved or deleted while it was in use: put it back, or start Everloop again"
            )
        self._file = file

    def is_at_hand(self) -> bool:
        """Return whether the file is unchanged since before the last commit of the writer's thread.

        If a checkpoint has changed it, the next commit restarts the log, and SQLite flushes the header of a new log.
        """
        try:
            file = os.stat(self._path)
        except OSError:
            return False
        known = self._file
        return known is not None and (file.st_ino, file.st_mtime_ns) == (known.st_ino, known.st_mtime_ns)

    def close(self) -> None:
        self.db.close()
        self.mark.close()


def _waiting(jobs: queue.SimpleQueue[Job | None], first: Job) -> tuple[list[Job], bool]:
    """Return the job and those queued behind it; True if there will be no more."""
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


# ---------------------------------------------------------------------------------------------- lost commits


class CommitMark:
    """Detects that a store has lost commits: a small file next to it holds the number of its last flushed commit.

    SQLite reads a write-ahead log up to the first incomplete frame, so a log that was truncated, or left behind when
    the database was copied, silently loses its last commits. Every flushed commit (the others may be lost without harm)
    therefore increments a counter in the database, and writes it to the file afterwards, without a flush. If the file
    has a higher number than the database, commits are missing. After a power loss the file may lag behind, which can
    hide a loss but never invents one.
    """

    def __init__(self, database: Path) -> None:
        self._file = -1
        with contextlib.suppress(OSError):  # without the file no loss is detected, but everything works
            self._file = os.open(mark_file(database), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    @staticmethod
    def forget(database: Path) -> None:
        """Discard the mark of an earlier database: this one is new."""
        mark_file(database).unlink(missing_ok=True)

    @staticmethod
    def verify(db: sqlite3.Connection, database: Path) -> None:
        """Warn, and record in the store, if previously known commits are missing."""
        known = _known(database)  # read first: a commit in between can only make the database newer
        (number,) = db.execute(NUMBER).fetchone()
        if known <= number:
            return
        try:
            if db.execute(NOTE_LOSS, (known, time.time())).rowcount == 0:
                return  # another process has recorded it
        except sqlite3.OperationalError:  # the database is read-only
            pass
        log.warning(
            "%s: the last %d commits are missing. Its -wal file was lost or truncated, or an older copy was put in its "
            "place; later writes are lost, and calls with side effects may run again",
            database,
            known - number,
        )

    def advance(self, db: sqlite3.Connection) -> int:
        """Count a commit, inside its transaction."""
        return int(db.execute(ADVANCE).fetchone()[0])

    def note(self, number: int) -> None:
        """Record the number of a commit that is on disk."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, b"%0*d\n" % (DIGITS, number), 0)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


FILES = ("", "-wal", "-shm", "-journal", "-commits")  # the files of a store, by what follows its name


def mark_file(database: Path) -> Path:
    return database.with_name(f"{database.name}-commits")


def _known(database: Path) -> int:
    try:
        return int(mark_file(database).read_bytes()[:DIGITS])
    except (OSError, ValueError):
        return 0

"""Threads that read and write, each with a connection of its own.

Writes of one session go one after another, and those that wait together are one transaction; different sessions go side
by side, and PostgreSQL makes one fsync of their commits. A connection that breaks is replaced. Where it broke while a
transaction was being committed, it is looked up what became of it before anything is written again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, TypeVar

from ...errors import StoreError
from ..jobs import Job, settle
from ..waker import Waker, forget_closed
from ..write import Write
from .connecting import Unreachable
from .crew import Crew, Kind, Local
from .rows import NOW

if TYPE_CHECKING:
    from .connecting import Asked, Connection

T = TypeVar("T")
PAUSE_SECONDS = 0.05  # until a connection is tried for again, then longer and longer
LONGEST_PAUSE = 1.0
# Each thread has a row, in which every transaction of it leaves its number.
KNOWN = f"INSERT INTO lane (id, number, at) VALUES (%s, 0, {NOW}) ON CONFLICT (id) DO NOTHING"
MARK = f"UPDATE lane SET number = %s, at = {NOW} WHERE id = %s RETURNING id"
MARKED = "SELECT number FROM lane WHERE id = %s FOR UPDATE"
AGAIN = ("40001", "40P01")  # two transactions in each other's way: one of them is told to try again
TRIES = 10


class Lanes:
    """Runs jobs in at most `size` threads, in order within a place (a session, say). A write is on disk when its future
    is done; a job may run more than once, and what an earlier try wrote is undone.

    `hook`, for tests, is called with "before" and "after" around every commit.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        explain: Callable[[Exception], Exception],
        size: int,
        patience: float,
    ) -> None:
        self.hook: Callable[[str], None] | None = None
        self.commits = 0
        self._connect = connect
        self._explain = explain
        self._size = size
        self._patience = patience
        self._crew: Crew | None = None
        self._ending: Crew | None = None  # the one before, while it does what was handed to it
        self._wakers: dict[asyncio.AbstractEventLoop, Waker[Job]] = {}
        self._lock = threading.Lock()
        self._hurried = self._away = False  # nobody has time to wait; and the server was not there since
        self._reached = False  # the server has been there before, so it is waited for when it is not

    def submit(self, kind: Kind, work: Callable[..., T], place: Hashable = None) -> Write[T]:
        """Queue a job from a coroutine."""
        loop = asyncio.get_running_loop()
        with self._lock:
            waker = self._wakers.get(loop)
            if waker is None:
                forget_closed(self._wakers)
                waker = self._wakers[loop] = Waker(loop, Job.settle)
        future: Write[T] = Write(loop=loop)
        self._put(Job(kind, work, future, waker), place)
        return future

    def call(self, kind: Kind, work: Callable[..., T], place: Hashable = None) -> T:
        """Run a job from plain code and wait for it."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._put(Job(kind, work, future, None), place)
        return future.result()

    async def close(self) -> None:
        """End the threads once everything queued is done; another job would start them again."""
        loop = asyncio.get_running_loop()
        with self._lock:
            crew, self._crew = self._crew, None
            if crew is not None:
                self._ending = crew
            waker = self._wakers.pop(loop, None)  # a job that comes later has another: nobody hands to a closed one
        if crew is not None:
            crew.end()
            await loop.run_in_executor(None, crew.join)
            with self._lock:
                if self._ending is crew:
                    self._ending = None
        if waker is not None:
            waker.close()

    def hurry(self) -> None:
        """From now on wait for no server that is away: the process is to end."""
        self._hurried = True

    def _put(self, job: Job, place: Hashable) -> None:
        with self._lock:
            if self._crew is None:
                self._crew = Crew(self._size, self._run, self._ending)
            self._crew.put(job, place)

    # ------------------------------------------------------------------------------------------ in a thread

    def _run(self, jobs: list[Job], local: Local) -> None:
        """Do the jobs, all of one kind, and tell whoever waits for them."""
        if jobs[0].kind == "aside":
            for job in jobs:
                _attempt(job)
        else:
            self._with_connection(jobs, local)
        settle(jobs)

    def _with_connection(self, jobs: list[Job], local: Local) -> None:
        """Do the jobs, waiting for the server where it is away for a while."""
        give_up = time.monotonic() + (self._patience if self._reached else 0)
        pause = PAUSE_SECONDS
        while True:
            try:
                connection = local.connection = local.connection or self._connection()
                self._reached = True
                return self._read(connection, jobs) if jobs[0].kind == "reads" else self._write(local, jobs, give_up)
            except Exception as error:
                if not self._may_pass(error, local) or self._is_late(give_up):
                    for job in jobs:
                        job.error = job.error or self._explain(error)
                    return
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _connection(self) -> Connection:
        if self._away:
            raise Unreachable("the store is away, and the process is to end")
        try:
            return self._connect()
        except Unreachable:
            self._away = self._hurried  # one who is in a hurry does not try a second time
            raise

    def _is_late(self, give_up: float) -> bool:
        return self._hurried or time.monotonic() > give_up

    def _may_pass(self, error: Exception, local: Local) -> bool:
        """Whether it was the connection, or the server, that failed."""
        if isinstance(error, Unreachable):
            return True
        if local.connection is not None and local.connection.closed:
            local.connection = None
            return not isinstance(error, StoreError)
        return False

    def _read(self, connection: Connection, jobs: list[Job]) -> None:
        import psycopg

        for job in jobs:
            try:
                job.result = job.work(connection)
            except psycopg.Error as error:
                if _lost(connection, error):
                    raise
                job.error = self._explain(error)
            except Exception as error:
                job.error = error

    def _write(self, local: Local, jobs: list[Job], give_up: float) -> None:
        """Do the jobs as one transaction; where the server refuses it, each one as its own."""
        import psycopg

        for tries in range(1, TRIES + 1):
            assert local.connection is not None
            try:
                if self._transact(local, jobs, give_up):
                    return
            except psycopg.Error as error:
                if _lost(local.connection, error):
                    raise
                _undo(local.connection)
                if error.sqlstate in AGAIN and tries < TRIES:
                    time.sleep(0.002 * tries)
                elif len(jobs) == 1:
                    jobs[0].error = self._explain(error)
                    return
                else:
                    break
        if len(jobs) == 1:
            jobs[0].error = StoreError(f"the store has undone a write {TRIES} times: try again later")
            return
        for job in jobs:
            self._with_connection([job], local)

    def _transact(self, local: Local, jobs: list[Job], give_up: float) -> bool:
        """Do the jobs and commit them. False when nothing of it was kept, and it can be done again.

        Where the connection breaks while it commits, the server is asked whether it did: nothing is done twice.
        """
        import psycopg

        connection = local.connection
        assert connection is not None
        if not local.known:  # beforehand: a row that is being made cannot be waited for
            connection.execute(KNOWN, (local.name,))
            local.known = True
        local.number += 1
        ending: Asked | None = None
        try:
            with connection.pipeline():
                connection.execute("BEGIN")
                marked = connection.execute(MARK, (local.number, local.name))
                self._attempt_all(connection, jobs)
                local.known = marked.fetchone() is not None
                if not local.known or all(job.error is not None for job in jobs):
                    connection.execute("ROLLBACK")
                    return local.known
                self._tell("before")
                ending = connection.execute("COMMIT")  # sent and answered when this block ends
            kept = ending.statusmessage == "COMMIT"
        except psycopg.Error as error:
            if ending is None or not _lost(connection, error):
                raise
            local.connection = None
            kept = self._became(local, give_up)
        if kept:
            self.commits += 1
            self._tell("after")
        return kept

    def _attempt_all(self, connection: Connection, jobs: list[Job]) -> None:
        for job in jobs:
            job.result = job.error = None
        for job in jobs:
            if len(jobs) > 1:
                connection.execute("SAVEPOINT job")
            if not self._attempt_write(connection, job) and len(jobs) > 1:
                connection.execute("ROLLBACK TO job")

    def _attempt_write(self, connection: Connection, job: Job) -> bool:
        import psycopg

        try:
            job.result = job.work(connection)
        except psycopg.DataError as error:  # refused before it was sent, or by the server, which then undoes all
            if connection.info.transaction_status != psycopg.pq.TransactionStatus.INERROR:
                job.error = self._explain(error)
                return False
            raise
        except psycopg.Error:
            raise
        except Exception as error:
            job.error = error
            return False
        return True

    def _became(self, local: Local, give_up: float) -> bool:
        """Whether a transaction was committed whose end was not heard of: then our mark has its number.

        The number that PostgreSQL itself gives it would not do: after a crash it is given again, to another one.
        """
        pause = PAUSE_SECONDS
        while True:
            try:
                connection = local.connection = local.connection or self._connection()
                row = connection.execute(MARKED, (local.name,)).fetchone()  # waits for it to end, if it has not yet
                return row is not None and row[0] == local.number
            except Exception as error:
                late = getattr(error, "sqlstate", None) == "55P03"  # it has not ended within the time for a lock
                if not late and not self._may_pass(error, local):
                    raise _unknown(error) from error
            if self._is_late(give_up):
                raise _unknown(None)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _tell(self, when: str) -> None:
        if self.hook is not None:
            self.hook(when)


def _attempt(job: Job) -> None:
    try:
        job.result = job.work()
    except Exception as error:
        job.error = error


def _lost(connection: Connection, error: Exception) -> bool:
    """Whether the connection is of no use any more. A fatal error is the last that is heard of one, and one that cannot
    leave its pipeline was broken inside it."""
    diagnosis = getattr(error, "diag", None)
    fatal = diagnosis is not None and diagnosis.severity_nonlocalized in ("FATAL", "PANIC")
    if fatal or (not connection.closed and connection.pgconn.pipeline_status):
        connection.close()
    return connection.closed


def _undo(connection: Connection) -> None:
    with contextlib.suppress(Exception):  # a connection that broke has undone it already
        connection.execute("ROLLBACK")


def _unknown(error: Exception | None) -> StoreError:
    why = f" ({error})" if error is not None else ""
    return StoreError(f"the connection broke while a write was being finished, and nobody can say whether it was{why}")

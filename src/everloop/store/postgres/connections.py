"""Threads that read and write through connections to PostgreSQL.

These threads are used instead of psycopg_pool because a write needs more than a connection: all queued writes of one
session form one transaction, its statements are pipelined, and if the response to a COMMIT is lost, the thread's own
mark row tells whether it happened. With an async pool, the same work would run on the event loop and delay its turns.

A `LoneWrite` without other queued writes is a single statement without an explicit transaction.

Writes of one session run in order; different sessions run in parallel, and PostgreSQL combines their commits into one
fsync. A broken connection is replaced. If it broke during a COMMIT, the outcome is looked up before anything is written
again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import random
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ...errors import StoreError
from ..jobs import CommitHooks, Job, Wakers, Write, settle
from . import prepared
from .connect import READ_ONLY, Unreachable, break_off
from .prepared import LoneWrite, MustTransact
from .transactions import NOW

if TYPE_CHECKING:
    from .connect import Connection, Result

T = TypeVar("T")
# "unflushed" writes survive the death of this process. They survive a crash of the database once it has flushed them,
# which every other write does along with everything before it: the WAL is a single stream.
Kind = Literal["writes", "unflushed", "reads", "aside"]
BATCH = 64  # writes per transaction
RETRY_SECONDS = 0.05  # delay before the first retry of a connection; it grows from there
MAX_RETRY = 0.5  # so that work resumes within a second of the end of an outage
# Each thread has a row in which each of its transactions leaves its number, and a lone write also its result. The
# number only grows, so a transaction whose number RESOLVE has taken in the meantime can no longer be committed. RESOLVE
# always writes: if a server waits for its synchronous standby, a commit whose wait was interrupted can be visible
# before the standby has it, and would be lost with the server. The commit of RESOLVE waits for both.
INSERT_MARK = f"INSERT INTO lane (id, number, at) VALUES (%s, %s, {NOW}) ON CONFLICT (id) DO NOTHING"
MARK = f"UPDATE lane SET number = %s, at = {NOW}, result = NULL WHERE id = %s AND number < %s RETURNING id"
RESOLVE = f"""UPDATE lane SET number = CASE WHEN number < %s THEN %s ELSE number END, at = {NOW}
    WHERE id = %s RETURNING number, result"""
UNMARKED = "EL001"  # raised by a lone write whose thread's row is gone
CONFLICTS = ("40001", "40P01")  # serialization failure and deadlock: the transaction can be retried
TRIES = 10


class _Again(Exception):
    """Nothing of a lone write was committed, and it can be run again."""


class ThreadState:
    """The state of a thread: its connection, the id of its mark row, and the number of its last transaction."""

    __slots__ = ("connection", "has_row", "name", "number")

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.name = f"lane.{secrets.token_hex(8)}"
        self.has_row = False
        self.number = 0


class Threads:
    """Up to `size` threads that run queued jobs. Jobs with the same key run in order, in one thread at a time."""

    def __init__(self, size: int, run: Callable[[list[Job], ThreadState], None], before: Threads | None) -> None:
        self._size = size
        self._run = run
        self._before = before  # these must end first
        self._threads: list[threading.Thread] = []
        self._idle: list[threading.Lock] = []  # one per idle thread, the most recently used one last
        self._ended = False
        self._ready: deque[Hashable] = deque()  # keys with jobs that no thread is running
        self._queues: dict[Hashable, deque[Job]] = {}  # by key, from its first job until it is idle again
        self._lock = threading.Lock()

    def put(self, job: Job, key: Hashable) -> None:
        with self._lock:
            key = key if key is not None else object()  # independent of all other jobs
            if key in self._queues:
                self._queues[key].append(job)
                return
            self._queues[key] = deque([job])
            self._ready.append(key)
            if self._idle:
                # The most recently used thread: its connection, and the server's end of it, are warm.
                self._idle.pop().release()
            elif len(self._threads) < self._size:
                name = f"everloop-postgres-{len(self._threads) + 1}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def end(self) -> None:
        with self._lock:
            self._ended = True
            while self._idle:
                self._idle.pop().release()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        if self._before is not None:
            self._before.join()
        state = ThreadState()
        for key, jobs in self._taken():
            self._run(jobs, state)
            with self._lock:
                if self._queues[key]:
                    self._ready.append(key)  # taken by this thread, unless another one takes it first
                else:
                    del self._queues[key]
        if state.connection is not None:
            state.connection.close()

    def _taken(self) -> Iterator[tuple[Hashable, list[Job]]]:
        """Yield one key's jobs at a time: as many of one kind as fit into a transaction."""
        wake = threading.Lock()  # held; whoever releases it has removed it from the idle ones
        wake.acquire()
        while True:
            with self._lock:
                if self._ready:
                    key = self._ready.popleft()
                    queue = self._queues[key]
                    jobs = [queue.popleft()]
                    while queue and queue[0].kind == jobs[0].kind and len(jobs) < BATCH:
                        jobs.append(queue.popleft())
                elif self._ended:
                    return
                else:
                    jobs = []
                    self._idle.append(wake)
            if jobs:
                yield key, jobs
            else:
                wake.acquire()


class Connections:
    """Runs jobs on up to `size` connections, in order per key (a session, for example).

    A write is on disk when its future is done. A job may run more than once; writes of an earlier attempt are rolled
    back.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        explain: Callable[[Exception], Exception],
        size: int,
        patience: float,
    ) -> None:
        self.commit_hooks = CommitHooks()
        self.commits = 0
        self._connect = connect
        self._explain = explain
        self._size = size
        self._patience = patience
        self._threads: Threads | None = None
        self._ending: Threads | None = None  # the previous threads, while they finish their jobs
        self._wakers = Wakers()
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._works = threading.Event()  # a job has succeeded since the last one that found no server
        self._hurried = self._away = False  # the process is shutting down; and the server has been unreachable since
        self._reached = False  # the server was reachable before, so an outage is waited out

    def submit(self, kind: Kind, work: Callable[..., T], key: Hashable = None) -> Write[T]:
        """Queue a job from a coroutine."""
        job, future = self._wakers.job(kind, work)
        self._put(job, key)
        return future

    def call(self, kind: Kind, work: Callable[..., T], key: Hashable = None) -> T:
        """Run a job from synchronous code and wait for it."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._put(Job(kind, work, future, None), key)
        return future.result()

    async def close(self) -> None:
        """End the threads once everything queued is done. A later job starts them again."""
        with self._lock:
            threads, self._threads = self._threads, None
            if threads is not None:
                self._ending = threads
            waker = self._wakers.pop()
        if threads is not None:
            threads.end()
            await asyncio.get_running_loop().run_in_executor(None, threads.join)
            with self._lock:
                if self._ending is threads:
                    self._ending = None
        if waker is not None:
            waker.close()

    def hurry(self) -> None:
        """Stop waiting for an unreachable server, because the process is shutting down."""
        self._hurried = True

    def break_all(self) -> None:
        """Break all connections to a server that does not answer: their users then look for the primary."""
        for connection in list(self._open):
            break_off(connection)

    def _put(self, job: Job, key: Hashable) -> None:
        with self._lock:
            if self._threads is None:
                self._threads = Threads(self._size, self._run, self._ending)
            self._threads.put(job, key)

    # ------------------------------------------------------------------------------------------ in a thread

    def _run(self, jobs: list[Job], state: ThreadState) -> None:
        """Run jobs of one kind, and settle their futures."""
        if jobs[0].kind == "aside":
            for job in jobs:
                _attempt(job)
        else:
            self._with_connection(jobs, state)
        settle(jobs)

    def _with_connection(self, jobs: list[Job], state: ThreadState) -> None:
        """Run the jobs, waiting out a temporary outage of the server."""
        give_up = time.monotonic() + (self._patience if self._reached else 0)
        pause = RETRY_SECONDS
        while True:
            try:
                connection = self._connection(state)
                self._reached = True
                if jobs[0].kind == "reads":
                    self._read(connection, jobs)
                else:
                    self._write(state, jobs, give_up)
                self._works.set()
                return
            except Exception as error:
                if not self._is_outage(error, state) or self._is_late(give_up):
                    for job in jobs:
                        job.error = job.error or self._explain(error)
                    return
            self._wait(pause)
            pause = min(2 * pause, MAX_RETRY)

    def _connection(self, state: ThreadState) -> Connection:
        """Return the thread's connection, or a new one if it broke."""
        if state.connection is not None and not state.connection.closed:
            return state.connection
        state.connection = None
        if self._away:
            raise Unreachable("the store is unreachable, and the process is shutting down")
        try:
            connection = state.connection = self._connect()
            self._open.add(connection)
            return connection
        except Unreachable:
            self._away = self._hurried  # when shutting down, there is no second attempt
            raise

    def _wait(self, pause: float) -> None:
        """Wait before a retry, but not longer than until the server works for another thread again."""
        self._works.clear()
        time.sleep(RETRY_SECONDS)
        self._works.wait(pause * random.uniform(0.7, 1.0) - RETRY_SECONDS)

    def _is_late(self, give_up: float) -> bool:
        return self._hurried or time.monotonic() > give_up

    def _is_outage(self, error: Exception, state: ThreadState) -> bool:
        """Return whether the connection or the server failed, rather than the job."""
        is_broken = state.connection is not None and state.connection.closed
        return isinstance(error, Unreachable) or (is_broken and not isinstance(error, StoreError))

    def _read(self, connection: Connection, jobs: list[Job]) -> None:
        import psycopg

        for job in jobs:
            try:
                job.result = job.work(connection)
            except psycopg.Error as error:
                if self._close_if_lost(connection, error):
                    raise
                job.error = self._explain(error)
            except Exception as error:
                job.error = error

    def _write(self, state: ThreadState, jobs: list[Job], give_up: float) -> None:
        """Run the jobs as one transaction; if the server refuses it, run each in its own."""
        import psycopg

        for tries in range(1, TRIES + 1):
            assert state.connection is not None
            try:
                if self._write_alone(state, jobs, give_up) or self._transact(state, jobs, give_up):
                    return
            except _Again:
                continue
            except psycopg.Error as error:
                if self._close_if_lost(state.connection, error):
                    raise
                with contextlib.suppress(Exception):  # a broken connection has already rolled back
                    state.connection.execute("ROLLBACK")
                if error.sqlstate in CONFLICTS and tries < TRIES:
                    time.sleep(0.002 * tries)
                elif len(jobs) == 1:
                    jobs[0].error = self._explain(error)
                    return
                else:
                    break
        if len(jobs) == 1:
            jobs[0].error = StoreError(f"the store has rolled back a write {TRIES} times: try again later")
            return
        for job in jobs:
            self._with_connection([job], state)

    def _write_alone(self, state: ThreadState, jobs: list[Job], give_up: float) -> bool:
        """Run a single queued job without an explicit transaction. Return False if it needs one."""
        import psycopg

        job, connection = jobs[0], state.connection
        if len(jobs) > 1 or not isinstance(job.work, LoneWrite):
            return False
        assert connection is not None
        job.result = job.error = None
        try:
            job.result = job.work.alone(connection, partial(self._call, state, give_up))
        except MustTransact:
            return False
        except psycopg.DataError as error:
            job.error = self._explain(error)
        except (psycopg.Error, _Again):
            raise
        except Exception as error:
            job.error = error
        return True

    def _call(self, state: ThreadState, give_up: float, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Run the statement of a lone write with the thread's mark: see `prepared.Call`."""
        import psycopg

        connection = state.connection
        assert connection is not None
        self._insert_mark(state)
        state.number += 1
        self.commit_hooks.call("before")
        try:
            rows = prepared.run(connection, query, (state.name, state.number, *values))
        except psycopg.Error as error:
            if error.sqlstate == UNMARKED:
                state.has_row = False
                raise _Again from error
            if not self._close_if_lost(connection, error):
                raise
            outcome = self._outcome(state, give_up)
            if outcome is None:
                raise _Again from error
            rows = [outcome]
        self.commits += 1
        self.commit_hooks.call("after")
        return rows

    def _insert_mark(self, state: ThreadState) -> None:
        """Insert the thread's row before a transaction: a lookup can only wait on a row that exists."""
        if not state.has_row:
            assert state.connection is not None
            state.connection.execute(INSERT_MARK, (state.name, state.number))
            state.has_row = True

    def _transact(self, state: ThreadState, jobs: list[Job], give_up: float) -> bool:
        """Run the jobs and commit them. Return False if nothing was committed, and they can be run again.

        If the connection breaks during the COMMIT, the server is asked whether it happened, so that nothing is done
        twice.
        """
        import psycopg

        connection = state.connection
        assert connection is not None
        self._insert_mark(state)
        state.number += 1
        ending: Result | None = None
        try:
            with connection.pipeline():
                connection.execute("BEGIN")
                if jobs[0].kind == "unflushed":
                    connection.execute("SET LOCAL synchronous_commit = off")
                marked = connection.execute(MARK, (state.number, state.name, state.number))
                self._attempt_all(connection, jobs)
                state.has_row = marked.fetchone() is not None
                if not state.has_row or all(job.error is not None for job in jobs):
                    connection.execute("ROLLBACK")
                    return state.has_row
                self.commit_hooks.call("before")
                ending = connection.execute("COMMIT")  # sent and answered when this block ends
            kept = ending.statusmessage == "COMMIT"
        except psycopg.Error as error:
            if ending is None or not self._close_if_lost(connection, error):
                raise
            kept = self._outcome(state, give_up) is not None
        if kept:
            self.commits += 1
            self.commit_hooks.call("after")
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
        except psycopg.DataError as error:  # refused before it was sent, or by the server, which aborts the transaction
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

    def _outcome(self, state: ThreadState, give_up: float) -> tuple[Any, ...] | None:
        """Return the result of a transaction whose outcome was not received.

        None if it was not and never will be committed. PostgreSQL's own transaction ids do not suffice: after a crash
        they are issued again.
        """
        pause = RETRY_SECONDS
        while True:
            try:
                connection = self._connection(state)
                values = (state.number, state.number + 1, state.name)
                row = connection.execute(RESOLVE, values).fetchone()  # waits for the transaction to end
                if row is not None and row[0] == state.number:
                    return row[1:]
                state.number += 1  # as RESOLVE has left it
                return None
            except Exception as error:
                is_running = getattr(error, "sqlstate", None) == "55P03"  # it did not end within the lock timeout
                if state.connection is not None:
                    self._close_if_lost(state.connection, error)
                if not is_running and not self._is_outage(error, state):
                    raise _unknown(error) from error
            if self._is_late(give_up):
                raise _unknown(None)
            self._wait(pause)
            pause = min(2 * pause, MAX_RETRY)

    def _close_if_lost(self, connection: Connection, error: Exception) -> bool:
        """Close a connection that can no longer be used, and return whether it is closed.

        That is the case after a fatal error, if it broke inside its pipeline, or if its server no longer accepts writes
        because another one is or will be the primary.
        """
        diagnosis = getattr(error, "diag", None)
        fatal = diagnosis is not None and diagnosis.severity_nonlocalized in ("FATAL", "PANIC")
        demoted = self.commits > 0 and getattr(error, "sqlstate", None) == READ_ONLY
        if fatal or demoted or (not connection.closed and connection.pgconn.pipeline_status):
            connection.close()
        return connection.closed


def _attempt(job: Job) -> None:
    try:
        job.result = job.work()
    except Exception as error:
        job.error = error


def _unknown(error: Exception | None) -> StoreError:
    why = f" ({error})" if error is not None else ""
    return StoreError(f"the connection broke during a commit, and it is unknown whether it took effect{why}")

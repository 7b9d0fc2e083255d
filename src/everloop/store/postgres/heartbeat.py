"""The heartbeat of a process: renews its workers' leases, receives notifications, and removes dead workers.

It is one thread with its own connection, so that neither a busy event loop nor a queue of writes lets a lease expire.
It does not wait for a synchronous standby either: while one is missing, all other writes wait, and the heartbeat
reports it.

A server may keep its connections open but not answer: its processes are frozen, or packets are dropped behind a proxy.
If there is another server to switch to, the heartbeat's own queries detect this, and all connections are broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..peers import ANY, JOINED, gone, of_this_process
from .connect import Unreachable
from .replication import StandbyWatch
from .transactions import FRESH, NOW

if TYPE_CHECKING:
    from .connect import Connection, Primary

log = logging.getLogger(__name__)
CHANNEL = "everloop"
LOG_CHANNEL = "everloop_log"  # notified of new entries while workers follow the log
BROADCASTS = ("relay", CHANNEL)  # the key of jobs that notify all processes, which must stay in order
RENEWALS = 3  # renewals per lease duration
RETRY_SECONDS = 0.5
WATCH_SECONDS = 0.5  # polling interval for a silent server
SILENT_SECONDS = 5.0  # without an answer to the heartbeat for this long, a server is given up

RENEW = f"""INSERT INTO worker (id, address, at)
    SELECT w.id, w.address, {NOW} FROM unnest(%s::text[], %s::text[]) AS w (id, address)
    ON CONFLICT (id) DO UPDATE SET at = excluded.at, address = excluded.address"""
# One process removes a dead worker, and notifies all others in the same transaction.
REMOVE_DEAD = f"""WITH dead AS (
        DELETE FROM worker WHERE id IN (
            SELECT id FROM worker w WHERE NOT {FRESH} AND id <> ALL(%s) FOR UPDATE SKIP LOCKED)
        RETURNING id)
    SELECT pg_notify('{CHANNEL}', '{ANY}') FROM dead"""

# A worker takes its first session: other workers on its machine watch its process from then on.
ANNOUNCE = f"SELECT pg_notify('{CHANNEL}', '{JOINED}')"
# Returns the primary's timeline. After a failover, the first process to run this gives all workers the full time to
# renew their rows: none could while there was no primary.
SEE_PRIMARY = "SELECT everloop_see_primary()"
REMOVE_MARKS = f"DELETE FROM lane WHERE at < {NOW} - 604800"  # the mark rows of threads that ended long ago

Deliver = Callable[[str], None]
Notices = list[tuple[str, str]]  # channel and payload


class Heartbeat:
    """Renews the leases of this process, from its first worker or listener until it is closed."""

    def __init__(
        self,
        connect: Callable[[], Connection],
        explain: Callable[[Exception], Exception],
        lease: float,
        primary: Primary | None,
    ) -> None:
        """With a `primary` there are several servers: one that does not answer is given up."""
        self.address = secrets.token_hex(6)  # the name of this process's own channel
        self._subscriber: Callable[[Notices | None], None] | None = None
        self.wake_is_due = False  # because it could not be sent
        self.standby = StandbyWatch(always=primary is not None)  # that also finds a silent server sooner
        self._timeline = ""  # of the most recently connected primary
        self._renewed_at = -math.inf  # time of the last renewal, by `_clock`
        self._term = 0
        self._connect = connect
        self._explain = explain
        self._lease = lease
        self._primary = primary
        self._asked_at = 0.0  # time of the oldest query that the server has not answered yet; 0: none
        self._connection: Connection | None = None
        self._workers: dict[str, str | None] = {}  # workers of this process, with an address if they have joined
        self._listeners: dict[object, tuple[asyncio.AbstractEventLoop, Deliver, str]] = {}
        self._log_listener: tuple[asyncio.AbstractEventLoop, Callable[[], None]] | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop: Stop | None = None

    def knows(self, worker: str) -> bool:
        """Return whether this process renews the worker's lease."""
        return worker in self._workers

    @property
    def term(self) -> int | None:
        """The number of the current term, during which the leases of this process were renewed without interruption.

        None if a renewal is late, so that the leases may have expired or soon will.
        """
        # In this order: a renewal after an interruption starts a new term before it counts.
        return None if _clock() - self._renewed_at > self._lease / 2 else self._term

    @property
    def is_late(self) -> bool:
        """Return whether this process has leases to renew and has not done so in time."""
        renewed_at = self._renewed_at
        return bool(self._workers) and renewed_at > -math.inf and _clock() - renewed_at > self._lease / 2

    def keep(self, worker: str, address: str | None = None) -> None:
        """Renew the leases of a worker of this process from now on. Its row exists already."""
        if not of_this_process(worker):
            return
        with self._lock:
            self._workers[worker] = address or self._workers.get(worker)
            self._start()

    def leave(self, worker: str) -> None:
        """Note that the worker takes no more work. It keeps its existing leases."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker] = None

    def listen(self, who: object, loop: asyncio.AbstractEventLoop, deliver: Deliver, ignored: str = "") -> None:
        """Call `deliver` on the loop with every notification to all workers, except for the ignored one.

        Ignoring it here saves waking the loop, which costs more than receiving a notification.
        """
        with self._lock:
            self._listeners[who] = (loop, deliver, ignored)
            self._start()

    def listen_to_log(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Call `wake` on the loop when entries may have been written. Must be called before the thread starts."""
        with self._lock:
            self._log_listener = (loop, wake)
            self._start()

    def start(self) -> None:
        """Receive notifications, even without a worker."""
        with self._lock:
            self._start()

    def unlisten(self, who: object) -> None:
        with self._lock:
            self._listeners.pop(who, None)

    async def close(self) -> None:
        """End the thread. A later call starts it again."""
        with self._lock:
            thread, self._thread = self._thread, None
            stop, self._stop = self._stop, None
            self._workers.clear()
        if thread is not None and stop is not None:
            stop.set()
            await asyncio.get_running_loop().run_in_executor(None, thread.join)
            stop.close()  # after the thread, which reads it, has ended

    # ------------------------------------------------------------------------------------------ in the thread

    def _start(self) -> None:
        if self._thread is None:
            self._stop = Stop()
            self._thread = threading.Thread(
                target=self._run, args=(self._stop,), name="everloop-heartbeat", daemon=True
            )
            self._thread.start()
            if self._primary is not None:
                watching = (self._stop, self._primary)
                threading.Thread(target=self._watch, args=watching, name="everloop-silence", daemon=True).start()

    def _watch(self, stop: Stop, primary: Primary) -> None:
        """Break all connections to a server that is silent."""
        while not stop.is_set:
            if (asked_at := self._asked_at) and time.monotonic() - asked_at > SILENT_SECONDS:
                self._asked_at = 0.0
                log.warning("the store has not answered for %.0f s: looking for the primary", SILENT_SECONDS)
                primary.give_up(self._connection)
            time.sleep(WATCH_SECONDS)

    def _run(self, stop: Stop) -> None:
        connection: Connection | None = None
        is_reported = False  # whether the server's being unreachable was reported
        try:
            while not stop.is_set:
                try:
                    if connection is None:
                        connection = self._connection = self._connect()
                        self._asked_at = time.monotonic()
                        connection.execute("SET synchronous_commit = local")
                        self._notice_failover(connection)
                        connection.execute(f"LISTEN {CHANNEL}")
                        connection.execute(f"LISTEN {CHANNEL}_{self.address}")
                        if self._log_listener is not None:
                            connection.execute(f"LISTEN {LOG_CHANNEL}")
                            self._wake_log_listener()
                        connection.execute(REMOVE_MARKS)
                        self._deliver(ANY)  # notifications may have been lost
                        self._relay(None)
                        if is_reported:
                            log.warning("the heartbeat is back")
                        is_reported = False
                    self._asked_at = time.monotonic()
                    self._renew_and_remove(connection)
                    self._asked_at = 0.0
                    self._receive(connection, stop, time.monotonic() + self._lease / RENEWALS)
                except Exception as error:
                    if not is_reported:
                        log.warning("no heartbeat: %s", self._explain(error))
                    is_reported = True
                    self._asked_at = 0.0
                    self.standby.forget()
                    if connection is not None:
                        connection.close()
                        connection = None
                    wait_for(RETRY_SECONDS, stop.fileno())
        finally:
            if connection is not None:
                connection.close()

    def _renew_and_remove(self, connection: Connection) -> None:
        """Renew this process's leases, and remove dead workers."""
        self.standby.read_setting(connection)
        connection.execute(REMOVE_DEAD, (self._lease, self._renew(connection)))
        if self.wake_is_due:
            self.wake_is_due = False  # before sending: it may be set again in the meantime
            try:
                connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, ANY))
            except Exception:
                self.wake_is_due = True
                raise

    def _renew(self, connection: Connection) -> list[str]:
        """Renew the rows of this process's workers.

        If one joins or leaves in the meantime, its row may be overwritten with old values, so they are written again.
        """
        while True:
            with self._lock:
                for worker in [worker for worker in self._workers if gone(worker)]:
                    del self._workers[worker]
                workers = dict(self._workers)
            if workers:
                sent_at = _clock()
                connection.execute(RENEW, (list(workers), list(workers.values())))
                if _clock() - self._renewed_at >= self._lease:
                    self._term += 1
                self._renewed_at = sent_at
            with self._lock:
                if workers == self._workers:
                    return list(workers)

    def _notice_failover(self, connection: Connection) -> None:
        row = connection.execute(SEE_PRIMARY).fetchone()
        timeline = row[0] if row is not None else ""
        if self._timeline not in ("", timeline):
            log.warning("the store has failed over to another server")
        self._timeline = timeline

    def _look_for_standby(self, connection: Connection) -> None:
        """Look whether commits wait for a standby; raise `Unreachable` if that is because another server took over."""
        self._asked_at = time.monotonic()
        self.standby.look(connection)
        self._asked_at = 0.0
        if self.standby.wait and self._primary is not None and self._primary.has_changed():
            raise Unreachable("this server was the primary before a failover")

    def _receive(self, connection: Connection, stop: Stop, until: float) -> None:
        """Deliver notifications until the next renewal is due."""
        while not stop.is_set:
            if self.standby.due_in() <= 0:
                self._look_for_standby(connection)
            notices = [(notice.channel, notice.payload) for notice in connection.notifies(timeout=0)]
            if any(channel == LOG_CHANNEL for channel, _ in notices):
                notices = [notice for notice in notices if notice[0] != LOG_CHANNEL]
                self._wake_log_listener()
            relayed = [notice for notice in notices if notice[0] != CHANNEL or notice[1].startswith("{")]
            if relayed:  # first: a worker that takes a turn must know its subscribers
                self._relay(relayed)
            for payload in {payload for _, payload in notices} - {payload for _, payload in relayed}:
                self._deliver(payload)
            if (left := until - time.monotonic()) <= 0:
                break
            wait_for(min(left, max(0.0, self.standby.due_in())), connection.fileno(), stop.fileno())

    def _wake_log_listener(self) -> None:
        if self._log_listener is not None:
            loop, wake = self._log_listener
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(wake)

    def subscribe(self, subscriber: Callable[[Notices | None], None]) -> None:
        """Call the subscriber, in the heartbeat's thread, with every notice that is not a wake-up; None after a gap."""
        self._subscriber = subscriber

    def _relay(self, notices: Notices | None) -> None:
        if self._subscriber is not None:
            self._subscriber(notices)

    def _deliver(self, payload: str) -> None:
        with self._lock:
            listeners = list(self._listeners.values())
        for loop, deliver, ignored in listeners:
            if payload != ignored:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(deliver, payload)


def _clock() -> float:
    """Return the time of a clock that, like the database's, keeps running while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def wait_for(seconds: float, *files: int) -> None:
    """Wait until one of the files is readable, or for `seconds`.

    `select` accepts no file descriptor above 1023, but a reconnect in a server with many clients may get one.
    """
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    poll.poll(1000 * seconds)


class Stop:
    """Tells the thread to end, and wakes it."""

    def __init__(self) -> None:
        self.is_set = False
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)

    def fileno(self) -> int:
        return self._read_end

    def set(self) -> None:
        self.is_set = True
        os.write(self._write_end, b"x")

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)

"""The heartbeat of a process: renews its workers' leases, hears wake-ups, and finds workers that renew theirs no more.

One thread with a connection of its own, so that neither a busy event loop nor a queue of writes lets a lease end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..peers import ANY
from ..workers import gone, of_this_process
from .rows import NOW

if TYPE_CHECKING:
    from .connecting import Connection

log = logging.getLogger(__name__)
CHANNEL = "everloop"
RENEWALS = 3  # in the time that a lease lasts
RETRY_SECONDS = 0.5

RENEW = f"""INSERT INTO worker (id, address, at)
    SELECT w.id, w.address, {NOW} FROM unnest(%s::text[], %s::text[]) AS w (id, address)
    ON CONFLICT (id) DO UPDATE SET at = excluded.at, address = excluded.address"""
# A worker that is found dead is taken off the list by one of the others, and by that all are woken.
BURY = f"""WITH dead AS (
        DELETE FROM worker WHERE id IN (
            SELECT id FROM worker
            WHERE greatest(at, extract(epoch FROM pg_postmaster_start_time())) < {NOW} - %s AND id <> ALL(%s)
            FOR UPDATE SKIP LOCKED)
        RETURNING id)
    SELECT pg_notify('{CHANNEL}', '{ANY}') FROM dead"""

TIDY = f"DELETE FROM lane WHERE at < {NOW} - 604800"  # of threads that ended long ago

Heard = Callable[[str], None]
Notices = list[tuple[str, str]]  # channel and payload


class Pulse:
    """Beats from the first worker or listener on until it is closed."""

    def __init__(
        self, connect: Callable[[], Connection], explain: Callable[[Exception], Exception], lease: float
    ) -> None:
        self.address = secrets.token_hex(6)  # the process has a channel of its own under this name
        self.relayed: Callable[[Notices | None], None] | None = None  # hears, in the thread, what is no wake-up
        self.owes = False  # a wake-up that could not be sent
        self._connect = connect
        self._explain = explain
        self._lease = lease
        self._workers: dict[str, str | None] = {}  # of this process, each with its address if it has joined
        self._listeners: dict[object, tuple[asyncio.AbstractEventLoop, Heard]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop: _Stop | None = None

    def knows(self, worker: str) -> bool:
        """Whether the worker's lease is renewed from here already."""
        return worker in self._workers

    def keep(self, worker: str, address: str | None = None) -> None:
        """Renew this worker's leases from now on, if it is one of this process. Its row is there already."""
        if not of_this_process(worker):
            return
        with self._lock:
            self._workers[worker] = address or self._workers.get(worker)
            self._start()

    def leave(self, worker: str) -> None:
        """The worker takes no more work; what it still holds stays its own until it has ended."""
        with self._lock:
            if worker in self._workers:
                self._workers[worker] = None

    def listen(self, who: object, loop: asyncio.AbstractEventLoop, heard: Heard) -> None:
        """Call `heard` in the loop with whatever is said to all workers."""
        with self._lock:
            self._listeners[who] = (loop, heard)
            self._start()

    def beat(self) -> None:
        """Hear what is said to this process, also where it has no worker."""
        with self._lock:
            self._start()

    def unlisten(self, who: object) -> None:
        with self._lock:
            self._listeners.pop(who, None)

    async def close(self) -> None:
        """End the thread; whoever needs it again starts it again."""
        with self._lock:
            thread, self._thread = self._thread, None
            stop, self._stop = self._stop, None
            self._workers.clear()
        if thread is not None and stop is not None:
            stop.set()
            await asyncio.get_running_loop().run_in_executor(None, thread.join)
            stop.close()  # by whoever has said it, and after the last who looks at it

    # ------------------------------------------------------------------------------------------ in the thread

    def _start(self) -> None:
        if self._thread is None:
            self._stop = _Stop()
            self._thread = threading.Thread(target=self._run, args=(self._stop,), name="everloop-pulse", daemon=True)
            self._thread.start()

    def _run(self, stop: _Stop) -> None:
        connection: Connection | None = None
        told = False  # that the server is away
        try:
            while not stop.told:
                try:
                    if connection is None:
                        connection = self._connect()
                        connection.execute(f"LISTEN {CHANNEL}")
                        connection.execute(f"LISTEN {CHANNEL}_{self.address}")
                        connection.execute(TIDY)
                        self._tell(ANY)  # something may have been said while nobody listened
                        self._relay(None)
                        if told:
                            log.warning("the heartbeat is back")
                        told = False
                    self._beat(connection)
                    self._hear(connection, stop, time.monotonic() + self._lease / RENEWALS)
                except Exception as error:
                    if not told:
                        log.warning("no heartbeat: %s", self._explain(error))
                    told = True
                    if connection is not None:
                        connection.close()
                        connection = None
                    _wait(RETRY_SECONDS, stop.fileno())
        finally:
            if connection is not None:
                connection.close()

    def _beat(self, connection: Connection) -> None:
        """Renew what is ours, take away what is dead, and wake all if that frees something."""
        connection.execute(BURY, (self._lease, self._renew(connection)))
        if self.owes:
            self.owes = False  # before it is sent: what comes meanwhile sets it again
            try:
                connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, ANY))
            except Exception:
                self.owes = True
                raise

    def _renew(self, connection: Connection) -> list[str]:
        """Say of our workers that they live. Where one comes or goes meanwhile, what it has written of itself may be
        written over by what was true before: once more, then."""
        while True:
            with self._lock:
                for worker in [worker for worker in self._workers if gone(worker)]:
                    del self._workers[worker]
                workers = dict(self._workers)
            if workers:
                connection.execute(RENEW, (list(workers), list(workers.values())))
            with self._lock:
                if workers == self._workers:
                    return list(workers)

    def _hear(self, connection: Connection, stop: _Stop, until: float) -> None:
        """Pass on what is said, until it is time to beat again."""
        while not stop.told:
            notices = [(notice.channel, notice.payload) for notice in connection.notifies(timeout=0)]
            relayed = [notice for notice in notices if notice[0] != CHANNEL or notice[1].startswith("{")]
            if relayed:  # first: whoever takes a turn up must know who follows it
                self._relay(relayed)
            for word in {payload for _, payload in notices} - {payload for _, payload in relayed}:
                self._tell(word)
            if (left := until - time.monotonic()) <= 0:
                break
            _wait(left, connection.fileno(), stop.fileno())

    def _relay(self, notices: Notices | None) -> None:
        if self.relayed is not None:
            self.relayed(notices)

    def _tell(self, word: str) -> None:
        with self._lock:
            listeners = list(self._listeners.values())
        for loop, heard in listeners:
            with contextlib.suppress(RuntimeError):  # a loop that has ended hears nothing
                loop.call_soon_threadsafe(heard, word)


def _wait(seconds: float, *files: int) -> None:
    """Until one of these can be read, or so long. `select` would not do: it takes no number above 1023, which a
    connection has that is made again in a server with many clients."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    poll.poll(1000 * seconds)


class _Stop:
    """A word to the thread that it is to end, which also ends its waiting."""

    def __init__(self) -> None:
        self.told = False
        self._hears, self._says = os.pipe()
        os.set_blocking(self._says, False)

    def fileno(self) -> int:
        return self._hears

    def set(self) -> None:
        self.told = True
        os.write(self._says, b"x")

    def close(self) -> None:
        os.close(self._hears)
        os.close(self._says)

"""Wake-ups by NOTIFY: how a worker gets and sends notices, on whichever machine the others run.

A notice about a session goes to the worker that holds it, or else to one of those that take work, so that the cost of a
message does not depend on the number of workers. The death of a worker on the same machine is detected at once; one on
another machine is dead when its lease has expired.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ...errors import StoreError
from ...log import Written
from ..peers import JOINED, SENDING, WORK, Notice, Peer, decode_notice, encode_notice, new_worker, retire
from . import prepared
from .heartbeat import BROADCASTS, CHANNEL

if TYPE_CHECKING:
    from .connect import Connection
    from .connections import Connections
    from .store import PostgresStore

log = logging.getLogger(__name__)
LATE_SECONDS = 1.0  # delay after which a worker looks for work that another one was notified of
# The addresses of workers that take any work, of those that only get other notices, and of those that follow the log.
TAKES_WORK, LISTENS, FOLLOWS = "work", "ear", "log"
AT_ONCE = 300  # ids per NOTIFY, which may have 8,000 bytes
# Notices are not stored, so they need not wait for the disk.
NOTIFY = "SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, %s)"
DIRECTED = "SELECT everloop_direct(%s, %s, %s)"


@dataclass(slots=True)
class _Pending:
    """A notice that has not been sent yet."""

    ids: set[int] = field(default_factory=set)
    all: bool = False  # without ids: for all workers
    sent: Written[None] | None = None


class Notifier:
    """Sends notices. Concurrent callers that send the same kind share one NOTIFY."""

    def __init__(self, connections: Connections, lease: float) -> None:
        self._connections = connections
        self._lease = lease
        self._pending: dict[str, _Pending] = {}
        self._lock = threading.Lock()

    async def send(self, what: str, ids: Iterable[int]) -> None:
        ids = set(ids)
        with self._lock:
            notice = self._pending.get(what)
            if notice is None:
                notice = self._pending[what] = _Pending()
                work = partial(self._notify, what=what, notice=notice)
                notice.sent = self._connections.submit("reads", work, BROADCASTS)
            notice.ids |= ids
            notice.all |= not ids
        assert notice.sent is not None
        try:
            await notice.sent
        except Exception:  # it may not have got a connection: the next caller must not wait for it
            with self._lock:
                if self._pending.get(what) is notice:
                    del self._pending[what]
            raise

    def seal(self) -> None:
        """Send later notices after a broadcast that happens now, instead of with one that is already queued."""
        with self._lock:
            self._pending.clear()

    def _notify(self, db: Connection, what: str, notice: _Pending) -> None:
        with self._lock:  # this notice may be too early for what a later caller has written
            if self._pending.get(what) is notice:
                del self._pending[what]
        if notice.all:
            prepared.run(db, NOTIFY, (CHANNEL, what))
            return
        ids = sorted(notice.ids)
        for some in (ids[start : start + AT_ONCE] for start in range(0, len(ids), AT_ONCE)):
            if what == WORK:
                prepared.run(db, DIRECTED, (CHANNEL, self._lease, some))
            else:
                prepared.run(db, NOTIFY, (CHANNEL, encode_notice(what, "", some)))


def send_now(db: Connection, what: str) -> bool:
    """Send a notice to all workers on a connection outside of a transaction.

    Return False if it may not have been sent.
    """
    import psycopg

    try:
        prepared.run(db, NOTIFY, (CHANNEL, what))
    except psycopg.Error:  # the connection is replaced at its next use
        return False
    return True


class NotifiedPeer(Peer):
    """A worker that is notified by NOTIFY.

    If it takes work, it also looks, after a delay, for work that others were notified of and may not have taken.
    """

    def __init__(
        self, store: PostgresStore, worker: str, on_notice: Callable[[Notice], None], takes_work: bool = False
    ) -> None:
        super().__init__(store, worker, on_notice)
        self._store = store
        self._takes = takes_work
        self._late: asyncio.TimerHandle | None = None

    async def _join(self) -> None:
        self._store.relay.bind()  # subscribers of a turn may announce themselves before it runs here
        if not await self._register(TAKES_WORK if self._takes else LISTENS):
            return
        ignored = SENDING if self._takes else ""  # output of turns is sent by peers that take no work
        self._store.heartbeat.listen(self, asyncio.get_running_loop(), self._receive, ignored)
        await self._watch_all()
        await self._store.wake(JOINED)

    async def drain(self) -> None:
        self._takes = False
        if self._joined:
            await self._register(LISTENS)

    async def _register(self, address: str) -> bool:
        """Write the worker's address. Return False if it has left in the meantime."""
        await self._store.join(self._worker, address)
        if not self._joined:
            await self._store.leave(self._worker)
        return self._joined

    async def leave(self) -> None:
        if not self._joined:
            return
        self._joined = False
        self._store.heartbeat.unlisten(self)
        if self._late is not None:
            self._late.cancel()
        self._stop()
        try:
            await self._store.leave(self._worker)
            await self._store.wake()
        except StoreError as error:  # the others will see the lease expire
            log.warning("%s", error)

    def _receive(self, text: str) -> None:
        if not self._joined:
            return
        if text == JOINED:
            self._spawn(self._watch_all())
            return
        notice = decode_notice(text)
        if notice.what == WORK and notice.to not in ("", self._worker):
            if self._takes and self._late is None:  # that worker may be frozen or busy
                pause = LATE_SECONDS * random.uniform(1, 1.5)
                self._late = asyncio.get_running_loop().call_later(pause, self._look_late)
            return
        self._on_notice(notice)

    def _look_late(self) -> None:
        self._late = None
        self._on_notice(Notice(WORK))

    def _exited(self, worker: str) -> None:
        """Handle the death of a worker on this machine: it gets no more notices, and its sessions are free."""
        self._spawn(self._store.leave(worker))
        self._on_notice(Notice())


class LogWatch:
    """Wakes when entries are written to the log of any session, by whichever process."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store
        self._worker = new_worker()
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Start watching. A write in progress at that moment may be missed."""
        self._store.heartbeat.listen_to_log(asyncio.get_running_loop(), self._changed.set)
        await self._store.join(self._worker, FOLLOWS)
        await self.changed()  # wait until it listens

    async def changed(self) -> None:
        """Wait for the next change; return at once if there was one since the last call."""
        await self._changed.wait()
        self._changed.clear()

    async def close(self) -> None:
        try:
            await self._store.leave(self._worker)
        except StoreError as error:  # it is removed when its lease has expired
            log.warning("%s", error)
        retire(self._worker)

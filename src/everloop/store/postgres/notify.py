"""Wake-ups by NOTIFY: how a worker hears of the others, wherever they run, and how it tells them what has changed.

A notice about a session goes to the worker that holds it, or else to one of those that take work: a message costs the
same, however many workers there are. The death of a worker on the same machine is seen at once; one on another machine
is dead when its lease has ended.
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
from ..peers import JOINED, WORK, Notice, Peer, decode_notice, encode_notice
from .pulse import CHANNEL
from .reading import NOTIFY
from .rows import FRESH

if TYPE_CHECKING:
    from .connecting import Connection
    from .store import PostgresStore

log = logging.getLogger(__name__)
LATE_SECONDS = 1.0  # after which a worker looks for work that another one was notified of
TAKES, HEARS = "work", "ear"  # the addresses of workers: those that take any work, and those that only want to hear
AT_ONCE = 300  # ids in one notice, which may have 8,000 bytes
DIRECTED = f"""SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, told.what) FROM (
    SELECT 'w ' || worker || ' ' || string_agg(id::text, ',') AS what FROM (
        SELECT i.id, coalesce(
            (SELECT s.worker FROM session s JOIN worker w ON w.id = s.worker WHERE s.id = i.id AND {FRESH}),
            (SELECT w.id FROM worker w WHERE w.address = '{TAKES}' AND {FRESH} AND i.id > 0 ORDER BY random() LIMIT 1),
            '') AS worker
        FROM unnest(%s::bigint[]) AS i (id)) AS picked
    GROUP BY worker) AS told"""


@dataclass(slots=True)
class _Pending:
    """What is to be said and has not gone out yet."""

    ids: set[int] = field(default_factory=set)
    all: bool = False  # it is not known of which
    sent: Written[None] | None = None


class Notifier:
    """Says what has changed; many who say the same at once are one."""

    def __init__(self, reader: Callable[[Callable[[Connection], None]], Written[None]], lease: float) -> None:
        self._reader = reader
        self._lease = lease
        self._notices: dict[str, _Pending] = {}
        self._lock = threading.Lock()

    async def say(self, what: str, ids: Iterable[int]) -> None:
        ids = set(ids)
        with self._lock:
            notice = self._notices.get(what)
            if notice is None:
                notice = self._notices[what] = _Pending()
                notice.sent = self._reader(partial(self._send, what=what, notice=notice))
            notice.ids |= ids
            notice.all |= not ids
        assert notice.sent is not None
        try:
            await notice.sent
        except Exception:  # it never got to its connection: the next one must not wait for it
            with self._lock:
                if self._notices.get(what) is notice:
                    del self._notices[what]
            raise

    def seal(self) -> None:
        """Something else is said now: what comes is said after it, and not with what is already on its way."""
        with self._lock:
            self._notices.clear()

    def _send(self, db: Connection, what: str, notice: _Pending) -> None:
        with self._lock:  # whoever comes now has written something that this one may be too early for
            if self._notices.get(what) is notice:
                del self._notices[what]
        if notice.all:
            db.execute(NOTIFY, (CHANNEL, what))
            return
        ids = sorted(notice.ids)
        for some in (ids[start : start + AT_ONCE] for start in range(0, len(ids), AT_ONCE)):
            if what == WORK:
                db.execute(DIRECTED, (CHANNEL, self._lease, self._lease, some))
            else:
                db.execute(NOTIFY, (CHANNEL, encode_notice(what, "", some)))


class NotifiedPeer(Peer):
    """A worker that is notified by NOTIFY. One that takes work also looks, after a while, for work that others were
    notified of and may not have taken."""

    def __init__(
        self, store: PostgresStore, worker: str, on_notice: Callable[[Notice], None], takes_work: bool = False
    ) -> None:
        super().__init__(store, worker, on_notice)
        self._store = store
        self._takes = takes_work
        self._late: asyncio.TimerHandle | None = None

    async def _join(self) -> None:
        self._store.relay.bind()  # subscribers of a turn may announce themselves before it runs here
        if not await self._register(TAKES if self._takes else HEARS):
            return
        self._store.pulse.listen(self, asyncio.get_running_loop(), self._receive)
        await self._watch_all()
        await self._store.wake(JOINED)

    async def drain(self) -> None:
        self._takes = False
        if self._joined:
            await self._register(HEARS)

    async def _register(self, address: str) -> bool:
        """Write the worker's address. False when it has left meanwhile."""
        await self._store.join(self._worker, address)
        if not self._joined:
            await self._store.leave(self._worker)
        return self._joined

    async def leave(self) -> None:
        if not self._joined:
            return
        self._joined = False
        self._store.pulse.unlisten(self)
        if self._late is not None:
            self._late.cancel()
        self._stop()
        try:
            await self._store.leave(self._worker)
            await self._store.wake()
        except StoreError as error:  # the others see the lease end
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
        """A worker on this machine has died: it gets no more notices, and its sessions are free."""
        self._spawn(self._store.leave(worker))
        self._on_notice(Notice())

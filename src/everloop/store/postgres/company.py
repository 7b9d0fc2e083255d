"""A worker among the others of a PostgreSQL store, wherever they run: they wake each other by NOTIFY.

The death of one on the same machine is heard at once; one on another machine is dead when its lease has ended.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from ...errors import StoreError
from ..deaths import Deaths
from ..news import WORK, News, read
from .pulse import JOINED
from .waking import HEARS, TAKES

if TYPE_CHECKING:
    from .store import PostgresStore

log = logging.getLogger(__name__)
LATE_SECONDS = 1.0  # after which work is looked for that another worker was told of


class Company:
    """This worker's place among the others. `heard` is told what has changed; one that `takes` work is also told, after
    a while, of what others were to take and perhaps have not."""

    def __init__(self, store: PostgresStore, worker: str, heard: Callable[[News], None], takes: bool = False) -> None:
        self._store = store
        self._worker = worker
        self._tell = heard
        self._takes = takes
        self._deaths = Deaths(self._died)
        self._tasks: set[asyncio.Task[None]] = set()
        self._joined = False
        self._late: asyncio.TimerHandle | None = None

    async def join(self) -> None:
        """Be known to the others and know them."""
        self._joined = True
        self._store.relay.bind()  # who follows a turn may be told before there is one here
        if not await self._be_known(TAKES if self._takes else HEARS):
            return
        self._store.pulse.listen(self, asyncio.get_running_loop(), self._heard)
        await self._watch_all()
        await self._store.wake(JOINED)

    async def rest(self) -> None:
        """Be told of no more work, but of all else."""
        self._takes = False
        if self._joined:
            await self._be_known(HEARS)

    async def _be_known(self, address: str) -> bool:
        """Whether it still is afterwards: it may have left again before it was there."""
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
        for task in list(self._tasks):
            task.cancel()
        self._deaths.close()
        try:
            await self._store.leave(self._worker)
            await self._store.wake()
        except StoreError as error:  # they see the lease end
            log.warning("%s", error)

    def watch(self, worker: str) -> None:
        """Hear of the death of a worker, also of one that has not joined."""
        self._deaths.watch(worker)

    def _heard(self, word: str) -> None:
        if not self._joined:
            return
        if word == JOINED:
            self._later(self._watch_all())
            return
        news = read(word)
        if news.what == WORK and news.to not in ("", self._worker):
            if self._takes and self._late is None:  # that one may be frozen, or have its hands full
                pause = LATE_SECONDS * random.uniform(1, 1.5)
                self._late = asyncio.get_running_loop().call_later(pause, self._look_late)
            return
        self._tell(news)

    def _look_late(self) -> None:
        self._late = None
        self._tell(News(WORK))

    def _died(self, worker: str) -> None:
        """One of this machine has: it is told of nothing any more, and what it had is free."""
        self._later(self._store.leave(worker))
        self._tell(News())

    async def _watch_all(self) -> None:
        """Keep an eye on every other process of this machine that takes work from the store."""
        others = await self._store.workers()
        if not self._joined:
            return
        for worker, _ in others:
            self.watch(worker)
        self._tell(News())  # one may have died before it could be watched

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s", error)

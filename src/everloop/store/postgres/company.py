"""A worker among the others of a PostgreSQL store, wherever they run: they wake each other by NOTIFY.

The death of one on the same machine is heard at once; one on another machine is dead when its lease has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import StoreError
from ..deaths import Deaths
from .pulse import JOINED

if TYPE_CHECKING:
    from .store import PostgresStore

log = logging.getLogger(__name__)


class Company:
    """This worker's place among the others. `changed` is called when there may be work to take."""

    def __init__(self, store: PostgresStore, worker: str, changed: Callable[[], None]) -> None:
        self._store = store
        self._worker = worker
        self._changed = changed
        self._deaths = Deaths(changed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._joined = False

    async def join(self) -> None:
        """Be known to the others and know them."""
        self._joined = True
        self._store.relay.bind()
        await self._store.join(self._worker, "notify")
        self._store.pulse.listen(self, asyncio.get_running_loop(), self._heard)
        await self._watch_all()
        await self._store.wake(JOINED)

    async def leave(self) -> None:
        if not self._joined:
            return
        self._joined = False
        self._store.pulse.unlisten(self)
        for task in list(self._tasks):
            task.cancel()
        self._deaths.close()
        try:
            await self._store.leave(self._worker)
            await self._store.wake()
        except StoreError as error:  # they see the lease end
            log.warning("%s", error)

    async def wake(self) -> None:
        """Tell all others that there may be work."""
        await self._store.wake()

    def watch(self, worker: str) -> None:
        """Hear of the death of a worker, also of one that has not joined."""
        self._deaths.watch(worker)

    def _heard(self, word: str) -> None:
        if not self._joined:
            return
        if word == JOINED:
            task = asyncio.get_running_loop().create_task(self._watch_all())
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        self._changed()

    async def _watch_all(self) -> None:
        """Keep an eye on every other process of this machine that takes work from the store."""
        for worker, _ in await self._store.workers():
            self.watch(worker)
        self._changed()  # one may have died before it could be watched

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s", error)

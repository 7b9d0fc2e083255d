"""How an agent hears what other processes of its store have done: by itself, or by the house that it lives in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from ..store.base import Incoming, Store
from ..store.news import ANY, ENDED, WORK, News
from .dispatcher import Dispatcher
from .peers import Neighbours
from .subagents import SubagentManager

if TYPE_CHECKING:
    from ..observability.metrics import Meters

WRITE_SECONDS = 0.05  # until a session is looked at again that somebody is just writing to


class House(Protocol):
    """The process that an agent lives in with those of other owners. It hears, and looks into the store, for all."""

    worker: str  # the name that all of them hold sessions under
    runs: bool  # whether turns are run in it at all
    meters: Meters | None  # what counts its work, where somebody reads that

    def changed(self) -> None:
        """There may be something new in the store."""
        ...

    def awaits(self) -> None:
        """An answer of another process is waited for, and may have been told of before that was known here."""
        ...

    def watch(self, worker: str) -> None:
        """Hear of the death of a worker of another process."""
        ...


class Listening:
    """The ear of an agent."""

    def __init__(
        self,
        store: Store,
        dispatcher: Dispatcher,
        subagents: SubagentManager,
        answer: Callable[[Incoming], Awaitable[None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        house: House | None,
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._subagents = subagents
        self._answer = answer
        self._spawn = spawn
        self._house = house
        self._neighbours: Neighbours | None = None
        self._scans = False  # it waits for a session that another process has

    async def join(self, heard: Callable[[News], None], takes: bool = False) -> None:
        """Be told by the other workers of this store what has changed."""
        if self._neighbours is None:
            self._neighbours = Neighbours(self._store, self._dispatcher.worker, heard, takes=takes)
            try:
                await self._neighbours.join()
            except BaseException:  # the store is away: the next one tries again
                self._neighbours = None
                raise
        heard(News())

    async def leave(self) -> None:
        if self._neighbours is not None:
            neighbours, self._neighbours = self._neighbours, None
            await neighbours.leave()

    def held(self, worker: str, awaited: bool) -> None:
        """Another process has a session that we want, and answers of it may be `awaited` here: hear when it is done
        there, or dies. It may be over already, so look again; where only a write is under way, after a while."""
        if self._house is None:
            self._spawn(self._join_for(worker))
        elif worker:
            self._house.watch(worker)
            if awaited:
                self._house.changed()
        else:
            asyncio.get_running_loop().call_later(WRITE_SECONDS, self._house.changed)

    def listen(self) -> None:
        """A sub-agent works here: hear from other processes that somebody stops it."""
        if self._neighbours is None and self._house is None:
            self._spawn(self.join(self._look_soon))

    async def _join_for(self, worker: str) -> None:
        self._scans = True
        await self.join(self._look_soon)
        if not worker:
            await asyncio.sleep(WRITE_SECONDS)
        elif self._neighbours is not None:
            self._neighbours.watch(worker)
        self._look_soon()

    def _look_soon(self, news: News = News()) -> None:  # noqa: B008
        if news.what in (ANY, ENDED, WORK):
            self._spawn(self._look())

    async def _look(self) -> None:
        """Without a durable bus: what other processes have done that concerns this one."""
        for row in await self._store.urgent(self._dispatcher.worker):
            session = self._dispatcher.session(row.message.owner, row.message.session_key)
            if session is not None and session.running and not row.message.reply:
                await self._answer(row)
        self._subagents.look_again()
        if self._scans:
            await self._dispatcher.scan()

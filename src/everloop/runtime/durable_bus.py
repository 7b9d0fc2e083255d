"""The bus of a server or worker: its queues are the store's inbox and outbox."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from ..bus import InboundMessage, MessageBus, OutboundMessage
from ..commands import kind_of
from ..store.base import Gathering, Outgoing, Store
from ..store.news import ANY, SENDING, WORK, News
from ..store.workers import new_worker, retire
from .peers import Neighbours, wake_all

AT_ONCE = 10  # messages taken for sending; all of them count as possible repeats when this process dies


class DurableBus(MessageBus):
    """A message is on disk when `publish_inbound` returns, and out of the outbox once `sent` says so.

    With a `channel`, only the messages to that channel are consumed here: others have their own bus over the store.
    """

    def __init__(self, store: Store, channel: str | None = None) -> None:
        super().__init__()
        self._store = store
        self._channels = None if channel is None else [channel]
        self._worker = new_worker()
        self._more = asyncio.Event()  # there may be something in the outbox
        self._neighbours: Neighbours | None = None  # whoever answers, and whoever else sends
        self._looking: asyncio.Task[bool] | None = None
        self._taken: deque[Outgoing] = deque()
        self._sending: dict[int, Outgoing] = {}  # by id() of the message handed out
        self.arrived: Callable[[], None] | None = None  # the loop in this process, if there is one

    async def publish_inbound(self, message: InboundMessage) -> None:
        row = await self._store.accept(message.addressed(), kind_of(message))
        if self.arrived is not None and not isinstance(self._store, Gathering):  # which says who is to take it
            self.arrived()
        await wake_all(self._store, WORK, [row.session])

    async def consume_inbound(self) -> InboundMessage:
        raise TypeError("a durable bus is consumed by claiming sessions from its store")

    def _heard(self, news: News) -> None:
        if news.what in (SENDING, ANY):
            self.more_outgoing()

    def more_outgoing(self) -> None:
        """Something may have come into the outbox."""
        self._more.set()

    async def consume_outbound(self) -> OutboundMessage:
        """The next message to send; `sent` must be told when its channel has taken it."""
        while not self._taken:
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
                self._looking.add_done_callback(lambda look: look.cancelled() or look.exception())  # all may have gone
            if not await asyncio.shield(self._looking):  # whoever waits may go: what was taken is for the next
                await self._more.wait()
        row = self._taken.popleft()
        self._sending[id(row.message)] = row
        return row.message

    async def _look(self) -> bool:
        """Take what there is to send, and be told of more. Whether there was something."""
        try:
            if self._neighbours is None:  # answers come from other processes too, and from what a dead one had taken
                neighbours = Neighbours(self._store, self._worker, self._heard)
                await neighbours.join()
                self._neighbours = neighbours
            self._more.clear()  # before looking: what comes in meanwhile sets it again
            found = await self._store.take_outgoing(self._worker, AT_ONCE, None, self._channels)
            self._taken.extend(found)
            return bool(found)
        finally:
            self._looking = None

    async def sent(self, message: OutboundMessage) -> None:
        """The channel has taken the message: it is not sent again."""
        row = self._sending.pop(id(message))
        await self._store.sent([row.id])

    async def close(self) -> None:
        """Nothing more is consumed here."""
        if (looking := self._looking) is not None:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        if self._neighbours is not None:
            neighbours, self._neighbours = self._neighbours, None
            await neighbours.leave()
        retire(self._worker)

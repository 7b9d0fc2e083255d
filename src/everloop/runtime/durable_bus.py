"""The bus of a server or worker: its queues are the store's inbox and outbox."""

from __future__ import annotations

import asyncio
from collections import deque

from ..bus import InboundMessage, MessageBus, OutboundMessage
from ..commands import kind_of
from ..store.base import Outgoing, Store
from ..store.peers import ANY, SENDING, WORK, Notice, Peer, new_worker, retire

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
        self._peer: Peer | None = None
        self._looking: asyncio.Task[bool] | None = None
        self._taken: deque[Outgoing] = deque()
        self._sending: dict[int, Outgoing] = {}  # by id() of the message handed out

    async def publish_inbound(self, message: InboundMessage) -> None:
        row = await self._store.accept(message.addressed(), kind_of(message))
        await self._store.wake(WORK, [row.session])

    async def consume_inbound(self) -> InboundMessage:
        raise TypeError("a durable bus is consumed by claiming sessions from its store")

    def _on_notice(self, notice: Notice) -> None:
        if notice.what in (SENDING, ANY):
            self.more_outgoing()

    def more_outgoing(self) -> None:
        """There may be something new in the outbox."""
        self._more.set()

    async def consume_outbound(self) -> OutboundMessage:
        """The next message to send; `sent` must be told when its channel has taken it."""
        while True:
            row = await self._next()
            try:
                is_kept = await self._store.keep_outgoing(row, self._worker)
            except BaseException:
                self._taken.appendleft(row)
                raise
            if is_kept:  # or another consumer sends it, because this one was silent for longer than its lease
                self._sending[id(row.message)] = row
                return row.message

    async def _next(self) -> Outgoing:
        """Take the next row out of those that were taken together, and more of them if there are none left."""
        while not self._taken:
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
                self._looking.add_done_callback(lambda look: look.cancelled() or look.exception())  # all may have gone
            if not await asyncio.shield(self._looking):  # a cancelled caller leaves what was taken to the next
                await self._more.wait()
        return self._taken.popleft()

    async def _look(self) -> bool:
        """Take messages to send, and subscribe to notices of more. Return whether there were any."""
        try:
            if self._peer is None:  # answers come from other processes too, and from what a dead one had taken
                peer = self._store.peer(self._worker, self._on_notice)
                await peer.join()
                self._peer = peer
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
        """Stop consuming."""
        if (looking := self._looking) is not None:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        if self._peer is not None:
            peer, self._peer = self._peer, None
            await peer.leave()
        retire(self._worker)

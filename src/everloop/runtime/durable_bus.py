"""The bus of a server or worker: its queues are the store's inbox and outbox."""

from __future__ import annotations

import asyncio
from collections import deque

from ..bus import InboundMessage, MessageBus, OutboundMessage
from ..commands import kind_of
from ..store.base import Outgoing, Store
from ..store.peers import ANY, SENDING, WORK, Notice, Peer, new_worker, retire

AT_ONCE = 10  # messages taken at a time; all of them count as possible repeats if this process dies


class DurableBus(MessageBus):
    """A message is on disk when `publish_inbound` returns, and leaves the outbox when `sent` is called.

    With a `channel`, only messages to that channel are consumed here; other channels have their own bus on the store.
    """

    def __init__(self, store: Store, channel: str | None = None) -> None:
        super().__init__()
        self._store = store
        self._channels = None if channel is None else [channel]
        self._worker = new_worker()
        self._more = asyncio.Event()  # the outbox may have something new
        self._peer: Peer | None = None
        self._looking: asyncio.Task[bool] | None = None
        self._taken: deque[Outgoing] = deque()
        self._sending: dict[int, Outgoing] = {}  # keyed by id() of the message handed out

    async def publish_inbound(self, message: InboundMessage) -> None:
        row = await self._store.accept(message.addressed(), kind_of(message))
        await self._store.wake(WORK, [row.session])

    async def consume_inbound(self) -> InboundMessage:
        raise TypeError("a durable bus has no inbound queue: claim sessions from its store instead")

    def _on_notice(self, notice: Notice) -> None:
        if notice.what in (SENDING, ANY):
            self.more_outgoing()

    def more_outgoing(self) -> None:
        """Check the outbox, which may have something new."""
        self._more.set()

    async def consume_outbound(self) -> OutboundMessage:
        """Return the next message to send; call `sent` once its channel has accepted it."""
        while True:
            row = await self._next()
            try:
                is_kept = await self._store.keep_outgoing(row, self._worker)
            except BaseException:
                self._taken.appendleft(row)
                raise
            if is_kept:  # otherwise this consumer outlived its lease, and another one sends it
                self._sending[id(row.message)] = row
                return row.message

    async def _next(self) -> Outgoing:
        """Pop the next row of the current batch, fetching another batch if it is empty."""
        while not self._taken:
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
                # there may be no caller left
                self._looking.add_done_callback(lambda look: look.cancelled() or look.exception())
            if not await asyncio.shield(self._looking):  # a cancelled caller leaves the batch to the next one
                await self._more.wait()
        return self._taken.popleft()

    async def _look(self) -> bool:
        """Fetch a batch of messages to send, and subscribe to notices of more. Return whether there were any."""
        try:
            if self._peer is None:  # other processes answer too, and a dead one may have left messages
                peer = self._store.peer(self._worker, self._on_notice)
                await peer.join()
                self._peer = peer
            self._more.clear()  # before looking, so that a notice that arrives meanwhile is not lost
            found = await self._store.take_outgoing(self._worker, AT_ONCE, None, self._channels)
            self._taken.extend(found)
            return bool(found)
        finally:
            self._looking = None

    async def sent(self, message: OutboundMessage) -> None:
        """Mark the message as sent, so that it is not sent again."""
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

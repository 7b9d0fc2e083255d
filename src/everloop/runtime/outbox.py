"""Connects an agent to its bus: takes inbound messages from it, and sends the output of turns through it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from ..bus import PULLED, WEB, InboundMessage, MessageBus, OutboundMessage
from ..store.base import Claim, Store
from ..store.peers import SENDING
from ..threads import BackgroundTasks
from .dispatcher import Dispatcher
from .durable_bus import DurableBus
from .owners import Owners

Take = Callable[[InboundMessage], Awaitable[None]]


class BusAdapter(Protocol):
    """How an agent receives the messages of its bus and sends its own."""

    async def feed(self, take: Take) -> None:
        """Resume what an earlier process left behind, then take messages as they arrive, until cancelled."""
        ...

    async def close(self) -> None:
        """Stop sending."""
        ...

    @property
    def sender(self) -> str | None:
        """The worker that sends the messages; None if another process may."""
        ...

    def is_unattended(self, claim: Claim) -> bool:
        """Return whether the answer must be sent, because the process that took the message has left its turn to this
        one."""
        ...

    async def hand_out(self, id: int, message: OutboundMessage, announced: bool = False) -> None:
        """Send a message from the store's outbox. `announced` means that other processes have been notified of it."""
        ...


class MemoryAdapter:
    """Adapter for an in-process bus.

    Its messages go into the store's inbox, and a message to it counts as sent once it is taken from the bus. Messages
    to chat networks are left to the process that runs their channels.
    """

    def __init__(
        self, store: Store, bus: MessageBus, dispatcher: Dispatcher, tasks: BackgroundTasks, networks: Collection[str]
    ) -> None:
        self._networks = networks
        self._store = store
        self._bus = bus
        self._dispatcher = dispatcher
        self._tasks = tasks
        self._handed_out: set[int] = set()  # outbox rows that are on the bus, or not yet marked as sent
        self._resending = asyncio.Lock()

    @property
    def sender(self) -> str | None:
        return self._dispatcher.worker

    def is_unattended(self, claim: Claim) -> bool:
        return False

    async def feed(self, take: Take) -> None:
        await self._dispatcher.scan()
        await self._resend()
        while True:
            await take(await self._bus.consume_inbound())

    async def hand_out(self, id: int, message: OutboundMessage, announced: bool = False) -> None:
        if message.channel in self._networks:
            await self._leave([id], message.channel)
            return
        self._handed_out.add(id)
        try:
            await self._bus.publish_outbound(message, partial(self._taken, id))
        except asyncio.CancelledError:
            self._handed_out.discard(id)
            raise

    async def _resend(self) -> None:
        """Send what an earlier process could not."""
        left: dict[str, list[int]] = {}
        async with self._resending:
            while rows := await self._store.take_outgoing(self._dispatcher.worker):
                for row in rows:
                    if row.message.channel in self._networks:
                        left.setdefault(row.message.channel, []).extend([] if row.message.repeat else [row.id])
                    elif row.id not in self._handed_out:
                        self._tasks.start(self.hand_out(row.id, row.message))
        for channel, ids in left.items():  # only now: otherwise the loop above would take them again
            await self._leave(ids, channel)

    async def _leave(self, ids: Sequence[int], channel: str) -> None:
        """Leave messages to the process that runs their channel; those with these ids have not been sent."""
        await self._store.hold_back(ids, self._dispatcher.worker)
        await self._store.release_outgoing(self._dispatcher.worker, channel)
        await self._store.wake(SENDING)

    async def close(self) -> None:
        """Do nothing: the bus belongs to its user."""

    def _taken(self, id: int) -> None:
        self._tasks.start(self._mark_sent(id))

    async def _mark_sent(self, id: int) -> None:
        await self._store.sent([id])
        async with self._resending:  # a resend may have read the row before it was marked
            self._handed_out.discard(id)


class DurableAdapter:
    """Adapter for a bus whose queues are the store's own: messages are claimed there, and senders are woken."""

    def __init__(self, owners: Owners, store: Store, bus: DurableBus, dispatcher: Dispatcher) -> None:
        self._owners = owners
        self._store = store
        self._bus = bus
        self._dispatcher = dispatcher

    @property
    def sender(self) -> str | None:
        return None

    def is_unattended(self, claim: Claim) -> bool:
        return not self._dispatcher.is_awaited(claim)

    async def feed(self, take: Take) -> None:
        await self._owners.run()

    async def hand_out(self, id: int, message: OutboundMessage, announced: bool = False) -> None:
        self._bus.more_outgoing()
        if not announced:
            await self._store.wake(SENDING)

    async def close(self) -> None:
        await self._bus.close()


def make_adapter(
    owners: Owners,
    store: Store,
    bus: MessageBus,
    dispatcher: Dispatcher,
    tasks: BackgroundTasks,
    networks: Collection[str],
) -> BusAdapter:
    if isinstance(bus, DurableBus):
        return DurableAdapter(owners, store, bus, dispatcher)
    return MemoryAdapter(store, bus, dispatcher, tasks, networks)


def reply(message: InboundMessage, text: str) -> list[OutboundMessage]:
    """Return the outgoing messages with this text for the chat that asked; none if it is not to be told."""
    channel, chat_id = message.origin
    if not message.reply or channel in PULLED or channel == WEB:  # the web page reads the log
        return []
    repeat = message.restored
    return [OutboundMessage(channel, chat_id, text, message.id, metadata=dict(message.metadata), repeat=repeat)]

"""Carries turn events between processes by NOTIFY: each process has its own channel, and all of them share another one.

Events for one process within a few hundredths of a second are sent together. Nothing is stored: a subscriber that
misses events reads the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ..peers import ENDED
from .heartbeat import CHANNEL, Heartbeat

if TYPE_CHECKING:
    from .connect import Connection
    from .connections import Connections

log = logging.getLogger(__name__)
BATCH_SECONDS = 0.04
RENEW_SECONDS = 10.0  # interval between announcements of a subscription
FORGET_SECONDS = 30.0  # expiry of a subscription that is not announced again
TOPICS = 200  # per announcement
WAITING_LIMIT = 512_000  # bytes queued for one address; beyond that the oldest are dropped
PIECE = 7_800  # bytes: PostgreSQL allows less than 8,000 per notification
# Events are not stored, so they need not wait for the disk.
NOTIFY_ALL = """SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, piece)
    FROM unnest(%s::text[]) AS piece"""


class Message(msgspec.Struct, omit_defaults=True):
    """A message to all processes."""

    # "watch": the sender subscribes to these topics, until "unwatch"; "ask": it also needs their current state.
    # "tell": `data` is for the publishers of the topics. "listens": the sender needs to know its subscribers.
    what: str
    address: str
    topics: list[str] = []
    data: str = ""


class NotifyRelay:
    """The relay of a store in this process."""

    def __init__(self, connections: Connections, heartbeat: Heartbeat, on_broadcast: Callable[[], None]) -> None:
        self.address = heartbeat.address
        self.batches = 0  # number sent, each as one or more NOTIFYs in a transaction
        self._on_broadcast = on_broadcast  # called before a message to all processes
        self._connections = connections
        self._heartbeat = heartbeat
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, SendQueue] = {}  # by address
        self._flushes: list[Callable[[], None]] = []
        self._batch_timer: asyncio.TimerHandle | None = None
        self._sent_at = 0.0
        self._renewal_timer: asyncio.TimerHandle | None = None
        self._publishers: dict[str, list[Publisher]] = {}  # by topic
        self._subscriptions: dict[str, list[Subscription]] = {}
        self._subscribers: dict[str, dict[str, float]] = {}  # by topic: address and expiry
        self._parts: dict[str, list[str]] = {}  # by sender: the pieces of an incomplete message
        heartbeat.subscribe(self._from_heartbeat)

    def bind(self) -> None:
        """Deliver to the running loop."""
        self._loop = asyncio.get_running_loop()

    def publish(
        self, owner: str, key: str, on_subscriber: Callable[[str], None], on_message: Callable[[bytes], None]
    ) -> Publisher:
        """Publish a session's events.

        `on_subscriber` is called with the address of each new subscriber, `on_message` with messages sent to the
        session.
        """
        self.bind()
        made = Publisher(self, topic_of(owner, key), on_subscriber, on_message)
        self._publishers.setdefault(made.topic, []).append(made)
        return made

    def subscribe(self, owner: str, key: str, on_event: Callable[[bytes], None]) -> Subscription:
        """Subscribe to the events of a session that runs in another process."""
        self.bind()
        self._heartbeat.start()
        made = Subscription(self, topic_of(owner, key), on_event)
        self._subscriptions.setdefault(made.topic, []).append(made)
        made.request_state()
        self._renew_later()
        return made

    def send(self, owner: str, key: str, data: bytes) -> None:
        """Send a message to the publisher of a session, in whichever process it is."""
        self.broadcast(Message("tell", self.address, [topic_of(owner, key)], data.decode()))

    def close(self) -> None:
        """Stop sending."""
        for handle in (self._batch_timer, self._renewal_timer):
            if handle is not None:
                handle.cancel()
        self._batch_timer = self._renewal_timer = None
        self._flushes.clear()
        for queue in self._queues.values():
            queue.drop()
        self._queues.clear()

    # ------------------------------------------------------------------------------------------ sending

    def subscribers(self, topic: str) -> Sequence[str]:
        """Return the addresses of a session's subscribers in other processes."""
        there = self._subscribers.get(topic)
        if not there:
            return ()
        now = time.monotonic()
        for address in [address for address, until in there.items() if until < now]:
            del there[address]
        if not there:
            del self._subscribers[topic]
        return list(there)

    def send_to(self, address: str, topic: str, data: bytes) -> None:
        """Queue one line for a process, to be sent in a batch."""
        queue = self._queues.get(address)
        if queue is None:
            queue = self._queues[address] = SendQueue(partial(self._notify, f"{CHANNEL}_{address}"), self.address)
        queue.put(b"%b %b\n" % (topic.encode(), data))
        self._send_later()

    def before_batch(self, flush: Callable[[], None]) -> None:
        """Call `flush` once before the next batches are sent."""
        self._flushes.append(flush)
        self._send_later()

    def broadcast(self, message: Message) -> None:
        self._notify(CHANNEL, [msgspec.json.encode(message).decode()])

    def wake(self) -> None:
        """Make all processes look into the store."""
        self._notify(CHANNEL, [ENDED])

    def _send_later(self) -> None:
        """Schedule the next batch: the first event after a pause is sent at once, the following ones in batches."""
        if self._batch_timer is None:
            loop = asyncio.get_running_loop()
            self._batch_timer = loop.call_at(max(self._sent_at + BATCH_SECONDS, loop.time()), self._send_batches)

    def _send_batches(self) -> None:
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            try:
                flush()
            except Exception:  # one turn's failure must not affect the others
                log.exception("turn events were lost")
        self._batch_timer, self._sent_at = None, asyncio.get_running_loop().time()
        for address, queue in list(self._queues.items()):
            if not queue.send():
                del self._queues[address]

    def _notify(self, channel: str, pieces: list[str], then: Callable[[], None] | None = None) -> None:
        self.batches += 1

        def work(db: Connection) -> None:
            db.execute(NOTIFY_ALL, (channel, pieces))

        def done(sent: asyncio.Future[None]) -> None:
            if not sent.cancelled() and (error := sent.exception()) is not None:
                log.debug("turn events were lost: %s", error)
            if then is not None:
                then()

        if channel == CHANNEL:
            self._on_broadcast()
        # In order per channel: subscribers must be known before the worker that runs the turn is woken.
        self._connections.submit("reads", work, ("relay", channel)).add_done_callback(done)

    # ------------------------------------------------------------------------------------------ subscriptions

    def _renew_later(self) -> None:
        if self._renewal_timer is None:
            self._renewal_timer = asyncio.get_running_loop().call_later(RENEW_SECONDS, self._renew)

    def _renew(self) -> None:
        self._renewal_timer = None
        if self._subscriptions:
            self._announce("watch")
            self._renew_later()

    def _announce(self, what: str) -> None:
        """Announce all subscriptions of this process."""
        topics = list(self._subscriptions)
        for start in range(0, len(topics), TOPICS):
            self.broadcast(Message(what, self.address, topics[start : start + TOPICS]))

    def remove(self, handle: Publisher | Subscription) -> None:
        """Remove a publisher or subscription that has ended."""
        by_topic: dict[str, list[Publisher]] | dict[str, list[Subscription]]
        by_topic = self._publishers if isinstance(handle, Publisher) else self._subscriptions
        left = [one for one in by_topic.pop(handle.topic, ()) if one is not handle]
        if left:
            by_topic[handle.topic] = left  # type: ignore[assignment]
        elif isinstance(handle, Subscription):
            self.broadcast(Message("unwatch", self.address, [handle.topic]))

    # ------------------------------------------------------------------------------------------ receiving

    def _from_heartbeat(self, notices: list[tuple[str, str]] | None) -> None:
        """Forward notices.

        Called in the heartbeat's thread; with None when it starts to listen, also after a lost connection.
        """
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._take_notices, notices)

    def _take_notices(self, notices: list[tuple[str, str]] | None) -> None:
        if notices is None:
            self._parts.clear()
            if self._subscriptions:  # notifications may have been lost
                self._announce("ask")
            self.broadcast(Message("listens", self.address))  # subscribers may have announced themselves before
            return
        for channel, payload in notices:
            try:
                if channel == CHANNEL:
                    self._take_message(msgspec.json.decode(payload, type=Message))
                else:
                    self._take_piece(payload)
            except (msgspec.MsgspecError, ValueError) as error:  # from another version
                log.warning("ignored a notification that cannot be decoded: %s", error)

    def _take_message(self, message: Message) -> None:
        if message.what == "tell":
            for one in [one for topic in message.topics for one in self._publishers.get(topic, ())]:
                one.on_message(message.data.encode())
        if message.address == self.address:
            return
        if message.what == "listens" and self._subscriptions:
            self._announce("watch")
        until = time.monotonic() + FORGET_SECONDS
        for topic in message.topics:
            if message.what in ("watch", "ask"):
                there = self._subscribers.setdefault(topic, {})
                new = message.address not in there
                there[message.address] = until
                for one in self._publishers.get(topic, ()) if new or message.what == "ask" else ():
                    one.on_subscriber(message.address)
            elif message.what == "unwatch" and topic in self._subscribers:
                there = self._subscribers[topic]
                there.pop(message.address, None)
                if not there:
                    del self._subscribers[topic]
        if message.what == "watch":
            for topic in list(self._subscribers):
                self.subscribers(topic)  # drops expired ones

    def _take_piece(self, payload: str) -> None:
        head, _, text = payload.partition("\n")
        sender, number, count = head.split(" ")
        parts = self._parts.setdefault(sender, [])
        if number == "0":
            parts.clear()
        elif len(parts) != int(number):  # an earlier piece was lost
            return
        parts.append(text)
        if len(parts) < int(count):
            return
        del self._parts[sender]
        for line in "".join(parts).split("\n")[:-1]:
            topic, _, data = line.partition(" ")
            for one in self._subscriptions.get(topic, ()):
                one.on_event(data.encode())


class SendQueue:
    """The queue of data for one address. Only one batch is in flight at a time, so that no backlog builds up."""

    def __init__(self, send: Callable[[list[str], Callable[[], None]], None], sender: str) -> None:
        self._send = send
        self._sender = sender
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._under_way = False

    def put(self, line: bytes) -> None:
        self._waiting.append(line)
        self._bytes += len(line)
        while self._bytes > WAITING_LIMIT and len(self._waiting) > 1:
            self._bytes -= len(self._waiting.popleft())

    def drop(self) -> None:
        """Discard the queued data."""
        self._waiting.clear()
        self._bytes = 0

    def send(self) -> bool:
        """Send the queued data, unless a batch is in flight. Return False if there is nothing to do."""
        if self._under_way:
            return True
        if not self._waiting:
            return False
        data = b"".join(self._waiting)
        self.drop()
        texts = list(pieces(data))
        self._under_way = True
        self._send(
            [f"{self._sender} {number} {len(texts)}\n{text}" for number, text in enumerate(texts)],
            self._sent,
        )
        return True

    def _sent(self) -> None:
        self._under_way = False
        self.send()


def pieces(data: bytes, size: int = PIECE) -> Iterator[str]:
    """Split text into pieces of at most `size` bytes, at character boundaries."""
    start = 0
    while start < len(data):
        end = min(start + size, len(data))
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end -= 1
        yield data[start:end].decode()
        start = end


class Publisher:
    """A session that runs here, and its subscribers in other processes."""

    def __init__(
        self, relay: NotifyRelay, topic: str, on_subscriber: Callable[[str], None], on_message: Callable[[bytes], None]
    ) -> None:
        self._relay = relay
        self.topic = topic
        self.on_subscriber = on_subscriber
        self.on_message = on_message
        self.before_batch = relay.before_batch

    @property
    def has_subscribers(self) -> bool:
        return bool(self._relay.subscribers(self.topic))

    def send(self, data: bytes, address: str | None = None) -> None:
        for one in self._relay.subscribers(self.topic) if address is None else (address,):
            self._relay.send_to(one, self.topic, data)

    def close(self) -> None:
        """Close the stream of a turn that has ended here; subscribers look into the store for its outcome."""
        if self.has_subscribers:
            self._relay.wake()
        self._relay.remove(self)


class Subscription:
    """A session that runs in another process and is followed here."""

    def __init__(self, relay: NotifyRelay, topic: str, on_event: Callable[[bytes], None]) -> None:
        self._relay = relay
        self.topic = topic
        self.on_event = on_event

    def request_state(self) -> None:
        self._relay.broadcast(Message("ask", self._relay.address, [self.topic]))

    def close(self) -> None:
        self._relay.remove(self)


def topic_of(owner: str, key: str) -> str:
    """Return a short, unique name for a session."""
    return hashlib.blake2b(msgspec.json.encode((owner, key)), digest_size=12).hexdigest()

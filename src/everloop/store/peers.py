"""Workers that share a store: what they notify each other of, how one takes part, and the relay of turn events.

Each store has its own transport: SQLite's workers are processes of one machine and use Unix sockets
(`sqlite/peers.py`), PostgreSQL's use NOTIFY (`postgres/notify.py`, `postgres/event_relay.py`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, Protocol

from .workers import ExitWatcher

log = logging.getLogger(__name__)
ANY = "a"  # anything may have changed
WORK = "w"  # sessions have messages in their inbox
ENDED = "e"  # messages were answered that another process may wait for
SENDING = "o"  # there is something in the outbox
TIMERS = "t"  # timers have changed
JOINED = "j"  # a worker has joined; for the peers themselves


class Notice(NamedTuple):
    """What has changed. `ids` are sessions, or inbox rows for `ENDED`; without ids it is not known which."""

    what: str = ANY
    to: str = ""  # the worker that should handle it; empty for all
    ids: tuple[int, ...] = ()


def encode_notice(what: str, to: str, ids: Iterable[int]) -> str:
    return f"{what} {to} {','.join(map(str, ids))}"


def decode_notice(text: str) -> Notice:
    """Read a notice, or a bare kind. An unknown one, from another version for example, can mean anything."""
    what, _, rest = text.partition(" ")
    to, _, ids = rest.partition(" ")
    known = what in (WORK, ENDED, SENDING, TIMERS)
    try:
        return Notice(what, to, tuple(int(id) for id in ids.split(",") if id)) if known else Notice()
    except ValueError:
        return Notice()


class Workers(Protocol):
    """The table of workers, as a store keeps it."""

    async def workers(self) -> list[tuple[str, str]]: ...


class Peer(ABC):
    """A worker's membership among the workers of a store: it is notified of changes and of the death of others."""

    def __init__(self, store: Workers, worker: str, on_notice: Callable[[Notice], None]) -> None:
        self._workers = store
        self._worker = worker
        self._on_notice = on_notice
        self._joined = False
        self._exits = ExitWatcher(self._exited)
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self) -> None:
        """Register, and get to know the other workers. If that fails, the worker has left again."""
        self._joined = True
        try:
            await self._join()
        except BaseException:
            await self.leave()
            raise

    @abstractmethod
    async def _join(self) -> None: ...

    @abstractmethod
    async def drain(self) -> None:
        """Receive no more notices of work, but all others."""

    @abstractmethod
    async def leave(self) -> None: ...

    def watch(self, worker: str) -> None:
        """Get a notice when this worker's process ends, even if it has not joined."""
        self._exits.watch(worker)

    def _exited(self, worker: str) -> None:
        self._on_notice(Notice())

    async def _watch_all(self) -> None:
        """Watch the processes of all other workers on this machine."""
        others = await self._workers.workers()
        if not self._joined:
            return
        for worker, _ in others:
            self.watch(worker)
        self._on_notice(Notice())  # one may have died before it could be watched

    def _stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        self._exits.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s", error)


class EventPublisher(Protocol):
    """Sends the events of a session's turn to subscribers in other processes."""

    @property
    def has_subscribers(self) -> bool: ...

    def send(self, data: bytes, address: str | None = None) -> None:
        """Send one line of JSON to all subscribers, or to one. It may get lost."""
        ...

    def before_batch(self, flush: Callable[[], None]) -> None:
        """Call `flush` once before the next batch is sent, so that it can send everything gathered since as one."""
        ...

    def close(self) -> None: ...


class EventSubscription(Protocol):
    """A subscription to the events of a session that runs in another process."""

    def request_state(self) -> None:
        """Ask the publisher for everything that a new subscriber must know."""
        ...

    def close(self) -> None: ...


class EventRelay(Protocol):
    """Carries turn events between the processes of a store. Nothing is kept, and events may get lost."""

    batches: int  # sent by this process

    def publish(
        self, owner: str, key: str, on_subscriber: Callable[[str], None], on_message: Callable[[bytes], None]
    ) -> EventPublisher:
        """Publish a session's events. `on_subscriber` gets the address of each new subscriber, `on_message` what is
        sent to the session with `send`."""
        ...

    def subscribe(self, owner: str, key: str, on_event: Callable[[bytes], None]) -> EventSubscription: ...

    def send(self, owner: str, key: str, data: bytes) -> None:
        """Send a message to the publisher of a session, in whatever process it is."""
        ...


class NoRelay:
    """The relay of a store whose processes do not follow each other's turns; they read the log instead."""

    batches = 0

    def publish(
        self, owner: str, key: str, on_subscriber: Callable[[str], None], on_message: Callable[[bytes], None]
    ) -> EventPublisher:
        return _Unheard()

    def subscribe(self, owner: str, key: str, on_event: Callable[[bytes], None]) -> EventSubscription:
        return _Unheard()

    def send(self, owner: str, key: str, data: bytes) -> None:
        pass


class _Unheard:
    """A publisher without subscribers, and a subscription without a publisher."""

    has_subscribers = False

    def send(self, data: bytes, address: str | None = None) -> None:
        pass

    def before_batch(self, flush: Callable[[], None]) -> None:
        pass

    def request_state(self) -> None:
        pass

    def close(self) -> None:
        pass

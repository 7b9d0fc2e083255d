"""Workers that share a store: their ids, liveness, notifications between them, and the relay of turn events.

A worker on this machine is identified by its process id *and* start time (process ids are reused), and its death is
detected through its pidfd: neither needs heartbeats or polling. A chat or a `run` is a worker, too, but need not join
the others: they learn about it with the first session that it takes.

Each store has its own transport: SQLite's workers are processes on one machine and use Unix sockets
(`sqlite/peers.py`), PostgreSQL's use NOTIFY (`postgres/notify.py`, `postgres/event_relay.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

log = logging.getLogger(__name__)
_numbers = itertools.count(1)
_here: set[str] = set()  # workers of this process that have not ended


# ---------------------------------------------------------------------------------------------- ids and liveness


def new_worker() -> str:
    """Return an id for a worker of this process: `<machine boot>.<pid namespace>.<pid>.<start time>.<number>`."""
    worker = f"{_PLACE}.{os.getpid()}.{_my_start_time()}.{next(_numbers)}"
    _here.add(worker)
    return worker


def retire(worker: str) -> None:
    """Mark a worker of this process as ended while the process continues."""
    _here.discard(worker)


def alive(worker: str) -> bool:
    """Return whether the worker may still write. One that cannot be checked from here counts as alive."""
    boot, namespace, pid, started, _number = worker.split(".")
    if f"{boot}.{namespace}" != _PLACE:
        return boot == _PLACE.split(".")[0]  # after a reboot, no earlier worker is left
    if int(pid) == os.getpid() and started == _my_start_time():
        return worker in _here
    return _start_time(int(pid)) == started


def gone(worker: str) -> bool:
    """Return whether the worker is known to have ended. For a worker on another machine, that is never known."""
    return of_this_machine(worker) and not alive(worker)


def of_this_machine(worker: str) -> bool:
    """Return whether the worker's process can be checked from here."""
    return worker.startswith(f"{_PLACE}.")


def of_this_process(worker: str) -> bool:
    return worker.startswith(f"{_PLACE}.{os.getpid()}.{_my_start_time()}.")


def process_of(worker: str) -> int:
    return int(worker.split(".")[2])


class ExitWatcher:
    """Calls `exited` when the process of a watched worker ends."""

    def __init__(self, exited: Callable[[str], None]) -> None:
        self._exited = exited
        self._watched: dict[str, int] = {}  # worker → pidfd

    def watch(self, worker: str) -> None:
        if worker in self._watched or not of_this_machine(worker) or process_of(worker) == os.getpid():
            return
        try:
            fd = os.pidfd_open(process_of(worker))
        except ProcessLookupError:  # it has already ended
            self._exited(worker)
            return
        except (OSError, AttributeError):  # out of file descriptors, or not on Linux
            return
        self._watched[worker] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, worker)

    def close(self) -> None:
        for worker in list(self._watched):
            self._forget(worker)

    def _ended(self, worker: str) -> None:
        self._forget(worker)
        self._exited(worker)

    def _forget(self, worker: str) -> None:
        fd = self._watched.pop(worker)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:  # not on Linux: one boot, one namespace
        boot, namespace = "local", "0"
    return f"{boot}.{namespace}"


def _my_start_time() -> str:
    global _me
    if _me[0] != os.getpid():  # this is a forked process
        _me = (os.getpid(), _start_time(os.getpid()))
    return _me[1]


def _start_time(pid: int) -> str:
    """Return the start time of a process in ticks since boot; "" if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # The name, in parentheses, may itself contain spaces and parentheses.
            fields = stat.read().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]  # a zombie no longer writes
    except (FileNotFoundError, ProcessLookupError):  # ProcessLookupError: it died between open and read
        if os.path.isdir("/proc/self"):
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "0"


# Read at import, so that nothing is read on an event loop.
_PLACE = _place()
_me = (os.getpid(), _start_time(os.getpid()))


# ---------------------------------------------------------------------------------------------- notices

ANY = "a"  # anything may have changed
WORK = "w"  # sessions have messages in their inbox
ENDED = "e"  # messages were answered that another process may await
SENDING = "o"  # the outbox has messages
TIMERS = "t"  # timers have changed
# Only for the peers themselves:
JOINED = "j"  # a worker has joined
HOLDS = "h"  # this worker takes sessions without having joined


class Notice(NamedTuple):
    """A change. `ids` are sessions, or inbox rows for `ENDED`; without ids, it is not known which ones changed."""

    what: str = ANY
    to: str = ""  # the worker that should handle it; empty for all
    ids: tuple[int, ...] = ()


def encode_notice(what: str, to: str, ids: Iterable[int]) -> str:
    return f"{what} {to} {','.join(map(str, ids))}"


def decode_notice(text: str) -> Notice:
    """Decode a notice, or a bare kind. An unknown one, such as from another version, can mean anything."""
    what, _, rest = text.partition(" ")
    to, _, ids = rest.partition(" ")
    known = what in (WORK, ENDED, SENDING, TIMERS)
    try:
        return Notice(what, to, tuple(int(id) for id in ids.split(",") if id)) if known else Notice()
    except ValueError:
        return Notice()


# ---------------------------------------------------------------------------------------------- membership


class Workers(Protocol):
    """The store's table of workers."""

    async def session_holders(self) -> list[str]: ...


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
        """Register, and learn about the other workers. If that fails, the worker leaves again."""
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
        """Stop receiving notices of work, but continue to receive all others."""

    @abstractmethod
    async def leave(self) -> None: ...

    def watch(self, worker: str) -> None:
        """Request a notice when this worker's process ends, even if it has not joined."""
        self._exits.watch(worker)

    def _exited(self, worker: str) -> None:
        self._on_notice(Notice())

    async def _watch_all(self) -> None:
        """Watch the processes of all other workers on this machine."""
        others = await self._workers.session_holders()
        if not self._joined:
            return
        for worker in others:
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


# ---------------------------------------------------------------------------------------------- the event relay


class EventPublisher(Protocol):
    """Sends the events of a session's turn to subscribers in other processes."""

    @property
    def has_subscribers(self) -> bool: ...

    def send(self, data: bytes, address: str | None = None) -> None:
        """Send one line of JSON to all subscribers, or to one. Delivery is not guaranteed."""
        ...

    def before_batch(self, flush: Callable[[], None]) -> None:
        """Call `flush` once before the next batch is sent, so that it can send everything buffered since as one."""
        ...

    def close(self) -> None: ...


class EventSubscription(Protocol):
    """A subscription to the events of a session that runs in another process."""

    def request_state(self) -> None:
        """Ask the publisher for the state that a new subscriber needs."""
        ...

    def close(self) -> None: ...


class EventRelay(Protocol):
    """Carries turn events between the processes of a store. Nothing is stored, and events may get lost."""

    batches: int  # sent by this process

    def publish(
        self, owner: str, key: str, on_subscriber: Callable[[str], None], on_message: Callable[[bytes], None]
    ) -> EventPublisher:
        """Publish a session's events.

        `on_subscriber` is called with the address of each new subscriber, `on_message` with messages sent to the
        session by `send`.
        """
        ...

    def subscribe(self, owner: str, key: str, on_event: Callable[[bytes], None]) -> EventSubscription: ...

    def send(self, owner: str, key: str, data: bytes) -> None:
        """Send a message to the publisher of a session, in whichever process it is."""
        ...


class NoRelay:
    """The relay of a store whose processes do not follow each other's turns; they read the log instead."""

    batches = 0

    def publish(
        self, owner: str, key: str, on_subscriber: Callable[[str], None], on_message: Callable[[bytes], None]
    ) -> EventPublisher:
        return _NullStream()

    def subscribe(self, owner: str, key: str, on_event: Callable[[bytes], None]) -> EventSubscription:
        return _NullStream()

    def send(self, owner: str, key: str, data: bytes) -> None:
        pass


class _NullStream:
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

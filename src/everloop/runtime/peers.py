"""Workers that share a store: they wake each other, and notice when one dies.

On one machine a wake-up is a datagram on a Unix socket; a death is seen on the process's pidfd. Neither is polled for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path

from ..errors import StoreError
from ..store.base import Gathering, Place, Store
from ..store.deaths import Deaths
from ..store.news import ANY, News, read
from ..store.workers import alive

log = logging.getLogger(__name__)
JOINED = "j"  # a worker has come


class Neighbours:
    """This worker's place among the others. `heard` is told what has changed, and where it `takes` work, what there is.

    How they hear of each other is the store's matter where it has a way of its own, as one for many machines has.
    """

    def __init__(self, store: Store, worker: str, heard: Callable[[News], None], *, takes: bool = False) -> None:
        self._place: Place = (
            store.neighbours(worker, heard, takes) if isinstance(store, Gathering) else Sockets(store, worker, heard)
        )

    async def join(self) -> None:
        """Be known to the others and know them; or, where that fails, have left again."""
        try:
            await self._place.join()
        except BaseException:
            await self._place.leave()
            raise

    async def rest(self) -> None:
        """Be told of no more work, but of all else."""
        await self._place.rest()

    async def leave(self) -> None:
        await self._place.leave()

    def watch(self, worker: str) -> None:
        """Hear of the death of a worker, also of one that has not joined."""
        self._place.watch(worker)


class Sockets:
    """A worker's place among those of one machine."""

    def __init__(self, store: Store, worker: str, heard: Callable[[News], None]) -> None:
        self._store = store
        self._worker = worker
        self._tell = heard
        self._joined = False
        self._socket: socket.socket | None = None
        self._deaths = Deaths(lambda _: heard(News()))
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self) -> None:
        self._joined = True
        path = await asyncio.to_thread(_socket_path)
        if not self._joined:  # it has left again before it was there
            return
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            made.bind(str(path))
        except OSError as error:
            made.close()
            raise StoreError(f"{path}: {error}: set XDG_RUNTIME_DIR to a folder with a shorter name") from None
        self._socket = made
        asyncio.get_running_loop().add_reader(self._socket, self._heard)
        await self._store.join(self._worker, str(path))
        await self._watch_all()
        await self._wake(JOINED)

    async def rest(self) -> None:
        """Here all hear of everything."""

    async def leave(self) -> None:
        self._joined = False
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        address = self._socket.getsockname()
        self._socket.close()
        self._socket = None
        for task in list(self._tasks):
            task.cancel()
        self._deaths.close()
        await asyncio.to_thread(Path(address).unlink, missing_ok=True)
        try:
            await self._store.leave(self._worker)
            await self._wake()
        except StoreError as error:  # they see the process end
            log.warning("%s", error)

    async def _wake(self, what: str = ANY) -> None:
        for worker, address in await self._store.workers():
            if worker != self._worker:
                send(address, what)

    def watch(self, worker: str) -> None:
        self._deaths.watch(worker)

    def _heard(self) -> None:
        assert self._socket is not None
        words: set[str] = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                if (word := self._socket.recv(16).decode()) == JOINED:
                    self._later(self._watch_all())
                else:
                    words.add(word)
        for word in words:
            self._tell(read(word))

    async def _watch_all(self) -> None:
        """Keep an eye on every other process that takes work from the store."""
        others = await self._store.workers()
        if not self._joined:
            return
        for worker, _ in others:
            self.watch(worker)
        self._tell(News())  # one may have died before it could be watched

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def wake_all(store: Store, what: str = ANY, ids: Iterable[int] = ()) -> None:
    """Tell the workers of a store what has changed: those that it concerns, or all."""
    if isinstance(store, Gathering):
        await store.wake(what, ids)
        return
    for _, address in await store.workers():
        send(address, what)


async def lives(store: Store, worker: str) -> bool:
    """Whether a worker of this store still has what it holds."""
    return await store.lives(worker) if isinstance(store, Gathering) else await asyncio.to_thread(alive, worker)


def send(address: str, what: str) -> None:
    # A full socket has wake-ups waiting in it already; a missing one has nobody behind it.
    nobody = contextlib.suppress(BlockingIOError, FileNotFoundError, ConnectionRefusedError)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender, nobody:
        sender.sendto(what.encode(), address)


def _socket_path() -> Path:
    """A path for a socket in a folder that is this user's alone (and short: sockets allow 107 bytes)."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"everloop-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StoreError(f"{folder} is not a private folder of this user: remove it and try again")
    _sweep(folder)
    return folder / f"{os.getpid()}-{secrets.token_hex(4)}"


def _sweep(folder: Path) -> None:
    """Take away the sockets that killed workers left behind: nobody listens on them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        for path in folder.iterdir():
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # gone meanwhile, or no socket of ours
                continue

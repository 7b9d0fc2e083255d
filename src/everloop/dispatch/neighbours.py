"""Workers on one machine that share a store: they wake each other, and notice when one dies.

A wake-up is a datagram on a Unix socket; a death is seen on the process's pidfd. Neither is polled for.
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
from collections.abc import Callable, Coroutine
from pathlib import Path

from ..errors import StoreError
from ..store.base import Store
from ..store.workers import process_of

log = logging.getLogger(__name__)
WAKE, JOINED = b"w", b"j"


class Neighbours:
    """This worker's place among the others. `changed` is called when there may be work to take."""

    def __init__(self, store: Store, worker: str, changed: Callable[[], None]) -> None:
        self._store = store
        self._worker = worker
        self._changed = changed
        self._socket: socket.socket | None = None
        self._watched: dict[str, int] = {}  # worker → pidfd
        self._tasks: set[asyncio.Task[None]] = set()

    async def join(self) -> None:
        """Be known to the others and know them."""
        path = await asyncio.to_thread(_socket_path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))
        asyncio.get_running_loop().add_reader(self._socket, self._heard)
        await self._store.join(self._worker, str(path))
        await self._watch_all()
        await self.wake(JOINED)

    async def leave(self) -> None:
        if self._socket is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        address = self._socket.getsockname()
        self._socket.close()
        self._socket = None
        for task in list(self._tasks):
            task.cancel()
        for fd in self._watched.values():
            loop.remove_reader(fd)
            os.close(fd)
        self._watched.clear()
        await asyncio.to_thread(Path(address).unlink, missing_ok=True)
        try:
            await self._store.leave(self._worker)
            await self.wake()
        except StoreError as error:  # they see the process end
            log.warning("%s", error)

    async def wake(self, what: bytes = WAKE) -> None:
        """Tell all others that there may be work."""
        for worker, address in await self._store.workers():
            if worker != self._worker:
                send(address, what)

    def _heard(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                if self._socket.recv(16) == JOINED:
                    self._later(self._watch_all())
        self._changed()

    async def _watch_all(self) -> None:
        """Keep an eye on every other process that takes work from the store."""
        for worker, _ in await self._store.workers():
            self.watch(worker)
        self._changed()  # one may have died before it could be watched

    def watch(self, worker: str) -> None:
        """Hear of the death of a worker, also of one that has not joined."""
        pid = process_of(worker)
        if worker in self._watched or pid == os.getpid():
            return
        try:
            fd = os.pidfd_open(pid)
        except (OSError, AttributeError):  # gone already, or not Linux
            return
        self._watched[worker] = fd
        asyncio.get_running_loop().add_reader(fd, self._died, worker)

    def _died(self, worker: str) -> None:
        fd = self._watched.pop(worker)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        self._changed()

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def wake_all(store: Store) -> None:
    """Wake every worker of a store, from a process that is none."""
    for _, address in await store.workers():
        send(address, WAKE)


def send(address: str, what: bytes) -> None:
    # A full socket has wake-ups waiting in it already; a missing one has nobody behind it.
    nobody = contextlib.suppress(BlockingIOError, FileNotFoundError, ConnectionRefusedError)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender, nobody:
        sender.sendto(what, address)


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

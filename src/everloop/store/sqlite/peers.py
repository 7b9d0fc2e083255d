"""Wake-ups between the processes of one machine: datagrams on Unix sockets, one socket per worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import StoreError
from ..peers import HOLDS, JOINED, Notice, Peer, decode_notice

if TYPE_CHECKING:
    from .store import SQLiteStore

log = logging.getLogger(__name__)
MESSAGE_BYTES = 256  # larger than any message


class SocketPeer(Peer):
    """A worker with a socket to which the others send wake-ups. Every worker gets every notice."""

    def __init__(self, store: SQLiteStore, worker: str, on_notice: Callable[[Notice], None]) -> None:
        super().__init__(store, worker, on_notice)
        self._store = store
        self._socket: socket.socket | None = None

    async def _join(self) -> None:
        path = await asyncio.to_thread(_socket_path)
        if not self._joined:  # it left before the path was known
            return
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            made.bind(str(path))
        except OSError as error:
            made.close()
            raise StoreError(f"{path}: {error}: set XDG_RUNTIME_DIR to a folder with a shorter name") from None
        self._socket = made
        asyncio.get_running_loop().add_reader(self._socket, self._receive)
        await self._store.join(self._worker, str(path))
        await self._watch_all()
        await self._store.wake(JOINED, but=self._worker)

    async def drain(self) -> None:
        """Do nothing: all workers on a machine get every notice."""

    async def leave(self) -> None:
        self._joined = False
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        address = self._socket.getsockname()
        self._socket.close()
        self._socket = None
        self._stop()
        await asyncio.to_thread(Path(address).unlink, missing_ok=True)
        try:
            await self._store.leave(self._worker)
            await self._store.wake(but=self._worker)
        except StoreError as error:  # the others detect the end of the process
            log.warning("%s", error)

    def _receive(self) -> None:
        assert self._socket is not None
        kinds: set[str] = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                kind = self._socket.recv(MESSAGE_BYTES).decode()
                if kind == JOINED:
                    self._spawn(self._watch_all())
                elif kind.startswith(f"{HOLDS} "):
                    self.watch(kind.partition(" ")[2])
                else:
                    kinds.add(kind)
        for kind in kinds:
            self._on_notice(decode_notice(kind))


def send_datagram(address: str, what: str) -> None:
    """Send a message to the worker at an address, unless it has ended or its socket buffer is full.

    A full buffer means that wake-ups are pending there.
    """
    unreachable = contextlib.suppress(BlockingIOError, FileNotFoundError, ConnectionRefusedError)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender, unreachable:
        sender.sendto(what.encode(), address)


def _socket_path() -> Path:
    """Return a short path for a socket in a private folder of this user: socket names are limited to 107 bytes."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"everloop-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StoreError(f"{folder} is not a private folder of this user: remove it and try again")
    _sweep(folder)
    return folder / f"{os.getpid()}-{secrets.token_hex(4)}"


def _sweep(folder: Path) -> None:
    """Remove the sockets of killed workers: no process listens on them."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        for path in folder.iterdir():
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:  # gone in the meantime, or not a socket
                continue

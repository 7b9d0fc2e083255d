"""Waits for writes to the store's file, so that `log --follow` need not poll it.

Workers wake each other for work, not for each entry: a datagram per write would slow the turn down. The kernel reports
writes to a file for free (inotify). If that is not available, the file's size and time are polled.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import struct
import sys
from pathlib import Path

STEP_SECONDS = 0.25  # between two polls, if the kernel reports nothing
CHANGES = 0x2 | 0x80 | 0x100 | 0x200  # a file was written, moved here, created, removed
LEAVES = 0x400 | 0x800  # the folder itself was removed or moved
GONE = LEAVES | 0x2000 | 0x8000  # … or its disk was unmounted, or the watch was removed
HEAD = struct.Struct("iIII")


class FileWatch:
    """Wakes when a database file, which need not exist yet, is written, created or removed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed = asyncio.Event()
        self._notify = _Inotify.open()
        self._seen: object = None
        self._place: Path | None = None
        if self._notify is not None:
            asyncio.get_running_loop().add_reader(self._notify.fd, self._heard)

    async def start(self) -> None:
        """Start: no change after this is missed."""
        await self._settled()
        self._seen = await asyncio.to_thread(self._look)

    async def changed(self) -> None:
        """Wait for the next change; return at once if there was one since the last call."""
        if self._notify is not None:
            await self._changed.wait()
            self._changed.clear()
            await self._settled()
            return
        while (found := await asyncio.to_thread(self._look)) == self._seen:  # noqa: ASYNC110 - nothing notifies us
            await asyncio.sleep(STEP_SECONDS)
        self._seen = found

    async def close(self) -> None:
        self._stop_notifying()

    def _stop_notifying(self) -> None:
        """Poll from now on."""
        if self._notify is not None:
            asyncio.get_running_loop().remove_reader(self._notify.fd)
            os.close(self._notify.fd)
            self._notify = None

    async def _settled(self) -> None:
        try:
            if self._notify is not None:
                await asyncio.to_thread(self._settle)
        except OSError:  # no more inotify watches, or the folder is unreadable
            self._stop_notifying()

    def _settle(self) -> None:
        """Watch the file's folder, or the nearest existing one above it."""
        assert self._notify is not None
        while True:
            place = self._path.parent
            while not place.is_dir() and place != place.parent:
                place = place.parent
            if place == self._place:
                return
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed in the meantime: try again
                self._notify.watch(place)
                self._place = place

    def _heard(self) -> None:
        assert self._notify is not None
        for mask, name in self._notify.read():
            if mask & GONE:
                self._place = None
            if mask & GONE or self._place != self._path.parent or name in (self._path.name, f"{self._path.name}-wal"):
                self._changed.set()

    def _look(self) -> object:
        found = []
        for path in (self._path, self._path.with_name(f"{self._path.name}-wal")):
            try:
                stat = path.stat()
            except OSError:
                continue
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return found


class _Inotify:
    """The kernel's notifications of changes in one folder."""

    def __init__(self, library: ctypes.CDLL, fd: int) -> None:
        self.fd = fd
        self._library = library
        self._watched = -1

    @classmethod
    def open(cls) -> _Inotify | None:
        if sys.platform != "linux":
            return None
        library = ctypes.CDLL(None, use_errno=True)
        fd = library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        return cls(library, fd) if fd >= 0 else None

    def watch(self, folder: Path) -> None:
        """Watch this folder instead of the previous one."""
        new = self._library.inotify_add_watch(self.fd, os.fsencode(folder), CHANGES | LEAVES)
        if new < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(folder))
        if self._watched not in (-1, new):
            self._library.inotify_rm_watch(self.fd, self._watched)
        self._watched = new

    def read(self) -> list[tuple[int, str]]:
        """Return (mask, file name) of each pending change in the watched folder."""
        found = []
        try:
            data = os.read(self.fd, 65536)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EINTR):
                return []
            raise
        while data:
            watched, mask, _, length = HEAD.unpack_from(data)
            name = os.fsdecode(data[HEAD.size : HEAD.size + length].rstrip(b"\0"))
            if watched == self._watched:
                found.append((mask, name))
            data = data[HEAD.size + length :]
        return found

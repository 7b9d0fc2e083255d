"""A proxy for a server's socket, which can break a connection at the worst moment."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

SOCKET = ".s.PGSQL.5432"
Cut = Literal["before", "after"]


class Proxy:
    """Forwards everything.

    On command, it breaks the connection that sends the next COMMIT, or a write that commits by itself: before it
    reaches the server, or after the server has done it and before the client learns of it.
    """

    def __init__(self, server: Path) -> None:
        self.cut: Cut | None = None
        self.cuts = 0
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.WriteTransport] = set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            theirs, to_server = await asyncio.open_unix_connection(self._server / SOCKET)
        except OSError:  # there is no server just now
            writer.transport.abort()
            self._tasks.discard(task)
            return
        both = (writer.transport, to_server.transport)
        self._open.update(both)
        answers = asyncio.create_task(self._pass(theirs, writer))
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                cut = self.cut if b"COMMIT" in data or b"lane." in data else None
                if cut is not None:
                    self.cut, self.cuts = None, self.cuts + 1
                if cut == "before":
                    break
                if cut == "after":
                    answers.cancel()
                    await asyncio.wait([answers])
                    answers = asyncio.create_task(self._swallow(theirs, writer))
                to_server.write(data)
                await to_server.drain()
        answers.cancel()
        for transport in both:
            transport.abort()
        await asyncio.gather(answers, writer.wait_closed(), to_server.wait_closed(), return_exceptions=True)
        self._open.difference_update(both)
        self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()  # even if the server has broken it: nothing else would tell the client

    async def _swallow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Wait for the answer, and break the connection instead of forwarding it."""
        await reader.read(65536)
        writer.transport.abort()

    def cut_all(self) -> int:
        """Break every connection that is open now; return how many."""
        there = list(self._open)
        for transport in there:
            transport.abort()
        return len(there) // 2

    async def close(self) -> None:
        self.cut_all()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def handled() -> None:
    """Wait until each accepted connection has reached its handler."""
    for _ in range(8):  # rounds of the loop from the accepted socket to the handler's first step
        await asyncio.sleep(0)


async def stop_accepting(listening: asyncio.Server) -> None:
    """Close a listener. First stop accepting: asyncio would leave open a connection that it is just accepting."""
    for accepting in listening.sockets:
        asyncio.get_running_loop().remove_reader(accepting.fileno())
    await handled()
    listening.close()


@contextlib.asynccontextmanager
async def proxied(dsn: str, folder: Path) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy in front of the database at this address, and the address that leads through it."""
    start, _, server = dsn.partition("?host=")
    place = Path(os.path.relpath(folder)) if len(str(folder)) > 80 else folder  # sockets allow 107 bytes
    proxy = Proxy(Path(server))
    listening = await asyncio.start_unix_server(proxy.connected, place / SOCKET)
    try:
        yield proxy, f"{start}?host={folder}"
    finally:
        await stop_accepting(listening)
        await proxy.close()

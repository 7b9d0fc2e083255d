"""A network that can be cut: addresses on loopback in front of servers' sockets, which may drop everything silently.

A cut closes no connection, and new ones are accepted without a response, as by a machine whose packets are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from .proxy import SOCKET, stop_accepting


class Line:
    """The path to one server."""

    def __init__(self, server: Path) -> None:
        self.server = server
        self.port = 0
        self._passes = asyncio.Event()
        self._passes.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._passes.clear()

    def mend(self) -> None:
        self._passes.set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        ends = [writer]
        try:
            await self._passes.wait()
            with contextlib.suppress(OSError):  # there is no server just now
                from_server, to_server = await asyncio.open_unix_connection(self.server / SOCKET)
                ends.append(to_server)
                both = (
                    asyncio.create_task(self._pass(reader, to_server)),
                    asyncio.create_task(self._pass(from_server, writer)),
                )
                try:
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for one in both:
                        one.cancel()
                    await asyncio.gather(*both, return_exceptions=True)
        finally:
            for end in ends:
                end.transport.abort()
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
            await self._passes.wait()  # the end of a connection is a packet, too

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def lines(servers: Sequence[Path], database: str) -> AsyncIterator[tuple[list[Line], str]]:
    """A path to each of the servers, and an address of the database over all of them."""
    made, listening = [Line(server) for server in servers], []
    for line in made:
        server = await asyncio.start_server(line.connected, "127.0.0.1", 0)
        line.port = server.sockets[0].getsockname()[1]
        listening.append(server)
    try:
        yield made, f"postgresql://postgres@{','.join(f'127.0.0.1:{line.port}' for line in made)}/{database}"
    finally:
        for server in listening:
            await stop_accepting(server)
        for line in made:
            await line.close()

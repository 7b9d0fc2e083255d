"""A pooler in front of the server, modelled on PgBouncer: it greets clients itself, and lends each one a connection for
a transaction, or for as long as the client stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

from .proxy import SOCKET, handled, stop_accepting

Mode = Literal["transaction", "session"]
GREETED = b"R" + struct.pack("!ii", 8, 0)  # every client is accepted
READY = b"Z" + struct.pack("!ic", 5, b"I")


class Lent:
    """A connection to the server, and the parameters that the server reported."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.settings = b""
        self.asked = 0  # responses in progress
        self.passing: asyncio.Task[None] | None = None

    async def greet(self, startup: bytes) -> None:
        self.writer.write(startup)
        while True:
            kind, message = await _message(self.reader)
            if kind == b"S":
                self.settings += message
            elif kind == b"Z":
                return


class Pooler:
    def __init__(self, server: Path, mode: Mode) -> None:
        self._server = server
        self._mode = mode
        self._free: list[Lent] = []
        self._all: list[Lent] = []
        self._clients: set[asyncio.Task[None]] = set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            # Cancelled by `close`; the loop's own callback would report that as an error.
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            writer.transport.abort()
            self._clients.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readexactly(4)
        startup = head + await reader.readexactly(struct.unpack("!i", head)[0] - 4)
        lent = await self._lend(startup)
        key = b"K" + struct.pack("!iii", 12, 2_000_000_000 + id(writer) % 1000, 7)
        writer.write(GREETED + lent.settings + key + READY)
        self._free.append(lent)
        holds: list[Lent] = []
        while True:
            kind, message = await _message(reader)
            if kind == b"X":
                break
            if not holds:
                holds.append(lent := await self._lend(startup))
                lent.passing = asyncio.create_task(self._pass(lent, writer, holds))
            lent.asked += kind in (b"Q", b"S")
            lent.writer.write(message)

    async def _lend(self, startup: bytes) -> Lent:
        if self._free:
            return self._free.pop()
        made = Lent(*await asyncio.open_unix_connection(self._server / SOCKET))
        self._all.append(made)  # before the server has answered: `close` may come first
        await made.greet(startup)
        return made

    async def _pass(self, lent: Lent, writer: asyncio.StreamWriter, holds: list[Lent]) -> None:
        """Return the server's answers, until the transaction is over."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                kind, message = await _message(lent.reader)
                writer.write(message)
                lent.asked -= kind == b"Z"
                if self._mode == "transaction" and message == READY and not lent.asked:
                    holds.clear()
                    self._free.append(lent)
                    return

    async def close(self) -> None:
        waits = [task for lent in self._all if (task := lent.passing) is not None]
        for task in (*self._clients, *waits):
            task.cancel()
        await asyncio.gather(*self._clients, *waits, return_exceptions=True)
        for lent in self._all:
            lent.writer.transport.abort()
        await asyncio.gather(*(lent.writer.wait_closed() for lent in self._all), return_exceptions=True)
        await handled()  # an aborted connection is closed in one of the loop's next rounds


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readexactly(5)
    return head[:1], head + await reader.readexactly(struct.unpack("!i", head[1:])[0] - 4)


@contextlib.asynccontextmanager
async def pooling(server: Path, folder: Path, mode: Mode) -> AsyncIterator[None]:
    """A pooler whose socket is in the folder."""
    pooler = Pooler(server, mode)
    listening = await asyncio.start_unix_server(pooler.connected, folder / SOCKET)
    try:
        yield
    finally:
        await stop_accepting(listening)
        await pooler.close()

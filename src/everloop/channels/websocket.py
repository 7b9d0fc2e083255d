"""A WebSocket client for networks that deliver messages over one connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

CONNECT_SECONDS = 20.0
LARGEST_FRAME = 16 * 1024 * 1024


class Closed(OSError):
    """The connection has ended; `code` says why, if the server did."""

    def __init__(self, code: int | None, reason: str = "") -> None:
        super().__init__(f"the server closed the connection ({code or 'without a reason'}) {reason}".strip())
        self.code = code


class WebSocket:
    """A connection that carries one JSON text a frame."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def receive(self) -> bytes:
        """The next text; `Closed` when there is none."""
        while True:
            frame = await self._socket.receive()
            if frame.type is aiohttp.WSMsgType.TEXT:
                return str(frame.data).encode()
            if frame.type is not aiohttp.WSMsgType.BINARY:
                raise Closed(self._socket.close_code, str(frame.extra or ""))

    async def send(self, value: Any) -> None:
        await self._socket.send_str(msgspec.json.encode(value).decode())

    async def close(self, code: int = 1000) -> None:
        await self._socket.close(code=code)


@asynccontextmanager
async def connected(url: str, *, heartbeat: float | None = None) -> AsyncIterator[WebSocket]:
    """Connect; with a `heartbeat` the connection ends when the server does not answer a ping in so many seconds."""
    async with aiohttp.ClientSession(trust_env=True) as session:
        async with asyncio.timeout(CONNECT_SECONDS):
            socket = await session.ws_connect(
                url,
                heartbeat=heartbeat,
                max_msg_size=LARGEST_FRAME,
                timeout=aiohttp.ClientWSTimeout(ws_close=2.0),
            )
        try:
            yield WebSocket(socket)
        finally:
            await socket.close()

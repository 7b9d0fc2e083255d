"""Servers on loopback that are slow, disconnect or violate the protocol in every known way, and a client for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from everloop.providers.base import ProviderError
from everloop.providers.http import Pool, Response
from everloop.providers.openai import OpenAIProvider, Timeouts
from tests.support.places import CERTIFICATES

ASK = [{"role": "user", "content": "hello"}]
MEGABYTE = 1 << 20


class Peer:
    """One connection as seen by a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.reader, self.writer, self.number = reader, writer, number

    async def head(self) -> str:
        return (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")

    async def request(self) -> tuple[str, bytes]:
        """Return the next request: its head and its body."""
        head = await self.head()
        size = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0] or 0)
        return head, await self.reader.readexactly(size)

    async def send(self, *blocks: bytes) -> None:
        for block in blocks:
            self.writer.write(block)
            await self.writer.drain()

    async def gone(self) -> bool:
        """Wait for the client to disconnect."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(MEGABYTE):
                pass
        return True


Handler = Callable[[Peer], Awaitable[Any]]


class Server:
    """A server on loopback whose behaviour is one function, called for every connection."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        self.connections = 0
        self.heads: list[str] = []
        self._handler, self._tls, self._host = handler, tls, host
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Server:
        # Clients that disconnect in the middle of a handshake are expected.
        asyncio.get_running_loop().set_exception_handler(self._unheard)
        self._server = await asyncio.start_server(self._serve, self._host, 0, ssl=self._tls, limit=MEGABYTE)
        self.port: int = self._server.sockets[0].getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{'https' if self._tls else 'http'}://{host}:{self.port}"
        return self

    def _unheard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), ConnectionError | ssl.SSLError):
            loop.default_exception_handler(context)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            await self._handler(Peer(reader, writer, self.connections))
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError, asyncio.CancelledError):
            pass  # the client has disconnected, or the test is over
        finally:
            self._tasks.discard(task)
            writer.close()

    async def __aexit__(self, *_: Any) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)


class Proxy(Server):
    """Forwards CONNECT requests to one place, whatever place they name."""

    def __init__(self, port: int, reply: str = "HTTP/1.1 200 Connection established\r\n\r\n", **options: Any) -> None:
        self._port, self._reply = port, reply
        super().__init__(self._tunnel, **options)

    async def _tunnel(self, peer: Peer) -> None:
        self.heads.append(await peer.head())
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await peer.send(self._reply.encode())
            await asyncio.gather(_copy(peer.reader, writer), _copy(reader, peer.writer))
        finally:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(MEGABYTE):
            writer.write(data)
            await writer.drain()
    writer.close()


def completion(text: str) -> bytes:
    message = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
    return json.dumps(message).encode()


def answer(text: str = "well", *headers: str, status: str = "HTTP/1.1 200 OK") -> bytes:
    """A complete HTTP response with its length."""
    body = completion(text)
    lines = [status, "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def raw(*headers: str, body: bytes = b"") -> bytes:
    """An HTTP response with exactly these headers."""
    return "\r\n".join(["HTTP/1.1 200 OK", *headers]).encode() + b"\r\n\r\n" + body


async def polite(peer: Peer) -> None:
    """Answer every request of every connection."""
    while True:
        _, body = await peer.request()
        await peer.send(answer(json.loads(body)["messages"][0]["content"]))


def keeping(heads: list[str]) -> Handler:
    """A well-behaved server that keeps the heads that it received."""

    async def handler(peer: Peer) -> None:
        while True:
            head, _ = await peer.request()
            heads.append(head)
            await peer.send(answer("from the origin"))

    return handler


def once(*blocks: bytes, then: bytes | None = None) -> Handler:
    """Answer the first connection's first request with these bytes; after that, behave well or send `then`."""

    async def handler(peer: Peer) -> None:
        await peer.request()
        if peer.number == 1:
            await peer.send(*blocks)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(20):
                    await peer.request()
                    await peer.send(then or answer("second on the same connection"))
                    await peer.gone()
        else:
            await peer.send(answer("fresh"))
            await peer.gone()

    return handler


def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / "localhost.pem", CERTIFICATES / "localhost.key")
    return context


@contextlib.asynccontextmanager
async def client(url: str, **options: Any) -> AsyncIterator[OpenAIProvider]:
    options.setdefault("timeouts", Timeouts(connect=30, first_token=30, token=30, total=30))
    provider = OpenAIProvider(url + ("" if "?" in url else "/v1"), options.pop("api_key", "secret-key"), "m", **options)
    try:
        yield provider
    finally:
        await provider.close()


async def say(provider: OpenAIProvider, text: str = "hello") -> str:
    return (await provider.chat([{"role": "user", "content": text}])).content or ""


async def failure(provider: OpenAIProvider) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        await provider.chat(ASK)
    return caught.value


async def posted(pool: Pool) -> Response:
    """Return the response to a request, as soon as its head has arrived."""
    response = await (await pool.take(20)).send([b"{}"])
    assert response is not None
    return response


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n", extension: bytes = b"") -> bytes:
    return b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces) + end


BODY = completion("which")
LENGTH = len(BODY)
CHUNKED = "Transfer-Encoding: chunked"

"""HTTP/1.1 on one connection: as much of it as a model API needs, and at a third of a general client's cost.

POST requests, one at a time; answers whole or as they come. Parsing is llhttp's (httptools); nothing here reads a byte
of the protocol by itself.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import httptools

from .origin import Origin

if TYPE_CHECKING:
    from .pool import Pool

SMALL = 1 << 16  # bytes up to which joining parts is cheaper than writing them one by one
AHEAD = 1 << 18  # bytes of an answer that may wait to be read before the server is made to wait
LONGEST_HEAD = 1 << 16
GOODBYE = 1.0  # seconds a server has to end a stream whose last word is in


class ConnectionBroke(OSError):
    """The connection ended, or what came over it was no HTTP."""


class NoConnection(OSError):
    """The server could not be reached."""


class ProxyRefused(NoConnection):
    """The proxy does not let us through to the server."""

    def __init__(self, proxy: Origin, status: int, reason: str) -> None:
        super().__init__(f"the proxy {proxy} refused with HTTP {status} {reason}".rstrip())
        self.status = status


class ConnectTimeout(OSError):
    """The server could not be reached in time."""


class Response:
    """An answer: its head, and its body as it comes. Whoever has it reads it to its end, or `leave`s or `close`s it."""

    def __init__(self, connection: Connection, whole: bool = False) -> None:
        self.status = 0
        self.reason = ""
        self.headers: dict[str, str] = {}
        self.complete = False
        self._connection: Connection | None = connection
        self._body: deque[bytes] = deque()
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._unread = False  # nobody wants the rest
        self._whole = whole  # whoever waits wants all of it, and is not woken for less

    @property
    def waiting(self) -> bool:
        """Whether some of the body is here and was not read."""
        return bool(self._body)

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """The next bytes of the body, as many as are there; empty at its end."""
        while not self._body:
            if self._error is not None:
                raise self._error
            if self.complete:
                return b""
            await self.wait()
        data = self._body.popleft() if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        if self._size > AHEAD and self._connection is not None:
            self._connection.resume()
        self._size = 0
        return data

    async def wait(self) -> None:
        """Until something new has come."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def fail(self, error: Exception) -> None:
        """Whoever reads gets this error, now or next."""
        if self._error is None and not self.complete:
            self._error = error
            self._wake()

    def leave(self) -> None:
        """All was said: the server may end its answer by itself, for a moment, and the connection is used again."""
        self._unread = True
        self._body.clear()
        if not self.complete and self._connection is not None:
            self._connection.resume()
            asyncio.get_running_loop().call_later(GOODBYE, self.close)

    def close(self) -> None:
        """Break off, at once."""
        if self._connection is not None:
            self._connection.abort()

    def _take(self, data: bytes) -> bool:
        """A piece of the body; True when enough of it waits."""
        if self._unread:
            return False
        self._body.append(data)
        self._size += len(data)
        self._wake()
        return self._size > AHEAD

    def _end(self) -> None:
        self.complete = True
        self._connection = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        enough = self.complete or self._error is not None or self._size > AHEAD or self.status not in (0, 200)
        if self._whole and not enough:
            return
        self._waiter.set_result(None)


class Connection(asyncio.BufferedProtocol):
    """One connection of a pool, with at most one request under way."""

    def __init__(self, pool: Pool) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._head = 0  # bytes that have come of this answer, since the last of its body
        self._sent = False  # the whole request
        self._until_close = False  # the body ends with the connection
        self._ended = False  # by the server
        self._tunnelling = False  # talking to a proxy
        self._writable: asyncio.Future[None] | None = None

    async def send(self, head: bytes, parts: Sequence[bytes], whole: bool = False) -> Response:
        """Send a request; the answer's head has come when this returns, or all of it if the `whole` is wanted."""
        if self.transport is None:
            raise ConnectionBroke("it has ended")
        response = self._response = Response(self, whole)
        self._head, self._sent = 0, False
        try:
            for block in _blocks(head, parts):
                if response.status or response._error is not None:  # it was answered before it was heard out
                    break
                self.transport.write(block)
                if self._writable is not None:
                    await self._writable
            else:
                self._sent = True
            while not response.status:
                if response._error is not None:
                    raise response._error
                await response.wait()
            return response
        except BaseException:
            if self._response is response:  # else its answer is whole, and the connection perhaps another request's
                self.abort()
            raise

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def silent(self) -> bool:
        """Open, and nothing has come that is still to be read: bytes from before a request are not its answer."""
        if self.transport is None or self.transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return not poll.poll(0)

    def resume(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    # what asyncio tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pool.buffer

    def buffer_updated(self, size: int) -> None:
        data = self._pool.buffer[:size]
        response = self._response
        if response is None or response.complete:  # nobody has asked for anything
            self.abort()
            return
        self._head += size
        try:
            self._parser.feed_data(data)
            if self._head > LONGEST_HEAD and not response.complete:
                self.give_up("the server's headers have no end")
        except httptools.HttpParserUpgrade:
            self.give_up("the server wants another protocol")
        except httptools.HttpParserError as error:
            self.give_up(f"what came back is no HTTP ({error})")

    def eof_received(self) -> None:
        self._ended = True

    def connection_lost(self, error: Exception | None) -> None:
        self.resume_writing()
        self.transport = None
        self._pool.forget(self)
        response, self._response = self._response, None
        if response is None or response.complete:
            return
        if self._until_close and self._ended and error is None and response.status:
            response._end()
        else:
            response.fail(ConnectionBroke(str(error) if error else "the server closed it"))
            response._connection = None

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def give_up(self, why: str) -> None:
        """Give up this connection, and tell whoever waits for its answer."""
        if self._response is not None:
            self._response.fail(ConnectionBroke(why))
        self.abort()

    # what the parser tells

    def on_message_begin(self) -> None:
        if self._response is None:  # a second answer to one request: it must never be taken for the next one's
            self.abort()

    def on_status(self, reason: bytes) -> None:
        if self._response is not None:
            self._response.reason = reason.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is not None and not self._response.status:  # and not a trailer
            self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        response, status = self._response, self._parser.get_status_code()
        if response is None:
            return
        if status < 200:  # an interim answer; the real one follows
            response.headers.clear()
            response.reason = ""
            return
        headers = response.headers
        sized = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
        self._until_close = not sized and status not in (204, 304)
        response.status = status
        response._wake()
        if not self._sent:  # nobody may be left to hear the rest of the request
            self.resume_writing()

    def on_body(self, data: bytes) -> None:
        self._head = 1
        if self._response is not None and self._response._take(data) and self.transport is not None:
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or not response.status or self._tunnelling:
            return
        reusable = self._parser.should_keep_alive() and self._sent and not self._until_close
        self._response = None
        response._end()
        if reusable:
            self.resume()
            self._parser = httptools.HttpResponseParser(self)
            self._pool.give_back(self)
        else:
            self.abort()


def _blocks(head: bytes, parts: Sequence[bytes]) -> list[bytes]:
    """What to write, one after another: small neighbours joined, large parts as they are, so they are never copied."""
    blocks: list[bytes] = []
    small = [head]
    for part in parts:
        if len(part) > SMALL:
            blocks += [b"".join(small), part]
            small = []
        else:
            small.append(part)
    return [*blocks, b"".join(small)] if small else blocks

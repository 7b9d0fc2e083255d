"""A small HTTP/1.1 client for model APIs: POST requests over pooled connections, direct or through a proxy.

One request at a time on a connection; answers are read whole or as they arrive. llhttp (httptools) parses the protocol,
at about half of a general client's CPU time for each streamed call.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import select
import socket
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

import httptools

from ..threads import in_thread

SMALL = 1 << 16  # bytes up to which joining parts is cheaper than writing each
AHEAD = 1 << 18  # unread bytes of a response before reading pauses
LONGEST_HEAD = 1 << 16
GOODBYE = 1.0  # seconds for a server to end a stream after its last event
AT_ONCE = 1 << 16  # bytes of one read
IDLE_SECONDS = 30.0  # until an unused connection is no longer trusted
FRAMING = frozenset({"host", "content-length", "transfer-encoding"})  # headers that the client writes itself

_is_name = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch
_is_value = re.compile(r"[\t\x20-\x7e\x80-\xff]*").fullmatch


# --------------------------------------------------------------------------------------- addresses


@dataclass(slots=True, frozen=True)
class Origin:
    """A server, and the path and query of every request to it."""

    scheme: str
    host: str
    port: int
    target: str
    user: str = ""  # "name:password" of the URL

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.scheme == "https" else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


def origin_of(url: str) -> Origin:
    """Parse an http(s) URL; a ValueError says why it cannot be one."""
    if any(ord(letter) <= 32 for letter in url):  # urlsplit silently removes line ends
        raise ValueError("a URL has no spaces, line ends or control characters")
    parts: SplitResult = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it does not begin with http:// or https:// and a host")
    host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if any(ord(letter) > 126 for letter in host + target):
        raise ValueError("it has characters that no URL may have")
    if any(not 0 < len(label) < 64 for label in host.removesuffix(".").split(".")) and ":" not in host:
        raise ValueError("it has no possible host name")
    user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}" if parts.username else ""
    return Origin(parts.scheme, host, port, target, user)


# ---------------------------------------------------------------------------------- one connection


class ConnectionBroke(OSError):
    """The connection ended, or what arrived was not HTTP."""


class NoConnection(OSError):
    """The server could not be reached."""


class ProxyRefused(NoConnection):
    """The proxy refused a tunnel to the server."""

    def __init__(self, proxy: Origin, status: int, reason: str) -> None:
        super().__init__(f"the proxy {proxy} refused with HTTP {status} {reason}".rstrip())
        self.status = status


class ConnectTimeout(OSError):
    """The server could not be reached in time."""


class Response:
    """A response: its head, and its body as it arrives. The caller reads it to the end, `leave`s it or `close`s it."""

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
        self._unread = False  # the rest is discarded
        self._whole = whole  # the reader is woken only for the whole body

    @property
    def waiting(self) -> bool:
        """Whether a part of the body has arrived and was not read."""
        return bool(self._body)

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def read(self) -> bytes:
        """All bytes of the body that have arrived since the last read; empty at its end."""
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
        """Wait until more of the response has arrived."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def fail(self, error: Exception) -> None:
        """Make the current or the next read raise this error."""
        if self._error is None and not self.complete:
            self._error = error
            self._wake()

    def leave(self) -> None:
        """Discard the rest: the server gets a moment to end the response, so that the connection can be reused."""
        self._unread = True
        self._body.clear()
        if not self.complete and self._connection is not None:
            self._connection.resume()
            asyncio.get_running_loop().call_later(GOODBYE, self.close)

    def close(self) -> None:
        """Abort the connection at once."""
        if self._connection is not None:
            self._connection.abort()

    def _take(self, data: bytes) -> bool:
        """Add bytes of the body; True when reading should pause."""
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
    """One connection of a pool, with at most one request in progress."""

    def __init__(self, pool: Pool) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._response: Response | None = None
        self._head = 0  # bytes received since the last part of a body: the size of the head
        self._sent = False  # the whole request was written
        self._until_close = False  # the body ends when the connection does
        self._ended = False  # by the server
        self._tunnelling = False  # asking a proxy for a tunnel
        self._writable: asyncio.Future[None] | None = None

    async def send(self, head: bytes, parts: Sequence[bytes], whole: bool = False) -> Response:
        """Send a request; return when the response's head has arrived, or with `whole` all of it."""
        if self.transport is None:
            raise ConnectionBroke("it has ended")
        response = self._response = Response(self, whole)
        self._head, self._sent = 0, False
        try:
            for block in _blocks(head, parts):
                if response.status or response._error is not None:  # answered before the whole request was sent
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
            if self._response is response:  # else it is complete, and the connection may serve another request
                self.abort()
            raise

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def silent(self) -> bool:
        """Whether it is open and has nothing to read: bytes that precede a request are not its response."""
        if self.transport is None or self.transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), select.POLLIN)
        return not poll.poll(0)

    def resume(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    # callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pool.buffer

    def buffer_updated(self, size: int) -> None:
        data = self._pool.buffer[:size]
        response = self._response
        if response is None or response.complete:  # no request is in progress
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
        """Fail the request in progress and abort the connection."""
        if self._response is not None:
            self._response.fail(ConnectionBroke(why))
        self.abort()

    # callbacks of the parser

    def on_message_begin(self) -> None:
        if self._response is None:  # a second response to one request must never be taken for the next one's
            self.abort()

    def on_status(self, reason: bytes) -> None:
        if self._response is not None:
            self._response.reason = reason.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._response is not None and not self._response.status:  # not a trailer
            self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        response, status = self._response, self._parser.get_status_code()
        if response is None:
            return
        if status < 200:  # an interim response; the final one follows
            response.headers.clear()
            response.reason = ""
            return
        headers = response.headers
        sized = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
        self._until_close = not sized and status not in (204, 304)
        response.status = status
        response._wake()
        if not self._sent:  # the server may not read the rest of the request
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
    """The blocks to write: small neighbours joined, large parts as they are, so that they are never copied."""
    blocks: list[bytes] = []
    small = [head]
    for part in parts:
        if len(part) > SMALL:
            blocks += [b"".join(small), part]
            small = []
        else:
            small.append(part)
    return [*blocks, b"".join(small)] if small else blocks


# ---------------------------------------------------------------------------------------- the pool


class Pool:
    """Connections to one origin, for one event loop."""

    def __init__(self, origin: Origin, headers: Mapping[str, str], proxy: str | None = None) -> None:
        self._origin = origin
        self._proxy = origin_of(proxy) if proxy else None
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._tls: ssl.SSLContext | None = None
        self._closed = False
        self._head = self._request_head(headers)
        # Shared by all connections: each read is parsed before anything else happens in the loop.
        self.buffer = memoryview(bytearray(AT_ONCE))

    async def post(self, parts: Sequence[bytes], connect_timeout: float, whole: bool = False) -> Response:
        """Send a body; return when the response's head has arrived, or with `whole` all of it."""
        head = b"%bContent-Length: %d\r\n\r\n" % (self._head, sum(map(len, parts)))
        connection = self._take_idle()
        if connection is not None:
            try:
                return await connection.send(head, parts, whole)
            except ConnectionBroke:
                if connection._head or self._closed:  # a response had begun, or the pool is closed
                    raise
                # The server closed the idle connection just as we wrote to it.
        connection = await self._connect(connect_timeout)
        return await connection.send(head, parts, whole)

    def give_back(self, connection: Connection) -> None:
        if self._closed:
            connection.abort()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close every connection; requests in progress fail."""
        self._closed = True
        for connection in self._all:
            connection.give_up("it was closed on this side")
        self._all.clear()
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if now - connection.idle_since < IDLE_SECONDS and connection.silent():
                return connection
            connection.abort()
        return None

    async def _connect(self, seconds: float) -> Connection:
        try:
            async with asyncio.timeout(seconds):
                connection = await self._open()
        except TimeoutError:
            raise ConnectTimeout(f"no connection within {seconds:g} s") from None
        except (ssl.SSLError, ProxyRefused):
            raise
        except OSError as error:
            through = f"through the proxy {self._proxy}: " if self._proxy else ""
            raise NoConnection(through + _reason(error)) from error
        if self._closed:
            connection.abort()
            raise ConnectionBroke("it was closed on this side")
        self._all.add(connection)
        return connection

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        first = self._proxy or self._origin
        if "https" in (first.scheme, self._origin.scheme) and self._tls is None:
            self._tls = await in_thread(ssl.create_default_context)  # reads the system's certificates
        tls = self._tls if first.scheme == "https" else None
        numeric = ":" in first.host or first.host[-1].isdigit()  # a name may have several addresses
        _, connection = await loop.create_connection(
            lambda: Connection(self), first.host, first.port, ssl=tls, happy_eyeballs_delay=None if numeric else 0.25
        )
        if self._proxy is not None and self._origin.scheme == "https":
            try:
                await self._tunnel(connection, self._proxy)
            except BaseException:
                connection.abort()
                raise
        return connection

    async def _tunnel(self, connection: Connection, proxy: Origin) -> None:
        """Ask the proxy for a tunnel to the origin, and start TLS over it."""
        origin = self._origin
        where = f"{f'[{origin.host}]' if ':' in origin.host else origin.host}:{origin.port}"
        head = f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n{self._proxy_authorization()}\r\n".encode()
        connection._tunnelling = True  # the response has no body, whatever its headers say
        response = await connection.send(head, ())
        if not 200 <= response.status < 300:
            raise ProxyRefused(proxy, response.status, response.reason)
        if connection.transport is None or response.waiting:
            raise NoConnection("what came back is no way through")
        connection._response, connection._parser = None, httptools.HttpResponseParser(connection)
        connection._tunnelling = False
        loop = asyncio.get_running_loop()
        tls = await loop.start_tls(connection.transport, connection, self._tls, server_hostname=origin.host)  # type: ignore[arg-type]
        if tls is None:
            raise NoConnection("the connection ended while it was made safe")
        connection.transport = tls

    def _proxy_authorization(self) -> str:
        if self._proxy is None or not self._proxy.user:
            return ""
        return f"Proxy-Authorization: Basic {base64.b64encode(self._proxy.user.encode()).decode()}\r\n"

    def _request_head(self, headers: Mapping[str, str]) -> bytes:
        """A request's head without its length: it is the same for every request."""
        origin = self._origin
        plain_proxy = self._proxy is not None and origin.scheme == "http"
        lines = [f"POST {f'{origin}{origin.target}' if plain_proxy else origin.target} HTTP/1.1\r\n"]
        lines += [f"Host: {origin.authority}\r\n", self._proxy_authorization() if plain_proxy else ""]
        given = {name.lower(): (name, value) for name, value in headers.items()}  # each once, the last one wins
        if origin.user and "authorization" not in given:
            lines.append(f"Authorization: Basic {base64.b64encode(origin.user.encode()).decode()}\r\n")
        for key, (name, value) in given.items():
            if not _is_name(name) or key in FRAMING:
                raise ValueError(f"{name!r} cannot be a header of a request")
            if not _is_value(value):
                raise ValueError(f"the header {name} has a line end or another character that no header may have")
            lines.append(f"{name}: {value}\r\n")
        return "".join(lines).encode("latin-1")


def _reason(error: OSError) -> str:
    if isinstance(error, NoConnection | socket.gaierror) or not error.errno:
        return error.strerror or str(error) or "the connection was closed"
    return os.strerror(error.errno)

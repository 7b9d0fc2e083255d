"""Model endpoints over HTTP: pooled connections, timeouts, streamed answers, and errors that a person can act on.

A small HTTP/1.1 client for POST requests, direct or through a proxy, with one request at a time on a connection. llhttp
(httptools) parses the protocol; a streamed call takes about half of a general client's CPU time.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import math
import os
import re
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

import httptools
import msgspec
from msgspec.structs import replace

from ..errors import ConfigError
from ..text import one_line
from ..threads import in_thread
from .base import Delta, LLMResponse, ProviderError, error_text, without_key

JOIN_BYTES = 1 << 16  # up to this size, joining parts is cheaper than writing each of them
READ_AHEAD_BYTES = 1 << 18  # unread bytes of a response before reading pauses
MAX_HEAD_BYTES = 1 << 16
STREAM_END_SECONDS = 1.0  # for a server to end a stream after its last event
READ_BYTES = 1 << 16  # per read
IDLE_SECONDS = 30.0  # until an unused connection is no longer trusted
FRAMING_HEADERS = frozenset({"host", "content-length", "transfer-encoding"})  # written by the client itself
RETRYABLE = frozenset({408, 409, 425, 429})  # and all of 5xx
MAX_ERROR_BYTES = 1 << 16
ERROR_SECONDS = 5.0
LAST_EVENTS_SECONDS = 5.0  # for a server's last events (usage, [DONE]) after the answer has ended
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ADVICE = {
    401: "check the API key (EVERLOOP_API_KEY)",
    403: "check the API key (EVERLOOP_API_KEY) and what it may use",
    404: "check the model's name (EVERLOOP_MODEL) and the base URL (EVERLOOP_BASE_URL, usually ending in /v1)",
}

_is_name = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch
_is_value = re.compile(r"[\t\x20-\x7e\x80-\xff]*").fullmatch


# --------------------------------------------------------------------------------------- addresses


class Origin(msgspec.Struct, frozen=True):
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
        raise ValueError("it has characters that are not allowed in a URL")
    if any(not 0 < len(label) < 64 for label in host.removesuffix(".").split(".")) and ":" not in host:
        raise ValueError("its host name is not valid")
    user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}" if parts.username else ""
    return Origin(parts.scheme, host, port, target, user)


# ---------------------------------------------------------------------------------- one connection


class ConnectionBroke(OSError):
    """The connection ended, or received something other than HTTP."""


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
    """A response: its head, and its body as it arrives. The caller reads it to the end or calls `leave` or `close`."""

    def __init__(self, connection: Connection, whole: bool = False) -> None:
        self.status = 0
        self.reason = ""
        self.headers: dict[str, str] = {}
        self.complete = False
        self.body: deque[bytes] = deque()  # parts that have not been read yet
        self._connection: Connection | None = connection
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._unread = False  # the rest is discarded
        self._whole = whole  # the reader is woken only for the whole body

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    async def read(self, deadline: float = math.inf) -> bytes:
        """Return all bytes of the body that have arrived since the last read; empty at its end."""
        data = b"".join(self.body) if await self.has_more(deadline) else b""
        self.body.clear()
        return data

    async def has_more(self, deadline: float = math.inf) -> bool:
        """Wait until a part of the body has arrived; return False at its end.

        Raises a TimeoutError if it waits until the deadline, a time of the event loop.
        """
        while not self.body:
            if self._size > READ_AHEAD_BYTES and self._connection is not None:
                self._connection.resume()
            self._size = 0
            if self._error is not None:
                raise self._error
            if self.complete:
                return False
            await self.wait(deadline)
        return True

    async def wait(self, deadline: float = math.inf) -> None:
        """Wait until more of the response has arrived."""
        self._waiter = asyncio.get_running_loop().create_future()
        if self._connection is not None:
            self._connection.set_deadline(deadline)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._connection is not None:
                self._connection.set_deadline(math.inf)

    def fail(self, error: Exception) -> None:
        """Make the current or the next read raise this error."""
        if self._error is None and not self.complete:
            self._error = error
            self._wake()

    def leave(self) -> None:
        """Discard the rest. The server gets a moment to end the response, so that the connection can be reused."""
        self._unread = True
        self.body.clear()
        if not self.complete and self._connection is not None:
            self._connection.resume()
            asyncio.get_running_loop().call_later(STREAM_END_SECONDS, self.close)

    def close(self) -> None:
        """Abort the connection at once."""
        if self._connection is not None:
            self._connection.abort()

    def _end(self) -> None:
        self.complete = True
        self._connection = None
        self.body = deque(self.body)  # exclude a second response to the request, which the parser may go on to read
        self._wake()

    def _grow(self, size: int) -> None:
        """Account for this many new bytes of the body."""
        if self._unread:
            self.body.clear()
            return
        self._size += size
        self._wake()
        if self._size > READ_AHEAD_BYTES and self._connection is not None:
            self._connection.pause()

    def _wake(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        enough = (
            self.complete or self._error is not None or self._size > READ_AHEAD_BYTES or self.status not in (0, 200)
        )
        if self._whole and not enough:
            return
        self._waiter.set_result(None)


class Connection(asyncio.BufferedProtocol):
    """One connection of a pool, with at most one request in progress."""

    def __init__(self, pool: Pool) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0  # when its last request ended
        self._pool = pool
        self._parser: httptools.HttpResponseParser  # of the request in progress
        self._response: Response | None = None
        self._head = 0  # bytes received since the last part of a body: the size of the head
        self._sent = False  # the whole request was written
        self._until_close = False  # the body ends when the connection does
        self._ended = False  # by the server
        self._tunnelling = False  # asking a proxy for a tunnel
        self._writable: asyncio.Future[None] | None = None
        self._poll = select.poll()
        self._deadline = math.inf  # of the request in progress, while something waits for it
        self._timer: asyncio.TimerHandle | None = None  # seldom rescheduled: checks the deadline when it fires
        self._timer_at = math.inf

    async def send(
        self, parts: Sequence[bytes], whole: bool = False, head: bytes = b"", deadline: float = math.inf
    ) -> Response | None:
        """Send a request; return when the response's head has arrived, or with `whole` all of it.

        Raises a TimeoutError at the deadline, a time of the event loop. Returns None if the server closed the idle
        connection just as the request was written: use another one.
        """
        if self.transport is None:
            raise ConnectionBroke("it has ended")
        response = self._response = Response(self, whole)
        self._parser = httptools.HttpResponseParser(self)
        self._head, self._sent = 0, False
        self.set_deadline(deadline)
        try:
            for block in _blocks(head or self._pool.head(parts), parts):
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
                await response.wait(deadline)
            return response
        except BaseException as error:
            if self._response is response:  # else it is complete, and the connection may serve another request
                self.abort()
            unanswered = isinstance(error, ConnectionBroke) and not self._head
            if unanswered and self.idle_since and not self._pool.is_closed:
                return None
            raise

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def silent(self) -> bool:
        """Whether the connection is open and has nothing to read: bytes that precede a request are not its response."""
        if self.transport is None or self.transport.is_closing():
            return False
        return not self._poll.poll(0)

    def set_deadline(self, deadline: float) -> None:
        """Fail the request in progress at this time of the event loop."""
        self._deadline = deadline
        if deadline < self._timer_at:
            self._set_timer(asyncio.get_running_loop(), deadline)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        self._stop_timer()
        self._timer, self._timer_at = loop.call_at(at, self._check_deadline, loop), at

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, math.inf

    def _check_deadline(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, self._timer_at = None, math.inf
        if self._deadline > loop.time():
            if self._deadline < math.inf:
                self._set_timer(loop, self._deadline)
        elif self._response is not None:
            self._response.fail(TimeoutError())
            self.resume_writing()  # the server may never read the request

    def pause(self) -> None:
        if self.transport is not None:
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    # callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._poll.register(transport.get_extra_info("socket"), select.POLLIN)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pool.buffer

    def buffer_updated(self, size: int) -> None:
        response = self._response
        if response is None or response.complete:  # no request is in progress
            self.abort()
            return
        self._head += size
        parts = len(response.body)
        try:
            self._parser.feed_data(self._pool.buffer[:size])
            if len(response.body) > parts:
                self._head = 1
                response._grow(size)
            elif self._head > MAX_HEAD_BYTES and not response.complete:
                self.give_up("the server's headers have no end")
        except httptools.HttpParserUpgrade:
            self.give_up("the server asked to switch protocols")
        except httptools.HttpParserError as error:
            self.give_up(f"the reply is not HTTP ({error})")

    def eof_received(self) -> None:
        self._ended = True

    def connection_lost(self, error: Exception | None) -> None:
        self.resume_writing()
        self._stop_timer()
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

    @property
    def on_body(self) -> Callable[[bytes], None]:
        """The parser's callback for each part of the body; a parser looks it up once, when it is made."""
        assert self._response is not None
        return self._response.body.append

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

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or not response.status or self._tunnelling:
            return
        reusable = self._parser.should_keep_alive() and self._sent and not self._until_close
        self._response, self._deadline = None, math.inf
        response._end()
        if reusable:
            self.resume()
            self._pool.give_back(self)
        else:
            self.abort()


def _blocks(head: bytes, parts: Sequence[bytes]) -> list[bytes]:
    """Return the blocks to write: adjacent small parts are joined, large ones are never copied."""
    if sum(map(len, parts)) <= JOIN_BYTES:
        return [b"".join([head, *parts])]
    blocks: list[bytes] = []
    small = [head]
    for part in parts:
        if len(part) > JOIN_BYTES:
            blocks += [b"".join(small), part]
            small = []
        else:
            small.append(part)
    return [*blocks, b"".join(small)] if small else blocks


# ---------------------------------------------------------------------------------------- the pool


class Pool:
    """A pool of connections to one origin, for one event loop."""

    def __init__(self, origin: Origin, headers: Mapping[str, str], proxy: str | None = None) -> None:
        self._origin = origin
        self._proxy = origin_of(proxy) if proxy else None
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._tls: ssl.SSLContext | None = None
        self.is_closed = False
        self._head = self._request_head(headers)
        # Shared by all connections: each read is parsed before anything else happens in the loop.
        self.buffer = memoryview(bytearray(READ_BYTES))

    async def take(self, connect_timeout: float) -> Connection:
        """Return a connection for one request: an idle one, or a new one."""
        return self._take_idle() or await self._connect(connect_timeout)

    def head(self, parts: Sequence[bytes]) -> bytes:
        """Return the head of a request with this body."""
        return b"%bContent-Length: %d\r\n\r\n" % (self._head, sum(map(len, parts)))

    def give_back(self, connection: Connection) -> None:
        if self.is_closed:
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
        self.is_closed = True
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
        if self.is_closed:
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
        response = await connection.send((), head=head)
        assert response is not None  # it was never idle
        if not 200 <= response.status < 300:
            raise ProxyRefused(proxy, response.status, response.reason)
        if connection.transport is None or response.body:
            raise NoConnection("the proxy did not open a tunnel")
        connection._response, connection._tunnelling = None, False
        loop = asyncio.get_running_loop()
        tls = await loop.start_tls(connection.transport, connection, self._tls, server_hostname=origin.host)  # type: ignore[arg-type]
        if tls is None:
            raise NoConnection("the connection ended during the TLS handshake")
        connection.transport = tls

    def _proxy_authorization(self) -> str:
        if self._proxy is None or not self._proxy.user:
            return ""
        return f"Proxy-Authorization: Basic {base64.b64encode(self._proxy.user.encode()).decode()}\r\n"

    def _request_head(self, headers: Mapping[str, str]) -> bytes:
        """Return a request's head without its length, which is the same for every request."""
        origin = self._origin
        plain_proxy = self._proxy is not None and origin.scheme == "http"
        lines = [f"POST {f'{origin}{origin.target}' if plain_proxy else origin.target} HTTP/1.1\r\n"]
        lines += [f"Host: {origin.authority}\r\n", self._proxy_authorization() if plain_proxy else ""]
        given = {name.lower(): (name, value) for name, value in headers.items()}  # the last duplicate wins
        if origin.user and "authorization" not in given:
            lines.append(f"Authorization: Basic {base64.b64encode(origin.user.encode()).decode()}\r\n")
        for key, (name, value) in given.items():
            if not _is_name(name) or key in FRAMING_HEADERS:
                raise ValueError(f"{name!r} cannot be a header of a request")
            if not _is_value(value):
                raise ValueError(f"the header {name} has a line end or another character that no header may have")
            lines.append(f"{name}: {value}\r\n")
        return "".join(lines).encode("latin-1")


def _reason(error: OSError) -> str:
    if isinstance(error, NoConnection | socket.gaierror) or not error.errno:
        return error.strerror or str(error) or "the connection was closed"
    return os.strerror(error.errno)


# ---------------------------------------------------------------------------------- the endpoint


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds to connect, until the first token, between two tokens, and for a whole call that is not streamed."""

    connect: float = 10
    first_token: float = 120
    token: float = 60
    total: float = 600


class Endpoint:
    """A model endpoint with one connection pool for each event loop, opened on first use and again after `close`."""

    def __init__(
        self, origin: Origin, headers: Mapping[str, str], timeouts: Timeouts, secret: str | None = None
    ) -> None:
        self.where = origin.authority
        self.timeouts = timeouts
        self._origin = origin
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
        self._secret = secret
        self._pools: dict[asyncio.AbstractEventLoop, Pool] = {}
        if secret and not (secret.isascii() and secret.isprintable() and " " not in secret):
            raise ConfigError(
                "the API key has a space, a line end or another character that no key has: set EVERLOOP_API_KEY to the "
                "key alone"
            )
        try:
            Pool(origin, self._headers)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    async def close(self) -> None:
        here = asyncio.get_running_loop()
        for loop in list(self._pools):
            pool = self._pools.pop(loop, None)
            if pool is None:
                continue
            if loop is here:
                pool.close()
                await asyncio.sleep(0)  # let the transports close
            elif not loop.is_closed():
                with suppress(RuntimeError):  # it was closed meanwhile
                    loop.call_soon_threadsafe(pool.close)

    async def fetch(self, body: Sequence[bytes], limit: int) -> bytes:
        """Send a request and read its whole answer, of up to `limit` bytes."""
        total = self.timeouts.total
        deadline = asyncio.get_running_loop().time() + total
        try:
            response = None
            while response is None:
                connection = await self._pool.take(min(self.timeouts.connect, total))
                response = await connection.send(body, whole=True, deadline=deadline)
            await self._check(response)
            return await self._read_whole(response, limit, deadline)
        except OSError as error:
            raise self._failure(error, f"gave no answer within {self.timeouts.total:g} s") from error

    async def stream(
        self, body: Sequence[bytes], answer: StreamedAnswer, limit: int
    ) -> AsyncGenerator[Delta | LLMResponse, None]:
        """Send a request and stream its answer; `limit` is the maximum bytes of a line or of an unstreamed answer."""
        clock = asyncio.get_running_loop().time
        timer = StreamTimer(self.timeouts, clock())
        try:
            async with asyncio.timeout(self.timeouts.first_token):
                response = None
                while response is None:
                    connection = await self._pool.take(self.timeouts.connect)
                    response = await connection.send(body)
                await self._check(response)
        except OSError as error:
            raise self._failure(error, timer.late()) from error
        if response.content_type.endswith(("json", "html")):  # a server that does not stream, or no model server
            if delta := feed_whole(answer, await self._fetch_rest(response, limit), self.where):
                yield delta
            yield answer.response()
            return
        events = EventReader(limit, timer)
        try:
            while not answer.over():
                try:
                    has_more = await response.has_more(timer.deadline(clock(), bool(answer.finish_reason)))
                except OSError as error:
                    if not answer.finish_reason:
                        raise self._failure(error, timer.late()) from error
                    has_more = False  # the answer has ended, and only its last events are missing
                for payload in events.read(response.body, clock()):
                    try:
                        delta = answer.feed(payload) if payload else None
                    except ProviderError:
                        if has_more or not answer.finish_reason:
                            raise
                        break  # an event that was cut off after the answer had ended
                    timer.on_data(clock(), answer.size())
                    if delta is not None:
                        yield delta
                    if answer.over():
                        break
                if not has_more:
                    break
        finally:
            if answer.ended:
                response.leave()
            else:
                response.close()
        if not (answer.ended or answer.finish_reason):
            raise ProviderError(f"the stream from {self.where} ended in the middle of the answer", retryable=True)
        yield answer.response()

    async def _check(self, response: Response) -> None:
        """Raise an error for a response that is not an answer."""
        if response.status != 200:
            try:
                raise await self._refusal(response)
            finally:
                response.close()
        if coding := coding_of(response):
            response.close()
            raise ProviderError(f"{self.where} compressed its answer ({one_line(coding, 40)}) though asked not to")

    @property
    def _pool(self) -> Pool:
        """The connection pool of the running event loop."""
        return self._pools.get(asyncio.get_running_loop()) or self._new_pool()

    def _new_pool(self) -> Pool:
        for loop in list(self._pools):
            if loop.is_closed():
                self._pools.pop(loop, None)
        try:
            pool = Pool(self._origin, self._headers, proxy_for(self._origin))
        except ValueError as error:
            raise ProviderError(f"the proxy for {self._origin} (HTTPS_PROXY, …) is not a valid URL: {error}") from None
        self._pools[asyncio.get_running_loop()] = pool
        return pool

    async def _fetch_rest(self, response: Response, limit: int) -> bytes:
        """Read the body of an open response that turned out not to be a stream."""
        try:
            async with asyncio.timeout(self.timeouts.total):
                return await self._read_whole(response, limit)
        except OSError as error:
            raise self._failure(error, f"gave no answer within {self.timeouts.total:g} s") from error

    async def _read_whole(self, response: Response, limit: int, deadline: float = math.inf) -> bytes:
        try:
            data = await read_up_to(response, limit, deadline)
        finally:
            response.close()
        if len(data) > limit:
            raise ProviderError(f"{self.where}: the answer is larger than {limit} bytes")
        return data

    async def _refusal(self, response: Response) -> ProviderError:
        """Return the error for a status other than 200, with the server's own message."""
        status, headers = response.status, response.headers
        if 300 <= status < 400:
            target = one_line(headers.get("location", "nowhere"))
            return ProviderError(
                f"{self.where}: HTTP {status}, moved to {target}: change the base URL (EVERLOOP_BASE_URL)",
                status=status,
            )
        try:
            async with asyncio.timeout(ERROR_SECONDS):
                data = b"" if coding_of(response) else (await read_up_to(response, MAX_ERROR_BYTES))[:MAX_ERROR_BYTES]
        except (
            ConnectionBroke,
            TimeoutError,
        ):  # it may answer before it has read the whole request: the status still counts
            data = b""
        error: Any = data.decode("utf-8", "replace")
        quota = False
        try:
            error = msgspec.json.decode(data)
            quota = error["error"]["code"] == "insufficient_quota"  # a 429 that a retry does not resolve
        except (msgspec.MsgspecError, ValueError, RecursionError, LookupError, TypeError):
            pass
        text = without_key(error_text(error) or one_line(response.reason) or "no reason given", self._secret)
        advice = f": {ADVICE[status]}" if status in ADVICE else ""
        return ProviderError(
            f"{self.where}: HTTP {status}: {text}{advice}",
            retryable=(status in RETRYABLE or status >= 500) and not quota,
            retry_after=retry_after(headers),
            status=status,
        )

    def _failure(self, error: Exception, late: str) -> ProviderError:
        """Convert a network error or a timeout to an error with a message for a person."""
        if isinstance(error, ConnectTimeout):
            return ProviderError(f"cannot reach {self._origin}: {error}", retryable=True)
        if isinstance(error, TimeoutError):
            return ProviderError(f"{self.where} {late}", retryable=True)
        if isinstance(error, ssl.SSLError):
            return ProviderError(f"no secure connection to {self._origin}: {one_line(str(error))}")
        if isinstance(error, ProxyRefused):
            return ProviderError(
                f"cannot reach {self._origin}: {one_line(str(error))}: check the proxy's address, user and password "
                "(HTTPS_PROXY)",
                retryable=error.status in RETRYABLE or error.status >= 500,
            )
        if isinstance(error, NoConnection):
            why = one_line(str(error))
            return ProviderError(f"cannot reach {self._origin}: {why}: is the server running?", retryable=True)
        reason = one_line(str(error) or type(error).__name__)
        return ProviderError(f"the connection to {self.where} broke: {reason}", retryable=True)


# -------------------------------------------------------------------------------- streamed answers


class StreamedAnswer(Protocol):
    """An answer that is still arriving. `ended` is set by its last event; `over` is also true once it is full."""

    finish_reason: str
    ended: bool

    def feed(self, payload: bytes) -> Delta | None: ...

    def over(self) -> bool: ...

    def size(self) -> int: ...

    def response(self) -> LLMResponse: ...


class StreamTimer:
    """The timeouts of a streamed answer: until its first token, and then from token to token.

    Comments, which a local server sends while it reads a long prompt, and pings, since a model may think silently,
    extend the wait up to a limit. So do chunks without content.
    """

    def __init__(self, timeouts: Timeouts, now: float) -> None:
        self._timeouts = timeouts
        self._started = self._grown = now  # when the answer last grew
        self._size = 0
        self._last = -math.inf  # when data last arrived, pings aside
        self._heard = False  # data has arrived since the last wait
        self._due = now + timeouts.first_token
        self._late = "sent no first token within {0.first_token:g} s"

    def deadline(self, now: float, has_finished: bool) -> float:
        """Return until when to wait; once the model has finished, that is only for the server's last events."""
        if self._heard:
            self._heard = False
            self._due = now + self._timeouts.token
            self._late = "stopped in the middle of the answer: nothing came for {0.token:g} s"
        return min(self._due, self._grown + LAST_EVENTS_SECONDS) if has_finished else self._due

    def on_data(self, now: float, size: int) -> None:
        """Record that data has arrived, and that the answer now has this size."""
        self._last = now
        if size > self._size:
            self._size, self._grown = size, now
        self._heard = now < self._grown + self._timeouts.total

    def on_comment(self, now: float) -> None:
        has_data = self._last > -math.inf
        if now < (self._last + self._timeouts.first_token if has_data else self._started + self._timeouts.total):
            self._extend(now)

    def on_ping(self, now: float) -> None:
        if now < self._last + self._timeouts.first_token:
            self._extend(now)

    def late(self) -> str:
        """Return what went wrong with an answer that missed its deadline."""
        return self._late.format(self._timeouts)

    def _extend(self, now: float) -> None:
        if (due := now + self._timeouts.token) > self._due:
            self._due, self._late = due, "sent keep-alives but no token: nothing came for {0.token:g} s"


class EventReader:
    """Reads the payloads of server-sent events from network chunks, and reports comments and pings to the `timer`.

    An unfinished line is buffered, up to `limit` bytes.
    """

    def __init__(self, limit: int, timer: StreamTimer) -> None:
        self._limit = limit
        self._timer = timer
        self._parts: list[bytes] = []
        self._size = 0
        self._first = True
        self._ping = False  # the next data belongs to a ping

    def read(self, chunks: deque[bytes], now: float) -> list[bytes]:
        """Consume the chunks, and return the payloads that they complete. No chunks mean the end of the stream, which
        completes the last line."""
        data = b"".join(chunks)
        chunks.clear()
        lines = data.split(b"\n")
        if self._parts and (len(lines) > 1 or not data):
            self._parts.append(lines[0])
            lines[0] = b"".join(self._parts)
            self._parts, self._size = [], 0
        if self._first and (len(lines) > 1 or not data):
            self._first, lines[0] = False, lines[0].removeprefix(BYTE_ORDER_MARK)
        if data and (tail := lines.pop()):
            self._parts.append(tail)
            self._size += len(tail)
            if self._size > self._limit:
                raise ProviderError(f"one line of the model's stream is longer than {self._limit} bytes")
        payloads: list[bytes] = []
        for line in lines:
            if line[:5] == b"data:":
                if self._ping:
                    self._timer.on_ping(now)
                else:
                    payloads.append(line[5:].strip())
            elif line[:1] == b":":
                self._timer.on_comment(now)
            else:
                self._ping = line[:6] == b"event:" and line[6:].strip() == b"ping"
        return payloads


def feed_whole(answer: StreamedAnswer, data: bytes, where: str) -> Delta | None:
    """Add a whole body. One that is not JSON usually means a wrong address."""
    data = data.removeprefix(BYTE_ORDER_MARK)
    if data.lstrip()[:1] != b"{":
        raise ProviderError(
            f"{where} answered with something that is not JSON (is the base URL right? it usually "
            f"ends in /v1): "
            f"{one_line(data[:300].decode('utf-8', 'replace'))}"
        )
    return answer.feed(data)


# ---------------------------------------------------------------------------- requests and headers


async def read_up_to(response: Response, limit: int, deadline: float = math.inf) -> bytes:
    """Read the body, and stop soon after `limit` bytes."""
    data = await response.read(deadline)
    if response.complete and not response.body:
        return data
    parts, size = [data], len(data)
    while size <= limit and (data := await response.read(deadline)):
        parts.append(data)
        size += len(data)
    return b"".join(parts)


def coding_of(response: Response) -> str:
    """Return the compression of the body, or "": requests ask for none, and none is supported."""
    for name in ("content-encoding", "transfer-encoding"):
        coding = response.headers.get(name, "").strip()
        if coding and coding.lower() not in ("identity", "chunked"):
            return coding
    return ""


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds the server asks to wait, in any of the three forms of the header."""
    seconds = math.nan
    try:
        if value := headers.get("retry-after-ms"):
            seconds = float(value) / 1000
        elif value := headers.get("retry-after"):
            seconds = float(value) if value[:1].isdigit() else _date(value) - time.time()
    except (ValueError, OverflowError):
        return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _date(text: str) -> float:
    from email.utils import parsedate_to_datetime  # a large package, and few servers send dates

    return parsedate_to_datetime(text).timestamp()


def endpoint_of(base_url: str, path: str) -> Origin:
    """Return the origin of a base URL with a path appended, unless the base URL ends with it."""
    try:
        origin = origin_of(base_url.strip())
    except ValueError:
        shown = re.sub(r"//[^/@]*@", "//***@", one_line(base_url))  # without its password
        raise ConfigError(f'base_url "{shown}" is not a URL: set EVERLOOP_BASE_URL to http://… or https://…') from None
    target, mark, query = origin.target.partition("?")
    target = target.rstrip("/")
    return replace(origin, target=(target if target.endswith(path) else target + path) + mark + query)


def proxy_for(origin: Origin) -> str | None:
    """Return the proxy that the environment names for a public host; None for this machine and its network."""
    host = origin.host
    try:
        public = ipaddress.ip_address(host).is_global
    except ValueError:
        public = "." in host and not host.endswith((".localhost", ".local", ".internal", ".lan"))
    if not public or not any(name.lower().endswith("_proxy") for name in os.environ):
        return None
    from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

    if proxy_bypass_environment(host):
        return None
    proxies = getproxies_environment()
    proxy: str = proxies.get(origin.scheme) or proxies.get("all") or ""
    if "://" not in proxy:
        return f"http://{proxy}" if proxy else None
    return proxy if proxy.startswith("http") else None

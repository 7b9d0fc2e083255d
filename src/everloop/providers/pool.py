"""Connections to one origin, used again and again: direct or through a proxy, with TLS where the origin has it."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import socket
import ssl
from collections.abc import Mapping, Sequence

import httptools

from ..threads import in_thread
from .origin import Origin, origin_of
from .wire import Connection, ConnectionBroke, ConnectTimeout, NoConnection, ProxyRefused, Response

AT_ONCE = 1 << 16  # bytes that are taken from a connection
IDLE_SECONDS = 30.0  # until an unused connection is no longer trusted
FRAMING = frozenset({"host", "content-length", "transfer-encoding"})  # what a request says by itself

_is_name = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch
_is_value = re.compile(r"[\t\x20-\x7e\x80-\xff]*").fullmatch


class Pool:
    """Connections to one origin, made in the loop that uses them."""

    def __init__(self, origin: Origin, headers: Mapping[str, str], proxy: str | None = None) -> None:
        self._origin = origin
        self._proxy = origin_of(proxy) if proxy else None
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._tls: ssl.SSLContext | None = None
        self._closed = False
        self._head = self._request_head(headers)
        # What comes over any of the connections is read from here before anything else happens in the loop.
        self.buffer = memoryview(bytearray(AT_ONCE))

    async def post(self, parts: Sequence[bytes], connect_timeout: float, whole: bool = False) -> Response:
        """Send a body; the answer's head has come when this returns, or all of it if the `whole` is wanted."""
        head = b"%bContent-Length: %d\r\n\r\n" % (self._head, sum(map(len, parts)))
        connection = self._take_idle()
        if connection is not None:
            try:
                return await connection.send(head, parts, whole)
            except ConnectionBroke:
                if connection._head or self._closed:  # an answer had begun, or none is wanted
                    raise
                # The server closed it just as we wrote: that happens to every idle connection once.
        connection = await self._connect(connect_timeout)
        return await connection.send(head, parts, whole)

    def give_back(self, connection: Connection) -> None:
        if self._closed:
            connection.abort()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """It has ended."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """End every connection; a request that is under way fails."""
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
            self._tls = await in_thread(ssl.create_default_context)  # it reads the machine's certificates
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
        """Ask the proxy for a way through to the origin, and speak TLS to the origin over it."""
        origin = self._origin
        where = f"{f'[{origin.host}]' if ':' in origin.host else origin.host}:{origin.port}"
        head = f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n{self._proxy_authorization()}\r\n".encode()
        connection._tunnelling = True  # its answer has no body, whatever its headers say
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
        """All of a request's head but its length, which is the same every time."""
        origin = self._origin
        plain_proxy = self._proxy is not None and origin.scheme == "http"
        lines = [f"POST {f'{origin}{origin.target}' if plain_proxy else origin.target} HTTP/1.1\r\n"]
        lines += [f"Host: {origin.authority}\r\n", self._proxy_authorization() if plain_proxy else ""]
        said = {name.lower(): (name, value) for name, value in headers.items()}  # each once, the last one wins
        if origin.user and "authorization" not in said:
            lines.append(f"Authorization: Basic {base64.b64encode(origin.user.encode()).decode()}\r\n")
        for key, (name, value) in said.items():
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

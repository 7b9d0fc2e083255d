"""HTTP for channels: a small client on the connections of `providers.http`, a WebSocket client, and a listener.

aiohttp is loaded only by the last two.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..providers.forms import FormFile, form_body, form_type, new_boundary
from ..providers.http import ConnectionBroke, Pool, origin_of, proxy_for, read_up_to, retry_after
from ..threads import in_thread
from .base import Later, Never, OutgoingFile

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

CONNECT_SECONDS = 10.0
DOWNLOAD_SECONDS = 120.0
UPLOAD_SECONDS = 300.0
MAX_REPLY = 16 * 1024 * 1024
MAX_BODY = 1024 * 1024  # of a request to the listener
MAX_FRAME = 16 * 1024 * 1024  # of a WebSocket
SOCKET_SECONDS = 20.0  # to connect
AGENT = "everloop"
Handle = Callable[["web.Request"], Awaitable["web.Response"]]


class TooLarge(OSError):
    """The reply is larger than the limit."""


class Reply(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def retry_after(self) -> float | None:
        """The number of seconds that the server asks to wait, if it does."""
        return retry_after(self.headers)


def header_bytes(value: str) -> bytes:
    """Return a header's raw bytes, which may not be valid text."""
    return value.encode("utf-8", "surrogateescape")


class HttpClient:
    """Sends requests to one origin. Raises `OSError` or `TimeoutError` if there is no answer."""

    def __init__(self, url: str) -> None:
        self._origin = origin_of(url)
        self._pool: Pool | None = None

    async def request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
        seconds: float,
        repeatable: bool = True,
        largest: int = MAX_REPLY,
    ) -> Reply:
        """Send a request to a path of the origin, and read the whole reply.

        If the connection ends before an answer, a `repeatable` request is sent again over another one.
        """
        if self._pool is None:
            self._pool = await in_thread(lambda: Pool(self._origin, {}, proxy_for(self._origin)))
        async with asyncio.timeout(seconds):
            response = None
            while response is None:
                connection = await self._pool.take(CONNECT_SECONDS)
                response = await connection.send(
                    (body,), whole=True, head=self._head(method, target, headers, len(body))
                )
                if response is None and not repeatable:  # the server may have handled it
                    raise ConnectionBroke("the server closed it")
            try:
                data = await read_up_to(response, largest)
            finally:
                if not response.complete:
                    response.close()
        if len(data) > largest:
            raise TooLarge(f"the reply is larger than {largest} bytes")
        return Reply(response.status, response.headers, data)

    async def download(self, target: str, headers: Mapping[str, str], limit: int) -> bytes:
        """Download a file, up to one byte more than the limit."""
        try:
            reply = await self.request("GET", target, headers, b"", DOWNLOAD_SECONDS, largest=limit)
        except TooLarge:
            return bytes(limit + 1)
        if reply.status in (408, 425, 429) or reply.status >= 500:
            raise OSError(f"HTTP {reply.status}")
        if reply.status != 200:
            raise Never(f"HTTP {reply.status}")
        return reply.body

    async def post(
        self, target: str, headers: Mapping[str, str], body: bytes, seconds: float, repeatable: bool = True
    ) -> Reply:
        """Send a POST request."""
        return await self.request("POST", target, headers, body, seconds, repeatable)

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
            await asyncio.sleep(0)  # let the transports close

    @property
    def origin(self) -> str:
        return str(self._origin)

    @property
    def target(self) -> str:
        """The path and query of the URL."""
        return self._origin.target

    def _head(self, method: str, target: str, headers: Mapping[str, str], size: int) -> bytes:
        through = f"{self._origin}" if self._origin.scheme == "http" and proxy_for(self._origin) else ""
        lines = [f"{method} {through}{target} HTTP/1.1", f"Host: {self._origin.authority}"]
        lines += [f"{name}: {value}" for name, value in {"User-Agent": AGENT, **headers}.items()]
        lines += ["Accept-Encoding: identity", f"Content-Length: {size}", "", ""]
        if any(re.search(r"[\r\n\0]", line) for line in lines):  # some servers treat each of them as a line end
            raise ValueError("a header contains a line end")
        head = "\r\n".join(lines)
        return head.encode("latin-1", "replace")


def form_of(fields: Mapping[str, str], files: Mapping[str, OutgoingFile]) -> tuple[str, bytes]:
    """Return the content type and the body of a form with files."""
    boundary = new_boundary()
    given = {name: FormFile(file.name, file.type, file.data) for name, file in files.items()}
    return form_type(boundary), form_body(fields, given, boundary)


def _client_for(url: str, hosts: Sequence[str], home: HttpClient) -> HttpClient:
    """Return a client for an address that a network sent: HTTPS at one of its own hosts, or the API's server."""
    try:
        origin = origin_of(url)
    except ValueError:
        raise Never("no address of a file") from None
    own = str(origin) == home.origin
    if not own and (origin.scheme != "https" or not f".{origin.host}".endswith(tuple(hosts))):
        raise Never("the file is not at the network itself")
    return HttpClient(url)


async def download_from(url: str, hosts: Sequence[str], home: HttpClient, limit: int, token: str = "") -> bytes:
    """Download a file from an address that the network sent."""
    client = _client_for(url, hosts, home)
    try:
        return await client.download(client.target, {"Authorization": f"Bearer {token}"} if token else {}, limit)
    finally:
        await client.close()


async def upload_to(url: str, hosts: Sequence[str], home: HttpClient, file: OutgoingFile) -> None:
    """Upload a file to an address that the network sent. Repeating it is harmless."""
    client = _client_for(url, hosts, home)
    try:
        reply = await client.post(client.target, {"Content-Type": file.type}, file.data, UPLOAD_SECONDS)
    finally:
        await client.close()
    if not 200 <= reply.status < 300:
        raise Later(reply.retry_after or 5.0, f"upload: HTTP {reply.status}")


# ---------------------------------------------------------------------------------------------------- WebSockets


class Closed(OSError):
    """The connection was closed; `code` is the server's reason, if it gave one."""

    def __init__(self, code: int | None, reason: str = "") -> None:
        super().__init__(f"the server closed the connection ({code or 'without a reason'}) {reason}".strip())
        self.code = code


class WebSocket:
    """A connection with one JSON text per frame."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def receive(self) -> bytes:
        """Return the next text; raises `Closed` at the end."""
        from aiohttp import WSMsgType

        while True:
            frame = await self._socket.receive()
            if frame.type is WSMsgType.TEXT:
                return str(frame.data).encode()
            if frame.type is not WSMsgType.BINARY:
                raise Closed(self._socket.close_code, str(frame.extra or ""))

    async def send(self, value: Any) -> None:
        await self._socket.send_str(msgspec.json.encode(value).decode())

    async def close(self, code: int = 1000) -> None:
        await self._socket.close(code=code)


@asynccontextmanager
async def connected(url: str, *, heartbeat: float | None = None) -> AsyncIterator[WebSocket]:
    """Connect. With a `heartbeat`, the connection is closed if a ping is not answered within that many seconds."""
    aiohttp = await in_thread(import_module, "aiohttp")
    async with aiohttp.ClientSession(trust_env=True) as session:
        async with asyncio.timeout(SOCKET_SECONDS):
            socket = await session.ws_connect(
                url,
                heartbeat=heartbeat,
                max_msg_size=MAX_FRAME,
                timeout=aiohttp.ClientWSTimeout(ws_close=2.0),
            )
        try:
            yield WebSocket(socket)
        finally:
            await socket.close()


# ---------------------------------------------------------------------------------------------------- a listener


@asynccontextmanager
async def listening(host: str, port: int, path: str, handle: Handle, largest: int = MAX_BODY) -> AsyncIterator[int]:
    """Serve POST requests to a path with `handle`, and yield the port; 0 picks a free one."""
    web = await in_thread(import_module, "aiohttp.web")
    app = web.Application(client_max_size=largest)
    app.router.add_post("/" + path.strip("/"), handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, reuse_address=True)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()

"""MCP servers with URLs: the SDK's streamable HTTP over a client with limits, which records failures.

To the SDK, every refusal by a server is the same error, and a broken connection ends all open calls. Here each call has
an `Exchange` that records the HTTP status or the broken connection, and only that call fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

from ...config import McpServer
from ...threads import in_thread
from .limits import MAX_MESSAGE, address_of

CLOSE_SECONDS = 2.0  # for telling the server that the session is over
# by which HTTP timeouts exceed a call's: if HTTP gave up first, the server would not be told to stop
SPARE_SECONDS = 10.0
_BROKEN = 599  # stands in for a missing status: no server sends it


@dataclass(slots=True)
class Exchange:
    """The HTTP outcome of the last request sent for a call."""

    status: int = 0
    problem: str = ""  # why there was no response

    def describe(self) -> str:
        """Describe why the request failed and what to do, if HTTP is the reason; "" otherwise."""
        status = self.status
        if self.problem or status < 400:
            return self.problem
        said = f"answered {status} {_phrase(status)}".rstrip()
        if status in (401, 403):
            return f"{said}: check the token in its headers and what that token may do"
        if status in (404, 405):
            return f"{said}: check its url"
        if status == 429 or status >= 500:
            return f"{said}: it has a problem of its own or is too busy, try again later"
        return said


exchange: ContextVar[Exchange | None] = ContextVar("everloop_mcp_exchange", default=None)


class Endpoint:
    """An HTTP connection to a server. `ended` is set when it is to end; each request is independent."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.ended = asyncio.Event()
        self.problem = ""

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Any]:
        """Yield the streams of messages from and to the server."""
        async with (
            await in_thread(self._client) as client,  # loading the certificates takes a while
            streamable_http_client(self.server.url, http_client=client, max_sse_event_size=MAX_MESSAGE) as streams,
        ):
            try:
                yield streams
            finally:
                self.ended.set()

    def describe_end(self) -> str:
        return self.problem or "the connection was closed"

    def details(self) -> str:
        return ""

    def _client(self) -> httpx2.AsyncClient:
        server = self.server
        # No proxy and no .netrc from the environment: data is sent only where the configuration says.
        return httpx2.AsyncClient(
            transport=_Limited(httpx2.AsyncHTTPTransport(trust_env=False), address_of(server.url)),
            headers={**server.headers, "accept-encoding": "identity"},
            timeout=httpx2.Timeout(server.timeout + SPARE_SECONDS, connect=server.connect_timeout),
            trust_env=False,
        )


class _Limited(httpx2.AsyncBaseTransport):
    """A transport that limits the size of responses and converts failures to responses."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, address: str) -> None:
        self._inner = inner
        self._address = address

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        note = (exchange.get() if request.method == "POST" else None) or Exchange()
        note.status, note.problem = 0, ""
        timeout = dict(request.extensions.get("timeout", {}))
        if request.method == "GET":  # waits for the server's messages, however long that takes
            timeout["read"] = None
        elif request.method == "DELETE":
            timeout = dict.fromkeys(timeout, CLOSE_SECONDS)
        request.extensions = {**request.extensions, "timeout": timeout}
        try:
            response = await self._inner.handle_async_request(request)
            note.status = response.status_code
            if response.headers.get("content-encoding", "identity") != "identity":
                await response.aclose()
                raise _Refused("compresses its answers although it was asked not to")
            if response.status_code < 400 and response.headers.get("content-type", "").startswith("text/event-stream"):
                return response  # its events have their own size limit
            return await _whole(response)
        except _Refused as error:
            note.problem = str(error)
        except httpx2.TimeoutException:
            note.problem = f"did not answer in time at {self._address}"
        except httpx2.TransportError as error:
            note.problem = f"cannot be reached at {self._address}: {str(error) or type(error).__name__}"
        return httpx2.Response(_BROKEN, request=request)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Refused(Exception):
    """A response that is not read."""


async def _whole(response: httpx2.Response) -> httpx2.Response:
    """Return the response with its body read, so that it cannot break while the SDK reads it."""
    body = bytearray()
    try:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        async for part in response.stream:
            body += part
            if len(body) > MAX_MESSAGE:
                raise _Refused(f"sent an answer of more than {MAX_MESSAGE >> 20} MB")
    finally:
        await response.aclose()
    headers = [(name, value) for name, value in response.headers.raw if name.lower() != b"transfer-encoding"]
    return httpx2.Response(response.status_code, headers=headers, content=bytes(body), extensions=response.extensions)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""

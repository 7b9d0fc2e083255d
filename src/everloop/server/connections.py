"""HTTP connections: listening sockets, per-connection limits, and the guard in front of the application."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import resource
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from ..errors import ConfigError
from ..messages import encode_json
from . import errors
from .errors import ApiError
from .guard import REQUEST_ID, Guard, Handler, new_request_id
from .origins import Binding

log = logging.getLogger("everloop.server")

IDLE_SECONDS = 75.0  # longer than proxies keep a connection open, so that the proxy closes it
HEAD_SECONDS = 15.0
SEND_SECONDS = 60.0
CANCEL_SECONDS = 5.0  # for a cancelled request to finish
LINGER_SECONDS = 2.0  # for a refused client to finish sending and read the response
IDLE_CONNECTIONS = 1_000  # in addition to those with a running request
OTHER_FILES = 256  # files that the process opens in addition to its connections


def connection_limit(requests: int) -> int:
    """Return how many connections may be open if this many requests may run, each with a connection to the model.

    Raises the limit on open files as far as needed and allowed: without a free descriptor no client can connect and no
    store can be opened.
    """
    wanted = requests + IDLE_CONNECTIONS
    needed = wanted + requests + OTHER_FILES
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        limit = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    return wanted if limit == resource.RLIM_INFINITY or limit >= needed else max((limit - OTHER_FILES) // 2, 16)


class Runner(web.AppRunner):
    """aiohttp's runner for an application behind a guard: no request bypasses the guard."""

    def __init__(
        self,
        app: web.Application,
        guard: Guard,
        *,
        shutdown_timeout: float = 60.0,
        idle_seconds: float = IDLE_SECONDS,
        head_seconds: float = HEAD_SECONDS,
        send_seconds: float = SEND_SECONDS,
        connections: int = IDLE_CONNECTIONS,
        admit: Handler | None = None,
    ) -> None:
        """`admit` receives requests instead of this guard, and passes each one on to this or another guard."""
        super().__init__(app, shutdown_timeout=shutdown_timeout)
        self._guard = guard
        self._admit = admit
        self._most = connections
        self._limits = (head_seconds, send_seconds)
        self._idle_seconds = idle_seconds
        app.middlewares.insert(0, guard.read_body)
        app.on_response_prepare.append(guard.add_headers)

    async def listen(self, binding: Binding, port: int, flag: str) -> list[str]:
        """Open the listening sockets, all on one port, and return their URLs.

        An error names the flag that sets the port.
        """
        await self.setup()
        for address in binding.addresses:
            try:
                site = web.TCPSite(self, address, port, reuse_address=True, backlog=1024)
                await site.start()
            except (OSError, OverflowError) as error:
                await self.cleanup()
                why = _reason(error)
                raise ConfigError(f"cannot listen on {address} port {port} ({why}): name another with {flag}") from None
            port = port or self.addresses[0][1]  # the same port on every address
        return [_url(*address[:2]) for address in self.addresses]

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        admit = functools.partial(self._guard.admit, handler=made.request_handler)
        self.admit: Handler = admit
        return _Server(
            self._guard,
            self._limits,
            self._most,
            self._admit or admit,
            request_factory=made.request_factory,
            handler_cancellation=True,
            keepalive_timeout=self._idle_seconds,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,  # compressed bodies are refused: a few bytes must not expand to gigabytes
            access_log=None,
        )

    def hurry(self) -> None:
        """Cancel the requests that are still running during cleanup."""
        if isinstance(self.server, _Server):
            self.server.hurry()


class _Server(web.Server):
    def __init__(
        self, guard: Guard, limits: tuple[float, float], connections: int, handler: Any, **options: Any
    ) -> None:
        super().__init__(handler, **options)
        self._most = connections
        self._make = functools.partial(Connection, self, guard, limits, loop=asyncio.get_running_loop())

    def __call__(self) -> web.RequestHandler:
        return self._make(**self._kwargs)

    def has_room(self, newcomer: Connection) -> bool:
        """Return whether a new connection may stay.

        At the limit, the oldest idle connection is closed to make room, so that a client that opens connections and
        sends nothing cannot lock out others.
        """
        if len(self._connections) <= self._most:
            return True
        for other in self._connections:
            if isinstance(other, Connection) and other is not newcomer and other.is_idle():
                other.force_close()
                return True
        return False

    def hurry(self) -> None:
        for connection in self._connections:
            if isinstance(connection, Connection):
                connection.end()


class Connection(web.RequestHandler):
    """A client's connection, with two timeouts that aiohttp lacks.

    They limit how long the head of a request takes to arrive, and how long the client takes to read the response.
    """

    __slots__ = ("_guard", "_head_seconds", "_head_timer", "_send_seconds", "_send_timer", "_server")

    def __init__(self, manager: _Server, guard: Guard, limits: tuple[float, float], **options: Any) -> None:
        super().__init__(manager, **options)
        self._server = manager
        self._guard = guard
        self._head_seconds, self._send_seconds = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._server.has_room(self) and self.transport is not None:
            self.transport.write(TOO_MANY)
            self.force_close()

    def data_received(self, data: bytes) -> None:
        if self._head_timer is None and self.is_idle():
            self._head_timer = self._loop.call_later(self._head_seconds, self.force_close)
        super().data_received(data)
        if self._head_timer is not None and not self.is_idle():
            self._head_timer.cancel()
            self._head_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_timer = self._loop.call_later(self._send_seconds, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """Wait for the running request, and cancel it after the timeout.

        aiohttp alone would wait for the timeout a second time after cancelling. Its own timer must fire later: if both
        fired together, the request could not finish cleanly.
        """
        ends = self._loop.call_later(timeout or 0.0, self.end)
        try:
            await super().shutdown((timeout or 0.0) + CANCEL_SECONDS)
        finally:
            ends.cancel()

    def end(self) -> None:
        """Cancel the running request, if there is one."""
        if self._task_handler is not None:
            self._task_handler.cancel()

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in (self._head_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the response if aiohttp cannot parse a request, or if an error was raised outside of the guard."""
        if REQUEST_ID not in request:
            request[REQUEST_ID] = new_request_id()
        if status < 500:
            log.debug("invalid HTTP request", exc_info=exc)
        elif request.writer.output_size == 0:
            log.error("request %s failed", request[REQUEST_ID], exc_info=exc)
        return self._guard.refusal(request, _error_for(status, exc, request[REQUEST_ID]), close=True)

    def is_idle(self) -> bool:
        """Return whether no request is running: the connection waits for the head of one."""
        return self._waiter is not None and not self._waiter.done()

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def _reason(error: OSError | OverflowError) -> str:
    """Return the system's words for an error; asyncio's repeat the address."""
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return (getattr(error, "strerror", None) or str(error)).rstrip(".")


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _too_many() -> bytes:
    """Return the response to a connection over the limit, sent before anything is read."""
    error = errors.unavailable("the server has as many connections as it can handle; try again soon", 1.0)
    body = encode_json(error.body())
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


TOO_MANY = _too_many()


def _error_for(status: int, exc: BaseException | None, id: str) -> ApiError:
    if isinstance(exc, LineTooLong):
        return ApiError(431, "the request's headers are too large", code="headers_too_large")
    return errors.bad_request("this is not a valid HTTP request") if status < 500 else errors.internal_error(id)

"""How the server keeps its connections: every request through the door, and no client for longer than it is worth."""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from ..messages import encode_json
from . import errors
from .errors import ApiError
from .guard import REQUEST_ID, Door, new_request_id

log = logging.getLogger("everloop.server")

IDLE_SECONDS = 75.0  # longer than proxies keep a connection, so that they are the ones who end it
HEAD_SECONDS = 15.0
SEND_SECONDS = 60.0
LINGER_SECONDS = 2.0  # in which a client that is told no may finish sending, and read it
IDLE_PLACES = 1_000  # connections on which nothing is asked, besides the requests at once
OTHER_FILES = 256  # that the process has open besides its connections


def room_for(requests: int) -> int:
    """How many connections may be open where so many requests may run, each with another one to the model.

    The limit of open files that the system sets is raised as far as that needs and it may be: without a file left
    nobody gets in, and no store can be opened.
    """
    wanted = requests + IDLE_PLACES
    needed = wanted + requests + OTHER_FILES
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        limit = needed if most == resource.RLIM_INFINITY else min(needed, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    return wanted if limit == resource.RLIM_INFINITY or limit >= needed else max((limit - OTHER_FILES) // 2, 16)


class Runner(web.AppRunner):
    """aiohttp's runner for an application behind a door: nothing of the application is reached around it."""

    def __init__(
        self,
        app: web.Application,
        door: Door,
        *,
        shutdown_timeout: float = 60.0,
        idle_seconds: float = IDLE_SECONDS,
        head_seconds: float = HEAD_SECONDS,
        send_seconds: float = SEND_SECONDS,
        places: int = IDLE_PLACES,
    ) -> None:
        super().__init__(app, shutdown_timeout=shutdown_timeout)
        self._door = door
        self._places = places
        self._limits = (head_seconds, send_seconds)
        self._idle_seconds = idle_seconds
        app.middlewares.insert(0, door.read_body)
        app.on_response_prepare.append(door.dress)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        admit = functools.partial(self._door.admit, handler=made.request_handler)
        return _Server(
            self._door,
            self._limits,
            self._places,
            admit,
            request_factory=made.request_factory,
            handler_cancellation=True,
            keepalive_timeout=self._idle_seconds,
            lingering_time=LINGER_SECONDS,
            auto_decompress=False,  # what is compressed is refused: a few bytes must not become gigabytes
            access_log=None,
        )

    def hurry(self) -> None:
        """While it is cleaned up: end the requests that are still under way."""
        if isinstance(self.server, _Server):
            self.server.hurry()


class _Server(web.Server):
    def __init__(self, door: Door, limits: tuple[float, float], places: int, handler: Any, **options: Any) -> None:
        super().__init__(handler, **options)
        self._places = places
        self._make = functools.partial(Connection, self, door, limits, loop=asyncio.get_running_loop())

    def __call__(self) -> web.RequestHandler:
        return self._make(**self._kwargs)

    def has_room(self, newcomer: Connection) -> bool:
        """Whether one more may stay. Where all places are taken, the oldest that asks for nothing gives way: whoever
        opens connections and is silent keeps nobody out."""
        if len(self._connections) <= self._places:
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
    """One client's connection.

    aiohttp ends one that is idle. What it has no limit for: a head that comes byte by byte, and a client that does not
    read what it is sent.
    """

    __slots__ = ("_door", "_head_seconds", "_head_timer", "_send_seconds", "_send_timer", "_server")

    def __init__(self, manager: _Server, door: Door, limits: tuple[float, float], **options: Any) -> None:
        super().__init__(manager, **options)
        self._server = manager
        self._door = door
        self._head_seconds, self._send_seconds = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._server.has_room(self) and self.transport is not None:
            self.transport.write(FULL)
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
        """Let the request that runs come to its end; after this time it is ended. aiohttp alone would then wait as long
        once more for one that it has only told to end."""
        ends = self._loop.call_later(timeout or 0.0, self.end)
        try:
            await super().shutdown(timeout)
        finally:
            ends.cancel()

    def end(self) -> None:
        """End the request that runs, if there is one."""
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
        """What aiohttp says for itself, when it cannot read a request or its handler failed outside of the door."""
        if REQUEST_ID not in request:
            request[REQUEST_ID] = new_request_id()
        if status < 500:
            log.debug("a request that is not valid HTTP", exc_info=exc)
        elif request.writer.output_size == 0:
            log.error("request %s failed", request[REQUEST_ID], exc_info=exc)
        return self._door.refusal(request, _worded(status, exc, request[REQUEST_ID]), close=True)

    def is_idle(self) -> bool:
        """Whether nothing is asked on it: the head of a request is waited for."""
        return self._waiter is not None and not self._waiter.done()

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


def _full() -> bytes:
    """What a connection gets that there is no place for, before anything is read of it."""
    error = errors.unavailable("the server has as many connections as it can keep; try again soon", 1.0)
    body = encode_json(error.body())
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


FULL = _full()


def _worded(status: int, exc: BaseException | None, id: str) -> ApiError:
    if isinstance(exc, LineTooLong):
        return ApiError(431, "the request's headers are too large", code="headers_too_large")
    return errors.bad_request("this is not a valid HTTP request") if status < 500 else errors.internal_error(id)

"""The base of the fake model servers: queued replies, scripts in model names, and broken networks."""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import msgspec
from aiohttp import web

from ..messages import encode_json
from ..providers.base import ToolCallRequest
from .replies import Reply, follow_script, read_state, written
from .scripted import words

MAX_REQUEST = 1 << 28


@dataclass(slots=True)
class Seen:
    """One request as received by the server."""

    time: float
    model: str
    stream: bool
    messages: int
    marker: str
    round: int
    problems: list[str]
    body: dict[str, Any] | None = None
    raw: bytes = b""  # the body, verbatim
    headers: dict[str, str] = field(default_factory=dict)
    gone: bool = False  # the client closed the connection before the end of the answer


class FakeServer:
    """A real HTTP server on a free loopback port, as an async context manager; `base_url` is set while it runs.

    Each request takes the next queued reply; without one, the model's name decides. `requests` lists every request
    received; one that breaks the API's contract gets a 400 that names the problem. A subclass implements one API.
    """

    root = ""  # path prefix in the base URL
    path = ""  # path of requests

    def __init__(self, *, port: int = 0, keep_bodies: bool = True) -> None:
        self.requests: list[Seen] = []
        self.replies: deque[Reply] = deque()
        self.base_url = ""
        self._port = port
        self._keep_bodies = keep_bodies
        self._runner: web.AppRunner | None = None
        self._clients: set[Any] = set()

    # implemented by subclasses

    def check(self, body: dict[str, Any]) -> list[str]:
        """Return the problems of a request, one line each."""
        raise NotImplementedError

    def plain(self, body: dict[str, Any]) -> list[Any]:
        """Return the messages in OpenAI's format, as far as needed to determine the state of the turn."""
        raise NotImplementedError

    def offered(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the argument schema of each tool."""
        raise NotImplementedError

    def error(self, message: str, status: int = 400, code: str | None = None) -> Any:
        """Return the body of an error."""
        raise NotImplementedError

    def events(self, reply: Reply, tokens: list[str], body: dict[str, Any], size: int) -> list[bytes]:
        """Return an answer as a stream of chunks; the first one only marks the start."""
        raise NotImplementedError

    def whole(self, reply: Reply, tokens: list[str], body: dict[str, Any], size: int) -> Any:
        """Return the same answer as a single body."""
        raise NotImplementedError

    def models(self) -> Any:
        """Return the list of models."""
        raise NotImplementedError

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add further paths of the API."""

    def refuse(self, request: web.Request) -> web.Response | None:
        """Return the response to a request that is refused before it is parsed."""
        return None

    # scripting by tests

    def reply(self, text: str, **options: Any) -> None:
        """Answer the next request with a text; `options` are further fields of `Reply`."""
        self.replies.append(Reply(text, **options))

    def calls(self, *calls: ToolCallRequest, **options: Any) -> None:
        self.replies.append(Reply(calls=list(calls), **options))

    def fail(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        """Refuse the next request; `body` is a text for the API's error format, or bytes or JSON to send verbatim."""
        if body is None or isinstance(body, str):
            body = self.error(body or "the server was told to fail", status)
        self.replies.append(Reply(status=status, body=body, headers=headers or {}))

    def cut(self, after_chunks: int, text: str = "cut in the middle of it", **options: Any) -> None:
        """Break the connection after this many chunks of the answer (not counting the role's chunk)."""
        self.replies.append(Reply(text, cut_after=after_chunks, **options))

    def hang(self, seconds: float, after_chunks: int = 0, text: str = "late", **options: Any) -> None:
        """Stall for this long, before the answer or after this many chunks of it."""
        if not after_chunks:
            self.replies.append(Reply(text, delay=seconds, **options))
        else:
            self.replies.append(Reply(text, hang_after=after_chunks, hang=seconds, **options))

    def raw(self, data: bytes, *, content_type: str = "text/event-stream", piece: int = 0, **options: Any) -> None:
        """Answer the next request with these bytes."""
        self.replies.append(Reply(raw=data, headers={"Content-Type": content_type}, piece=piece, **options))

    def load(self, lines: str) -> None:
        """Queue replies from JSON lines, each an object with the fields of `Reply`."""
        for line in lines.splitlines():
            if line.strip():
                self.replies.append(msgspec.json.decode(line, type=Reply))

    @property
    def connections(self) -> int:
        """The number of connections that requests have used."""
        return len(self._clients)

    @property
    def invalid(self) -> int:
        """The number of requests whose conversation broke the contract."""
        return sum(1 for request in self.requests if request.problems)

    # serving

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=MAX_REQUEST)
        app.router.add_post(self.path, self._take)
        app.router.add_get("/v1/models", self._models)
        self.add_routes(app.router)
        app.router.add_get("/_log", self._log)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}{self.root}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return as_json(self.models())

    async def _log(self, request: web.Request) -> web.Response:
        return as_json([asdict(replace(seen, body=None, raw=b"", headers={})) for seen in self.requests])

    async def _take(self, request: web.Request) -> web.StreamResponse:
        self._clients.add(request.transport.get_extra_info("peername") if request.transport else None)
        raw = await request.read()
        if (refused := self.refuse(request)) is not None:
            return refused
        try:
            body = msgspec.json.decode(raw, type=dict[str, Any])
        except msgspec.DecodeError as error:
            return as_json(self.error(f"the body is not JSON: {error}"), 400)
        messages = body.get("messages") or []
        marker, round = read_state(self.plain(body))
        seen = Seen(
            time.time(), str(body.get("model")), bool(body.get("stream")), len(messages), marker, round,
            self.check(body), body if self._keep_bodies else None, raw if self._keep_bodies else b"",
            dict(request.headers),
        )  # fmt: skip
        self.requests.append(seen)
        if seen.problems:
            return as_json(self.error("invalid conversation: " + "; ".join(seen.problems)), 400)
        try:
            reply = self.replies.popleft() if self.replies else self._scripted(body, marker, round)
        except LookupError as error:
            return as_json(self.error(str(error), 404, "model_not_found"), 404)
        except ValueError as error:
            return as_json(self.error(str(error)), 400)
        try:
            return await self._answer(request, reply, body, len(raw))
        except (asyncio.CancelledError, ConnectionError):
            seen.gone = True
            raise

    def _scripted(self, body: dict[str, Any], marker: str, round: int) -> Reply:
        return follow_script(str(body.get("model")), self.offered(body), len(body["messages"]), marker, round)

    async def _answer(self, request: web.Request, reply: Reply, body: dict[str, Any], size: int) -> web.StreamResponse:
        if reply.delay:
            await asyncio.sleep(reply.delay)
        if reply.status != 200 or reply.body is not None:
            if isinstance(reply.body, bytes):
                return web.Response(body=reply.body, status=reply.status, headers=reply.headers)
            return as_json(reply.body, reply.status, reply.headers)
        if reply.raw is not None:
            return await _send(request, reply, _cut_up(reply.raw, reply.piece), first=1)
        tokens = reply.tokens if reply.tokens is not None else words(reply.text)
        if body.get("stream"):
            return await _send(request, reply, self.events(reply, tokens, body, size), first=0)
        await asyncio.sleep(reply.token_delay * written(reply, tokens))
        return await _send_whole(request, reply, self.whole(reply, tokens, body, size))


async def _send(request: web.Request, reply: Reply, parts: list[bytes], *, first: int) -> web.StreamResponse:
    """Write a stream, with any configured breakage; the first part has this number."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **reply.headers})
    await response.prepare(request)
    for count, part in enumerate(parts, start=first):
        await response.write(part)
        if count == reply.cut_after:
            await asyncio.sleep(0.01)  # lets the client receive what was written before
            assert request.transport is not None
            request.transport.abort()
            return response
        if count == reply.hang_after:
            await asyncio.sleep(reply.hang)
        if reply.token_delay and count:
            await asyncio.sleep(reply.token_delay)
        elif reply.piece:
            await asyncio.sleep(0)
    await response.write_eof()
    return response


async def _send_whole(request: web.Request, reply: Reply, body: Any) -> web.StreamResponse:
    if reply.cut_after is None and reply.hang_after is None:
        return as_json(body, headers=reply.headers)
    data = encode_json(body)
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(data))})
    await response.prepare(request)
    await response.write(data[: len(data) // 2])
    await asyncio.sleep(reply.hang)
    assert request.transport is not None
    request.transport.abort()
    return response


def as_json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=encode_json(value), status=status, headers=headers, content_type="application/json")


def _cut_up(data: bytes, piece: int) -> list[bytes]:
    return [data[at : at + piece] for at in range(0, len(data), piece)] if piece else [data]


async def serve(server: FakeServer, script: str = "") -> None:
    """Run until the process is told to stop; the first line printed is the base URL."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with server:
        server.load(script)
        print(server.base_url, flush=True)
        await stop.wait()


def run(kind: type[FakeServer], name: str, description: str, arguments: Sequence[str] | None = None) -> int:
    """Run such a server as a program."""
    parser = argparse.ArgumentParser(prog=f"python -m everloop.testing.{name}", description=description)
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes a free one")
    parser.add_argument("--script", type=Path, help="a file of replies to give first, one JSON object per line")
    options = parser.parse_args(arguments)
    script = options.script.read_text() if options.script else ""
    asyncio.run(serve(kind(port=options.port, keep_bodies=False), script))
    return 0

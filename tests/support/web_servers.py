"""Shared by the tests of the web tools: servers on loopback that misbehave on demand and count connections, and the
tools.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from everloop.log import Call
from everloop.tools.base import Plan
from everloop.tools.context import CallContext
from everloop.tools.registry import ToolRegistry
from everloop.tools.web.web import WebSettings, web_tools

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes = b"", kind: str = "text/plain", status: int = 200, **headers: str) -> bytes:
    """A complete HTTP response; `_` in a header's name is `-`."""
    lines = [f"HTTP/1.1 {status} Fine", f"Content-Type: {kind}"] if kind else [f"HTTP/1.1 {status} Fine"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def redirect(location: str, status: int = 302) -> bytes:
    return answer(status=status, Location=location)


@dataclass
class Server:
    """A server; `answers` by path, `connections` and `requests` in order of arrival."""

    port: int = 0
    answers: dict[str, Answer] = field(default_factory=dict)
    connections: int = 0
    requests: list[str] = field(default_factory=list)  # complete request heads

    @property
    def paths(self) -> list[str]:
        return [head.split(" ", 2)[1] for head in self.requests]

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head.decode("latin-1"))
            path = self.requests[-1].split(" ", 2)[1]
            found = self.answers.get(path, self.answers.get("*", answer(b"found nothing", status=404)))
            if isinstance(found, bytes):
                writer.write(found)
                await writer.drain()
            else:
                await found(writer)
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


@asynccontextmanager
async def serving(
    answers: dict[str, Answer] | None = None, tls: ssl.SSLContext | None = None, hosts: tuple[str, ...] = ("127.0.0.1",)
) -> AsyncIterator[Server]:
    """A server that runs as long as the block, on one port of all the hosts."""
    server = Server(answers=answers or {})
    async with _listening(server, server.talk, tls, hosts):
        yield server


@asynccontextmanager
async def proxy_to(server: Server) -> AsyncIterator[Server]:
    """A proxy that leads every tunnel to one server, whatever its target; `requests` has the targets."""
    proxy = Server()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        proxy.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        from_server, to_server = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            await asyncio.gather(_pipe(reader, to_server), _pipe(from_server, writer))
        finally:
            to_server.transport.abort()

    async with _listening(proxy, talk):
        yield proxy


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def _listening(
    server: Server,
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    tls: ssl.SSLContext | None = None,
    hosts: tuple[str, ...] = ("127.0.0.1",),
) -> AsyncIterator[None]:
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await talk(reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            tasks.discard(task)

    listeners = []
    try:
        for host in hosts:
            listeners.append(await asyncio.start_server(accept, host, server.port, ssl=tls))
            server.port = listeners[0].sockets[0].getsockname()[1]
        yield
    finally:
        for listener in listeners:
            listener.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for listener in listeners:
            await listener.wait_closed()


@dataclass
class Names:
    """A DNS of the test's own: for each name its answers, one list per lookup, the last one repeated."""

    answers: dict[str, list[list[str]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        left = self.answers.get(host, [[]])
        return left.pop(0) if len(left) > 1 else left[0]


class Internet:
    """The network beyond this machine, for tests: public addresses lead to servers here, all others nowhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.routes: dict[str, int] = {}  # address → port of a server on loopback
        self.own: set[str] = set()  # addresses of this machine
        self.tried: list[str] = []  # connections beyond loopback
        guarded, name_of = socket.socket.connect, socket.socket.getsockname
        probed: dict[int, str] = {}

        def connect(sock: socket.socket, place: Any) -> None:
            host = place[0] if isinstance(place, tuple) else ""
            if not host or host.startswith("127.") or host == "::1":
                return guarded(sock, place)
            if sock.type == socket.SOCK_DGRAM:
                probed[sock.fileno()] = host
                return None
            self.tried.append(host)
            if host not in self.routes:
                raise OSError(errno.ENETUNREACH, "there is no internet in tests")
            return guarded(sock, ("127.0.0.1", self.routes[host]))

        def getsockname(sock: socket.socket) -> Any:
            host = probed.pop(sock.fileno(), "") if sock.type == socket.SOCK_DGRAM else ""
            return (host if host in self.own else "192.0.2.1", 9) if host else name_of(sock)

        monkeypatch.setattr(socket.socket, "connect", connect)
        monkeypatch.setattr(socket.socket, "getsockname", getsockname)


class Web:
    """The tools, and servers under their own names."""

    def __init__(self, *servers: Server, **settings: Any) -> None:
        self.names = Names({"wiki.example": [["127.0.0.1"]]})
        listed = tuple(f"wiki.example:{server.port}" for server in servers)
        self.tools = web_tools(WebSettings(**{"private_hosts": listed, **settings}), resolve=self.names)
        self.registry = ToolRegistry(self.tools)
        self.context = CallContext("me", "s", "t", "c", "cli", "d", Path(), True, "k", lambda text: None)

    async def run(self, name: str, **arguments: Any) -> tuple[str, str]:
        result = await self.registry.run(Call("c", name, arguments), self.context)
        return result.status, result.content

    async def __call__(self, name: str, **arguments: Any) -> str:
        status, content = await self.run(name, **arguments)
        assert status == "ok", content
        return content

    async def fails(self, name: str, **arguments: Any) -> str:
        status, content = await self.run(name, **arguments)
        assert status == "error", content
        return json.loads(content)["message"]

    def plan(self, name: str, **arguments: Any) -> Plan:
        tool = self.registry.get(name)
        assert tool is not None
        return tool.plan(arguments)

"""A small application behind the guard, on a real socket, and clients that write arbitrary bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from everloop.server.connections import Runner
from everloop.server.guard import OWNER, Guard, needs
from everloop.store.sqlite import SQLiteStore
from everloop.store.tokens import hash_of, new_token

SECRET = "a-secret-of-the-inside"


@dataclass
class Answer:
    """A response as it came over the wire."""

    status: int
    headers: dict[str, list[str]]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's shape; fails when it has another."""
        assert self.header("content-type").startswith("application/json")
        found = json.loads(self.body)
        assert found.keys() == {"error"}
        assert found["error"].keys() == {"message", "type", "param", "code"}
        assert found["error"]["message"]
        assert SECRET not in self.body.decode()
        assert b"Traceback" not in self.body
        return dict(found["error"])

    def header(self, name: str) -> str:
        (value,) = self.headers.get(name, [""])
        return value


@dataclass
class House:
    """Counts the requests that reached a handler."""

    store: SQLiteStore
    guard: Guard
    port: int = 0
    entered: list[web.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    ended: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def owners(self) -> list[str]:
        return [request[OWNER] for request in self.entered]

    async def token(self, name: str, owner: str | None = None, rights: str = "use") -> str:
        token = new_token()
        await self.store.add_token(name, owner or name, hash_of(token), rights.split(","))
        return token

    # ------------------------------------------------------------------------------------------ handlers

    @needs("admin")
    async def secret(self, request: web.Request) -> web.StreamResponse:
        return await self.echo(request)

    async def echo(self, request: web.Request) -> web.StreamResponse:
        self.entered.append(request)
        self.bodies.append(await request.read())
        return web.json_response({"owner": request[OWNER]})

    async def wait(self, request: web.Request) -> web.StreamResponse:
        self.entered.append(request)
        try:
            await self.gate.wait()
        finally:
            self.ended += 1
        return web.json_response({})

    async def broken(self, request: web.Request) -> web.StreamResponse:
        self.entered.append(request)
        raise RuntimeError(SECRET)

    async def unavailable(self, request: web.Request) -> web.StreamResponse:
        raise web.HTTPServiceUnavailable(reason=SECRET, text=SECRET)

    async def broken_stream(self, request: web.Request) -> web.StreamResponse:
        self.entered.append(request)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"begun")
        raise RuntimeError(SECRET)

    async def endless(self, request: web.Request) -> web.StreamResponse:
        self.entered.append(request)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 65536)
        finally:
            self.ended += 1

    async def health(self, request: web.Request) -> web.StreamResponse:
        self.entered.append(request)
        return web.json_response({"status": "ok"})

    # ------------------------------------------------------------------------------------------ clients

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def raw(self, *pieces: bytes | str, pause: float = 0.0) -> list[Answer]:
        """Write these bytes on one connection and read all that comes back until it is closed or silent."""
        reader, writer = await self.connect()
        try:
            for piece in pieces:
                writer.write(piece if isinstance(piece, bytes) else piece.encode())
                await asyncio.sleep(pause)
            return await answers_in(reader)
        finally:
            writer.close()

    async def ask(
        self, method: str = "POST", path: str = "/echo", body: bytes | None = b"{}", **headers: str | None
    ) -> Answer:
        """One well-formed request; a header that is None is left out."""
        found: dict[str, str | None] = {"Host": f"127.0.0.1:{self.port}", "Connection": "close"}
        if method not in ("GET", "HEAD", "OPTIONS"):
            found["Content-Type"] = "application/json"
            found["Content-Length"] = str(len(body or b""))
        else:
            body = b""
        found |= {name.replace("_", "-").title(): value for name, value in headers.items()}
        lines = [
            f"{method} {path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in found.items() if value is not None),
        ]
        (answer,) = await self.raw("\r\n".join([*lines, "", ""]).encode() + (body or b""))
        return answer


@contextlib.asynccontextmanager
async def opened_house(folder: Path, host: str = "127.0.0.1", **options: Any) -> AsyncIterator[House]:
    """The application behind a guard with these options."""
    store = SQLiteStore(folder / "store.db")
    limits = {
        name: options.pop(name)
        for name in ("idle_seconds", "head_seconds", "send_seconds", "connections")
        if name in options
    }
    settings = {"loopback": True, "token_needed": False, "body_limit": 100_000, "at_once": 50, "at_once_each": 20}
    house = House(store, Guard(store, **{**settings, **options}))
    app = web.Application()
    app.router.add_post("/echo", house.echo)
    app.router.add_delete("/echo", house.echo)
    app.router.add_get("/read", house.echo)
    app.router.add_get("/admin", house.secret)
    app.router.add_post("/wait", house.wait)
    app.router.add_post("/broken", house.broken)
    app.router.add_post("/unavailable", house.unavailable)
    app.router.add_post("/broken_stream", house.broken_stream)
    app.router.add_get("/endless", house.endless)
    app.router.add_get("/healthz", house.health)
    runner = Runner(app, house.guard, shutdown_timeout=0.2, **limits)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    house.port = runner.addresses[0][1]
    try:
        yield house
    finally:
        house.gate.set()
        await runner.cleanup()
        await store.close()


async def answers_in(reader: asyncio.StreamReader) -> list[Answer]:
    found: list[Answer] = []
    with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        while True:
            async with asyncio.timeout(5.0 if found else 20.0):
                head = await reader.readuntil(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")[:-2]
                headers: dict[str, list[str]] = {}
                for line in lines:
                    name, _, value = line.partition(":")
                    headers.setdefault(name.lower(), []).append(value.strip())
                status = int(first.split(" ")[1])
                body = b""
                if status >= 200 and "content-length" in headers:
                    body = await reader.readexactly(int(headers["content-length"][0]))
                elif "transfer-encoding" in headers:
                    body = await reader.read(-1)
            if status >= 200:
                found.append(Answer(status, headers, body))
    return found

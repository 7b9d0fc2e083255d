"""A system that is connected through the webhook channel: it signs what it sends, and checks what it receives."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import random
import shutil
import socket
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from everloop.channels.webhook import SIGNATURE, TIME, is_signed, signature
from everloop.testing.channels import shown_file

SECRET = "a-secret-that-must-never-be-shown"


def free_port() -> int:
    """Return a port for a server that is started later, below the range that the system gives to clients."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


async def listening(port: int) -> None:
    """Wait until a server that was started accepts connections."""
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.transport.abort()
            return


@asynccontextmanager
async def server_process(*command: str, port: int, folder: Path) -> AsyncIterator[None]:
    """Run a server that listens on the port; remove its folder at the end."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr
    )
    try:
        await listening(port)
        yield
    finally:
        process.terminate()
        await process.wait()
        shutil.rmtree(folder, ignore_errors=True)


class HookNetwork:
    """Sends each message until it is accepted, twice and out of order if configured, and accepts each key once."""

    def __init__(self, *, rough: bool = False) -> None:
        self.settings: dict[str, Any] = {}
        self.got: list[dict[str, Any]] = []  # every request, including repeats
        self.status: list[tuple[int, dict[str, str]]] = []  # statuses of responses before 200
        self.uploads: list[tuple[str, str, str, bytes]] = []  # chat, kind, name and content of files
        self.answers = True  # if false, the connection is closed after the request has been read
        self._rough = rough
        self._known: dict[str, None] = {}
        self._heard: defaultdict[str, list[str]] = defaultdict(list)
        self._number = 0
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[HookNetwork]:
        app = web.Application(client_max_size=60_000_000)
        app.router.add_post("/answers", self._take)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.settings = {
            "name": "hook",
            "network": "webhook",
            "allow": ["anna"],
            "secret": SECRET,
            "url": f"http://127.0.0.1:{port}/answers",
            "port": free_port(),
        }
        async with aiohttp.ClientSession() as self._session:
            try:
                yield self
            finally:
                await runner.cleanup()

    async def say(self, chat: str, text: str, **more: Any) -> None:
        self._number += 1
        message = {"id": more.pop("id", f"m{self._number}"), "chat": chat, "sender": "anna", "text": text, **more}
        for _ in range(2 if self._rough else 1):
            while await self.post(message) != 200:
                await asyncio.sleep(0.02)

    async def post(self, message: dict[str, Any], *, secret: str = SECRET, at: float | None = None) -> int:
        """Try once: the status, or 0 without a response."""
        body, now = json.dumps(message).encode(), str(int(at if at is not None else time.time()))
        return await self.post_headers({TIME: now, SIGNATURE: signature(secret, now, body)}, body)

    async def post_headers(self, headers: dict[str, str], body: bytes = b"{}") -> int:
        """Send a request with exactly these headers."""
        assert self._session is not None
        try:
            url = f"http://127.0.0.1:{self.settings['port']}/hook"
            async with self._session.post(url, data=io.BytesIO(body), headers=headers) as reply:
                await reply.read()
                return reply.status
        except aiohttp.ClientError:
            return 0

    async def post_bytes(self, header: bytes) -> int:
        """Send a request with a header that no client library would send."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.settings["port"])
        head = b"POST /hook HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n" + header + b"\r\n\r\n"
        writer.write(head)
        status = int((await reader.readline()).split()[1])
        writer.close()
        return status

    def heard(self, chat: str) -> list[str]:
        return self._heard[chat]

    async def disturb(self) -> None:
        """Drop the channel's connections, as when its process dies."""

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if not is_signed(SECRET, request.headers[TIME], body, request.headers[SIGNATURE], time.time()):
            return web.Response(status=401)
        message = json.loads(body)
        self.got.append(message)
        if self.status:
            status, headers = self.status.pop(0)
            return web.Response(status=status, headers=headers)
        assert request.headers["Idempotency-Key"] == message["key"]
        if message["key"] not in self._known:
            self._known[message["key"]] = None
            texts = [shown_file(one["name"], message["text"]) for one in message.get("files", [])]
            self._heard[message["chat"]] += texts or [message["text"]]
            for one in message.get("files", []):
                self.uploads.append((message["chat"], "file", one["name"], base64.b64decode(one["data"])))
        if not self.answers and request.transport is not None:
            request.transport.abort()
        return web.json_response({"id": f"n{len(self._known)}"})

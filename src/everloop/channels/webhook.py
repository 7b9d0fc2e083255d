"""Webhook: any system connects by signed HTTP requests, in and out.

Both directions carry the time and an HMAC-SHA256 of `TIME.BODY` under a shared secret, so that neither can be forged
or replayed later. Outgoing requests have an idempotency key, so that a repeat is invisible.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time

import msgspec
from aiohttp import web

from .base import Attachment, Can, Inbox, Later, Never, NoFile, Options, Part, Received
from .http import UPLOAD_SECONDS, HttpClient, header_bytes, listening

FRESH_SECONDS = 300.0  # how old a signed request may be
SEND_SECONDS = 30.0
TIME, SIGNATURE, KEY = "X-Everloop-Time", "X-Everloop-Signature", "Idempotency-Key"


class GivenFile(msgspec.Struct):
    """A file of a request; its content is in base64."""

    name: str
    data: bytes


class Incoming(msgspec.Struct):
    """The body of a request."""

    id: str
    chat: str
    sender: str
    text: str = ""
    name: str = ""
    group: bool = False
    mentioned: bool = False
    thread: str = ""
    files: list[GivenFile] = []


class SentFile(msgspec.Struct):
    """A file of a request that Everloop sends; its content is in base64."""

    name: str
    type: str
    data: bytes


class Outgoing(msgspec.Struct, omit_defaults=True):
    """The body of a request that Everloop sends."""

    key: str
    chat: str
    text: str
    part: int
    thread: str = ""
    reply_to: str | None = None
    repeat: bool = False
    files: tuple[SentFile, ...] = ()


class Taken(msgspec.Struct):
    """The optional reply of the receiver."""

    id: str = ""


def signature(secret: str, at: str, body: bytes) -> str:
    """Return the value of the signature header."""
    return "sha256=" + hmac.new(secret.encode(), header_bytes(at) + b"." + body, hashlib.sha256).hexdigest()


def is_signed(secret: str, at: str, body: bytes, given: str, now: float) -> bool:
    """Return whether a request was recently signed with the secret."""
    right = hmac.compare_digest(signature(secret, at, body).encode(), header_bytes(given))
    return right and at.isdecimal() and len(at) < 16 and abs(now - int(at)) <= FRESH_SECONDS


def _attachment(file: GivenFile) -> Attachment:
    async def read(limit: int) -> bytes:
        return file.data[: limit + 1]

    return Attachment(file.name, read, len(file.data))


class Webhook:
    """Listens for signed requests, and sends answers to a URL."""

    can = Can(text=16_000, form="markdown", repeats="key", threads=True, media=100_000_000)

    def __init__(self, options: Options) -> None:
        self.name = options.name
        self._secret = options.secret("secret")
        self._url = options.address("url")
        self._host = options.text("host", "127.0.0.1")
        self._port = options.number("port", 8003)
        self._path = options.text("path", f"/{options.name}")
        self._largest = 1_000_000 * options.number("body_mb", 10)
        if len(self._secret) < 16:
            raise options.problem("secret must have at least 16 characters, such as `openssl rand -hex 32` makes")
        self._client = HttpClient(self._url)
        self.port = self._port  # the actual port, if the settings have 0 for any free one

    async def receive(self, inbox: Inbox) -> None:
        async def handle(request: web.Request) -> web.Response:
            return await self._handle(request, inbox)

        async with listening(self._host, self._port, self._path, handle, self._largest) as self.port:
            await inbox.ready()
            await asyncio.Event().wait()

    async def _handle(self, request: web.Request, inbox: Inbox) -> web.Response:
        body = await request.read()
        at, given = request.headers.get(TIME, ""), request.headers.get(SIGNATURE, "")
        if not is_signed(self._secret, at, body, given, time.time()):
            return web.Response(status=401)
        try:
            message = msgspec.json.decode(body, type=Incoming)
        except msgspec.MsgspecError as error:
            return web.json_response({"error": str(error)}, status=400)
        await inbox.accept(
            Received(
                id=message.id,
                chat=message.chat,
                sender=message.sender,
                text=message.text,
                name=message.name,
                group=message.group,
                mentioned=message.mentioned,
                thread=message.thread,
                files=tuple(_attachment(file) for file in message.files),
            )
        )
        return web.json_response({"taken": message.id})

    async def send(self, part: Part, key: str) -> str:
        files = tuple(SentFile(file.name, file.type, file.data) for file in part.files)
        message = Outgoing(key, part.chat, part.text, part.number, part.thread, part.reply_to, part.repeat, files)
        body, at = msgspec.json.encode(message), str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            KEY: key,
            TIME: at,
            SIGNATURE: signature(self._secret, at, body),
        }
        seconds = UPLOAD_SECONDS if files else SEND_SECONDS
        reply = await self._client.post(self._client.target, headers, body, seconds)
        if reply.status == 413 and files:
            raise NoFile("it is too large for the receiver")
        if reply.status in (408, 425, 429) or (reply.status == 503 and reply.retry_after is not None):
            raise Later(reply.retry_after or 5.0, f"HTTP {reply.status}")
        if reply.status >= 500:
            raise OSError(f"HTTP {reply.status}")
        if not 200 <= reply.status < 300:
            raise Never(f"HTTP {reply.status}")
        try:
            return msgspec.json.decode(reply.body, type=Taken).id or key
        except msgspec.MsgspecError:
            return key

    async def show(self, chat: str, key: str, text: str) -> None:
        """Nothing is shown before the answer."""

    async def close(self) -> None:
        await self._client.close()

"""Outside users of the company: clients of its servers, and a channel. Each keeps its own record."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from everloop import InboundMessage
from everloop.errors import StoreError
from everloop.runtime.durable_bus import DurableBus

from ..crash.history import Asked
from ..server.serving import CHAT, Streamed, text_of

PATIENCE = 60.0  # seconds; a later answer means a missed wake-up
PLANS = ["", "", "", "s", "s", "n", "sn", "w", "s.n", "nw.s", "aa", "l", "l.s"]


class HttpClient:
    """One session at any available server: one message after another, each repeated until it is answered."""

    def __init__(self, http: aiohttp.ClientSession, name: str, urls: Callable[[], Sequence[str]], seed: str) -> None:
        self.record: list[Asked] = []
        self._http = http
        self._name = name
        self._urls = urls
        self._random = random.Random(seed)
        self._read: Reading | None = None  # an interrupted stream

    async def converse(self, messages: int, answered: Callable[[], None], pause: float = 0.0) -> None:
        for number in range(messages):
            plan = self._random.choice(PLANS)
            asked = Asked(self._name, f"{self._name}-{number}{f'.{plan}' if plan else ''}")
            self.record.append(asked)
            if self._random.random() < 0.08:
                await self._hang_up(asked)
            else:
                await self._ask(asked, f"key-{number}")
                if self._random.random() < 0.15:
                    await self._ask(asked, f"key-{number}")  # once more, at any server
            answered()
            await asyncio.sleep(pause)

    async def _ask(self, asked: Asked, key: str) -> None:
        """Repeat until there is an answer."""
        wanted = len(asked.answers) + 1
        while len(asked.answers) < wanted and not asked.refused:
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._try(asked, key)
            except TimeoutError:
                asked.refused.append(f"its client has waited {PATIENCE} s for nothing")
            except (aiohttp.ClientError, ConnectionError):
                await asyncio.sleep(self._random.uniform(0.02, 0.2))

    async def _hang_up(self, asked: Asked) -> None:
        """Ask, and usually leave before the answer."""
        asked.hung_up = True
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, ConnectionError):
            async with asyncio.timeout(self._random.uniform(0.01, 0.3)):
                await self._try(asked, f"left-{asked.mark}")

    async def _try(self, asked: Asked, key: str) -> None:
        urls = self._urls()
        if not urls:
            raise ConnectionError("no server is there just now")
        if self._read is None or self._read.mark != asked.mark:
            self._read = Reading(asked.mark) if self._random.random() < 0.5 else None
        body = {"messages": [{"role": "user", "content": f"mark:{asked.mark}"}], "stream": self._read is not None}
        headers = {"X-Session": self._name, "Idempotency-Key": key}
        if self._read is not None and self._read.position:
            headers["Last-Event-ID"] = self._read.position
        async with self._http.post(self._random.choice(urls) + CHAT, json=body, headers=headers) as response:
            if response.status >= 500:
                raise ConnectionError(f"{response.status} {await response.text()}")
            if response.status != 200:
                asked.refused.append(f"its client was refused: {response.status} {await response.text()}")
            elif self._read is None:
                asked.answers.append((False, text_of(await response.json())))
            else:
                asked.resumed += bool(self._read.position)
                leaves = not self._read.position and self._random.random() < 0.1
                asked.hung_up |= leaves  # and reconnects, perhaps to another server
                text = await self._read.to_the_end(response, leave=leaves)
                asked.answers.append((True, text))
                self._read = None


class Reading:
    """Reads a streamed answer as a client does that reconnects, to any server, for what is missing."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.position = ""  # of the last complete event
        self._text = ""  # up to that event

    async def to_the_end(self, response: Any, leave: bool = False) -> str:
        """Return the complete text; a reader told to leave disconnects as soon as it has a part."""
        streamed, ids = Streamed(), 0
        before = self._text
        async for line in response.content:
            if not line.endswith(b"\n"):
                break  # interrupted in the middle of a line
            streamed.take(line.decode().removesuffix("\n"))
            if line == b"\n" and len(streamed.ids) > ids:
                ids = len(streamed.ids)
                self.position, self._text = streamed.ids[-1], before + streamed.text
                if leave:
                    raise ConnectionError("it has gone")
        if not streamed.done or any("error" in chunk for chunk in streamed.chunks):
            raise ConnectionError("the stream ended before its end")
        return before + streamed.text


class Publisher:
    """The side of a channel that accepts messages: a chat's in order, each until it is acknowledged."""

    def __init__(self, bus: DurableBus, folder: Path, seed: str) -> None:
        self.published: dict[str, list[str]] = {}
        self.acknowledged: list[str] = []
        self._bus = bus
        self._answers = folder / "answers"
        self._random = random.Random(seed)
        self._seen = 0  # bytes of the answers
        self.delivered = 0

    async def feed(self, chat: str, messages: int, ahead: int) -> None:
        for number in range(messages):
            while len(self.acknowledged) - self.delivered > ahead:
                await asyncio.sleep(0.05)
            plan = self._random.choice(PLANS)
            id = f"{chat}-{number}"
            new = self._random.random() < 0.02
            content = "/new" if new else f"mark:{id}.{plan}" if plan else f"mark:{id}"
            await self._publish(InboundMessage("test", "me", chat, content, id=id))
            await asyncio.sleep(self._random.uniform(0.0, 0.05))

    async def _publish(self, message: InboundMessage) -> None:
        assert message.id is not None
        self.published.setdefault(message.chat_id, []).append(message.id)
        while True:
            try:
                await self._bus.publish_inbound(message)
                break
            except StoreError:  # not acknowledged, so it is sent again
                await asyncio.sleep(0.1)
        self.acknowledged.append(message.id)

    async def count(self) -> None:
        """Count the answers as they arrive."""
        while True:
            if self._answers.exists() and self._answers.stat().st_size > self._seen:
                with self._answers.open("rb") as file:
                    file.seek(self._seen)
                    data = file.read()
                self._seen += len(data)
                self.delivered += data.count(b"\n")
            await asyncio.sleep(0.05)

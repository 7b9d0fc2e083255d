"""A model that stops in the middle of what it says, until the test lets it go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from everloop.testing.openai_server import FakeOpenAI, Reply
from everloop.testing.scripted import words


class HeldOpenAI(FakeOpenAI):
    """Of one answer only a part is sent; the rest comes when `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self._held: Reply | None = None
        self._client = 0  # the port of whoever asked

    def hold(self, reply: Reply, after_chunks: int = 0) -> None:
        """Stop before the answer, or after so many chunks of it (the role's chunk is not counted)."""
        self._held = reply
        reply.hang_after = after_chunks
        self.replies.append(reply)

    @property
    def heard(self) -> bool:
        """Whether the client has read all that was sent so far."""
        return self.reached.is_set() and not _unread(self._client)

    async def _answer(self, request: web.Request, reply: Reply, body: dict[str, Any], size: int) -> web.StreamResponse:
        if reply is not self._held:
            return await super()._answer(request, reply, body, size)
        assert request.transport is not None
        self._client = request.transport.get_extra_info("peername")[1]
        if not reply.hang_after:
            await self._wait()
            reply.hang_after = None
            return await super()._answer(request, reply, body, size)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for count, part in enumerate(self.events(reply, words(reply.text), body, size)):
            await response.write(part)
            if count == reply.hang_after:
                await self._wait()
        await response.write_eof()
        return response

    async def _wait(self) -> None:
        self.reached.set()
        await self.go.wait()


def _unread(port: int) -> int:
    """How many bytes have come in at a port of this machine, and nobody has read them."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, _, queues, *_ = line.split()
        if int(local.partition(":")[2], 16) == port:
            return int(queues.partition(":")[2], 16)
    return 0

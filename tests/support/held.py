"""A model that pauses in the middle of its answer until the test lets it continue."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from everloop.testing.openai_server import FakeOpenAI, Reply
from everloop.testing.scripted import words


class HeldOpenAI(FakeOpenAI):
    """Sends part of one answer, and the rest once `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self._held: Reply | None = None
        self._client = 0  # the client's port

    def hold(self, reply: Reply, after_chunks: int = 0) -> None:
        """Pause before the answer, or after so many chunks of it (not counting the chunk with the role)."""
        self._held = reply
        reply.hang_after = after_chunks
        self.replies.append(reply)

    @property
    def heard(self) -> bool:
        """Whether the client has read everything sent so far."""
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
    """Return how many received bytes are unread at a port of this machine."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, _, queues, *_ = line.split()
        if int(local.partition(":")[2], 16) == port:
            return int(queues.partition(":")[2], 16)
    return 0

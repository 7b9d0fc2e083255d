"""A stream on its way to a client: a turn's events go in, and whatever waits goes out in one write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from .. import events
from ..messages import encode_json
from ..providers.sse import encode
from .answers import Chunks

LONGEST_ARGUMENT = 200  # characters of a tool's arguments in a comment
RESTARTED = "\n\n[The answer was cut off and begins again.]\n\n"


class Feed:
    """The bytes of a streamed answer. `emit` is told the turn's events; the rest is for the one who writes."""

    def __init__(self, chunks: Chunks, ping_seconds: float) -> None:
        self.said = False  # whether something of the answer has gone out in the round that runs
        self._chunks = chunks
        self._ping_seconds = ping_seconds
        self._waiting: list[bytes] = []
        self._more = asyncio.Event()
        self._gap = False  # there was text before the tools that ran
        self._over = False

    def emit(self, event: events.Event) -> None:
        match event:
            case events.Text(text):
                if self._gap:
                    text, self._gap = f"\n\n{text}", False
                self.said = True
                self._put(self._chunks.text(text))
            case events.Reasoning(text):
                self._put(self._chunks.reasoning(text))
            case events.Restarted() if self.said:
                self._put(self._chunks.text(RESTARTED))
            case events.ToolStarted(call, name, arguments):
                self._gap, self.said = self._gap or self.said, False
                shown = encode(arguments).decode()[:LONGEST_ARGUMENT]
                self._comment("tool", {"call": call, "name": name, "status": "started", "arguments": shown})
            case events.ToolEnded(call, name, _, status, seconds):
                self._comment("tool", {"call": call, "name": name, "status": status, "seconds": seconds})
            case events.Compacting():
                self._comment("compacting", {"turns": event.turns})

    def unsaid(self, text: str) -> bytes:
        """Words that no event has brought."""
        return self._chunks.text(f"\n\n{text}" if self._gap or self.said else text) if text else b""

    def end(self, run: asyncio.Future[Any]) -> None:
        """Nothing more comes: the turn is over, or has failed, of which whoever asks for its result is told."""
        if not run.cancelled():
            run.exception()
        self._over = True
        self._more.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """What is to be written, as it comes; in a long silence, signs of life."""
        while True:
            if not self._waiting and not self._over:
                self._more.clear()
                try:
                    async with asyncio.timeout(self._ping_seconds):
                        await self._more.wait()
                except TimeoutError:
                    yield self._chunks.comment("ping")
                    continue
            if self._waiting:
                data, self._waiting = b"".join(self._waiting), []
                yield data
            elif self._over:
                return

    def _comment(self, what: str, facts: dict[str, object]) -> None:
        self._put(self._chunks.comment(f"{what} {encode_json(facts).decode()}"))

    def _put(self, data: bytes) -> None:
        self._waiting.append(data)
        self._more.set()

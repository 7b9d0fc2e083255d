"""The model of the crash tests: the marker of a message is the plan of its turn.

`mark:7.sn.w` makes a round with the tools `safe` and `never` side by side, then a round with `slow`, and then
answers `done:7.sn.w`. The progress of a turn is read from its messages alone, so it does not matter which process asks
or how often.

    python -m tests.crash.model [SECONDS BETWEEN TWO WORDS]
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import Any

from everloop.providers.base import ToolCallRequest
from everloop.testing import FakeOpenAI
from everloop.testing.openai_server import Reply

TOOLS = {"s": "safe", "n": "never", "w": "slow", "l": "long", "a": "alone", "k": "fatal_safe", "K": "fatal_never"}
TOOLS |= {"p": "asked", "m": "message"}


def plan(marker: str) -> list[list[str]]:
    """The tools of each round of a message's turn."""
    return [[TOOLS[letter] for letter in round] for round in marker.split(".")[1:]]


class _Plan(deque[Reply]):
    """Takes the place of the server's queued replies, and computes the reply to the newest request."""

    def __init__(self, server: FakeOpenAI, delay: float, token_delay: float) -> None:
        super().__init__()
        self._server = server
        self._delay = delay
        self._token_delay = token_delay

    def __bool__(self) -> bool:
        return True

    def popleft(self) -> Reply:
        seen = self._server.requests[-1]
        rounds = plan(seen.marker)
        reply = Reply(delay=self._delay, token_delay=self._token_delay)
        if seen.round >= len(rounds):
            reply.text = f"I am done:{seen.marker} and glad"
            return reply
        reply.calls = [
            ToolCallRequest(
                f"{seen.marker}_{seen.round}_{n}", name, _arguments(name, f"{seen.marker}/{seen.round}/{n}")
            )
            for n, name in enumerate(rounds[seen.round])
        ]
        return reply


def _arguments(name: str, text: str) -> dict[str, Any]:
    return {"content": f"said:{text}"} if name == "message" else {"text": text}


def planned(*, delay: float = 0.0, token_delay: float = 0.0, **options: Any) -> FakeOpenAI:
    """A server whose answers follow the markers."""
    server = FakeOpenAI(**options)
    server.replies = _Plan(server, delay, token_delay)
    return server


async def main() -> None:
    token_delay = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
    async with planned(delay=0.002, token_delay=token_delay, keep_bodies=False) as server:
        print(server.base_url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())

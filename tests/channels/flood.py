"""A flood of messages from one person, while another person writes, too."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from everloop import LLMProvider, LLMResponse
from everloop.testing.channels import running

from .says import found


class HoldsUp(LLMProvider):
    """Answers every request, but keeps one person waiting until released."""

    default_model = "holds-up"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go_on = asyncio.Event()

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        said = str(next(one["content"] for one in reversed(messages) if one["role"] == "user"))
        self.asked.append(said)
        if said.startswith("flood"):
            await self.go_on.wait()
        return LLMResponse(f"re: {said}")


def _taken(store: Path) -> list[str]:
    """The flood's messages in the inbox."""
    with closing(sqlite3.connect(store)) as db:
        rows = [json.loads(data)["content"] for (data,) in db.execute("SELECT data FROM inbox ORDER BY id")]
    return [text for text in rows if text.startswith("flood")]


async def check_flood(
    network: Any, folder: Path, loud: str, quiet: str, who: Callable[[str], dict[str, Any]] = lambda chat: {}
) -> None:
    """Flood a network from one chat: the other one does not wait, and the flood is answered in order, up to the limit.

    `who` has the arguments that name the sender in a chat.
    """
    says = HoldsUp()
    network.settings |= {"per_minute": 4, "stream": False}

    async def heard(chat: str, number: int) -> list[str]:
        texts: list[str] = await asyncio.to_thread(network.heard, chat)
        return texts if len(texts) >= number else []

    async with running(network.settings, folder, says):
        for number in range(20):
            await network.say(loud, f"flood {number}", **who(loud))
        for number in range(3):
            await network.say(quiet, f"calm {number}", **who(quiet))
        calm = await found(lambda: heard(quiet, 3))
        taken = await asyncio.to_thread(_taken, folder / "store.db")
        asked_before = [text for text in says.asked if text.startswith("flood")]
        says.go_on.set()
        answers = await found(lambda: heard(loud, 5))
    assert calm == ["re: calm 0", "re: calm 1", "re: calm 2"]
    assert taken == ["flood 0", "flood 1", "flood 2", "flood 3"]
    assert len(asked_before) <= 1  # the next message of a chat waits for the answer to the previous one
    assert [text for text in answers if text.startswith("re:")] == [f"re: flood {number}" for number in range(4)]
    assert next(text for text in answers if not text.startswith("re:")).startswith("That was too fast")

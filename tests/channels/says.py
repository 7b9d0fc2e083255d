"""A model that always gives the same answer, and records its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from everloop import LLMProvider, LLMResponse, ToolCallRequest

T = TypeVar("T")


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that another task or process does."""
    async with asyncio.timeout(40):
        while not condition():
            await asyncio.sleep(0.01)


async def found(look: Callable[[], Awaitable[T]]) -> T:
    """Look until something is there."""
    async with asyncio.timeout(40):
        while not (there := await look()):
            await asyncio.sleep(0.01)
    return there


class Says(LLMProvider):
    default_model = "says"

    def __init__(self, text: str) -> None:
        self.text = text
        self.asked: list[str] = []

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        self.asked.append(next(one["content"] for one in reversed(messages) if one["role"] == "user"))
        return LLMResponse(self.text)


class Recalls(LLMProvider):
    """Answers with everything that was said in its session. The text `schedule` adds a job that does the same."""

    default_model = "recalls"

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        if messages[-1]["role"] == "user" and str(messages[-1]["content"]) == "schedule":
            arguments = {"action": "add", "every": "1h", "message": "recall"}
            return LLMResponse(None, [ToolCallRequest("call-1", "cron", arguments)])
        return LLMResponse(" | ".join(str(one["content"]) for one in messages if one["role"] == "user"))

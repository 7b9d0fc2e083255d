"""A model that always gives the same answer, and records its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from everloop import LLMProvider, LLMResponse

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

"""Answers that take long to parse do not delay other work."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from everloop.messages import Conversation
from everloop.providers.base import Delta, LLMProvider, LLMResponse
from everloop.runtime.model_call import ModelCall

from .tools import TOOLS

SLOW = {
    "nested": '{"name": "exec", "arguments": ' + '{"a":' * 150_000,
    "list": '[exec(command="a"), ' * 45_000,
    "marks": "<tool_call>" * 75_000,
    "signs": "a < b { c [ d ` e\n" * 50_000,
}


class Writes(LLMProvider):
    """Writes a text, in pieces of some size."""

    def __init__(self, text: str, size: int) -> None:
        self.text = text
        self.size = size

    async def chat(self, messages: Any, tools: Any = None, model: Any = None) -> LLMResponse:
        return LLMResponse(self.text)

    async def stream(self, messages: Any, tools: Any = None, model: Any = None) -> AsyncIterator[Delta | LLMResponse]:
        for place in range(0, len(self.text), self.size):
            yield Delta(self.text[place : place + self.size])
            await asyncio.sleep(0)
        yield LLMResponse(self.text)


@contextlib.asynccontextmanager
async def longest_wait() -> AsyncIterator[list[float]]:
    """Return the longest time in seconds for which the event loop was busy at a stretch."""
    waits = [0.0]

    async def beat() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            waits[0] = max(waits[0], time.thread_time() - began)

    beating = asyncio.create_task(beat())
    await asyncio.sleep(0)
    yield waits
    await asyncio.sleep(0)
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)


@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_answer_that_takes_long_is_parsed_outside_the_event_loop(text: str, streamed: bool):
    async with longest_wait() as waits:
        await ModelCall(Writes(text, 200_000)).ask(Conversation(), TOOLS, (lambda event: None) if streamed else None)
    assert waits[0] < 0.05


async def test_a_long_conversation_is_searched_outside_the_event_loop():
    page = [f"page {number} " + "word " * 2_000_000 for number in range(3)]
    conversation = Conversation([{"role": "tool", "tool_call_id": "1", "content": text} for text in page])
    called = '<tool_call>{"name": "exec", "arguments": {"command": "ls"}}</tool_call>'
    for emit in (None, lambda event: None):
        async with longest_wait() as waits:
            answer = await ModelCall(Writes(called, 10), brought=page).ask(conversation, TOOLS, emit)
        assert [one.name for one in answer.tool_calls] == ["exec"]
        assert waits[0] < 0.05

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from everloop import AgentLoop, LLMProvider, MessageBus

from .chat import Chat


@pytest.fixture
async def start(tmp_path) -> AsyncIterator[Callable[..., Chat]]:
    """Start loops on one store; all are closed at the end, and no task may be left."""
    before = asyncio.all_tasks()
    chats: list[Chat] = []

    def begin(provider: LLMProvider, bus: MessageBus | None = None, **options: Any) -> Chat:
        bus = bus or MessageBus()
        options.setdefault("store", tmp_path / "store.db")
        chats.append(Chat(AgentLoop(bus, provider, tmp_path, **options), bus))
        return chats[-1]

    yield begin
    for chat in chats:
        if not chat.task.done():
            await chat.stop()
        await chat.agent.close()
    await asyncio.sleep(0)
    assert not asyncio.all_tasks() - before - {asyncio.current_task()}

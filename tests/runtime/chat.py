"""A user who chats with a running loop, and steps and tools that wait until they are released."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from everloop import AgentLoop, InboundMessage, MessageBus, Tool
from everloop.store.sqlite import SQLiteStore


def said(messages: Sequence[dict[str, Any]], place: int = -1) -> str:
    """The text of a message, without the time and the note on scheduled work added for the model."""
    return str(messages[place]["content"]).split("\n\n[It is now ")[0].split("\n\n[This is scheduled work: ")[0]


def echo(messages: Sequence[dict[str, Any]], tools: Any) -> str:
    """A scripted step that echoes the message."""
    return said(messages)


class Gate:
    """A step of a script that waits until it is opened."""

    def __init__(self, then: Any = "opened") -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()
        self.then = then

    async def __call__(self, messages: Any, tools: Any) -> Any:
        self.reached.set()
        await self.open.wait()
        return self.then


class Held(Tool):
    """A tool that runs until it is released."""

    name = "held"
    description = "Waits."
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}  # noqa: RUF012

    def __init__(self, parallel: bool = True) -> None:
        self.parallel = parallel
        self.started: list[int] = []
        self.cancelled = 0
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.together = self.most = 0

    async def execute(self, n: int = 0) -> str:
        self.started.append(n)
        self.together += 1
        self.most = max(self.most, self.together)
        self.begun.set()
        try:
            await self.go.wait()
            for _ in range(5 - n):  # the last to start ends first
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.together -= 1
        return f"held {n}"


class Chat:
    """A running loop and a user at the other end of its bus."""

    def __init__(self, agent: AgentLoop, bus: MessageBus) -> None:
        self.agent = agent
        self.bus = bus
        self.task = asyncio.create_task(agent.run())

    async def say(self, text: str, chat: str = "1", **options: Any) -> None:
        await self.bus.publish_inbound(InboundMessage("test", "user", chat, text, **options))

    async def hear(self) -> str:
        return (await asyncio.wait_for(self.bus.consume_outbound(), 30)).content

    async def ask(self, text: str, chat: str = "1", **options: Any) -> str:
        await self.say(text, chat, **options)
        return await self.hear()

    async def placed(self, count: int) -> None:
        """Wait until it is decided how this many messages affect the running turn."""

        def settled() -> bool:
            session = self.agent.dispatcher.session("me", "test:1")
            return session is not None and len(session.state.steering) + len(session.behind) == count

        await until(settled)

    async def stop(self) -> None:
        self.agent.stop()
        await asyncio.wait_for(self.task, 20)


async def entries(tmp_path: Any, key: str = "test:1") -> list[Any]:
    store = SQLiteStore(tmp_path / "store.db")
    info = await store.session("me", key)
    logged = await store.read_log(info.id) if info else []
    await store.close()
    return [one.entry for one in logged]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)

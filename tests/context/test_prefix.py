"""The prefix of a request: byte for byte the same as long as nothing in it has changed, so that caches hit."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, Config, MessageBus, ToolCallRequest, tool
from everloop.providers.openai import OpenAIProvider
from everloop.testing import call
from everloop.testing.openai_server import FakeOpenAI

from ..runtime.chat import until


class Scene:
    """A workspace and a store used by one agent after another; the model's server records every byte it receives."""

    def __init__(self, folder: Path, server: FakeOpenAI) -> None:
        self.folder = folder
        self.server = server
        self.workspace = folder / "workspace"
        self.workspace.mkdir()
        (self.workspace / "AGENTS.md").write_text("Be brief.")
        self.agent = self.start()

    def start(self) -> AgentLoop:
        config = Config(home=self.folder / "home", window=50_000)
        provider = OpenAIProvider(self.server.base_url, model="m")
        store = self.folder / "store.db"
        agent = AgentLoop(MessageBus(), provider, self.workspace, config=config, store=store, busy="steer")
        agent.tools.register(steers)
        return agent

    async def restart(self) -> None:
        await self.agent.close()
        self.agent = self.start()

    async def turn(self, text: str, *steps: str | ToolCallRequest) -> list[bytes]:
        """Run a turn with these model answers; return its requests as received over the wire."""
        before = len(self.server.requests)
        for step in steps or ("fine",):
            if isinstance(step, str):
                self.server.reply(step)
            else:
                self.server.calls(step)
        await self.agent.process_direct(text)
        return [seen.raw for seen in self.server.requests[before:]]


@pytest.fixture
async def scene(tmp_path) -> AsyncIterator[Scene]:
    async with FakeOpenAI() as server:
        made = Scene(tmp_path, server)
        yield made
        await made.agent.close()


@tool
async def steers() -> str:
    """Steer the turn while it runs."""
    agent = running[0]
    said.append(asyncio.create_task(agent.process_direct("and in green")))
    session = agent.dispatcher.session("me", "cli:direct")
    assert session is not None
    await until(lambda: bool(session.state.steering))
    return "steered"


running: list[AgentLoop] = []
said: list[asyncio.Task[str]] = []


def history(request: bytes) -> bytes:
    """A request up to its last message. Quotes inside a text are escaped, so this cannot occur in one."""
    return request[: request.index(b'],"tools":[')]


def tools(request: bytes) -> bytes:
    return request[request.index(b'],"tools":[') :]


def shared(one: bytes, other: bytes) -> int:
    """Return the length of the common prefix of two requests."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def grows(requests: list[bytes]) -> None:
    """Check that each request extends the previous one."""
    for one, other in pairwise(requests):
        assert history(other).startswith(history(one)), f"they differ after {shared(one, other)} of {len(one)} bytes"
        assert tools(other) == tools(one)


async def test_rounds_turns_steering_a_silence_and_restarts_only_add_to_a_request(scene):
    running[:] = [scene.agent]
    requests = await scene.turn("paint it", call("steers"), "painted")
    assert await said[-1] == "painted"
    assert b"and in green" in requests[-1]
    requests += await scene.turn("look", call("list_dir", path="."), "seen")
    await scene.restart()
    requests += await scene.turn("and after a restart", call("list_dir", path="."), "the same")
    await scene.restart()
    with sqlite3.connect(scene.folder / "store.db") as store:  # as if the last turn had been hours ago
        store.execute("UPDATE session SET updated_at = updated_at - 10000")
    store.close()
    requests += await scene.turn("still there?")
    requests += await scene.turn("good")
    assert len(requests) == 8
    grows(requests)
    assert len(re.findall(rb"\[It is now ", requests[-1])) == 1


async def test_a_change_affects_only_what_follows_it(scene):
    first = (await scene.turn("one"))[0]
    skill = scene.workspace / "skills" / "tea"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text("---\nname: tea\ndescription: How to make tea.\n---\nBoil water.")
    with_skill = await scene.turn("two")
    place = first.index(b"- git:")  # skills are sorted by name
    assert shared(first, with_skill[0]) > place
    assert b"- tea: How to make tea." in with_skill[0]
    grows(with_skill + await scene.turn("three"))

    before = (await scene.turn("four"))[0]
    (scene.workspace / "memory").mkdir()
    (scene.workspace / "memory" / "MEMORY.md").write_text("- likes tea")
    after = (await scene.turn("five"))[0]
    assert shared(before, after) >= before.index(b"Be brief.") + len("Be brief.")
    os.utime(scene.workspace / "AGENTS.md")  # touched, but not changed
    grows([after, *await scene.turn("six")])


async def test_a_compaction_changes_only_what_it_summarises(scene):
    long = "and some more words to be summarised " * 20
    requests = [*await scene.turn(f"one {long}"), *await scene.turn(f"two {long}"), *await scene.turn("three")]
    grows(requests)
    scene.server.reply("they counted")
    assert "now a summary" in await scene.agent.process_direct("/compact")
    compacted = await scene.turn("four")
    system = requests[-1].index(b'{"role":"user"')
    assert shared(requests[-1], compacted[0]) >= system
    assert b"they counted" in compacted[0]
    assert b'"content":"one ' not in compacted[0]
    assert b'"content":"three"' in compacted[0]
    compacted += await scene.turn("five")
    await scene.restart()
    compacted += await scene.turn("six", call("list_dir", path="."), "done")
    grows(compacted)


async def test_conversations_of_one_workspace_share_all_but_the_end_of_the_system_prompt(scene):
    one = (await scene.turn("one"))[0]
    scene.server.reply("fine")
    await scene.agent.process_direct("two", "cli:other")
    other = scene.server.requests[-1].raw
    assert shared(one, other) >= one.index(b"This conversation began on")
    assert tools(one) == tools(other)


async def test_conversations_started_on_the_same_day_share_the_whole_system_prompt(
    tmp_path: Path, monkeypatch: Any
) -> None:
    async def prompt(now: float, key: str) -> str:
        monkeypatch.setattr("time.time", lambda: now)
        server.reply("hello")
        async with AgentLoop(MessageBus(), provider, tmp_path, store=tmp_path / "s.db") as agent:
            await agent.process_direct("hi", key)
        body = server.requests[-1].body
        assert body is not None
        assert body["messages"][-1] == {"role": "user", "content": "hi"}
        return str(body["messages"][0]["content"])

    noon = 1_800_000_000.0 - 1_800_000_000.0 % 86_400 + 43_200 + time.timezone
    async with FakeOpenAI() as server:
        provider = OpenAIProvider(server.base_url, model="m")
        first, later, next_day = (
            await prompt(noon, "a"),
            await prompt(noon + 7200, "b"),
            await prompt(noon + 86_400, "c"),
        )
    assert first == later != next_day

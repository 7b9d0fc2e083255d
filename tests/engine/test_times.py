"""The log contains how long the model took."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from everloop import AgentLoop, LLMProvider, LLMResponse, MessageBus, events, tool
from everloop.log import CallEnded, ModelAnswered, decode_entry, encode_entry
from everloop.providers.base import Delta
from everloop.replay import replay
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call


class Slow(LLMProvider):
    """Streams reasoning, one word, and after a pause the rest."""

    def __init__(self, pause: float = 0.06) -> None:
        self.pause = pause

    async def chat(self, messages: Any, tools: Any = None, model: Any = None) -> LLMResponse:
        await asyncio.sleep(2 * self.pause)
        return LLMResponse("one two", reasoning="hm")

    async def stream(self, messages: Any, tools: Any = None, model: Any = None) -> AsyncIterator[Any]:
        await asyncio.sleep(self.pause)
        yield Delta(reasoning="hm")
        await asyncio.sleep(self.pause)
        yield Delta("one two")
        yield LLMResponse("one two")


class OnlyChat(LLMProvider):
    chat = Slow.chat
    pause = 0.06


async def answered(provider: LLMProvider, tmp_path: Path, emit: events.Emit | None = None) -> ModelAnswered:
    store = SQLiteStore(tmp_path / "store.db")
    async with AgentLoop(MessageBus(), provider, tmp_path, store=store) as agent:
        await agent.process_direct("x", on_event=emit)
        session = await store.session("me", "cli:direct")
        assert session is not None
        log = [one.entry for one in await store.read_log(session.id)]
    assert (await replay(log)).same
    (entry,) = (entry for entry in log if isinstance(entry, ModelAnswered))
    return entry


async def test_an_answer_records_its_duration_and_its_time_to_first_token(tmp_path):
    entry = await answered(Slow(), tmp_path, lambda event: None)
    assert 0.05 < entry.first_token < entry.seconds - 0.05
    assert entry.seconds < 30


async def test_each_round_records_its_own_first_token(tmp_path):
    class Rounds(Slow):
        asked = 0

        async def stream(self, messages: Any, tools: Any = None, model: Any = None) -> AsyncIterator[Any]:
            self.asked += 1
            async for item in super().stream(messages, tools, model):
                yield item if self.asked == 2 or isinstance(item, Delta) else LLMResponse("", [call("list_dir")])

    store = SQLiteStore(tmp_path / "store.db")
    async with AgentLoop(MessageBus(), Rounds(), tmp_path, store=store) as agent:
        await agent.process_direct("x", on_event=lambda event: None)
        session = await store.session("me", "cli:direct")
        assert session is not None
        log = [one.entry for one in await store.read_log(session.id)]
    first, second = (entry for entry in log if isinstance(entry, ModelAnswered))
    for entry in (first, second):
        assert 0.05 < entry.first_token < entry.seconds - 0.05


async def test_an_unstreamed_answer_has_no_first_token(tmp_path):
    entry = await answered(Slow(), tmp_path)
    assert entry.seconds > 0.1
    assert entry.first_token == 0
    watched = await answered(OnlyChat(), tmp_path / "other", lambda event: None)
    assert watched.seconds > 0.1
    assert watched.first_token == 0


async def test_a_stopped_answer_records_its_duration_so_far(tmp_path):
    class Endless(LLMProvider):
        async def stream(self, messages: Any, tools: Any = None, model: Any = None) -> AsyncIterator[Any]:
            await asyncio.sleep(0.05)
            yield Delta("so far")
            await asyncio.sleep(60)

    store = SQLiteStore(tmp_path / "store.db")
    async with AgentLoop(MessageBus(), Endless(), tmp_path, store=store) as agent:
        said = asyncio.Event()
        turn = asyncio.create_task(
            agent.process_direct("x", on_event=lambda event: said.set() if isinstance(event, events.Text) else None)
        )
        await asyncio.wait_for(said.wait(), 30)
        await asyncio.sleep(0.05)
        await agent.process_direct("/stop")
        await turn
        session = await store.session("me", "cli:direct")
        assert session is not None
        entry = (await store.read_log(session.id))[1].entry
    assert isinstance(entry, ModelAnswered)
    assert entry.content == "so far"
    assert 0.04 < entry.first_token < entry.seconds - 0.04


def test_an_old_log_can_still_be_read():
    old = '{"type":"answer","content":"hi","usage":{"prompt_tokens":1}}'
    entry = decode_entry(old)
    assert isinstance(entry, ModelAnswered)
    assert (entry.seconds, entry.first_token) == (0.0, 0.0)
    assert encode_entry(entry) == old


async def test_an_entry_records_how_long_the_turn_waited_for_the_disk(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")

    def slow_disk(when: str) -> None:
        if when == "before" and threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)

    model = ScriptedProvider([call("write_file", path="a.txt", content="x"), "done"])
    async with AgentLoop(MessageBus(), model, tmp_path, store=store) as agent:
        store.writer.commit_hooks.add(slow_disk)
        await agent.process_direct("x")
        session = await store.session("me", "cli:direct")
        assert session is not None
        log = [one.entry for one in await store.read_log(session.id)]
    ended = next(entry for entry in log if isinstance(entry, CallEnded))
    assert 0.05 <= ended.flushed < 30  # the call has an effect: its intent was flushed
    last = [entry for entry in log if isinstance(entry, ModelAnswered)][-1]
    assert last.flushed == 0.0  # a result needs no flush
    assert (await replay(log)).same


async def test_times_of_nothing_take_no_room_in_the_log(tmp_path: Path) -> None:
    """A step that was not streamed and waited for no flush has two such times."""

    @tool(read_only=True)
    async def look() -> str:
        """Look."""
        return "seen"

    provider = ScriptedProvider([call("look"), "done"])
    path = tmp_path / "a.db"
    async with AgentLoop(MessageBus(), provider, workspace=tmp_path, store=SQLiteStore(path)) as agent:
        agent.tools.register(look)
        assert await agent.process_direct("hi") == "done"
    with sqlite3.connect(path) as db:
        rows = [data for (data,) in db.execute("SELECT data FROM entry WHERE kind IN ('answer', 'result')")]
    assert len(rows) == 3
    assert not [data for data in rows if re.search(r":0\.0[,}]", data)]

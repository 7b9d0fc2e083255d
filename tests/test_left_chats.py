"""A chat whose turn another process takes to its end: its answer is shown, now or when the person comes back, once."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sqlite3
from pathlib import Path
from typing import Any

from everloop import AgentLoop, InboundMessage, MessageBus
from everloop.cli.common import show_undelivered
from everloop.cli.paper import Paper
from everloop.dispatch.durable import DurableBus
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider
from everloop.testing.openai_server import Reply

from .commands import environment, everloop, start, until
from .held import HeldOpenAI
from .loop.chat import Gate
from .server.serving import process


async def ended(home: Path) -> None:
    """Wait until no turn of the chat is open."""
    store = SQLiteStore(home / "everloop.db")
    async with asyncio.timeout(30):
        while (info := await store.session("me", "cli:direct")) is None or info.open_turn is not None:
            await asyncio.sleep(0.02)
    await store.close()


def waiting(folder: Path) -> int:
    """How many messages have come in that are not done."""
    with contextlib.closing(sqlite3.connect(folder / "store.db")) as db:
        return int(db.execute("SELECT count(*) FROM inbox WHERE state <> 'done'").fetchone()[0])


async def shown(agent: AgentLoop, answer: str) -> str:
    """What of the outbox is shown beside an answer that was shown just now."""
    paper = Paper(io.StringIO(), colour=False)
    await show_undelivered(agent, "cli:direct", paper, shown=answer)
    return str(paper._stream.getvalue())  # type: ignore[attr-defined]


async def test_the_answer_to_a_killed_chat_is_shown_when_the_person_comes_back(tmp_path: Path) -> None:
    settings: Any = {"EVERLOOP_HOME": str(tmp_path), "EVERLOOP_WORKSPACE": str(tmp_path / "workspace")}
    async with HeldOpenAI() as server:
        server.hold(Reply("never heard"))
        chat = await start(env=environment(server, **settings))
        chat.stdin.write(b"how is the weather?\n")
        await server.reached.wait()
        chat.kill()
        await chat.communicate()
        server.reply("Fine.")
        async with process(server, tmp_path):  # a server of the same store looks for what is to be done
            await ended(tmp_path)
        server.reply("You are welcome.")
        back = await everloop(server=server, stdin=b"thanks\n", **settings)
        assert back.lines == ["✉ while you were away: Fine.", "You are welcome."]
        server.reply("Bye.")
        assert (await everloop(server=server, stdin=b"bye\n", **settings)).lines == ["Bye."]
        server.go.set()


async def test_an_answer_of_another_process_that_was_shown_is_not_shown_once_more(tmp_path: Path) -> None:
    gate = Gate("the job is done")
    worker_store, store = SQLiteStore(tmp_path / "store.db"), SQLiteStore(tmp_path / "store.db")
    bus = DurableBus(worker_store)
    worker = AgentLoop(bus, ScriptedProvider([gate, "an answer"]), tmp_path, store=worker_store)
    async with AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path, store=store) as chat:
        running = asyncio.create_task(worker.run())
        await bus.publish_inbound(InboundMessage("cli", "cron", "direct", "do the job"))
        await asyncio.wait_for(gate.reached.wait(), 30)
        asking = asyncio.create_task(chat.process_direct("and this?", attended=True))
        await until(lambda: waiting(tmp_path) == 2)
        gate.open.set()
        assert await asyncio.wait_for(asking, 30) == "an answer"
        assert await shown(chat, "an answer") == "✉ while you were away: the job is done\n"
        assert await shown(chat, "") == ""
        worker.stop()
        await running
        await worker.close()


async def test_an_answer_that_somebody_in_the_process_waits_for_is_not_sent_as_well(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    async with AgentLoop(DurableBus(store), ScriptedProvider(["here it is"]), tmp_path, store=store) as agent:
        assert await agent.process_direct("where is it?", attended=True) == "here it is"
        assert await agent.undelivered("cli", "direct") == []

"""A chat whose turn another process finishes: its answer is shown once, now or when the user returns."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from everloop import AgentLoop, InboundMessage, MessageBus, OutboundMessage
from everloop.cli.chat_plain import _answer
from everloop.cli.common import show_undelivered
from everloop.cli.live_output import LiveOutput
from everloop.cli.output import Output, Renderer
from everloop.cli.status import SessionStatus
from everloop.cli.terminal import Chat
from everloop.config import Config
from everloop.runtime.durable_bus import DurableBus
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider
from everloop.testing.openai_server import Reply

from ..server.serving import process
from ..support.commands import environment, everloop, start, until
from ..support.held import HeldOpenAI
from .chat import Gate


async def ended(home: Path) -> None:
    """Wait until no turn of the chat is open."""
    store = SQLiteStore(home / "everloop.db")
    async with asyncio.timeout(30):
        while (info := await store.session("me", "cli:direct")) is None or info.open_turn is not None:
            await asyncio.sleep(0.02)
    await store.close()


def waiting(folder: Path) -> int:
    """Return the number of messages received but not done."""
    with contextlib.closing(sqlite3.connect(folder / "store.db")) as db:
        return int(db.execute("SELECT count(*) FROM inbox WHERE state <> 'done'").fetchone()[0])


async def shown(agent: AgentLoop, answer: str) -> str:
    """Return the outbox messages that are shown in addition to an answer shown just now."""
    output = Output(io.StringIO(), colour=False)
    await show_undelivered(agent, "cli:direct", output, shown=answer)
    return str(output._stream.getvalue())  # type: ignore[attr-defined]


async def test_the_answer_to_a_killed_chat_is_shown_when_the_user_returns(tmp_path: Path) -> None:
    settings: Any = {"EVERLOOP_HOME": str(tmp_path), "EVERLOOP_WORKSPACE": str(tmp_path / "workspace")}
    async with HeldOpenAI() as server:
        server.hold(Reply("never heard"))
        chat = await start(env=environment(server, **settings))
        chat.stdin.write(b"how is the weather?\n")
        await server.reached.wait()
        chat.kill()
        await chat.communicate()
        server.reply("Fine.")
        async with process(server, tmp_path):  # a server on the same store looks for work
            await ended(tmp_path)
        server.reply("You are welcome.")
        back = await everloop(server=server, stdin=b"thanks\n", **settings)
        assert back.lines == ["✉ while you were away: Fine.", "You are welcome."]
        server.reply("Bye.")
        assert (await everloop(server=server, stdin=b"bye\n", **settings)).lines == ["Bye."]
        server.go.set()


async def test_an_answer_of_another_process_that_was_shown_is_not_shown_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate("the job is done")
    worker_store, store = SQLiteStore(tmp_path / "store.db"), SQLiteStore(tmp_path / "store.db")
    bus = DurableBus(worker_store)
    worker = AgentLoop(bus, ScriptedProvider([gate, "an answer"]), tmp_path, store=worker_store)
    begin = store.begin

    async def later(*given: Any) -> Any:
        """Let the worker claim the messages queued behind the job before the chat does."""
        if gate.open.is_set():
            await until(lambda: waiting(tmp_path) == 0)
        return await begin(*given)

    monkeypatch.setattr(store, "begin", later)
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


async def test_an_answer_with_a_local_waiter_is_not_sent_as_well(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    async with AgentLoop(DurableBus(store), ScriptedProvider(["here it is"]), tmp_path, store=store) as agent:
        assert await agent.process_direct("where is it?", attended=True) == "here it is"
        assert await agent.undelivered("cli", "direct") == []


class Closed(io.StringIO):
    """A closed screen."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


async def left(store: SQLiteStore, *texts: str) -> None:
    """Put answers into the outbox that no process was available to send."""
    message = InboundMessage("cli", "cron", "direct", "/status")
    outgoing = [OutboundMessage("cli", "direct", text) for text in texts]
    await store.answer(await store.accept(message.addressed(), "urgent"), outgoing)


async def test_an_answer_that_could_not_be_shown_is_shown_next_time(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "store.db")
    await left(store, "Fine.")
    await store.close()
    async with AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path, store=tmp_path / "store.db") as agent:
        with pytest.raises(BrokenPipeError):
            await show_undelivered(agent, "cli:direct", Output(Closed(), colour=False))
    async with AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path, store=tmp_path / "store.db") as agent:
        assert await shown(agent, "") == "✉ while you were away (possibly a repeat): Fine.\n"
        assert await shown(agent, "") == ""


async def test_all_answers_from_an_absence_are_shown_however_many(tmp_path: Path) -> None:
    async with AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path, store=tmp_path / "store.db") as agent:
        assert isinstance(agent.store, SQLiteStore)
        await left(agent.store, *(f"job {number}" for number in range(250)))
        assert len((await shown(agent, "")).splitlines()) == 250


class Screen(io.StringIO):
    """The screen's contents, and the state of the outbox at each write."""

    def __init__(self, unsent: Callable[[], int]) -> None:
        super().__init__()
        self._unsent = unsent
        self.seen: list[tuple[str, int]] = []

    def write(self, text: str) -> int:
        self.seen.append((text, self._unsent()))
        return len(text)


async def test_at_a_terminal_an_answer_counts_as_sent_when_it_is_on_the_screen(tmp_path: Path) -> None:
    def unsent() -> int:
        with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as db:
            return int(db.execute("SELECT count(*) FROM outbox WHERE sent_at IS NULL").fetchone()[0])

    async with AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path, store=tmp_path / "store.db") as agent:
        assert isinstance(agent.store, SQLiteStore)
        await left(agent.store, "Fine.")
        output = LiveOutput()
        output._stream = screen = Screen(unsent)
        await show_undelivered(agent, "cli:direct", output)
        assert screen.seen == [("✉ while you were away: Fine.\n", 1)]
        assert unsent() == 0


async def test_an_answer_of_another_process_is_shown_though_a_turn_ended_here_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, taken = Gate("the first answer"), asyncio.Event()
    here, there = SQLiteStore(tmp_path / "store.db"), SQLiteStore(tmp_path / "store.db")
    chat = AgentLoop(MessageBus(), ScriptedProvider([gate]), tmp_path, store=here)
    other = AgentLoop(MessageBus(), ScriptedProvider(["the second answer"]), tmp_path, store=there)
    begin = here.begin

    async def late(*given: Any) -> Any:
        """Another process claims the messages queued behind the first turn."""
        if chat.provider.requests:  # type: ignore[attr-defined]
            await other.resume()
            taken.set()
        return await begin(*given)

    monkeypatch.setattr(here, "begin", late)
    out = io.StringIO()
    output = Output(out, colour=False)
    view = Renderer(output)
    async with chat, other:
        chat.watch("cli:direct", view)
        first = asyncio.create_task(_answer(chat, "cli:direct", "one", view, output))
        await asyncio.wait_for(gate.reached.wait(), 30)
        second = asyncio.create_task(_answer(chat, "cli:direct", "two", view, output))
        await until(lambda: waiting(tmp_path) == 2)
        gate.open.set()
        async with asyncio.timeout(30):
            await asyncio.gather(first, second)
        assert taken.is_set()
    assert out.getvalue().index("the first answer\n") < out.getvalue().index("the second answer\n")


async def test_the_chat_at_a_terminal_shows_such_an_answer_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.__stdout__", out := io.StringIO())
    async with AgentLoop(MessageBus(), ScriptedProvider(["a job's answer"]), tmp_path, store=tmp_path / "s") as agent:

        async def elsewhere(line: str, *_: Any, **__: Any) -> str:
            """A turn of this session ends here while another process runs the next one."""
            await AgentLoop.process_direct(agent, "do the job")
            return "the answer"

        monkeypatch.setattr(agent, "process_direct", elsewhere)
        with create_pipe_input() as keys, create_app_session(keys, DummyOutput()):
            status = SessionStatus(agent, Config(), "cli:direct")
            opened = Chat(agent, Config(), InMemoryHistory(), "cli:direct", "hello", status)
            chat = asyncio.create_task(opened.run())
            keys.send_text("how is it?\r")
            await until(lambda: "a job's answer\n" in out.getvalue())
            await until(lambda: "the answer\n" in out.getvalue())
            keys.send_text("\x04")
            await asyncio.wait_for(chat, 30)

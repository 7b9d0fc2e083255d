"""A worker's bus: its queues are in the store, and another process may be at their other end."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, InboundMessage, MessageBus
from everloop.runtime.durable_bus import DurableBus
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call

from .chat import until


def said(text: str) -> InboundMessage:
    return InboundMessage("test", "user", "one", text)


class Gate:
    """A step of a script that waits until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    async def __call__(self, messages: object, tools: object) -> str:
        self.reached.set()
        await self.open.wait()
        return "first answer"


class Chat:
    """A worker on a store, and a channel with its own store object on the same file."""

    def __init__(self, folder: Path, busy: str, *steps: Any) -> None:
        self.provider = ScriptedProvider([*steps])
        self.store = SQLiteStore(folder / "store.db")
        self.channel = DurableBus(SQLiteStore(folder / "store.db"))
        self.bus = DurableBus(self.store)
        self.agent = AgentLoop(self.bus, self.provider, folder, store=self.store, busy=busy)  # type: ignore[arg-type]

    async def __aenter__(self) -> Chat:
        self.running = asyncio.create_task(self.agent.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.agent.stop()
        await self.running
        await self.agent.close()
        await self.bus.close()
        await self.channel.close()
        await self.channel._store.close()

    async def hear(self) -> str:
        message = await asyncio.wait_for(self.channel.consume_outbound(), 30)
        await self.channel.sent(message)
        return message.content


async def test_a_message_of_another_process_steers_the_turn_that_runs(tmp_path):
    gate = Gate()
    async with Chat(tmp_path, "steer", gate, "both answered") as chat:
        await chat.channel.publish_inbound(said("one"))
        await gate.reached.wait()
        await chat.channel.publish_inbound(said("and two"))
        session = chat.agent.dispatcher.session("me", "test:one")
        assert session is not None
        await until(lambda: bool(session.state.steering))  # the worker has been notified
        gate.open.set()
        assert await chat.hear() == "both answered"
        assert [m["content"] for m in chat.provider.requests[-1].messages[1:]] == ["one", "first answer", "and two"]


@pytest.mark.parametrize("answers", [1, 2], ids=["in the same turn", "in the next turn"])
async def test_a_message_that_is_read_while_the_turn_takes_it_steers_it_once(tmp_path, monkeypatch, answers):
    gates = [Gate() for _ in range(answers + 1)]
    async with Chat(tmp_path, "steer", *gates, "answer", "answer") as chat:
        await chat.channel.publish_inbound(said("one"))
        await gates[0].reached.wait()
        await chat.channel.publish_inbound(said("and two"))
        session = chat.agent.dispatcher.session("me", "test:one")
        assert session is not None
        await until(lambda: bool(session.state.steering))
        waiting, read, passed = chat.store.waiting, asyncio.Event(), asyncio.Event()

        async def slow(owner: str, key: str) -> Any:
            rows = await waiting(owner, key)
            read.set()
            await passed.wait()
            return rows

        monkeypatch.setattr(chat.store, "waiting", slow)
        await chat.channel.publish_inbound(said("and three"))
        await read.wait()  # two and three have been read, and two is taken before any notification
        for gate in gates[:-1]:
            gate.open.set()
        await gates[-1].reached.wait()
        passed.set()
        if answers == 1:  # if not, the running turn is that of the third
            await until(lambda: "and three" in str(session.state.steering))
        await asyncio.sleep(0.1)  # nothing is announced twice
        gates[-1].open.set()
        for _ in range(answers):
            await chat.hear()
        heard = [m["content"] for m in chat.provider.requests[-1].messages if m["role"] == "user"]
    assert heard == ["one", "and two", "and three"]


async def test_a_message_of_another_process_replaces_the_turn_that_runs(tmp_path):
    gate = Gate()
    async with Chat(tmp_path, "interrupt", gate, "second answer") as chat:
        await chat.channel.publish_inbound(said("one"))
        await gate.reached.wait()
        await chat.channel.publish_inbound(said("rather two"))
        assert await chat.hear() == "second answer"


async def test_stop_from_another_process_reaches_the_worker_that_runs_the_turn(tmp_path):
    gate = Gate()
    async with Chat(tmp_path, "queue", gate, "later answer") as chat:
        await chat.channel.publish_inbound(said("one"))
        await gate.reached.wait()
        await chat.channel.publish_inbound(said("/stop"))
        assert await chat.hear() == "Stopped. The work so far is kept."
        await chat.channel.publish_inbound(said("two"))
        assert await chat.hear() == "later answer"


async def test_stop_ends_a_turn_even_while_no_process_runs_it(tmp_path):
    gate = Gate()
    async with Chat(tmp_path, "queue", gate) as chat:
        await chat.channel.publish_inbound(said("one"))
        await gate.reached.wait()
    chat = Chat(tmp_path, "queue", "NEVER")  # the turn was interrupted, and a worker comes to resume it
    await chat.channel.publish_inbound(said("/stop"))
    async with chat:
        assert await chat.hear() == "Stopped. The work so far is kept."


@pytest.mark.parametrize("words", [("one", "/stop"), ("/stop", "one")])
async def test_a_queued_stop_ends_the_turn_of_a_message_sent_before_it(tmp_path, words):
    chat = Chat(tmp_path, "queue", "answer")
    for text in words:
        await chat.channel.publish_inbound(said(text))
    heard = ["Stopped. The work so far is kept."] if words[0] == "one" else ["Nothing is running.", "answer"]
    async with chat:
        assert [await chat.hear() for _ in heard] == heard


async def test_stop_reaches_a_turn_that_another_process_claims_at_that_moment(tmp_path):
    first, second = Gate(), Gate()
    async with Chat(tmp_path, "queue", first) as chat:
        await chat.channel.publish_inbound(said("one"))
        await first.reached.wait()
    async with contextlib.AsyncExitStack() as stack:
        here = await stack.enter_async_context(
            AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path, store=tmp_path / "store.db")
        )
        chat = Chat(tmp_path, "queue", second)
        begin = here.store.begin

        async def too_late(*session: Any) -> Any:
            await stack.enter_async_context(chat)
            await second.reached.wait()
            return await begin(*session)

        here.store.begin = too_late  # type: ignore[method-assign,assignment]
        assert "Stopped" in await here.process_direct("/stop", "test:one")
        assert await chat.hear() == "Stopped. The work so far is kept."


async def test_a_worker_waits_for_no_other_process_to_stop_a_turn(tmp_path, monkeypatch):
    monkeypatch.setattr("everloop.runtime.session.STOP_SECONDS", 3600)
    first, second = Gate(), Gate()
    async with Chat(tmp_path, "queue", first) as chat:
        await chat.channel.publish_inbound(said("one"))
        await first.reached.wait()
    late = Chat(tmp_path, "queue", "another answer")
    session = late.store.session
    async with AgentLoop(MessageBus(), ScriptedProvider([second]), tmp_path, store=tmp_path / "store.db") as other:

        async def too_late(owner: str, key: str) -> Any:
            goes_on = asyncio.create_task(other.resume("test:one"))  # claims the turn at this moment
            await second.reached.wait()
            goes_on.cancel()
            late.store.session = session  # type: ignore[method-assign]
            return await session(owner, key)

        late.store.session = too_late  # type: ignore[method-assign]
        await late.channel.publish_inbound(said("/stop"))
        async with late:
            assert await late.hear() == "Stopped. The work so far is kept."
            await late.channel.publish_inbound(InboundMessage("test", "user", "two", "and you?"))
            assert await late.hear() == "another answer"


async def test_a_late_stop_stops_no_other_turn(tmp_path):
    late, other = Chat(tmp_path, "queue", "second answer"), Chat(tmp_path, "queue", "first answer")
    begin, over = late.store.begin, asyncio.Event()

    async def held(*session: Any) -> Any:
        await over.wait()
        return await begin(*session)

    late.store.begin = held  # type: ignore[method-assign,assignment]
    await late.channel.publish_inbound(said("one"))
    await late.channel.publish_inbound(said("/stop"))
    async with late:
        assert await late.hear() == "Stopped. The work so far is kept."
        async with other:  # claims the message to be stopped first, and answers it
            assert await late.hear() == "first answer"
        await late.channel.publish_inbound(said("two"))
        over.set()
        assert await late.hear() == "second answer"


async def test_messages_wait_in_order_behind_a_turn(tmp_path):
    async with Chat(tmp_path, "queue", "a1", "a2", "a3") as chat:
        for text in ("one", "two", "three"):
            await chat.channel.publish_inbound(said(text))
        assert [await chat.hear() for _ in range(3)] == ["a1", "a2", "a3"]


async def test_a_worker_continues_after_a_failed_read_of_the_store(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("everloop.runtime.owners.RETRY_SECONDS", 0.05)
    async with Chat(tmp_path, "queue", "answer") as chat:
        path = tmp_path / "store.db"
        await chat.channel.publish_inbound(said("/help"))
        await chat.hear()
        ready = chat.store.ready

        async def broken(worker: str, owner: str | None = None) -> list[tuple[str, str]]:
            from everloop.errors import StoreError

            chat.store.ready = ready  # type: ignore[method-assign]
            raise StoreError(f"{path} is locked by another program")

        chat.store.ready = broken  # type: ignore[method-assign]
        await chat.channel.publish_inbound(said("one"))
        assert await chat.hear() == "answer"
    assert "locked" in caplog.text


async def test_a_worker_that_had_a_subagent_before_it_ran_still_receives_new_messages(tmp_path):
    chat = Chat(tmp_path, "queue", call("spawn", task="count", wait=True), "40 beans", "counted", "first", "second")
    assert await chat.agent.process_direct("how many?") == "counted"  # it subscribes to a stop of the sub-agent
    async with chat:
        for text in ("first", "second"):
            await chat.channel.publish_inbound(said(text))
            assert await chat.hear() == text


async def test_unacknowledged_answers_are_sent_again_with_a_repeat_mark(tmp_path):
    async with Chat(tmp_path, "queue", "answer") as chat:
        await chat.channel.publish_inbound(said("one"))
        first = await asyncio.wait_for(chat.channel.consume_outbound(), 30)
        assert (first.content, first.repeat) == ("answer", False)
        await chat.channel.close()  # it never acknowledged with `sent`
        other = DurableBus(SQLiteStore(tmp_path / "store.db"))
        again = await asyncio.wait_for(other.consume_outbound(), 30)
        assert (again.content, again.repeat) == ("answer", True)
        await other.sent(again)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(other.consume_outbound(), 0.2)
        await other.close()
        await other._store.close()

"""Scheduled work and the heartbeat through a running loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from everloop import AgentLoop, Config, CronService, MessageBus
from everloop.errors import StoreError
from everloop.log import TurnEnded, UserSaid
from everloop.runtime.agent import agent_of
from everloop.runtime.durable_bus import DurableBus
from everloop.runtime.owners import Owners
from everloop.store.base import Timer
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call

from .chat import Chat, entries, until


def start(tmp_path, model, **settings) -> Chat:
    bus = MessageBus()
    config = Config(home=tmp_path / "home", **settings)
    return Chat(AgentLoop(bus, model, tmp_path, config=config, store=tmp_path / "store.db"), bus)


async def test_a_job_created_by_the_agent_fires_and_is_answered_in_its_chat(tmp_path):
    model = ScriptedProvider(
        [call("cron", action="add", message="water the beans", at="in 1 second"), "ok", "Watered."]
    )
    chat = start(tmp_path, model)
    assert isinstance(chat.agent.cron_service, CronService)
    await chat.say("remind me")
    heard = [await asyncio.wait_for(chat.bus.consume_outbound(), 30) for _ in range(2)]
    assert [(one.channel, one.chat_id, one.content) for one in heard] == [
        ("test", "1", "ok"),
        ("test", "1", "Watered."),
    ]
    said = [entry for entry in await entries(tmp_path) if isinstance(entry, UserSaid)]
    assert [entry.sender for entry in said] == ["user", "cron"]
    assert said[0].content == "remind me"
    note = said[1].note
    assert said[1].content == "water the beans"
    assert model.requests[-1].messages[-1]["content"] == f"water the beans\n\n[{note}]"
    assert f"the job {said[1].job}," in note
    assert "scheduled work" in note  # the model must not mistake it for a user
    assert "Nobody is there" in note
    await chat.stop()
    await chat.agent.close()


async def test_the_turn_of_a_job_can_neither_schedule_more_nor_ask(tmp_path):
    steps: list[Any] = [call("cron", action="add", message="again", every="1h"), "could not"]
    model = ScriptedProvider(steps)
    chat = start(tmp_path, model)
    await chat.agent.cron_service.add("go", at="in 1 second", channel="test", chat_id="1")
    assert await chat.hear() == "could not"
    assert '"status":"error"' in str(model.requests[-1].messages[-1]["content"])
    assert await chat.agent.cron_service.list() == []
    await chat.stop()
    await chat.agent.close()


async def test_a_job_missed_while_down_comes_once_at_the_start(tmp_path):
    chat = start(tmp_path, ScriptedProvider([]))
    await chat.agent.cron_service.add("late", at="in 3 seconds", channel="test", chat_id="1")
    await chat.stop()
    await chat.agent.close()
    await asyncio.sleep(3.2)
    chat = start(tmp_path, ScriptedProvider(["here I am", "NEVER"]))
    assert await chat.hear() == "here I am"
    await chat.stop()
    await chat.agent.close()
    chat = start(tmp_path, ScriptedProvider(["NEVER"]))
    await asyncio.sleep(0.2)
    assert chat.bus.outbound_size == 0
    await chat.stop()
    await chat.agent.close()


async def test_the_heartbeat_answers_only_if_there_is_something_to_report(tmp_path):
    (tmp_path / "HEARTBEAT.md").write_text("# Tasks\n- [ ] look at the beans\n")
    model = ScriptedProvider(["HEARTBEAT_OK", "The beans are dry.", *["HEARTBEAT_OK"] * 20])
    chat = start(tmp_path, model, heartbeat_minutes=1 / 60, heartbeat_to="test:1")
    assert await chat.hear() == "The beans are dry."
    assert "look at the beans" in model.requests[0].messages[-1]["content"]
    assert len(model.requests) >= 2
    (tmp_path / "HEARTBEAT.md").write_text("# Tasks\n- [x] look at the beans\n")
    await asyncio.sleep(1.5)
    asked = len(model.requests)
    await asyncio.sleep(1.5)
    assert len(model.requests) == asked
    assert chat.bus.outbound_size == 0
    await chat.stop()
    await chat.agent.close()


async def test_a_full_store_at_the_start_of_the_heartbeat_does_not_end_scheduled_work(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("everloop.cron.heartbeat.RETRY_SECONDS", 0.05)
    store = SQLiteStore(tmp_path / "store.db")
    set_timer = store.set_timer

    async def full(timer: Timer) -> None:
        store.set_timer = set_timer  # type: ignore[method-assign]
        raise StoreError("the disk is full")

    store.set_timer = full  # type: ignore[method-assign]
    config = Config(home=tmp_path / "home", heartbeat_minutes=60)
    chat = Chat(
        AgentLoop(bus := MessageBus(), ScriptedProvider(["Watered."]), tmp_path, config=config, store=store), bus
    )
    await until(lambda: "the disk is full" in caplog.text)
    await chat.agent.cron_service.add("water", at="in 1 second", channel="test", chat_id="1")
    assert await chat.hear() == "Watered."
    assert "heartbeat" in {timer.id for timer in await store.timers()}
    await chat.stop()
    await chat.agent.close()


async def test_the_loop_is_quiet_when_it_is_stopped(tmp_path):
    chat = start(tmp_path, ScriptedProvider([]), heartbeat_minutes=1)
    await asyncio.sleep(0.05)
    await chat.stop()
    await chat.agent.close()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_a_jobs_answer_is_kept_for_its_chat_until_the_user_returns(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")
    config = Config(home=tmp_path / "home")
    worker = AgentLoop(DurableBus(store), ScriptedProvider(["Watered."]), tmp_path, config=config, store=store)
    running = asyncio.create_task(worker.run())
    await worker.cron_service.add("water", at="in 1 second", channel="cli", chat_id="direct")
    async with asyncio.timeout(30):
        while not any(isinstance(entry, TurnEnded) for entry in await entries(tmp_path, "cli:direct")):
            await asyncio.sleep(0.05)
    worker.stop()
    await running
    await worker.close()
    async with AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path, store=tmp_path / "store.db") as chat:
        assert await chat.undelivered("cli", "other") == []
        assert [row.message.content for row in await chat.undelivered("cli", "direct")] == ["Watered."]
        assert await chat.undelivered("cli", "direct") == []


@asynccontextmanager
async def owners(folder: Path, *steps: Any) -> AsyncIterator[Owners]:
    """The agents of a process, without jobs added after its start."""
    store = SQLiteStore(folder / "store.db")
    config = Config(home=folder / "home", workspace=folder)
    made = Owners(config, store, ScriptedProvider([*steps]), agent_of)
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.close()
        await store.close()


async def test_a_terminating_process_leaves_jobs_to_the_others(tmp_path):
    async with owners(tmp_path) as one:
        cron = (await one.agent("me")).cron_service
        job = await cron.add("water", every="1h", channel="test", chat_id="1", owner="ada")
        one.drain()
        await until(lambda: one._resting is not None and one._resting.done())
        cron.clock = lambda: job.next_due
        cron.changed()
        await asyncio.sleep(0.3)
        assert [timer.due_at for timer in await one.store.timers()] == [job.next_due]


async def test_a_job_fired_by_a_terminating_process_goes_to_the_others_at_once(tmp_path):
    async with owners(tmp_path) as one, owners(tmp_path, "Watered.") as other:
        cron = (await one.agent("me")).cron_service
        fire = one.store.fire_timer

        async def told_to_end(*firing: Any) -> bool:
            one.drain()
            return await fire(*firing)

        one.store.fire_timer = told_to_end  # type: ignore[method-assign,assignment]
        job = await cron.add("water", every="1h", channel="test", chat_id="1", owner="ada")
        await other.agent("ada")
        await asyncio.sleep(0.5)  # by then no process checks because of a newcomer
        cron.clock = lambda: job.next_due
        cron.changed()
        async with asyncio.timeout(20):
            while not other.provider.requests:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)

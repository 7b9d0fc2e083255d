"""Timers, workers, and many of them at once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from everloop import AgentLoop, MessageBus
from everloop.errors import StoreError
from everloop.log import ModelAnswered, UserSaid
from everloop.store.base import Busy, Store, Timer
from everloop.store.peers import Notice, retire
from everloop.testing import ScriptedProvider

from ..support.commands import until
from .steps import away_once, begun, finish, log_of, message

# ---------------------------------------------------------------------------------------------- timers


async def test_timers_are_kept_changed_and_removed(store):
    await store.set_timer(Timer("me", "a", 20.0, {"x": 1}))
    await store.set_timer(Timer("me", "b", 10.0, {}))
    await store.set_timer(Timer("you", "a", 15.0, {}))
    assert [(timer.owner, timer.id) for timer in await store.timers()] == [("me", "b"), ("you", "a"), ("me", "a")]
    assert [(timer.owner, timer.id) for timer in await store.timers(limit=2)] == [("me", "b"), ("you", "a")]
    await store.set_timer(Timer("me", "a", 5.0, {"x": 2}))
    assert await store.timers("me") == [Timer("me", "a", 5.0, {"x": 2}), Timer("me", "b", 10.0, {})]
    assert await store.cancel_timer("me", "a")
    assert not await store.cancel_timer("me", "a")
    assert [timer.id for timer in await store.timers("you")] == ["a"]


async def test_a_timer_fires_once_however_many_workers_try(opened, me):
    stores = [await opened() for _ in range(3)]
    timer = Timer("me", "a", 10.0, {})
    await stores[0].set_timer(timer)
    said = message("tick", id="cron:a:10")
    fired = await asyncio.gather(*(store.fire_timer(timer, said, 20.0) for store in stores for _ in range(3)))
    assert fired.count(True) == 1
    assert [one.due_at for one in await stores[0].timers()] == [20.0]
    assert await stores[0].fire_timer(Timer("me", "a", 20.0, {}), message("tock"), None)
    assert await stores[0].timers() == []
    claim = await stores[1].begin("me", "test:1", me)
    assert claim is not None
    assert (await finish(stores[1], claim)).more  # tick, and then tock


# ---------------------------------------------------------------------------------------------- workers


async def test_workers_are_known_while_they_live(store, me, other):
    await store.join(me, "/run/me")
    await store.join(other, "/run/other")
    assert dict(await store.workers()) == {me: "/run/me", other: "/run/other"}
    retire(other)
    assert dict(await store.workers()) == {me: "/run/me"}
    await store.leave(me)
    assert await store.workers() == []


async def test_a_worker_whose_process_ended_is_dead(store, me):
    code = "from everloop.store.peers import new_worker; print(new_worker())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    gone = done.stdout.strip()
    claim = await store.begin("me", "test:1", gone, message())
    assert claim is not None
    assert await store.ready(me) == [("me", "test:1")]


async def test_a_worker_that_could_not_join_can_do_so_later(store, tmp_path, monkeypatch):
    away_once(store, "join", monkeypatch)
    heard: list[Notice] = []
    async with AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path, store=store) as agent:
        notices = agent._owners._notices
        monkeypatch.setattr(notices, "_on_notice", heard.append)
        with pytest.raises(StoreError):
            await notices.join(agent.worker)
        await notices.join(agent.worker)
        await until(lambda: heard)
        heard.clear()
        await store.wake()
        await until(lambda: heard)


async def test_an_agent_can_be_closed_while_it_waits_to_join(store, tmp_path, monkeypatch):
    joining = asyncio.Event()

    async def never(*_: object) -> None:
        joining.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "join", never)
    agent = AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path, store=store)
    agent._owners.on_subagent()
    async with asyncio.timeout(30):
        await joining.wait()
        await agent.close()


# ---------------------------------------------------------------------------------------------- many at once


async def test_two_workers_never_hold_one_session(opened, workers):
    stores = [await opened() for _ in range(3)]
    held = most = 0
    answered: list[str] = []
    for n in range(12):
        await stores[0].accept(message(str(n)))

    async def work(store: Store, worker: str) -> None:
        nonlocal held, most
        while len(answered) < 12:
            try:
                claim = await store.begin("me", "test:1", worker)
            except Busy:
                await asyncio.sleep(0.001)
                continue
            if claim is None:
                continue
            held += 1
            most = max(most, held)
            assert claim.message is not None
            answered.append(claim.message.content)
            await store.append(claim, [ModelAnswered("x")])
            held -= 1
            await finish(store, claim)

    async with asyncio.timeout(20):
        await asyncio.gather(*(work(store, worker) for store, worker in zip(stores, workers, strict=True)))
    assert most == 1
    assert answered == [str(n) for n in range(12)]


async def test_a_closed_store_can_be_used_again(store, me):
    await finish(store, await begun(store, me))
    await store.close()
    await store.close()
    assert len(await log_of(store)) == 3
    await begun(store, me)


async def test_writes_submitted_before_the_store_was_closed_are_on_disk(opened, me):
    store = await opened()
    claim = await begun(store, me)
    writes = [store.append(claim, [UserSaid(str(n))]) for n in range(50)]
    await store.close()
    await asyncio.gather(*writes)
    assert len(await log_of(await opened())) == 51

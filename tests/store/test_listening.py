"""An agent gets notices of other workers, even if the store was unavailable when it first tried to subscribe."""

from __future__ import annotations

import asyncio

import pytest

from everloop import AgentLoop, MessageBus
from everloop.errors import StoreError
from everloop.store.peers import Notice
from everloop.testing import ScriptedProvider

from ..support.commands import until
from .steps import away_once


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

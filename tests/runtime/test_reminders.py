"""Scheduled reminders: sent as written, without a model."""

from __future__ import annotations

import asyncio

import pytest

from everloop import AgentLoop, InboundMessage, MessageBus
from everloop.config import Config
from everloop.providers.base import ProviderError
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call
from tests.support.commands import everloop


def no_model(messages, tools):
    raise ProviderError("the model was asked")


@pytest.mark.parametrize("config", [None, Config(day_tokens=1)], ids=["plain", "budget"])
async def test_a_due_reminder_is_sent_as_written_without_a_model_call(tmp_path, config):
    store = SQLiteStore(tmp_path / "store.db")
    bus, provider = MessageBus(), ScriptedProvider([no_model], repeat_last=True)
    async with AgentLoop(bus, provider, tmp_path, store=store, config=config) as agent:
        running = asyncio.create_task(agent.run())
        await agent.cron_service.add("water the beans", at="in 1 second", channel="test", chat_id="7", deliver="text")
        async with asyncio.timeout(20):
            said = await bus.consume_outbound()
        assert (said.channel, said.chat_id, said.content) == ("test", "7", "Reminder: water the beans")
        assert provider.requests == []
        (session,) = await store.sessions("me")
        log = await store.read_log(session.id)
        assert [type(one.entry).__name__ for one in log] == ["UserSaid", "ModelAnswered", "TurnEnded"]
        agent.stop()
        await running


async def test_the_model_sets_a_reminder_and_is_not_called_when_it_fires(tmp_path):
    bus = MessageBus()
    add = call("cron", action="add", message="look at the tide", at="in 1 second", deliver="text")
    async with AgentLoop(bus, ScriptedProvider([add, "I will."]), tmp_path, store=tmp_path / "s.db") as agent:
        running = asyncio.create_task(agent.run())
        await bus.publish_inbound(InboundMessage("test", "user", "7", "Remind me to look."))
        async with asyncio.timeout(20):
            answers = [(await bus.consume_outbound()).content for _ in range(2)]
        assert answers == ["I will.", "Reminder: look at the tide"]
        agent.stop()
        await running


async def test_the_command_adds_a_reminder(tmp_path):
    done = await everloop("cron", "add", "water the beans", "--every", "1h", "--deliver", "text")
    assert done.status == 0
    assert '"deliver":"text"' in (await everloop("cron", "list", "--json")).out.replace(" ", "")

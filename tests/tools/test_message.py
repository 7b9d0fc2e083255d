"""`message`: to the chat of the turn, elsewhere only where the settings allow, and never twice."""

from __future__ import annotations

import asyncio
from typing import Any

from everloop import AgentLoop, MessageBus
from everloop.bus import InboundMessage, OutboundMessage
from everloop.config import Config
from everloop.log import Call, CallEnded, ModelAnswered
from everloop.store.peers import new_worker
from everloop.testing import ScriptedProvider, call


def agent_of(folder: Any, *steps: Any, **settings: Any) -> AgentLoop:
    model = ScriptedProvider(steps)
    return AgentLoop(MessageBus(), model, folder, config=Config(**settings), store=folder / "store.db")


async def sent_by(agent: AgentLoop) -> list[tuple[str, str, str]]:
    await asyncio.sleep(0)
    found = []
    while agent.bus.outbound_size:
        message = await agent.bus.consume_outbound()
        found.append((message.channel, message.chat_id, message.content))
    return found


async def statuses(agent: AgentLoop) -> list[str]:
    info = await agent.store.session("me", "cli:direct")
    assert info is not None
    return [one.entry.status for one in await agent.store.read_log(info.id) if isinstance(one.entry, CallEnded)]


async def test_it_goes_to_the_chat_that_the_turn_came_from(tmp_path):
    async with agent_of(tmp_path, call("message", content="half-way"), "done") as agent:
        await agent.process_direct("go", channel="test", chat_id="7")
        assert await sent_by(agent) == [("test", "7", "half-way")]


async def test_another_chat_is_out_of_reach_unless_the_settings_name_it(tmp_path):
    step = call("message", content="psst", channel="mail", chat_id="eve")
    async with agent_of(tmp_path, step, "done") as agent:
        await agent.process_direct("go")
        assert await sent_by(agent) == []
        assert await statuses(agent) == ["error"]
    async with agent_of(tmp_path, step, "done", message_to=("mail:*",)) as agent:
        await agent.process_direct("go", session_key="other")
        assert await sent_by(agent) == [("mail", "eve", "psst")]


async def test_a_call_that_is_run_again_after_a_crash_sends_nothing_twice(tmp_path):
    async with agent_of(tmp_path, "unused") as agent:
        said = InboundMessage("cli", "user", "direct", "go", session="cli:direct", reply=False).addressed()
        claim = await agent.store.begin("me", "cli:direct", new_worker(), said)
        assert claim is not None
        asked = call("message", content="once")
        await agent.store.append(claim, [ModelAnswered(None, (Call(asked.id, "message", asked.arguments),))])
        # It was sent, and then the process died before the result was on disk.
        await agent.store.post(claim, OutboundMessage("cli", "direct", "once"), f"{claim.turn}/{asked.id}", None)
        await agent.store.release(claim)
    async with agent_of(tmp_path, "done") as agent:
        await agent.resume()
        rows = await agent.store.take_outgoing("somebody")
        assert [row.message.content for row in rows] == ["once"]
        assert await sent_by(agent) == []  # nothing new was sent
        assert await statuses(agent) == ["ok"]

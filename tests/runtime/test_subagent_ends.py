"""Sub-agents that end early: on a stop, with their turn, or because their task cannot be read."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everloop import AgentLoop, Config, InboundMessage
from everloop.log import Request, TurnEnded
from everloop.runtime.agent import agent_of
from everloop.runtime.durable_bus import DurableBus
from everloop.runtime.owners import Owners
from everloop.runtime.subagents import ParentTurn
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call
from everloop.tools.base import ToolError

from .chat import Gate, until
from .test_subagents import Both, hear, say, silent
from .test_subagents import house as house


async def test_stop_ends_them_and_nothing_is_reported(house):
    gate = Gate("late")
    agent = house.start(Both([call("spawn", task="slow"), "started", "NEVER"], [gate]))
    await say(agent, "go")
    await hear(agent)
    await gate.reached.wait()
    await say(agent, "/stop")
    assert "Stopped" in (await hear(agent))[2]
    (child,) = await house.children()
    await until(lambda: not agent.dispatcher.session("me", child))
    ended = (await house.log(child))[-1]
    assert isinstance(ended, TurnEnded)
    assert ended.reason == "cancelled"
    assert await silent(agent)


async def test_stop_ends_an_awaited_sub_agent(house):
    gate = Gate("late")
    agent = house.start(Both([call("spawn", task="slow", wait=True), "NEVER"], [gate]))
    await say(agent, "go")
    await gate.reached.wait()
    await say(agent, "/stop")
    assert "Stopped" in (await hear(agent))[2]
    (child,) = await house.children()
    await until(lambda: not agent.dispatcher.session("me", child))
    assert (await house.log(child))[-1].reason == "cancelled"


async def test_stop_from_a_process_that_runs_no_turns_ends_one_that_has_not_begun(house):
    store = SQLiteStore(house.folder / "store.db")
    front = Owners(Config(home=house.folder / "home"), store, ScriptedProvider([]), agent_of, runs=False)
    agent = await front.agent("me")
    id = await agent.subagents.spawn("slow", ParentTurn(channel="test", chat_id="1"))
    assert "Stopped" in await agent.process_direct("/stop", "test:1")
    await front.close()
    await store.close()
    model = Both(["NEVER"], ["NEVER"])
    bus = DurableBus(SQLiteStore(house.folder / "store.db"))
    async with AgentLoop(bus, model, house.folder, store=bus._store) as worker:
        running = asyncio.create_task(worker.run())
        try:
            await asyncio.wait_for(worker.subagents.output(id), 20)
        finally:
            worker.stop()
            await running
    assert model.asked == {"parent": [], "child": []}
    assert (await house.log(f"sub:{id}"))[-1].reason == "cancelled"


async def test_a_replaced_turn_ends_only_its_awaited_sub_agents(house):
    gates = [Gate("late"), Gate("40 beans")]
    model = Both(
        [call("spawn", task="count"), "ok", call("spawn", task="slow", wait=True), "second", "third"], [*gates[::-1]]
    )
    agent = house.start(model, busy="interrupt")
    await say(agent, "go")
    await hear(agent)
    await gates[1].reached.wait()
    await say(agent, "go on")
    await gates[0].reached.wait()
    await say(agent, "rather this")
    assert (await hear(agent))[2] == "second"
    gates[1].open.set()
    assert (await hear(agent))[2] == "third"
    await until(lambda: not agent.dispatcher._sessions)
    logs = [await house.log(child) for child in await house.children()]
    assert sorted(log[-1].reason for log in logs) == ["answer", "cancelled"]


async def test_a_client_that_disconnects_ends_the_sub_agents_of_its_turn(house):
    gate = Gate("late")
    agent = house.start(Both([call("spawn", task="slow"), "NEVER"], [gate]))
    message = InboundMessage("api", "ada", "1", "go", id="m1", request=Request())
    asked = asyncio.create_task(agent.requests.run(message))
    await gate.reached.wait()
    asked.cancel()
    await asyncio.wait([asked])
    agent.requests.withdraw(message)
    (child,) = await house.children()
    await until(lambda: not agent.dispatcher._sessions)
    assert (await house.log(child))[-1].reason == "cancelled"


@pytest.mark.parametrize(("reason", "heard"), [("cancelled", []), ("replaced", ["reported"])])
async def test_a_sub_agent_being_started_when_its_turn_is_stopped_is_ended_too(house, reason, heard):
    agent = house.start(Both([call("spawn", task="count"), "reported"], ["40 beans"]))
    accept = agent.store.accept

    async def stopped_meanwhile(message: InboundMessage, *kind: Any) -> Any:
        if message.channel == "sub":
            agent.dispatcher.stop_turn("me", "test:1", reason, "stopped")
        return await accept(message, *kind)

    agent.store.accept = stopped_meanwhile
    await say(agent, "go")
    if reason == "cancelled":
        assert (await hear(agent))[2] == "stopped"
    for text in heard:
        assert (await hear(agent))[2] == text
    await until(lambda: not agent.dispatcher._sessions)
    (child,) = await house.children()
    assert (await house.log(child))[-1].reason == ("answer" if heard else "cancelled")
    assert await silent(agent)


async def test_a_sub_agent_with_unreadable_terms_fails_and_does_not_stay_open(house):
    agent = house.start(Both(["I see."], ["NEVER"]))
    facts = {"definition": {"of": "another version"}, "parent": "test:1", "origin": "test:1", "label": "odd"}
    task = InboundMessage("sub", "agent", "5", "go", id="spawn:5", reply=False, attended=False, metadata=facts)
    with pytest.raises(ToolError, match="failed"):
        await asyncio.wait_for(asyncio.gather(agent.subagents.result("5"), agent.bus.publish_inbound(task)), 20)
    assert (await hear(agent))[2] == "I see."
    assert (await house.log("sub:5"))[-1].reason == "error"

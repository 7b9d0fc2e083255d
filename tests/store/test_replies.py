"""One-word answers to questions, with several workers on one store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everloop import AgentLoop, tool
from everloop.bus import InboundMessage
from everloop.config import Config, Rule
from everloop.log import Call, CallsAsked, CallsDecided, Cleared, Entry, ModelAnswered
from everloop.runtime.durable_bus import DurableBus
from everloop.store.base import Claim, Store
from everloop.testing import ScriptedProvider, call

from .steps import answer, begun, finish, log_of, message

ASKED: list[Entry] = [
    ModelAnswered(None, (Call("a", "exec"),)),
    CallsAsked(("a",), "may I?", ("exec:ls", "tool:x"), ("fetch:example.org",)),
]


async def parked(store: Store, worker: str) -> Claim:
    claim = await begun(store, worker)
    await store.park(claim, ASKED, [answer("may I?")])
    return claim


async def test_a_reply_is_an_answer_only_while_a_question_is_open(store, me):
    claim = await begun(store, me)
    before = await store.accept(message("y"), "reply")
    assert before.kind == "message"
    await store.park(claim, ASKED, [answer("may I?")])
    after = await store.accept(message("y"), "reply")
    assert after.kind == "urgent"
    assert await store.decide("me", "test:1", True, word=before) is None  # it came before the question
    assert [row.id for row in await store.urgent(me)] == [after.id]
    assert await store.decide("me", "test:1", True, word=after) is not None
    assert await store.decide("me", "test:1", True, word=after) is None
    assert (await store.accept(message("n"), "reply")).kind == "message"


async def test_a_message_that_answers_nothing_is_not_put_into_the_inbox(store, me):
    await begun(store, me)
    assert await store.decide("me", "test:1", True, word=message("y", id="m9")) is None
    assert await store.find("me", "m9") is None


@pytest.mark.parametrize(
    ("allowed", "always", "granted"),
    [
        (True, True, {"exec:ls", "tool:x", "fetch:example.org"}),
        (True, False, {"fetch:example.org"}),
        (False, True, set()),
        (None, False, set()),
    ],
)
async def test_an_answers_grants_are_written_with_it(opened, me, allowed, always, granted):
    store = await opened()
    await parked(store, me)
    await store.decide("me", "test:1", allowed, "ann", always=always)
    again = await opened()
    assert await again.grants("me", "test:1") == granted
    assert await again.grants("you", "test:1") == set()
    decided = [entry for entry in await log_of(again) if isinstance(entry, CallsDecided)]
    assert [entry.always for entry in decided] == ([] if allowed is None else [always])


async def test_a_new_conversation_revokes_grants(store, me):
    await parked(store, me)
    await store.decide("me", "test:1", True, always=True)
    await store.grant("me", "test:2", ["tool:x"])
    resumed = await store.begin("me", "test:1", me)
    assert resumed is not None
    await finish(store, resumed)
    assert await store.grants("me", "test:1")
    await store.note("me", "test:1", [Cleared()])
    assert await store.grants("me", "test:1") == set()
    assert await store.grants("me", "test:2") == {"tool:x"}


async def test_of_two_workers_one_takes_the_answer_and_the_call_runs_once(opened, tmp_path):
    launched: list[str] = []

    @tool
    async def launch(name: str) -> str:
        """Launch a rocket."""
        launched.append(name)
        return f"{name} is up"

    # If the second answer comes after the first was taken, it is an ordinary message.
    provider = ScriptedProvider([call("launch", name="ada"), "it flies", "what?"])
    config = Config(home=tmp_path / "home", policy=(Rule(do="ask", tool="launch"),))
    agents: list[AgentLoop] = []
    for _ in range(2):
        store = await opened()
        agent = AgentLoop(DurableBus(store), provider, tmp_path, config=config, store=store)
        agent.tools.register(launch)
        agents.append(agent)
    channel = DurableBus(await opened())
    running = [asyncio.create_task(agent.run()) for agent in agents]
    try:
        await channel.publish_inbound(InboundMessage("test", "ann", "1", "up!"))
        question = await _next(channel)
        assert "May I" in question
        # Two members of the group answer at once.
        words = [InboundMessage("test", who, "1", "y") for who in ("ann", "bob")]
        await asyncio.gather(*map(channel.publish_inbound, words))
        said = [await _next(channel) for _ in range(3)]
    finally:
        for agent in agents:
            agent.stop()
        await asyncio.gather(*running)
        await channel.close()
        for agent in agents:
            await agent.close()
    assert launched == ["ada"]
    assert "it flies" in said
    assert "Approved." in said
    assert len([one for one in await _decided(await opened()) if one.allowed]) == 1


async def _decided(store: Store) -> list[CallsDecided]:
    info = await store.session("me", "test:1")
    assert info is not None
    log = [one.entry for one in await store.read_log(info.id)]
    return [entry for entry in log if isinstance(entry, CallsDecided)]


async def _next(bus: Any) -> str:
    async with asyncio.timeout(60):
        message = await bus.consume_outbound()
    await bus.sent(message)
    return str(message.content)

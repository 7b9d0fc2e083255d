"""Calls that need approval: the turn waits on disk, and continues whenever the decision arrives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, InboundMessage, MessageBus, Tool, tool
from everloop import events as ev
from everloop.commands import HOW_TO_ANSWER, with_how_to_answer
from everloop.config import Config, Rule
from everloop.log import CallEnded, CallsAsked, CallsDecided, TurnEnded, UserSaid
from everloop.replay import replay
from everloop.runtime.durable_bus import DurableBus
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call

ASK = Config(policy=(Rule(do="ask", tool="launch", why="rockets are dear"),))
DENY = Config(policy=(Rule(do="deny", tool="launch", why="no rockets"),))


class Pad:
    """A tool with an effect, and a record of its runs."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def tool(self) -> Tool:
        @tool
        async def launch(name: str) -> str:
            """Launch a rocket."""
            self.launched.append(name)
            return f"{name} is up"

        return launch


@pytest.fixture
def pad() -> Pad:
    return Pad()


def agent_of(folder: Path, pad: Pad, steps: list[Any], config: Any = ASK, **options: Any) -> AgentLoop:
    agent = AgentLoop(
        MessageBus(), ScriptedProvider(steps), folder, config=config, store=folder / "store.db", **options
    )
    agent.tools.register(pad.tool())
    return agent


LAUNCH = [call("launch", name="ada"), "it flies"]


async def log_of(agent: AgentLoop) -> list[Any]:
    info = await agent.store.session("me", "cli:direct")
    return [one.entry for one in await agent.store.read_log(info.id)] if info else []


async def test_nothing_runs_before_the_decision_and_the_turn_continues_with_it(tmp_path, pad):
    async with agent_of(tmp_path, pad, LAUNCH) as agent:
        question = await agent.process_direct("up!", attended=True)
        assert pad.launched == []
        assert '"ada"' in question
        assert "rockets are dear" in question
        assert with_how_to_answer(await agent.question() or "") == question
        assert await agent.process_direct("/approve", attended=True) == "it flies"
        assert await agent.question() is None
    assert pad.launched == ["ada"]


async def test_the_answer_may_come_after_a_restart(tmp_path, pad):
    async with agent_of(tmp_path, pad, LAUNCH[:1]) as agent:
        question = await agent.process_direct("up!", attended=True)
    async with agent_of(tmp_path, pad, LAUNCH[1:]) as agent:
        assert with_how_to_answer(await agent.question() or "") == question
        await agent.resume()
        assert pad.launched == []
        assert await agent.process_direct("/approve", attended=True) == "it flies"
    assert pad.launched == ["ada"]


async def test_a_refusal_and_its_reason_reach_the_model(tmp_path, pad):
    async with agent_of(tmp_path, pad, [call("launch", name="ada"), "as you wish"]) as agent:
        await agent.process_direct("up!", attended=True)
        assert await agent.process_direct("/deny it rains", attended=True) == "as you wish"
        log = await log_of(agent)
    assert pad.launched == []
    ended = next(entry for entry in log if isinstance(entry, CallEnded))
    assert ended.status == "denied"
    assert "it rains" in ended.content


async def test_a_whole_round_waits_and_one_decision_covers_all_calls(tmp_path, pad):
    steps = [[call("launch", name="ada"), call("list_dir"), call("launch", name="bob")], "up"]
    async with agent_of(tmp_path, pad, steps) as agent:
        question = await agent.process_direct("up!", attended=True)
        assert '"ada"' in question
        assert '"bob"' in question
        assert [entry for entry in await log_of(agent) if isinstance(entry, CallEnded)] == []
        await agent.process_direct("/approve", attended=True)
    assert sorted(pad.launched) == ["ada", "bob"]


async def test_without_a_user_the_call_is_denied_and_the_model_gets_the_reason(tmp_path, pad):
    async with agent_of(tmp_path, pad, [call("launch", name="ada"), "then not"]) as agent:
        assert await agent.process_direct("up!") == "then not"
        ended = next(entry for entry in await log_of(agent) if isinstance(entry, CallEnded))
    assert pad.launched == []
    assert ended.status == "denied"
    assert "rockets are dear" in ended.content
    assert "there is no one to ask" in ended.content


async def test_a_denied_call_does_not_run_and_is_not_asked_about(tmp_path, pad):
    async with agent_of(tmp_path, pad, [call("launch", name="ada"), "then not"], DENY) as agent:
        assert await agent.process_direct("up!", attended=True) == "then not"
    assert pad.launched == []


async def test_a_chat_is_asked_and_answered_over_the_bus(tmp_path, pad):
    async with agent_of(tmp_path, pad, LAUNCH) as agent:
        running = asyncio.create_task(agent.run())
        await agent.bus.publish_inbound(InboundMessage("test", "ann", "1", "up!"))
        question = await agent.bus.consume_outbound()
        assert '"ada"' in question.content
        assert question.content.endswith(HOW_TO_ANSWER)
        assert (question.channel, question.chat_id) == ("test", "1")
        await agent.bus.publish_inbound(InboundMessage("test", "bob", "2", "/approve"))  # a decision from another chat
        assert (await agent.bus.consume_outbound()).chat_id == "2"
        assert pad.launched == []
        await agent.bus.publish_inbound(InboundMessage("test", "ann", "1", "/approve"))
        said = [(await agent.bus.consume_outbound()).content for _ in range(2)]
        assert "it flies" in said
        agent.stop()
        await running
    assert pad.launched == ["ada"]


async def test_the_result_of_a_sub_agent_cannot_approve(tmp_path, pad):
    async with agent_of(tmp_path, pad, [*LAUNCH, "heard"]) as agent:
        running = asyncio.create_task(agent.run())
        await agent.bus.publish_inbound(InboundMessage("test", "ann", "1", "up!"))
        await agent.bus.consume_outbound()
        await agent.bus.publish_inbound(InboundMessage("system", "sub", "test:1", "/approve"))
        assert "still waiting" in (await agent.bus.consume_outbound()).content
        assert pad.launched == []
        agent.stop()
        await running


async def test_a_message_after_a_question_is_kept_and_answered_next(tmp_path, pad):
    async with agent_of(tmp_path, pad, [*LAUNCH, "second"]) as agent:
        running = asyncio.create_task(agent.run())
        await agent.bus.publish_inbound(InboundMessage("test", "ann", "1", "up!"))
        await agent.bus.consume_outbound()
        await agent.bus.publish_inbound(InboundMessage("test", "ann", "1", "and then?"))
        assert "waiting" in (await agent.bus.consume_outbound()).content
        await agent.bus.publish_inbound(InboundMessage("test", "ann", "1", "/approve"))
        said = [(await agent.bus.consume_outbound()).content for _ in range(3)]
        assert said.index("it flies") < said.index("second")
        agent.stop()
        await running


async def test_a_steering_message_denies_the_call_and_is_passed_to_the_turn(tmp_path, pad):
    model = [call("launch", name="ada"), "the blue one, then"]
    async with agent_of(tmp_path, pad, model, busy="steer") as agent:
        await agent.process_direct("up!", attended=True)
        assert await agent.process_direct("no, the blue one", attended=True) == "the blue one, then"
        log = await log_of(agent)
    assert pad.launched == []
    assert [entry.content for entry in log if isinstance(entry, UserSaid)] == ["up!", "no, the blue one"]
    assert sum(isinstance(entry, TurnEnded) for entry in log) == 1


async def test_an_interrupting_message_ends_the_waiting_turn(tmp_path, pad):
    model = [call("launch", name="ada"), "something else"]
    async with agent_of(tmp_path, pad, model, busy="interrupt") as agent:
        await agent.process_direct("up!", attended=True)
        assert await agent.process_direct("forget it", attended=True) == "something else"
        ends = [entry.reason for entry in await log_of(agent) if isinstance(entry, TurnEnded)]
    assert pad.launched == []
    assert ends == ["replaced", "answer"]


async def test_a_rule_changed_to_deny_applies_to_an_open_question(tmp_path, pad):
    async with agent_of(tmp_path, pad, LAUNCH[:1]) as agent:
        await agent.process_direct("up!", attended=True)
    async with agent_of(tmp_path, pad, ["then not"], DENY) as agent:
        assert await agent.process_direct("/approve", attended=True) == "then not"
        assert (await replay(await log_of(agent))).same
    assert pad.launched == []


async def test_a_new_conversation_ends_the_waiting_turn(tmp_path, pad):
    async with agent_of(tmp_path, pad, [*LAUNCH[:1], "hello"]) as agent:
        await agent.process_direct("up!", attended=True)
        assert "new conversation" in await agent.process_direct("/new", attended=True)
        assert await agent.question() is None
        assert await agent.process_direct("hi", attended=True) == "hello"
    assert pad.launched == []


async def test_the_status_shows_an_open_question(tmp_path, pad):
    async with agent_of(tmp_path, pad, LAUNCH) as agent:
        assert "waits" not in await agent.process_direct("/status")
        await agent.process_direct("up!", attended=True)
        assert "waits for your answer" in await agent.process_direct("/status")


async def test_a_turn_that_waits_can_be_stopped(tmp_path, pad):
    async with agent_of(tmp_path, pad, [*LAUNCH[:1], "next"]) as agent:
        await agent.process_direct("up!", attended=True)
        await agent.process_direct("/stop")
        await agent.resume()
        assert await agent.question() is None
        assert await agent.process_direct("/approve", attended=True) == "There is no open question."
        assert await agent.process_direct("go on", attended=True) == "next"
    assert pad.launched == []


async def test_a_waiting_turn_can_be_stopped_right_after_a_message(tmp_path, pad):
    async with agent_of(tmp_path, pad, [*LAUNCH[:1], "next"]) as agent:
        await agent.process_direct("up!", attended=True)
        said = asyncio.create_task(agent.process_direct("and now?", attended=True))
        while agent.dispatcher.session("me", "cli:direct") is None:
            await asyncio.sleep(0)
        assert "Stopped" in await agent.process_direct("/stop")  # while the message is being found to have to wait
        assert "still waiting" in await said
        await agent.resume()
        assert await agent.question() is None
        assert "next" in str(await log_of(agent))
    assert pad.launched == []


async def test_a_decision_received_by_two_processes_is_confirmed_with_its_actual_effect(tmp_path, pad):
    workers = [agent_of(tmp_path, pad, [*LAUNCH]) for _ in range(2)]
    first, second = (one.store for one in workers)
    channel = DurableBus(SQLiteStore(tmp_path / "store.db"))
    await workers[0].process_direct("up!", "test:1", "test", "1", attended=True)
    row = await channel._store.accept(InboundMessage("test", "user", "1", "/approve").addressed(), "urgent")
    answer, over = first.answer, asyncio.Event()

    async def slow(*answered: Any) -> list[int]:
        await over.wait()
        return await answer(*answered)

    first.answer = slow  # type: ignore[method-assign,assignment]
    heard = asyncio.create_task(workers[0]._answer_urgent(row))
    while (await second.incoming(row.id)).first_seq is None:
        await asyncio.sleep(0.01)
    await workers[1]._answer_urgent(row)
    over.set()
    await heard
    said = await asyncio.wait_for(workers[1].bus.consume_outbound(), 20)
    assert said.content == "Approved."
    for one in workers:
        await one.close()
    await channel.close()
    await channel._store.close()


async def test_approving_twice_runs_once(tmp_path, pad):
    async with agent_of(tmp_path, pad, LAUNCH) as agent:
        await agent.process_direct("up!", attended=True)
        both = await asyncio.gather(*(agent.process_direct("/approve", attended=True) for _ in range(2)))
    assert "it flies" in both
    assert pad.launched == ["ada"]


async def test_a_subscriber_receives_the_question(tmp_path, pad):
    seen: list[ev.Event] = []
    async with agent_of(tmp_path, pad, LAUNCH) as agent:
        question = await agent.process_direct("up!", attended=True, on_event=seen.append)
        assert isinstance(asked := seen[-1], ev.Asked)
        assert with_how_to_answer(asked.question) == question
        await agent.process_direct("/approve", attended=True, on_event=seen.append)
    started = [event for event in seen if isinstance(event, ev.TurnStarted)]
    assert [event.resumed for event in started] == [False, False]  # nothing was interrupted
    assert isinstance(seen[-1], ev.TurnEnded)


@pytest.mark.parametrize("word", ["/approve", "/deny no"])
async def test_a_turn_with_a_question_is_replayed_and_a_forged_one_is_found(tmp_path, pad, word):
    async with agent_of(tmp_path, pad, [[call("launch", name="ada"), call("list_dir")], "over"]) as agent:
        await agent.process_direct("up!", attended=True)
        await agent.process_direct(word, attended=True)
        log = await log_of(agent)
    assert (await replay(log)).same
    without = [entry for entry in log if not isinstance(entry, CallsDecided)]
    assert not (await replay(without)).same
    forged = [CallsDecided(entry.ids, not entry.allowed) if isinstance(entry, CallsDecided) else entry for entry in log]
    assert not (await replay(forged)).same


async def test_a_denied_call_is_replayed(tmp_path, pad):
    async with agent_of(tmp_path, pad, [[call("list_dir"), call("launch", name="ada")], "over"], DENY) as agent:
        await agent.process_direct("up!")
        assert (await replay(await log_of(agent))).same


async def test_a_fork_of_a_waiting_turn_asks_its_own_question(tmp_path, pad):
    async with agent_of(tmp_path, pad, [*LAUNCH, "forked and flown"]) as agent:
        question = await agent.process_direct("up!", attended=True)
        await agent.store.fork("me", "cli:direct", None, "cli:copy")
        await agent.resume("cli:copy")
        assert with_how_to_answer(await agent.question("cli:copy") or "") == question
        assert pad.launched == []
        await agent.process_direct("/approve", "cli:copy", attended=True)
        assert pad.launched == ["ada"]
        assert with_how_to_answer(await agent.question() or "") == question


async def test_a_kill_between_the_decision_and_its_turn_loses_nothing(tmp_path, pad):
    async with agent_of(tmp_path, pad, LAUNCH[:1]) as agent:
        await agent.process_direct("up!", attended=True)
    store = SQLiteStore(tmp_path / "store.db")
    await store.decide("me", "cli:direct", True)  # and the process ends
    await store.close()
    async with agent_of(tmp_path, pad, LAUNCH[1:]) as agent:
        await agent.resume()
        log = await log_of(agent)
    assert pad.launched == ["ada"]
    assert sum(isinstance(entry, CallsAsked) for entry in log) == 1

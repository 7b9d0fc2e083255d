"""A loop that is stopped and started again, or closed."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from everloop import MessageBus
from everloop.testing import ScriptedProvider, call

from .chat import Gate, until


async def test_stop_ends_run_at_once_and_a_new_loop_finishes_the_turn(start):
    gate = Gate()
    chat = start(ScriptedProvider([call("list_dir"), gate]))
    await chat.say("work")
    await gate.reached.wait()
    began = asyncio.get_running_loop().time()
    await chat.stop()
    assert asyncio.get_running_loop().time() - began < 10  # endless
    provider = ScriptedProvider(["finished later"])
    assert await start(provider).hear() == "finished later"
    assert [message["role"] for message in provider.requests[0].messages] == ["system", "user", "assistant", "tool"]


async def test_a_loop_runs_again_after_it_was_stopped(start):
    gate = Gate()
    chat = start(ScriptedProvider(["one", gate, "three"]))
    assert await chat.ask("1") == "one"
    await chat.say("2")
    await gate.reached.wait()
    await chat.stop()
    chat.task = asyncio.create_task(chat.agent.run())
    assert await chat.hear() == "three"


async def test_stop_before_run_has_begun_ends_it(start):
    chat = start(ScriptedProvider([]))
    await chat.stop()


async def test_a_message_taken_from_the_bus_is_not_lost_when_the_loop_is_stopped_right_then(start):
    bus = MessageBus()
    chat = start(ScriptedProvider([]), bus)
    await chat.agent.store.session("me", "x")  # the file is open
    await asyncio.sleep(0.05)
    for n in range(5):
        await chat.say(f"hi {n}")
    while bus.inbound_size:
        await asyncio.sleep(0)
    await chat.stop()
    later = start(ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True))
    assert [await later.hear() for _ in range(5)] == [f"hi {n}" for n in range(5)]


@pytest.mark.parametrize("hops", range(8))
async def test_closing_the_loop_fails_pending_waits_for_an_answer(start, hops):
    chat = start(ScriptedProvider([Gate()], repeat_last=True))
    await asyncio.sleep(0.02)
    waiting = asyncio.create_task(chat.agent.process_direct("hi"))
    for _ in range(hops):
        await asyncio.sleep(0)
    await chat.agent.close()
    if not hops:
        waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError), pytest.raises(Exception, match="continues at the next start"):
        await asyncio.wait_for(waiting, 20)


async def test_a_loop_stopped_at_any_moment_can_be_used_again(start):
    provider = ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True)
    chat = start(provider)
    await asyncio.sleep(0.02)
    for hops in range(12):
        waiting = asyncio.create_task(chat.agent.process_direct(f"first {hops}", f"cli:{hops}"))
        for _ in range(hops + 1):
            await asyncio.sleep(0)
        await chat.agent._owners.rest()
        await asyncio.wait([waiting], timeout=20)
        assert waiting.done()
        waiting.exception()
        assert await asyncio.wait_for(chat.agent.process_direct("again", f"cli:{hops}"), 20) == "again"


async def test_an_answer_not_delivered_when_the_loop_stopped_arrives_after_its_next_start(start):
    bus = MessageBus(size=1)
    chat = start(ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True), bus)
    for n in range(3):
        await chat.say(str(n), str(n))
    await until(lambda: bus.outbound_size == 1)
    await asyncio.sleep(0.1)
    await chat.stop()
    chat.task = asyncio.create_task(chat.agent.run())
    await asyncio.sleep(0.1)  # the answer that is already on the bus is not put there again
    assert sorted([await chat.hear() for _ in range(3)]) == ["0", "1", "2"]
    await asyncio.sleep(0.05)
    assert bus.outbound_size == 0


async def test_an_answer_taken_while_the_loop_restarts_does_not_arrive_twice(start, monkeypatch):
    chat = start(ScriptedProvider(["hello"]))
    await chat.say("hi")
    await until(lambda: chat.bus.outbound_size == 1)
    await chat.stop()
    found, go_on = asyncio.Event(), asyncio.Event()
    take_outgoing = chat.agent.store.take_outgoing

    async def slowly(*args):
        rows = await take_outgoing(*args)
        if rows:
            found.set()
            await go_on.wait()
        return rows

    monkeypatch.setattr(chat.agent.store, "take_outgoing", slowly)
    chat.task = asyncio.create_task(chat.agent.run())
    await asyncio.wait_for(found.wait(), 20)
    assert await chat.hear() == "hello"
    await asyncio.sleep(0.1)  # it is marked as sent
    go_on.set()
    await asyncio.sleep(0.1)  # time in which it would be put on the bus again
    assert chat.bus.outbound_size == 0


async def test_a_new_loop_resends_an_answer_that_was_not_taken(start):
    chat = start(ScriptedProvider(["hello"]))
    await chat.say("hi")
    await until(lambda: chat.bus.outbound_size == 1)
    await chat.stop()
    later = start(ScriptedProvider([]))
    message = await asyncio.wait_for(later.bus.consume_outbound(), 20)
    assert (message.content, message.repeat) == ("hello", True)


async def test_a_cancelled_caller_does_not_affect_others(start):
    gate = Gate("late")
    chat = start(ScriptedProvider([gate, "next"]))
    caller = asyncio.create_task(chat.agent.process_direct("hi"))
    await gate.reached.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    gate.open.set()
    assert await chat.agent.process_direct("more") == "next"

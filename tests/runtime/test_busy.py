"""Messages that arrive while their session is busy, and chat commands."""

from __future__ import annotations

import asyncio

import pytest

from everloop import AgentLoop, MessageBus
from everloop import events as ev
from everloop.log import CallEnded, ModelAnswered, TurnEnded
from everloop.testing import ScriptedProvider, call, check_conversation

from .chat import Gate, Held, entries, until


async def test_a_steered_message_reaches_the_model_in_its_next_round(start):
    provider = ScriptedProvider([call("held"), lambda messages, _: messages[-1]["content"]])
    chat = start(provider, busy="steer")
    held = Held()
    chat.agent.tools.register(held)
    await chat.say("work")
    await held.begun.wait()
    await chat.say("and hurry")
    await chat.placed(1)
    held.go.set()
    assert await chat.hear() == "and hurry"
    assert [message["role"] for message in provider.requests[1].messages] == [
        "system", "user", "assistant", "tool", "user",
    ]  # fmt: skip


async def test_a_message_steered_in_during_the_answer_is_answered_in_the_same_turn(start, tmp_path):
    gate = Gate("first answer")
    provider = ScriptedProvider([gate, "second answer"])
    chat = start(provider, busy="steer")
    await chat.say("work")
    await gate.reached.wait()
    await chat.say("wait, also this")
    await chat.placed(1)
    gate.open.set()
    assert await chat.hear() == "second answer"
    assert [message["content"] for message in provider.requests[1].messages[1:]] == [
        "work", "first answer", "wait, also this",
    ]  # fmt: skip
    assert sum(isinstance(entry, TurnEnded) for entry in await entries(tmp_path)) == 1


async def test_a_steered_message_never_overtakes_one_that_waits(start, tmp_path):
    gate = Gate("first")
    chat = start(ScriptedProvider([gate, "second"]), busy="steer")
    await chat.say("one")
    await gate.reached.wait()
    await chat.say("/new")
    await chat.say("two")
    await chat.placed(2)
    gate.open.set()
    assert await chat.hear() == "first"
    assert "new conversation" in await chat.hear()
    assert await chat.hear() == "second"


async def test_an_interrupting_message_replaces_the_running_turn(start, tmp_path):
    gate = Gate()
    provider = ScriptedProvider([gate, "the new one"])
    chat = start(provider, busy="interrupt")
    await chat.say("old")
    await gate.reached.wait()
    assert await chat.ask("new") == "the new one"
    assert [type(entry).__name__ for entry in await entries(tmp_path)] == [
        "UserSaid", "TurnEnded", "UserSaid", "ModelAnswered", "TurnEnded",
    ]  # fmt: skip
    assert check_conversation(provider.requests[-1].messages) == []


async def test_an_interrupting_message_replaces_a_turn_that_has_just_started(start):
    provider = ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True)
    chat = start(provider, busy="interrupt")
    await asyncio.gather(*(chat.say(str(n)) for n in range(5)))
    assert await chat.hear() == "4"


async def test_an_unknown_busy_setting_is_refused(tmp_path):
    with pytest.raises(ValueError, match="queue"):
        AgentLoop(MessageBus(), ScriptedProvider([]), tmp_path, busy="bad")  # type: ignore[arg-type]


async def test_stop_cancels_tools_at_once_and_keeps_the_history_valid(start, tmp_path):
    provider = ScriptedProvider([[call("held", n=1), call("held", n=2)], "still here"])
    chat = start(provider)
    held = Held()
    chat.agent.tools.register(held)
    await chat.say("work")
    await until(lambda: len(held.started) == 2)
    await chat.say("/stop")
    assert await chat.hear() == "Stopped. The work so far is kept."
    await until(lambda: held.cancelled == 2)
    assert await chat.ask("and now?") == "still here"
    results = [entry for entry in await entries(tmp_path) if isinstance(entry, CallEnded)]
    assert [result.status for result in results] == ["cancelled", "cancelled"]
    assert all("outcome unknown" in result.content for result in results)


async def test_stop_cancels_the_model_call_and_keeps_the_text_received_so_far(start, tmp_path):
    chat = start(ScriptedProvider(["one two " + "three " * 500], token_delay=0.01))
    words: list[str] = []
    chat.agent.watch("test:1", lambda event: words.append(event.text) if isinstance(event, ev.Text) else None)
    await chat.say("count")
    await until(lambda: len(words) >= 2)
    await chat.say("/stop")
    assert await chat.hear() == "Stopped. The work so far is kept."
    await until(lambda: chat.agent.dispatcher.session("me", "test:1") is None)
    answered = [entry for entry in await entries(tmp_path) if isinstance(entry, ModelAnswered)]
    assert answered[0].content
    assert answered[0].content.startswith("one two ")
    assert answered[0].finish_reason == "cancelled"


async def test_stop_right_after_a_message_stops_its_turn(start):
    gate = Gate()
    chat = start(ScriptedProvider([gate], repeat_last=True))
    await chat.say("work")
    await chat.say("/stop")
    assert await chat.hear() == "Stopped. The work so far is kept."
    await until(lambda: chat.agent.dispatcher.session("me", "test:1") is None)
    assert "running: nothing" in await chat.ask("/status")


async def test_stop_with_nothing_running_says_so(start):
    chat = start(ScriptedProvider([]))
    assert await chat.ask("/stop") == "Nothing is running."
    assert await chat.agent.process_direct("/stop") == "Nothing is running."


async def test_a_stopped_turn_does_not_stop_the_next_one(start):
    gate = Gate()
    chat = start(ScriptedProvider([gate, "next"]))
    await chat.say("work")
    await gate.reached.wait()
    await chat.say("behind it")
    await chat.placed(1)
    await chat.say("/stop")
    assert sorted([await chat.hear(), await chat.hear()]) == ["Stopped. The work so far is kept.", "next"]
    assert chat.bus.outbound_size == 0


async def test_new_starts_a_new_conversation_after_the_messages_before_it(start):
    provider = ScriptedProvider([lambda messages, _: str(len(messages))], repeat_last=True)
    chat = start(provider)
    for text in ("a", "b", "/new", "c"):
        await chat.say(text)
    said = [await chat.hear() for _ in range(4)]
    assert said[:2] == ["2", "4"]
    assert "new conversation" in said[2]
    assert said[3] == "2"
    assert "new conversation" in await chat.agent.process_direct("/new", "test:1")
    assert await chat.agent.process_direct("d", "test:1") == "2"


@pytest.mark.parametrize("text", ["/help", " /HELP ", "/help@the_bot"])
async def test_help_lists_the_commands(start, text):
    chat = start(ScriptedProvider([]))
    for said in (await chat.ask(text), await chat.agent.process_direct(text)):
        assert all(f"/{name}" in said for name in ("stop", "new", "help", "status"))


async def test_status_shows_what_is_running(start):
    gate = Gate()
    chat = start(ScriptedProvider([gate], model="small-model"))
    assert "running: nothing" in await chat.ask("/status")
    await chat.say("work")
    await gate.reached.wait()
    said = await chat.ask("/status")
    assert "model: small-model" in said
    assert "running: turn " in said
    assert "session: test:1, 1 entries" in said
    gate.open.set()
    await chat.hear()


async def test_text_that_only_looks_like_a_command_goes_to_the_model(start):
    chat = start(ScriptedProvider(["yes"], repeat_last=True))
    for text in ("/stop it please", "/unknown", "stop"):
        assert await chat.ask(text) == "yes"

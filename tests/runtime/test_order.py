"""The order of answers, and behaviour under errors and overload."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from everloop import InboundMessage, LLMProvider, LLMResponse, MessageBus, ToolCallRequest
from everloop.log import UserSaid
from everloop.testing import ScriptedProvider, call

from .chat import Gate, entries


async def test_messages_of_one_session_are_answered_in_order(start):
    chat = start(ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True))
    for n in range(20):
        await chat.say(str(n))
    assert [await chat.hear() for _ in range(20)] == [str(n) for n in range(20)]


async def test_a_slow_session_delays_no_other(start):
    gate = Gate()
    chat = start(ScriptedProvider([gate, "quick"]))
    await chat.say("slow", "1")
    await gate.reached.wait()
    assert await chat.ask("hi", "2") == "quick"
    gate.open.set()
    assert await chat.hear() == "opened"


async def test_two_hundred_sessions_at_once(start):
    chat = start(ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True))
    for n in range(200):
        await chat.say(f"from {n}", str(n))
    assert {await chat.hear() for _ in range(200)} == {f"from {n}" for n in range(200)}


async def test_direct_calls_at_once_in_one_session_keep_their_order(start):
    seen: list[str] = []

    def echo(messages: Any, _: Any) -> str:
        seen.append(messages[-1]["content"])
        return messages[-1]["content"]

    chat = start(ScriptedProvider([echo], repeat_last=True))
    texts = [str(n) for n in range(15)]
    answers = await asyncio.gather(*(chat.agent.process_direct(text) for text in texts))
    assert seen == texts
    assert list(answers) == texts


async def test_a_message_with_a_known_id_is_taken_once(start, tmp_path):
    chat = start(ScriptedProvider(["one", "two"]))
    await chat.say("hi", id="m1")
    await chat.say("hi", id="m1")
    assert await chat.hear() == "one"
    await chat.say("hi", id="m1")
    assert await chat.ask("again", id="m2") == "two"
    assert [entry.content for entry in await entries(tmp_path) if isinstance(entry, UserSaid)] == ["hi", "again"]


async def test_resubmitting_a_known_id_gives_the_same_answer(start):
    gate = Gate("the answer")
    chat = start(ScriptedProvider([gate]))
    message = InboundMessage("test", "user", "1", "hi", id="m1", reply=False).addressed()
    first = await chat.agent.dispatcher.submit(message)
    await gate.reached.wait()
    second = await chat.agent.dispatcher.submit(message)
    third = await chat.agent.dispatcher.submit(message)
    gate.open.set()
    assert set(await asyncio.wait_for(asyncio.gather(first, second, third), 20)) == {"the answer"}
    late = await chat.agent.dispatcher.submit(message)
    assert await asyncio.wait_for(late, 20) == "the answer"


async def test_an_error_is_a_readable_reply_and_the_loop_continues(start):
    chat = start(ScriptedProvider([RuntimeError("no such model"), "fine"]))
    assert await chat.ask("hi") == "Sorry, I encountered an error: no such model"
    assert await chat.ask("hi") == "fine"


async def test_a_message_that_cannot_be_written_is_answered_too(start):
    chat = start(ScriptedProvider(["fine"]))
    assert (await chat.ask("hi", metadata={"odd": object()})).startswith("Sorry, I encountered an error: ")
    assert (await chat.ask(None)).startswith("Sorry, I encountered an error: ")
    assert await chat.ask("hi") == "fine"


async def test_the_work_is_kept_when_the_rounds_are_used_up(start):
    provider = ScriptedProvider(
        [call("list_dir", path="."), call("list_dir", path="."), lambda messages, _: str(len(messages))]
    )
    chat = start(provider, max_iterations=2)
    assert "2 rounds" in await chat.ask("work")
    assert await chat.ask("go on") == "8"  # system, user, 2 × (call, result), notice, user


async def test_a_full_bus_applies_backpressure(start):
    bus = MessageBus(size=2)
    await bus.publish_inbound(InboundMessage("test", "u", "1", "a"))
    await bus.publish_inbound(InboundMessage("test", "u", "1", "b"))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(bus.publish_inbound(InboundMessage("test", "u", "1", "c")), 0.01)
    chat = start(ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True), bus)
    publisher = asyncio.create_task(chat.say("d"))
    assert [await chat.hear() for _ in range(3)] == ["a", "b", "d"]
    await publisher


async def test_a_provider_that_returns_the_wrong_type_gets_a_clear_error(start):
    class Sloppy(LLMProvider):
        async def chat(self, messages: Any, tools: Any = None, model: Any = None) -> Any:
            return "just text"

    chat = start(Sloppy())
    assert "returned a str and not an LLMResponse" in await chat.agent.process_direct("hi")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"content": 5}, "an LLMResponse whose content is a int, not a text"),
        ({"content": "x", "reasoning": ["y"]}, "an LLMResponse whose reasoning is a list, not a text"),
        ({"content": None, "tool_calls": [{"name": "f"}]}, "a call that is a dict, not a ToolCallRequest"),
    ],
)
async def test_a_provider_whose_response_has_invalid_fields_gets_an_error_that_names_them(start, answer, told):
    class Sloppy(LLMProvider):
        async def chat(self, messages: Any, tools: Any = None, model: Any = None) -> Any:
            return LLMResponse(**answer)

    assert f"the provider returned {told}" in await start(Sloppy()).agent.process_direct("hi")


async def test_a_provider_whose_chat_is_not_async_gets_a_clear_error(start):
    class Sloppy(LLMProvider):
        def chat(self, messages: Any, tools: Any = None, model: Any = None) -> Any:
            return LLMResponse("hi")

    assert "Sloppy.chat() is not an async function" in await start(Sloppy()).agent.process_direct("hi")


async def test_a_call_without_a_name_is_an_unknown_tool_and_the_turn_continues(start):
    none: Any = None
    number: Any = 7
    nameless = [ToolCallRequest("c1", none, {}), ToolCallRequest("c2", number, {})]
    model = ScriptedProvider([LLMResponse(None, nameless), "done"])
    assert await start(model).agent.process_direct("hi") == "done"
    results = [message["content"] for message in model.requests[1].messages if message["role"] == "tool"]
    assert ['\\"unknown\\" does not exist' in results[0], '\\"7\\" does not exist' in results[1]] == [True, True]

"""A turn's own context, its parallel calls, and the prompt."""

from __future__ import annotations

import asyncio
import base64
import itertools
from typing import Any

import pytest

from everloop import InboundMessage, tool
from everloop.messages import encode_json
from everloop.testing import ScriptedProvider, call
from everloop.tools.context import current_call

from ..support.drawing import PIXEL
from .chat import Held, until


@pytest.mark.parametrize(
    ("chat_id", "channel", "chat", "session"),
    [
        ("telegram:12", "telegram", "12", "telegram:12"),
        ("slack:C1:thread:9", "slack", "C1:thread:9", "slack:C1:thread:9"),
        ("direct", "cli", "direct", "cli:direct"),
    ],
)
async def test_a_system_message_is_processed_and_answered_in_its_origins_session(
    start, chat_id, channel, chat, session
):
    provider = ScriptedProvider(["hello", "the sub-agent is done"])
    running = start(provider)
    await running.agent.process_direct("hi", session)
    await running.bus.publish_inbound(InboundMessage("system", "spawn", chat_id, "result: 42"))
    answer = await asyncio.wait_for(running.bus.consume_outbound(), 20)
    assert (answer.channel, answer.chat_id, answer.content) == (channel, chat, "the sub-agent is done")
    assert [message["content"] for message in provider.requests[1].messages[1:]] == ["hi", "hello", "result: 42"]


async def test_each_call_knows_its_own_turn(start):
    @tool
    async def whereami() -> str:
        """Tell where this call comes from."""
        await asyncio.sleep(0.01)
        found = current_call()
        return f"{found.channel}|{found.chat_id}|{found.session}|{found.turn}|{found.idempotency_key}"

    def step(messages: Any, _: Any) -> Any:
        if messages[-1]["role"] == "user":
            return [call("whereami"), call("whereami")]
        return f"{messages[-2]['content']} {messages[-1]['content']}"

    chat = start(ScriptedProvider([step], repeat_last=True))
    chat.agent.tools.register(whereami)
    for n in range(10):
        await chat.say("where?", f"c{n}")
    turns = set()
    for _ in range(10):
        message = await asyncio.wait_for(chat.bus.consume_outbound(), 20)
        first, second = message.content.split()
        channel, chat_id, session, turn, key = first.split("|")
        assert (channel, chat_id, session) == ("test", message.chat_id, f"test:{message.chat_id}")
        assert second.split("|")[:4] == [channel, chat_id, session, turn]
        assert key != second.split("|")[4]
        assert key.startswith(turn)
        turns.add(turn)
    assert len(turns) == 10


async def test_parallel_calls_start_together_and_their_results_keep_the_order_of_the_calls(start):
    provider = ScriptedProvider([[call("held", n=n) for n in range(4)], "ok"])
    chat = start(provider)
    held = Held()
    chat.agent.tools.register(held)
    await chat.say("go")
    await until(lambda: len(held.started) == 4)
    held.go.set()
    assert await chat.hear() == "ok"
    assert [message["content"] for message in provider.requests[1].messages[-4:]] == [f"held {n}" for n in range(4)]


async def test_a_tool_that_is_not_parallel_runs_alone(start):
    provider = ScriptedProvider([[call("held", n=0), call("list_dir"), call("held", n=1), call("held", n=2)], "ok"])
    chat = start(provider)
    held = Held(parallel=False)
    held.go.set()
    chat.agent.tools.register(held)
    assert await chat.ask("go") == "ok"
    assert held.started == [0, 1, 2]
    assert held.most == 1


async def test_the_prompt_only_grows_at_its_end(start):
    steps: list[Any] = [call("list_dir", path="."), "one", [call("list_dir"), call("list_dir")], "two", "three"]
    provider = ScriptedProvider(steps)
    chat = start(provider)
    for n in range(3):
        await chat.ask(f"message {n}")
    prompts = [encode_json(request.messages) for request in provider.requests]
    for before, after in itertools.pairwise(prompts):
        assert after.startswith(before[:-1])
    assert len({encode_json(request.tools) for request in provider.requests}) == 1


async def test_a_new_loop_sends_the_same_prompt_as_the_old_one_would(start):
    provider = ScriptedProvider([[call("list_dir"), call("nope")], "one", "two"])
    chat = start(provider)
    await chat.ask("a")
    await chat.stop()
    again = ScriptedProvider(["two"])
    await start(again).ask("b")
    first = encode_json(provider.requests[1].messages)
    assert encode_json(again.requests[0].messages).startswith(first[:-1])


async def test_a_picture_goes_to_the_model_and_stays_in_the_history(start, tmp_path):
    picture = tmp_path / "dot.png"
    picture.write_bytes(PIXEL)
    provider = ScriptedProvider(["a dot", "still a dot"])
    chat = start(provider)
    await chat.ask("what is it?", media=[str(picture), str(tmp_path / "notes.pdf")])
    picture.unlink()
    await chat.ask("sure?")
    url = "data:image/png;base64," + base64.b64encode(PIXEL).decode()
    for request in provider.requests:
        image, text = request.messages[1]["content"]
        assert image == {"type": "image_url", "image_url": {"url": url}}
        assert text["text"] == f"what is it?\n[attachment: {tmp_path / 'notes.pdf'}]"

"""The prompt cache: the prefix stays the same from request to request, and is marked where the API should keep it."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from everloop.messages import Conversation, assistant_message, tool_message, user_message
from everloop.providers.anthropic import AnthropicProvider
from everloop.providers.anthropic.request import MARKER, Histories
from everloop.testing.anthropic_server import blocks_of, check_request

from .streams import ECHO

MARK = MARKER[:-1]
SYSTEM = {"role": "system", "content": "You are an agent. " * 50}


def raw(provider: AnthropicProvider, messages: Any, tools: Any = ECHO) -> bytes:
    """Return the bytes of a request."""
    return b"".join(provider._request(messages, tools, None, None, stream=True)[0])


def prefix(body: bytes) -> bytes:
    """Return a request without markers, up to the end of its last block."""
    assert check_request(json.loads(body)) == []
    return re.sub(rb"\]\}\](,\"thinking\":\{[^}]*\})?,\"stream\":true\}$", b"", body.replace(MARK, b""))


def rounds() -> list[list[dict[str, Any]]]:
    """The additions from request to request: rounds with several calls, steering, new turns."""
    steps: list[list[dict[str, Any]]] = [[SYSTEM, user_message("begin")]]
    for turn in range(4):
        for n in range(3):
            calls = [(f"c{turn}-{n}-{i}", "echo", {"text": "x" * 50}) for i in range(n + 1)]
            step = [
                assistant_message("on it", calls),
                *(tool_message(id, "echo", "result " * 30) for id, _, _ in calls),
            ]
            steps.append([*step, user_message("and hurry")] if n == turn else step)
        steps.append([assistant_message(f"done {turn} "), user_message("go on")])
    return steps


def test_a_sent_request_is_byte_for_byte_the_beginning_of_the_next():
    provider = AnthropicProvider("k", "m", thinking=2048)
    conversation, before = Conversation(), b""
    for step in rounds():
        conversation.extend(step)
        now = prefix(raw(provider, conversation))
        assert now.startswith(before)
        assert prefix(raw(AnthropicProvider("k", "m", thinking=2048), list(conversation))) == now
        before = now


def test_the_last_tool_the_system_prompt_and_the_users_last_two_messages_are_marked():
    provider = AnthropicProvider("k", "m")
    conversation = Conversation()
    tools = [*ECHO, {"type": "function", "function": {"name": "last"}}]
    for count, step in enumerate(rounds()):
        conversation.extend(step)
        body = json.loads(raw(provider, conversation, tools))
        assert ["cache_control" in tool for tool in body["tools"]] == [False, True]
        assert ["cache_control" in block for block in body["system"]] == [True]
        users = [message["content"] for message in body["messages"] if message["role"] == "user"]
        assert all("cache_control" in blocks[-1] for blocks in users[-2:])
        assert sum("cache_control" in block for block in blocks_of(body)) == (4 if count else 3)
        assert raw(provider, conversation, tools).count(MARK) == (4 if count else 3)


async def test_from_round_to_round_everything_but_the_new_part_is_read_from_the_cache(server, provider):
    conversation, asked = Conversation(), []
    for step in rounds():
        conversation.extend(step)
        server.reply("ok")
        asked.append((await provider.chat(conversation, ECHO)).usage)
    assert "cached_tokens" not in asked[0]
    for before, now in pairwise(asked):
        assert now["cached_tokens"] == before["prompt_tokens"]
        assert now["prompt_tokens"] == now["cached_tokens"] + now["cache_write_tokens"]


async def test_a_round_of_many_calls_does_not_lose_the_cache(server, provider):
    calls: list[tuple[str, str, dict[str, Any]]] = [(f"c{i}", "echo", {}) for i in range(60)]
    conversation = Conversation([SYSTEM, user_message("begin")])
    server.reply("ok")
    first = (await provider.chat(conversation, ECHO)).usage
    conversation.append(assistant_message(None, calls))
    conversation.extend(tool_message(id, "echo", "ok") for id, _, _ in calls)
    server.reply("ok")
    assert (await provider.chat(conversation, ECHO)).usage["cached_tokens"] == first["prompt_tokens"]


async def test_another_model_gets_the_same_prefix(server, provider):
    conversation = Conversation([SYSTEM, user_message("begin")])
    server.reply("ok")
    await provider.chat(conversation, ECHO)
    server.reply("ok")
    await provider.chat(conversation, ECHO, "another")
    first, second = (request.body for request in server.requests)
    assert {**first, "model": ""} == {**second, "model": ""}


TEXTS = st.sampled_from(["", " ", "word", "two\n", "é😀", '"quoted"\\'])


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Any valid conversation, with empty texts, several users in a row, and rounds of calls."""
    made: list[dict[str, Any]] = []
    for number in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(["system", "user", "user", "assistant", "calls"]))
        if kind == "calls":
            ids = [f"{number}.{i}" for i in range(draw(st.integers(1, 3)))]
            made.append(assistant_message(draw(TEXTS), [(id, "echo", {"t": draw(TEXTS)}) for id in ids]))
            made += [tool_message(id, "echo", draw(TEXTS)) for id in ids]
        else:
            made.append({"role": kind, "content": draw(TEXTS)})
    return made


@settings(max_examples=200)
@given(messages=conversations(), thinking=st.booleans(), tools=st.sampled_from([None, ECHO]))
def test_any_conversation_sent_piece_by_piece_is_valid_and_keeps_its_prefix(messages, thinking, tools):
    provider = AnthropicProvider("k", "m", thinking=1024 if thinking else None)
    conversation = Conversation()
    for message in messages:
        conversation.append(message)
        if message.get("tool_calls") or (message["role"] == "tool" and message is not messages[-1]):
            continue
        body = raw(provider, conversation, tools)
        assert check_request(json.loads(body)) == []
        assert body == raw(
            AnthropicProvider("k", "m", thinking=1024 if thinking else None), list(messages[: len(conversation)]), tools
        )
        assert body.count(MARK) <= 4


@settings(max_examples=50)
@given(messages=conversations(), data=st.data())
def test_the_parts_stay_few_and_equivalent(messages, data):
    histories, conversation = Histories(), Conversation()
    while messages:
        count = data.draw(st.integers(1, len(messages)))
        conversation.extend(messages[:count])
        messages = messages[count:]
        parts = histories.encoded(conversation).parts()
        assert parts[0] == b"["
        assert b"".join(parts) == b"".join(Histories().encoded(list(conversation)).parts())
        assert len(parts) < 20


def test_a_long_conversation_is_kept_in_few_parts():
    histories, conversation = Histories(), Conversation()
    for n in range(1000):
        conversation.append(user_message(f"question {n}"))
        assert len(histories.encoded(conversation).parts()) < 25
        conversation.append(assistant_message(f"answer {n}"))

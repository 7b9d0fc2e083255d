"""Answers, whole and streamed, as servers of all kinds write them."""

from __future__ import annotations

import json

import pytest

from everloop.providers.base import Delta
from everloop.providers.openai import OpenAIProvider
from everloop.testing import call

from .streams import ASK, ECHO, END, piece, sse, watch


async def test_a_chat_gives_text_reasoning_usage_and_the_reason_it_ended(server, provider):
    server.reply("good day", reasoning="be polite")
    answer = await provider.chat(ASK)
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("good day", "be polite", "stop")
    assert answer.usage["completion_tokens"] == 2
    assert not answer.has_tool_calls
    request = server.requests[0]
    assert request.headers["Authorization"] == "Bearer secret-key"
    assert request.body == {"model": "some-model", "messages": ASK}


async def test_a_chat_gives_the_tool_calls_and_sends_the_tools(server, provider):
    server.calls(call("echo", text="a"), call("echo", text="é\n"))
    answer = await provider.chat(ASK, ECHO, "other-model")
    assert [(c.name, c.arguments, c.error) for c in answer.tool_calls] == [
        ("echo", {"text": "a"}, None),
        ("echo", {"text": "é\n"}, None),
    ]
    assert answer.content is None
    assert answer.finish_reason == "tool_calls"
    assert server.requests[0].body["tools"] == ECHO
    assert server.requests[0].model == "other-model"


async def test_a_stream_joins_the_pieces_of_parallel_calls(server, provider):
    server.calls(call("echo", text="first"), call("echo", text="second"))
    shown, answer = await watch(provider, tools=ECHO)
    assert shown == []
    assert [c.arguments for c in answer.tool_calls] == [{"text": "first"}, {"text": "second"}]
    assert len({c.id for c in answer.tool_calls}) == 2
    assert answer.finish_reason == "tool_calls"


async def test_extra_fields_go_into_every_request(server):
    provider = OpenAIProvider(server.base_url, model="m", extra={"temperature": 0, "seed": 7}, headers={"X-Org": "us"})
    server.reply("ok")
    server.reply("ok")
    await provider.chat(ASK)
    await watch(provider)
    assert all(request.body["seed"] == 7 and request.body["temperature"] == 0 for request in server.requests)
    assert server.requests[0].headers["X-Org"] == "us"
    assert "Authorization" not in server.requests[0].headers
    await provider.close()


async def test_a_whole_completion_with_odd_fields_is_read(server, provider):
    message = {
        "role": None,
        "content": None,
        "refusal": None,
        "annotations": [],
        "tool_calls": [
            {"function": {"name": "echo", "arguments": {"n": 1}}},
            {"id": None, "function": {"name": "now", "arguments": ""}},
        ],
    }
    server.raw(
        json.dumps(
            {"choices": [{"message": message, "finish_reason": None, "logprobs": None}], "usage": None}
        ).encode(),
        content_type="application/json",
    )
    answer = await provider.chat(ASK)
    assert [(c.id, c.name, c.arguments, c.error) for c in answer.tool_calls] == [
        ("", "echo", {"n": 1}, None),
        ("", "now", {}, None),
    ]


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\n", "\r\n"])
@pytest.mark.parametrize("size", [0, 1, 7])
async def test_a_stream_is_read_whatever_its_line_ends_and_wherever_the_network_splits_it(server, provider, end, size):
    server.raw(
        sse({"role": "assistant", "content": None}, {"content": "gr"}, {"content": "üße 😀"}, END, end=end), piece=size
    )
    shown, answer = await watch(provider)
    assert [delta.text for delta in shown] == ["gr", "üße 😀"]
    assert answer.content == "grüße 😀"


async def test_comments_events_and_an_unrequested_usage_chunk_are_ignored(server, provider):
    usage = {
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 1,
            "total_tokens": 4,
            "cost": 0.1,
            "prompt_tokens_details": {"cached_tokens": 2, "audio_tokens": 0},
        },
        "choices": [],
    }
    server.raw(b": ping\n\nevent: message\nid: 1\nretry: 3\n" + sse({"content": "hi"}, usage, END) + b": bye\n\n")
    _, answer = await watch(provider)
    assert answer.content == "hi"
    assert answer.usage == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4, "cached_tokens": 2}


async def test_the_end_of_a_stream_is_recognised_with_done_a_finish_reason_or_a_missing_line_end(server, provider):
    server.raw(sse({"content": "a"}, END, done=False))
    server.raw(sse({"content": "b"}))
    server.raw(sse({"content": "c"}, END, done=False).rstrip())
    server.raw(sse({"content": "d"}).rstrip())
    assert [(await watch(provider))[1].content for _ in range(4)] == ["a", "b", "c", "d"]


async def test_reasoning_is_read_from_either_field_and_a_refusal_is_text(server, provider):
    server.raw(sse({"reasoning": "r1 "}, {"reasoning_content": "r2", "reasoning": "r2"}, {"refusal": "no."}, END))
    _, answer = await watch(provider)
    assert (answer.reasoning, answer.content) == ("r1 r2", "no.")


async def test_content_that_is_a_list_of_parts_is_its_text(server, provider):
    server.raw(sse({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, None]}, END))
    assert (await watch(provider))[1].content == "ab"


async def test_a_line_of_megabytes_arrives_complete(server, provider):
    text = "x" * 1_500_000
    server.raw(sse({"content": text}, END), piece=50_000)
    shown, answer = await watch(provider)
    assert answer.content == text
    assert len(shown) == 1


async def test_a_server_that_does_not_stream_is_shown_in_one_piece(server, provider):
    body = {"choices": [{"message": {"content": "all at once"}, "finish_reason": "stop"}]}
    server.raw(json.dumps(body).encode(), content_type="application/json; charset=utf-8")
    shown, answer = await watch(provider)
    assert shown == [Delta("all at once")]
    assert answer.content == "all at once"


async def test_lone_surrogates_are_replaced_and_split_pairs_are_joined(server, provider):
    server.raw(
        sse('{"choices":[{"delta":{"content":"a\\ud83d"}}]}', '{"choices":[{"delta":{"content":"\\ude00b"}}]}', END)
    )
    assert (await watch(provider))[1].content == "a😀b"
    server.raw(sse('{"choices":[{"delta":{"content":"a\\ud83d"}}]}', {"content": "b\u0001"}, {"content": "c"}))
    assert (await watch(provider))[1].content == "a\ufffdb\x01c"
    server.raw(b'{"choices":[{"message":{"content":"x\\udc00 \xff"}}]}', content_type="application/json")
    assert (await provider.chat(ASK)).content == "x\ufffd \ufffd"
    server.raw(sse(piece(0, "a\ud800", "echo", '{"t":"\\ud800"}'), END))
    made = (await watch(provider))[1].tool_calls[0]
    assert (made.id, made.arguments) == ("a?", {"t": "?"})

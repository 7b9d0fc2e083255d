"""The OpenAI-compatible provider, against a real HTTP server that behaves as servers do."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Any

import pytest

from everloop.errors import ConfigError
from everloop.messages import Conversation
from everloop.providers.base import Delta, LLMResponse, ProviderError
from everloop.providers.openai import OpenAIProvider, Timeouts
from everloop.testing import FakeOpenAI, call

ASK = [{"role": "user", "content": "hello"}]
ECHO = [{"type": "function", "function": {"name": "echo", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
async def server() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as server:
        yield server


@pytest.fixture
async def provider(server: FakeOpenAI) -> AsyncIterator[OpenAIProvider]:
    provider = OpenAIProvider(server.base_url, "secret-key", "some-model")
    yield provider
    await provider.close()


async def watch(provider: Any, messages: Any = ASK, tools: Any = None, model: Any = None) -> tuple[list[Delta], Any]:
    """Everything a stream shows, and its answer."""
    items: list[Any] = [item async for item in provider.stream(messages, tools, model)]
    assert isinstance(items[-1], LLMResponse)
    assert all(isinstance(item, Delta) for item in items[:-1])
    return items[:-1], items[-1]


def sse(*chunks: Any, done: bool = True, end: str = "\n\n") -> bytes:
    """A stream of these chunks; a dict without choices is a delta."""
    lines = []
    for chunk in chunks:
        if isinstance(chunk, dict) and not {"choices", "error", "usage"} & chunk.keys():
            chunk = {"choices": [{"index": 0, "delta": chunk}]}
        lines.append("data: " + (chunk if isinstance(chunk, str) else json.dumps(chunk)))
    if done:
        lines.append("data: [DONE]")
    return "".join(line + end for line in lines).encode()


def piece(index: int | None = None, id: str | None = None, name: str | None = None, arguments: Any = None) -> dict:
    """A delta with a piece of one tool call."""
    made: dict[str, Any] = {"function": {"name": name, "arguments": arguments}, "id": id}
    if index is not None:
        made["index"] = index
    return {"tool_calls": [made]}


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


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


async def test_a_stream_shows_each_token_and_ends_with_the_whole_answer(server, provider):
    server.reply("one two three", reasoning="think first")
    shown, answer = await watch(provider)
    assert [delta.reasoning for delta in shown if delta.reasoning] == ["think ", "first"]
    assert [delta.text for delta in shown if delta.text] == ["one ", "two ", "three"]
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("one two three", "think first", "stop")
    assert answer.usage["completion_tokens"] == 3
    assert server.requests[0].body["stream_options"] == {"include_usage": True}


async def test_a_stream_puts_the_pieces_of_parallel_calls_together(server, provider):
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


# What servers send


CALL_VARIANTS = {
    "name repeated in every piece": [
        piece(0, "a", "echo", ""),
        piece(0, "a", "echo", '{"n"'),
        piece(0, "a", "echo", ":1}"),
        piece(1, "b", "echo", '{"n":2}'),
    ],
    "name and id null after the first piece": [
        piece(0, "a", "echo", None),
        piece(0, None, None, '{"n":1}'),
        piece(1, "b", "echo", None),
        piece(1, None, None, '{"n":2}'),
    ],
    "no index at all": [
        piece(None, "a", "echo", '{"n"'),
        piece(None, None, None, ":1}"),
        piece(None, "b", "echo", '{"n":2}'),
    ],
    "every index 0": [
        piece(0, "a", "echo", '{"n":1}'),
        piece(0, "b", "echo", '{"n"'),
        piece(0, "b", None, ":2}"),
    ],
    "empty ids and every index 0": [piece(0, "", "echo", '{"n":1}'), piece(0, "", "echo", '{"n":2}')],
    "neither id nor index": [piece(None, None, "echo", '{"n":1}'), piece(None, None, "echo", '{"n":2}')],
    "an id that comes late": [
        piece(0, None, "echo", ""),
        piece(0, "a", None, '{"n":1}'),
        piece(1, None, "echo", '{"n":2}'),
        piece(1, "b", None, ""),
    ],
    "arguments as an object": [piece(0, "a", "echo", {"n": 1}), piece(1, "b", "echo", {"n": 2})],
    "both in one delta": [
        {
            "tool_calls": [
                piece(0, "a", "echo", '{"n":1}')["tool_calls"][0],
                piece(1, "b", "echo", '{"n":2}')["tool_calls"][0],
            ]
        },
    ],
    "one id for both": [piece(0, "a", "echo", '{"n":1}'), piece(1, "a", "echo", '{"n":2}')],
    "pieces that take turns": [
        piece(0, "a", "echo", ""),
        piece(1, "b", "echo", ""),
        piece(0, None, None, '{"n":'),
        piece(1, None, None, '{"n":'),
        piece(0, None, None, "1}"),
        piece(1, None, None, "2}"),
    ],
}


@pytest.mark.parametrize("variant", CALL_VARIANTS)
async def test_calls_are_read_however_a_server_cuts_them(server, provider, variant):
    server.raw(sse(*CALL_VARIANTS[variant], END))
    _, answer = await watch(provider)
    assert [(c.name, c.arguments, c.error) for c in answer.tool_calls] == [
        ("echo", {"n": 1}, None),
        ("echo", {"n": 2}, None),
    ]
    ids = [c.id for c in answer.tool_calls if c.id]
    assert len(ids) == len(set(ids))
    assert answer.finish_reason == "tool_calls"


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
async def test_a_stream_is_read_whatever_its_line_ends_and_wherever_the_network_cuts_it(server, provider, end, size):
    server.raw(
        sse({"role": "assistant", "content": None}, {"content": "gr"}, {"content": "üße 😀"}, END, end=end), piece=size
    )
    shown, answer = await watch(provider)
    assert [delta.text for delta in shown] == ["gr", "üße 😀"]
    assert answer.content == "grüße 😀"


async def test_comments_events_and_an_unasked_usage_chunk_are_taken_in_stride(server, provider):
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


async def test_an_end_is_an_end_with_done_or_a_finish_reason_or_no_last_line_end(server, provider):
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


async def test_a_line_of_megabytes_arrives_whole(server, provider):
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


# Arguments


@pytest.mark.parametrize(
    ("raw", "arguments"),
    [
        ("", {}),
        ("  ", {}),
        ('{"a": "line\nbreak"}', {"a": "line\nbreak"}),
        ("{}", {}),
        ('{"a":{"b":[1]}}', {"a": {"b": [1]}}),
    ],
)
async def test_arguments_are_read_strictly_and_then_with_raw_control_characters(server, provider, raw, arguments):
    server.raw(sse(piece(0, "a", "echo", raw), END))
    made = (await watch(provider))[1].tool_calls[0]
    assert (made.arguments, made.error) == (arguments, None)


@pytest.mark.parametrize(
    "raw", ["[1]", "5", "null", '"text"', '{"a":', "{'a': 1}", '{"a": NaN}', '{"a": 1e999}', "[" * 9999]
)
async def test_arguments_that_are_no_object_become_an_error_of_the_call(server, provider, raw):
    server.raw(sse(piece(0, "a", "echo", raw), END))
    made = (await watch(provider))[1].tool_calls[0]
    assert made.arguments == {}
    assert made.error.startswith("arguments are not valid JSON: ")
    assert made.error.endswith(": " + raw[:200])


@pytest.mark.parametrize("raw", ['{"path": "a", "content": "long', ""])
async def test_a_call_that_the_token_limit_cut_off_says_so(server, provider, raw):
    end = {"choices": [{"delta": {}, "finish_reason": "length"}]}
    server.raw(sse(piece(0, "a", "now", ""), piece(1, "b", "write_file", raw), end))
    answer = (await watch(provider))[1]
    assert answer.tool_calls[0].error is None
    assert "cut off" in answer.tool_calls[1].error
    assert answer.tool_calls[1].arguments == {}
    assert answer.finish_reason == "length"


# Limits


@pytest.mark.parametrize("streamed", [True, False])
async def test_text_beyond_the_limit_is_cut_and_says_so(server, streamed):
    provider = OpenAIProvider(server.base_url, model="m", answer_limit=20)
    server.reply("word " * 50, token_delay=0.001 if streamed else 0)
    shown, answer = await watch(provider) if streamed else ([], await provider.chat(ASK))
    assert answer.content == "word " * 4 + "\n\n[The answer was cut at 20 characters.]"
    assert answer.finish_reason == "length"
    if streamed:
        assert "".join(delta.text for delta in shown) == answer.content
        await until(lambda: server.requests[0].gone)
    await provider.close()


async def test_text_of_exactly_the_limit_is_not_cut(server):
    provider = OpenAIProvider(server.base_url, model="m", answer_limit=10)
    server.reply("word " * 2)
    assert (await watch(provider))[1].content == "word word "
    await provider.close()


async def test_reasoning_and_arguments_are_limited_too(server):
    provider = OpenAIProvider(server.base_url, model="m", answer_limit=20)
    server.reply("never said", reasoning="hm " * 50)
    shown, answer = await watch(provider)
    assert answer.content == "[The model's reasoning was cut at 20 characters.]"
    assert len(answer.reasoning) == 20
    assert "".join(delta.text for delta in shown) == answer.content
    server.calls(call("echo", text="x" * 100))
    answer = (await watch(provider))[1]
    assert answer.content == "[The model's tool call was cut at 20 characters.]"
    assert "cut off" in answer.tool_calls[0].error
    await provider.close()


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_a_body_without_end_is_not_read_to_its_end(server, content_type):
    provider = OpenAIProvider(server.base_url, model="m", answer_limit=10)
    server.raw(b" " * 40_000_000, content_type=content_type, piece=100_000)
    with pytest.raises(ProviderError, match=r"larger than|longer than") as error:
        await watch(provider)
    assert not error.value.retryable
    await until(lambda: server.requests[0].gone)
    await provider.close()


async def test_calls_without_end_are_refused(server, provider):
    server.raw(sse(*(piece(i, f"id{i}", "echo", "{}") for i in range(600)), END))
    with pytest.raises(ProviderError, match="more than 512 tool calls"):
        await watch(provider)


# Errors


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("status", "retryable", "says"),
    [
        (400, False, "HTTP 400: too long"),
        (401, False, "EVERLOOP_API_KEY"),
        (403, False, "EVERLOOP_API_KEY"),
        (404, False, "EVERLOOP_MODEL"),
        (408, True, "HTTP 408"),
        (409, True, "HTTP 409"),
        (425, True, "HTTP 425"),
        (429, True, "HTTP 429"),
        (500, True, "HTTP 500: too long"),
        (503, True, "HTTP 503"),
    ],
)
async def test_a_refused_request_says_why_and_whether_to_try_again(server, provider, streamed, status, retryable, says):
    server.fail(status, "too\n long")
    with pytest.raises(ProviderError) as error:
        await (watch(provider) if streamed else provider.chat(ASK))
    assert error.value.retryable is retryable
    assert error.value.status == status
    assert says in str(error.value)
    assert "127.0.0.1:" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>Bad Gateway</html>", "HTTP 502: <html>Bad Gateway</html>"),
        (b"", "HTTP 502: Bad Gateway"),
        ({"error": "plain words"}, "HTTP 502: plain words"),
        ({"message": "vllm's way", "code": 1}, "HTTP 502: vllm's way"),
        ({"detail": [{"msg": "x"}]}, 'HTTP 502: [{"msg": "x"}]'),
        (b"x" * 100_000, "HTTP 502: " + "x" * 300),
        ({"error": {"message": "bad key secret-key"}}, "HTTP 502: bad key ***"),
    ],
)
async def test_an_error_body_of_any_shape_is_one_readable_line_without_the_key(server, provider, body, says):
    server.fail(502, body)
    with pytest.raises(ProviderError) as error:
        await provider.chat(ASK)
    assert str(error.value).split(": ", 1)[1] == says


async def test_an_empty_purse_is_not_worth_waiting_for(server, provider):
    server.fail(429, {"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}})
    with pytest.raises(ProviderError) as error:
        await provider.chat(ASK)
    assert not error.value.retryable


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "Retry-After": "1"}, 0.25),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "-5"}, None),
        ({}, None),
    ],
)
async def test_the_wait_a_server_asks_for_is_read(server, provider, headers, seconds):
    server.fail(429, headers=headers)
    with pytest.raises(ProviderError) as error:
        await provider.chat(ASK)
    assert error.value.retry_after == seconds


async def test_a_wait_given_as_a_date_is_the_time_until_then(server, provider):
    server.fail(503, headers={"Retry-After": formatdate(time.time() + 30, usegmt=True)})
    with pytest.raises(ProviderError) as error:
        await provider.chat(ASK)
    assert 25 < (error.value.retry_after or 0) <= 30


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_connection_cut_in_the_middle_is_an_error_to_try_again(server, provider, streamed):
    server.cut(2)
    with pytest.raises(ProviderError, match="broke") as error:
        await (watch(provider) if streamed else provider.chat(ASK))
    assert error.value.retryable


async def test_a_stream_that_ends_without_a_finish_is_an_error_to_try_again(server, provider):
    server.raw(sse({"content": "half an ans"}, done=False))
    server.raw(b"")
    for _ in range(2):
        with pytest.raises(ProviderError, match="ended in the middle") as error:
            await watch(provider)
        assert error.value.retryable


async def test_what_breaks_after_the_end_of_an_answer_does_not_matter(server, provider):
    server.reply("one two", cut_after=3)
    assert (await watch(provider))[1].content == "one two"


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        ({"message": "overloaded", "code": 502}, True),
        ("overloaded", True),
        ({"message": "overloaded", "code": 400}, False),
    ],
)
async def test_an_error_inside_an_answer_is_raised(server, provider, error, retryable):
    server.raw(sse({"content": "a"}, {"error": error}))
    server.raw(json.dumps({"error": error}).encode(), content_type="application/json")
    for ask in (watch(provider), provider.chat(ASK)):
        with pytest.raises(ProviderError, match="overloaded") as raised:
            await ask
        assert raised.value.retryable is retryable


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_page_instead_of_an_answer_points_at_the_base_url(server, provider, streamed):
    server.raw(b"<html>Welcome!</html>", content_type="text/html")
    with pytest.raises(ProviderError, match=r"not JSON.*base URL.*Welcome") as error:
        await (watch(provider) if streamed else provider.chat(ASK))
    assert not error.value.retryable


@pytest.mark.parametrize("data", [b"{nonsense", b'{"choices": 5}', b"{" * 5000])
async def test_broken_json_is_an_error_that_shows_it(server, provider, data):
    server.raw(data, content_type="application/json")
    server.raw(b"data: " + data + b"\n\n")
    for ask in (provider.chat(ASK), watch(provider)):
        with pytest.raises(ProviderError, match="not a chat completion") as error:
            await ask
        assert error.value.retryable
        assert data[:5].decode() in str(error.value)


async def test_a_redirect_is_not_followed_but_named(server, provider):
    server.fail(307, headers={"Location": "https://elsewhere.example/v1"})
    with pytest.raises(ProviderError, match=r"moved to https://elsewhere.example/v1.*EVERLOOP_BASE_URL"):
        await provider.chat(ASK)
    assert len(server.requests) == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_server_that_is_not_there_is_named(streamed):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        provider = OpenAIProvider(f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
        with pytest.raises(
            ProviderError, match=r"cannot reach http://127.0.0.1:\d+: .*is the server running\?"
        ) as error:
            await (watch(provider) if streamed else provider.chat(ASK))
    assert error.value.retryable
    await provider.close()


async def test_a_server_that_does_not_speak_http_is_an_error():
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    provider = OpenAIProvider(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(ProviderError):
        await provider.chat(ASK)
    await provider.close()
    server.close()


# Time


def timed(server: FakeOpenAI, **seconds: float) -> OpenAIProvider:
    return OpenAIProvider(server.base_url, model="m", timeouts=Timeouts(**seconds))


async def test_a_first_token_that_does_not_come_ends_the_wait(server):
    provider = timed(server, first_token=0.1)
    server.hang(5)
    with pytest.raises(ProviderError, match=r"no first token within 0.1 s") as error:
        await watch(provider)
    assert error.value.retryable
    await provider.close()


async def test_comments_do_not_count_as_tokens(server):
    provider = timed(server, first_token=0.15, token=5)
    server.raw(b": ping\n\n" * 100, piece=9, token_delay=0.01)
    started = time.monotonic()
    with pytest.raises(ProviderError, match=r"no first token within 0.15 s"):
        await watch(provider)
    assert time.monotonic() - started < 0.9
    await provider.close()


async def test_a_stream_that_falls_silent_is_given_up(server):
    provider = timed(server, first_token=5, token=0.1)
    server.hang(5, after_chunks=2, text="one two three")
    stream = provider.stream(ASK)
    shown: list[Any] = [await anext(stream), await anext(stream)]
    started = time.monotonic()
    with pytest.raises(ProviderError, match=r"nothing came for 0.1 s") as error:
        await anext(stream)
    assert time.monotonic() - started < 2
    assert [delta.text for delta in shown] == ["one ", "two "]
    assert error.value.retryable
    await provider.close()


async def test_a_slow_but_steady_stream_is_not_given_up(server):
    provider = timed(server, first_token=0.15, token=0.15, total=0.15)
    server.reply("a b c d e f g h", token_delay=0.03)
    assert (await watch(provider))[1].content == "a b c d e f g h"
    await provider.close()


async def test_the_clock_stands_still_while_the_watcher_is_slow(server):
    provider = timed(server, first_token=0.1, token=0.1)
    server.reply("a b c", token_delay=0.01)
    answer: Any = None
    async for item in provider.stream(ASK):
        answer = item
        await asyncio.sleep(0.15)
    assert answer.content == "a b c"
    await provider.close()


async def test_an_answer_that_ended_does_not_wait_long_for_the_last_words(server, monkeypatch):
    monkeypatch.setattr("everloop.providers.openai.LAST_WORDS", 0.1)
    provider = timed(server, token=30)
    server.hang(5, after_chunks=3, text="one two")
    started = time.monotonic()
    assert (await watch(provider))[1].content == "one two"
    assert time.monotonic() - started < 2
    await provider.close()


async def test_an_unstreamed_answer_has_a_time_limit_in_all(server):
    provider = timed(server, total=0.1)
    server.hang(5)
    server.reply("x", hang_after=1, hang=5)
    for _ in range(2):
        with pytest.raises(ProviderError, match=r"no answer within 0.1 s") as error:
            await provider.chat(ASK)
        assert error.value.retryable
    await provider.close()


async def test_a_connection_that_does_not_come_about_is_given_up():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = []
        for _ in range(4):  # fills the queue of connections nobody takes
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(full.getsockname())
            waiting.append(client)
        provider = OpenAIProvider(f"http://127.0.0.1:{full.getsockname()[1]}", timeouts=Timeouts(connect=0.2))
        for ask in (provider.chat(ASK), watch(provider)):
            with pytest.raises(ProviderError, match=r"cannot reach .*: no connection within 0.2 s") as error:
                await ask
            assert error.value.retryable
        await provider.close()
        for client in waiting:
            client.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("streamed", [True, False])
async def test_cancelling_closes_the_connection_at_once(server, provider, streamed):
    server.reply("a b c", token_delay=30)
    task = asyncio.create_task(watch(provider) if streamed else provider.chat(ASK))
    await until(lambda: server.requests)
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: server.requests[0].gone)


async def test_leaving_a_stream_closes_the_connection_at_once(server, provider):
    server.reply("a b c", token_delay=30)
    stream = provider.stream(ASK)
    assert await anext(stream) == Delta("a ")
    await stream.aclose()
    await until(lambda: server.requests[0].gone)


# Connections and bytes


async def test_connections_are_used_again(server, provider):
    for _ in range(5):
        server.reply("ok")
        await provider.chat(ASK)
    for _ in range(5):
        server.reply("ok")
        await watch(provider)
        await asyncio.sleep(0.01)
    assert server.connections == 1


def test_a_provider_can_be_used_by_one_event_loop_after_another():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    provider = OpenAIProvider(f"http://127.0.0.1:{port}/v1", model="tools-0x0")

    async def ask(*, close: bool) -> str | None:
        async with FakeOpenAI(port=port):
            answer = await provider.chat(ASK)
            if close:
                await provider.close()
            return answer.content

    assert [asyncio.run(ask(close=close)) for close in (True, False, True)] == ["done:?"] * 3


async def test_a_conversation_is_sent_as_the_bytes_it_keeps(server, provider):
    conversation = Conversation([{"role": "user", "content": "é 😀"}])
    conversation.json()
    kept = conversation[0]
    conversation[0] = {"role": "user", "content": "not encoded again"}
    for _ in range(2):
        server.reply("ok")
        await provider.chat(conversation, ECHO)
    conversation[0] = kept
    assert server.requests[1].body["messages"] == [{"role": "user", "content": "é 😀"}]
    assert server.requests[1].body["tools"] == ECHO


async def test_tools_are_encoded_once_while_the_list_stays_the_same(server, provider):
    tools = list(ECHO)
    for _ in range(3):
        server.reply("ok")
    await provider.chat(ASK, tools)
    tools.append({"type": "function", "function": {"name": "later"}})
    await provider.chat(ASK, tools)
    await provider.chat(ASK, [])
    assert [len(request.body.get("tools", [])) for request in server.requests] == [1, 2, 0]
    assert "tools" not in server.requests[2].body


async def test_messages_with_lone_surrogates_are_sent_with_replacements(server, provider):
    server.reply("ok")
    server.reply("ok")
    await provider.chat([{"role": "user", "content": "a\ud800b"}])
    await provider.chat(Conversation([{"role": "user", "content": "a\ud800b"}]))
    assert [request.body["messages"][0]["content"] for request in server.requests] == ["a?b", "a?b"]


async def test_a_body_of_megabytes_is_sent(server, provider):
    server.reply("ok")
    await provider.chat([{"role": "user", "content": "x" * 3_000_000}])
    assert len(server.requests[0].body["messages"][0]["content"]) == 3_000_000


async def test_a_public_host_is_reached_through_the_proxy_of_the_environment(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.base_url.removesuffix("/v1"))
    server.reply("through the proxy")
    provider = OpenAIProvider("http://models.example.com/v1", model="m")
    assert (await provider.chat(ASK)).content == "through the proxy"
    assert server.requests[0].headers["Host"] == "models.example.com"
    await provider.close()


async def test_loopback_is_reached_without_the_proxy(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    provider = OpenAIProvider(server.base_url, model="tools-0x0")
    assert (await provider.chat(ASK)).content == "done:?"
    await provider.close()


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x/v1", "http://", "http://[", "not a url"])
def test_a_base_url_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="EVERLOOP_BASE_URL"):
        OpenAIProvider(url)


@pytest.mark.parametrize("suffix", ["", "/", "/chat/completions"])
async def test_a_base_url_may_end_as_people_write_it(server, suffix):
    provider = OpenAIProvider(server.base_url + suffix, model="tools-0x0")
    assert (await provider.chat(ASK)).content == "done:?"
    await provider.close()


async def test_a_password_in_the_base_url_is_not_shown(server):
    server.fail(500)
    for base_url in (server.base_url, "http://127.0.0.1:1/v1"):
        provider = OpenAIProvider(base_url.replace("://", "://me:hidden@"))
        with pytest.raises(ProviderError) as error:
            await provider.chat(ASK)
        assert "127.0.0.1" in str(error.value)
        assert "hidden" not in str(error.value)
        await provider.close()


async def test_a_long_conversation_is_sent_whole_and_grows_at_its_end(server, provider):
    conversation = Conversation({"role": "user", "content": f"{n}: " + "long " * 500} for n in range(200))
    for n in range(3):
        conversation.append({"role": "assistant", "content": f"answer {n}"})
        conversation.append({"role": "user", "content": f"question {n}"})
        server.reply("ok")
        await provider.chat(conversation, ECHO)
        assert server.requests[-1].body["messages"] == list(conversation)
        assert server.requests[-1].body["tools"] == ECHO

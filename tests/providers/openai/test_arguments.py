"""The arguments of calls, and the limits of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everloop.providers.base import ProviderError
from everloop.providers.openai import Answer, OpenAIProvider, parse_arguments
from everloop.testing import call

from .streams import END, piece, sse, until, watch


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
async def test_arguments_that_are_not_an_object_become_an_error_of_the_call(server, provider, raw):
    server.raw(sse(piece(0, "a", "echo", raw), END))
    made = (await watch(provider))[1].tool_calls[0]
    assert made.arguments == {}
    assert made.error.startswith("arguments are not valid JSON: ")
    assert made.error.endswith(": " + raw[:200])


@pytest.mark.parametrize("raw", ['{"path": "a", "content": "long', ""])
async def test_a_call_truncated_by_the_token_limit_says_so(server, provider, raw):
    end = {"choices": [{"delta": {}, "finish_reason": "length"}]}
    server.raw(sse(piece(0, "a", "now", ""), piece(1, "b", "write_file", raw), end))
    answer = (await watch(provider))[1]
    assert answer.tool_calls[0].error is None
    assert "cut off" in answer.tool_calls[1].error
    assert answer.tool_calls[1].arguments == {}
    assert answer.finish_reason == "length"


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
async def test_an_endless_body_is_not_read_to_its_end(server, content_type):
    provider = OpenAIProvider(server.base_url, model="m", answer_limit=10)
    server.raw(b" " * 40_000_000, content_type=content_type, piece=100_000)
    with pytest.raises(ProviderError, match=r"larger than|longer than") as error:
        await watch(provider)
    assert not error.value.retryable
    await until(lambda: server.requests[0].gone)
    await provider.close()


@pytest.mark.parametrize(
    ("piece", "end"),
    [("word ", '"}'), ("}", '"}'), ("{}x", "")],
    ids=["words", "brackets in a text", "objects"],
)
def test_pieces_that_all_have_the_name_are_read_in_linear_time(piece, end, monkeypatch):
    read: list[int] = []

    def counted(raw: str) -> Any:
        read.append(len(raw))
        return parse_arguments(raw)

    monkeypatch.setattr("everloop.providers.openai.parse_arguments", counted)
    answer = Answer(1_000_000, "somewhere")
    texts = [*(['{"text": "'] if end else []), *[piece] * 2000, end]
    for text in texts:
        function = {"name": "echo", "arguments": text}
        delta = {"tool_calls": [{"index": 0, "function": function}]}
        answer.feed(json.dumps({"choices": [{"delta": delta}]}).encode())
    calls = answer.response().tool_calls
    assert sum(read) <= 4 * len("".join(texts))
    assert len(calls) == 1
    assert calls[0].arguments == ({"text": piece * 2000} if end else {})
    assert bool(calls[0].error) is not bool(end)


async def test_endless_calls_are_refused(server, provider):
    server.raw(sse(*(piece(i, f"id{i}", "echo", "{}") for i in range(600)), END))
    with pytest.raises(ProviderError, match="more than 512 tool calls"):
        await watch(provider)

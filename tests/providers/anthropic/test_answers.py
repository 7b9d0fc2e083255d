"""Answers, whole and streamed."""

from __future__ import annotations

import pytest

from everloop.providers.anthropic import AnthropicProvider
from everloop.providers.base import Delta, ProviderError
from everloop.testing import call

from .streams import ASK, ECHO, SECRET, begin, end, event, message, piece, sse, text, until, watch


async def test_a_chat_gives_text_reasoning_usage_and_the_reason_it_ended(server, provider):
    server.reply("good day", reasoning="be polite")
    answer = await provider.chat(ASK)
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("good day", "be polite", "stop")
    assert answer.usage["completion_tokens"] == 2
    assert not answer.has_tool_calls
    request = server.requests[0]
    assert request.headers["x-api-key"] == SECRET
    assert request.headers["anthropic-version"] == "2023-06-01"
    assert "Authorization" not in request.headers


async def test_a_chat_gives_the_tool_calls(server, provider):
    server.calls(call("echo", text="a"), call("echo", text="é\n"))
    answer = await provider.chat(ASK, ECHO, "other-model")
    assert [(c.name, c.arguments, c.error) for c in answer.tool_calls] == [
        ("echo", {"text": "a"}, None),
        ("echo", {"text": "é\n"}, None),
    ]
    assert (answer.content, answer.finish_reason) == (None, "tool_calls")
    assert server.requests[0].model == "other-model"


async def test_a_stream_joins_the_pieces_of_parallel_calls(server, provider):
    server.calls(call("echo", text="first"), call("echo", text="second"), call("now"), text="wait")
    shown, answer = await watch(provider, tools=ECHO)
    assert shown == [Delta("wait")]
    assert [c.arguments for c in answer.tool_calls] == [{"text": "first"}, {"text": "second"}, {}]
    assert len({c.id for c in answer.tool_calls}) == 3
    assert answer.finish_reason == "tool_calls"


async def test_a_whole_answer_and_a_streamed_one_are_the_same(server, provider):
    for _ in range(2):
        server.calls(call("echo", text="first"), text="a b", reasoning="c d", finish_reason="max_tokens")
    server.replies[1].calls = server.replies[0].calls
    streamed = (await watch(provider, tools=ECHO))[1]
    whole = await provider.chat(ASK, ECHO)
    for answer in (streamed, whole):
        assert answer.usage.pop("cached_tokens", None) or answer.usage.pop("cache_write_tokens")
    assert streamed == whole


@pytest.mark.parametrize(
    ("reason", "ours"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("pause_turn", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("refusal", "content_filter"),
        ("something_new", "something_new"),
    ],
)
async def test_the_reason_for_the_end_is_translated_into_our_terms(server, provider, reason, ours):
    server.reply("x", finish_reason=reason)
    server.reply("x", finish_reason=reason)
    assert (await provider.chat(ASK)).finish_reason == ours
    assert (await watch(provider))[1].finish_reason == ours


async def test_usage_counts_cached_tokens_as_part_of_the_prompt(server, provider):
    usage = {"input_tokens": 5, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20}
    server.raw(
        message({"type": "text", "text": "hi"}, usage={**usage, "output_tokens": 7, "server_tool_use": None}),
        content_type="application/json",
    )
    start = event("message_start", message={"usage": {**usage, "output_tokens": 1, "service_tier": "standard"}})
    server.raw(start + begin(0, "text", text="") + text("hi") + end(output_tokens=7))
    for answer in (await provider.chat(ASK), (await watch(provider))[1]):
        assert answer.usage == {
            "prompt_tokens": 125, "completion_tokens": 7, "total_tokens": 132, "cached_tokens": 100,
            "cache_write_tokens": 20,
        }  # fmt: skip


@pytest.mark.parametrize(("first", "last"), [(0, 9), (9, 0)])
async def test_usage_that_comes_only_at_one_end_is_read(server, provider, first, last):
    start = event("message_start", message={"usage": {"input_tokens": first, "output_tokens": 0}})
    server.raw(start + text("hi") + end(input_tokens=last, output_tokens=2))
    assert (await watch(provider))[1].usage == {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}


async def test_pings_and_unknown_events_blocks_and_pieces_are_ignored(server, provider):
    server.raw(
        b": hello\n\nid: 7\nretry: 10\n"
        + sse(
            event("ping"),
            b'data: {"type": "ping"}\n\n',
            event("something_new", index=0, delta={"type": "text_delta", "text": "not text"}),
            begin(0, "redacted_thinking", data="xyz"),
            event("content_block_stop", index=0),
            begin(1, "server_tool_use", id="s", name="web_search", input={}),
            piece(1, "input_json_delta", partial_json='{"q":1}'),
            begin(2, "text", text="be"),
            piece(2, "text_delta", text="tween"),
            piece(2, "citations_delta", citation={"cited_text": "nobody"}),
            piece(2, "signature_delta", signature="x"),
            event("content_block_stop", index=2),
        )
    )
    shown, answer = await watch(provider)
    assert [delta.text for delta in shown] == ["be", "tween"]
    assert (answer.content, answer.tool_calls, answer.reasoning) == ("between", [], None)


CALLS = {
    "as the API sends them": [
        begin(0, "tool_use", id="a", name="echo", input={}),
        piece(0, "input_json_delta", partial_json=""),
        piece(0, "input_json_delta", partial_json='{"n":'),
        piece(0, "input_json_delta", partial_json="1}"),
        event("content_block_stop", index=0),
        begin(1, "tool_use", id="b", name="echo", input={}),
        piece(1, "input_json_delta", partial_json='{"n":2}'),
        event("content_block_stop", index=1),
    ],
    "whole at the beginning": [
        begin(0, "tool_use", id="a", name="echo", input={"n": 1}),
        event("content_block_stop", index=0),
        begin(1, "tool_use", id="b", name="echo", input={"n": 2}),
    ],
    "whole and then in pieces": [
        begin(0, "tool_use", id="a", name="echo", input={"n": 1}),
        piece(0, "input_json_delta", partial_json='{"n":1}'),
        begin(1, "tool_use", id="b", name="echo", input={"n": 7}),
        piece(1, "input_json_delta", partial_json='{"n":2}'),
    ],
    "with one index": [
        begin(0, "tool_use", id="a", name="echo"),
        piece(0, "input_json_delta", partial_json='{"n":1}'),
        begin(0, "tool_use", id="b", name="echo"),
        piece(0, "input_json_delta", partial_json='{"n":2}'),
    ],
    "without an index": [
        event("content_block_start", content_block={"type": "tool_use", "id": "a", "name": "echo"}),
        piece(None, "input_json_delta", partial_json='{"n":1}'),
        event("content_block_start", content_block={"type": "tool_use", "id": "b", "name": "echo"}),
        piece(None, "input_json_delta", partial_json='{"n":2}'),
    ],
    "under one id": [
        begin(0, "tool_use", id="a", name="echo", input={"n": 1}),
        begin(1, "tool_use", id="a", name="echo", input={"n": 2}),
    ],
}


@pytest.mark.parametrize("variant", CALLS)
async def test_calls_are_read_however_a_server_splits_them(server, provider, variant):
    server.raw(sse(*CALLS[variant]))
    _, answer = await watch(provider)
    assert [(c.name, c.arguments, c.error) for c in answer.tool_calls] == [
        ("echo", {"n": 1}, None),
        ("echo", {"n": 2}, None),
    ]
    ids = [c.id for c in answer.tool_calls if c.id]
    assert len(ids) == len(set(ids))
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("raw", ["[1]", "null", '{"a":', '{"a": NaN}'])
async def test_arguments_that_are_not_an_object_become_an_error_of_the_call(server, provider, raw):
    server.raw(sse(begin(0, "tool_use", id="a", name="echo"), piece(0, "input_json_delta", partial_json=raw)))
    made = (await watch(provider))[1].tool_calls[0]
    assert made.arguments == {}
    assert made.error.startswith("arguments are not valid JSON: ")


async def test_a_call_truncated_by_the_token_limit_says_so(server, provider):
    server.raw(
        begin(0, "tool_use", id="a", name="now", input={})
        + event("content_block_stop", index=0)
        + begin(1, "tool_use", id="b", name="write_file")
        + piece(1, "input_json_delta", partial_json='{"path": "a", "content": "long')
        + end("max_tokens")
    )
    answer = (await watch(provider))[1]
    assert answer.tool_calls[0].error is None
    assert "cut off" in answer.tool_calls[1].error
    assert (answer.tool_calls[1].arguments, answer.finish_reason) == ({}, "length")


async def test_a_piece_of_a_call_that_never_began_is_a_temporary_error(server, provider):
    server.raw(sse(begin(0, "text", text=""), piece(3, "input_json_delta", partial_json='{"n":1}')))
    with pytest.raises(ProviderError) as error:
        await watch(provider)
    assert error.value.retryable


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("size", [0, 1, 7])
async def test_a_stream_is_read_whatever_its_line_ends_and_wherever_the_network_splits_it(
    server, provider, line_end, size
):
    stream = sse(begin(0, "text", text=""), text("gr"), text("üße 😀")).replace(b"\n", line_end.encode())
    server.raw(stream, piece=size)
    shown, answer = await watch(provider)
    assert [delta.text for delta in shown] == ["gr", "üße 😀"]
    assert answer.content == "grüße 😀"


async def test_the_end_of_a_stream_is_recognised_with_a_stop_event_a_reason_or_a_missing_line_end(server, provider):
    delta = event("message_delta", delta={"stop_reason": "end_turn"})
    for data in (text("a") + delta, text("b") + event("message_stop"), (text("c") + delta).rstrip()):
        server.raw(data)
    assert [(await watch(provider))[1].content for _ in range(3)] == ["a", "b", "c"]


async def test_a_server_that_does_not_stream_is_shown_in_one_piece(server, provider):
    blocks = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "all "},
        None,
        {"type": "text", "text": "at once"},
    ]
    server.raw(message(*blocks), content_type="application/json; charset=utf-8")
    shown, answer = await watch(provider)
    assert shown == [Delta("all at once", "hm")]
    assert (answer.content, answer.reasoning) == ("all at once", "hm")


async def test_lone_surrogates_are_replaced_and_split_pairs_are_joined(server, provider):
    def half(words: str) -> bytes:
        return (
            b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"%b"}}\n\n'
            % words.encode()
        )

    server.raw(half("a\\ud83d") + half("\\ude00b") + end())
    assert (await watch(provider))[1].content == "a😀b"
    server.raw(half("a\\ud83d") + half("b") + half("c\x01") + end())
    assert (await watch(provider))[1].content == "a\ufffdbc\x01"
    server.raw(b'{"content":[{"type":"text","text":"x\\udc00 \xff"}]}', content_type="application/json")
    assert (await provider.chat(ASK)).content == "x\ufffd \ufffd"


async def test_an_answer_of_many_blocks_is_cut_once(server):
    provider = AnthropicProvider("k", "m", base_url=server.base_url, answer_limit=20)
    server.raw(message(*[{"type": "text", "text": "word " * 9}] * 3), content_type="application/json")
    given = begin(0, "tool_use", id="a", name="echo", input={"n": 1})
    server.raw(sse(given, piece(1, "text_delta", text="word " * 9)))
    for answer in (await provider.chat(ASK), (await watch(provider))[1]):
        assert answer.content == "word " * 4 + "\n\n[The answer was cut at 20 characters.]"
    await provider.close()


async def test_reasoning_and_arguments_are_limited_too(server):
    provider = AnthropicProvider("k", "m", base_url=server.base_url, answer_limit=20)
    server.reply("never said", reasoning="hm " * 50)
    answer = (await watch(provider))[1]
    assert answer.content == "[The model's reasoning was cut at 20 characters.]"
    assert len(answer.reasoning) == 20
    for data in (
        sse(begin(0, "tool_use", id="a", name="echo"), piece(0, "input_json_delta", partial_json='{"t":"' + "x" * 99)),
        sse(begin(0, "tool_use", id="a", name="echo", input={"t": "x" * 99})),
    ):
        server.raw(data)
        answer = (await watch(provider))[1]
        assert "cut off" in answer.tool_calls[0].error
        assert answer.finish_reason == "length"
    await provider.close()


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_an_endless_body_is_not_read_to_its_end(server, content_type):
    provider = AnthropicProvider("k", "m", base_url=server.base_url, answer_limit=10)
    server.raw(b" " * 40_000_000, content_type=content_type, piece=100_000)
    with pytest.raises(ProviderError, match=r"larger than|longer than"):
        await watch(provider)
    await until(lambda: server.requests[0].gone)
    await provider.close()


@pytest.mark.parametrize("kind", ["tool_use", "text"])
async def test_endless_blocks_are_refused(server, provider, kind):
    server.raw(sse(*(begin(i, kind, id=f"id{i}", name="echo", text="") for i in range(5000))))
    with pytest.raises(ProviderError, match="more than"):
        await watch(provider)

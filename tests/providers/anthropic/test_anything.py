"""Whatever a server sends."""

from __future__ import annotations

import json
import unicodedata
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everloop.providers.anthropic.answer import MessageAnswer
from everloop.providers.base import LLMResponse, ProviderError
from everloop.providers.http import EventReader, StreamTimer, Timeouts

from .streams import begin, end, event, piece, sse, text

GOOD = sse(
    begin(0, "thinking", thinking=""),
    piece(0, "thinking_delta", thinking="hm 😀"),
    event("content_block_stop", index=0),
    begin(1, "text", text=""),
    piece(1, "text_delta", text="grüße"),
    event("ping"),
    begin(2, "tool_use", id="a", name="echo", input={}),
    piece(2, "input_json_delta", partial_json='{"n":'),
    piece(2, "input_json_delta", partial_json="1}"),
    event("content_block_stop", index=2),
    input_tokens=3,
)


def read(blocks: list[bytes]) -> LLMResponse:
    """Return what the reader makes of a stream that arrives in these blocks."""
    answer, events = MessageAnswer(1000, "somewhere", {}), EventReader(100_000, StreamTimer(Timeouts(), 0.0))
    for block in filter(None, blocks):
        for payload in events.read(deque([block]), 0.0):
            if not answer.over():
                answer.feed(payload)
    return answer.response()


def _one_line(error: ProviderError) -> None:
    assert str(error)
    assert not [one for one in str(error) if unicodedata.category(one) in ("Cc", "Zl", "Zp")]


def test_a_stream_is_the_same_wherever_it_is_split():
    whole = read([GOOD])
    assert (whole.content, whole.reasoning, whole.finish_reason) == ("grüße", "hm 😀", "tool_calls")
    assert whole.tool_calls[0].arguments == {"n": 1}
    for at in range(len(GOOD) + 1):
        assert read([GOOD[:at], GOOD[at:]]) == whole


JSON: st.SearchStrategy[Any] = st.sampled_from(
    [
        None, True, 0, -1, 2**70, 1.5, "", "text", "tool_use", "{}", "\ud83d", "line\nend\x1b", [], [1],
        [{"text": "d"}], {}, {"type": "text"}, {"type": {}}, {"usage": {"input_tokens": 3}},
        {"usage": [1]}, {"text": {"text": 1}},
    ]
)  # fmt: skip
FIELDS = ["text", "thinking", "partial_json", "id", "name", "input", "stop_reason"]
PIECES = ["text", "thinking", "tool_use", "text_delta", "thinking_delta", "input_json_delta", "input_json_delta"]
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(PIECES)}, optional=dict.fromkeys(FIELDS, st.sampled_from(["a", '{"x":', "1}"]) | JSON)
)
KINDS = ["message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"]
EVENTS = st.fixed_dictionaries(
    {"type": st.sampled_from([*KINDS, *KINDS, "message_stop", "message", "ping", "error", "new"]) | JSON},
    optional={
        "index": st.integers(0, 2) | JSON,
        "delta": BLOCK | JSON,
        "content_block": BLOCK | JSON,
        "content": st.lists(BLOCK | st.none(), max_size=2) | JSON,
        "message": JSON,
        "usage": st.dictionaries(st.sampled_from(["input_tokens", "output_tokens"]), st.integers(-5, 50)) | JSON,
        "stop_reason": JSON,
        "error": JSON,
    },
)


@settings(max_examples=150)
@given(events=st.lists(EVENTS, max_size=8), limit=st.sampled_from([3, 1000]))
def test_whatever_events_arrive_there_is_an_answer_or_one_clear_error(events, limit):
    answer = MessageAnswer(limit, "somewhere", {})
    shown = ""
    try:
        for one in events:
            if answer.over():
                break
            if delta := answer.feed(json.dumps(one).encode()):
                shown += delta.text
        response = answer.response()
    except ProviderError as error:
        _one_line(error)
        return
    assert (response.content or "").rstrip("\ufffd") == shown.rstrip("\ufffd")
    for call in response.tool_calls:
        assert isinstance(call.arguments, dict)
        assert isinstance(call.name, str)
    assert all(type(count) is int for count in response.usage.values())


@settings(max_examples=100)
@given(data=st.binary(max_size=60), at=st.integers(0, len(GOOD)))
def test_garbage_in_a_stream_is_skipped_or_one_clear_error(data, at):
    try:
        read([GOOD[:at], data, GOOD[at:]])
    except ProviderError as error:
        _one_line(error)


@settings(max_examples=30)
@given(size=st.integers(1, 40), words=st.lists(st.text(min_size=1, max_size=8), max_size=10))
def test_any_text_arrives_as_it_was_sent(size, words):
    stream = begin(0, "text", text="") + b"".join(map(text, words)) + end()
    blocks = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert read(blocks).content == "".join(words)


@pytest.mark.parametrize("field", ["index", "delta", "content_block", "message", "usage"])
def test_a_missing_field_is_not_an_error(field):
    def without(line: bytes) -> bytes:
        if not line.startswith(b"data: "):
            return line
        value: dict[str, Any] = json.loads(line[6:])
        value.pop(field, None)
        return b"data: " + json.dumps(value).encode()

    try:
        answer = read([b"\n".join(map(without, GOOD.split(b"\n")))])
    except ProviderError:
        assert field == "content_block"  # a call that never began
        return
    assert isinstance(answer, LLMResponse)

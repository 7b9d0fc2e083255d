"""Whatever comes as the body of a chat request, it is a request or an error of the client."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everloop.messages import Conversation
from everloop.server.errors import ApiError
from everloop.server.requests import ChatRequest, read_chat
from everloop.testing.conversation import check_conversation

from .chats import ALL, HELLO, PIXEL, calls, result, tool
from .test_requests import OPTIONS


def read_or_error(body: bytes) -> ChatRequest | ApiError:
    try:
        return read_chat(body, honours=ALL, messages_limit=1000)
    except ApiError as error:
        return error


def outcome(body: bytes) -> ChatRequest | ApiError:
    """Return the outcome of a body: a request, or an error that names a parameter."""
    request = read_or_error(body)
    if isinstance(request, ApiError):
        assert request.status == 400
        json.dumps(request.body(), ensure_ascii=False).encode()
        assert len(request.message) < 1000
        return request
    Conversation(request.messages).json()
    assert check_conversation(request.messages) == []
    return request


def with_text(json_text: bytes) -> bytes:
    return b'{"messages":[{"role":"user","content":"%b"}]}' % json_text


DEEP = 200_000


@pytest.mark.parametrize(
    "body",
    [
        b"", b" ", b"null", b"[]", b"1", b'"x"', b"{", b"\xff", b"\xef\xbb\xbf{}", b"\x00",
        with_text(b"x") + b"x", with_text(b"\xff"),
        with_text(b"a\nb"), b'{"temperature":NaN}', b'{"temperature":Infinity}', b'{"temperature":1e999}',
        b'{"seed":%b}' % (b"9" * 100_000),
        b'{"tools":%b}' % (b"[" * DEEP), b'{"tools":%b%b}' % (b"[" * DEEP, b"]" * DEEP),
        b'{"metadata":%b' % (b'{"a":' * DEEP), b"[" * DEEP, b'{"x\\ud800":1}', b'{"messages":[{"role":"\\ud800"}]}',
        b'["\\ud800",%b%b]' % (b"[" * DEEP, b"]" * DEEP), b'{"a":"\\ud800","seed":%b}' % (b"9" * 10_000),
        b'["\\ud800",NaN]',
        b'{"messages":[{"role":"user","content":"\\ud800"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"\\ud800"}],"tools":[{"function":{"name":"x","parameters":{"a":NaN}}}]}',
        b'{"messages":[{"role":"user","content":"x"}],"verbosity":"%b"}' % (b"x" * 10_000),
        b'{"a":"\\ud800', b'\xff"\\ud800"',
        b'{"messages":[{"role":"user","content":"x","more":%b}]}' % (b"[" * DEEP),
        b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"x","parameters":{"a":%b1%b}}}]}'
        % (b'{"a":' * 5000, b"}" * 5000),
    ],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_an_invalid_body_is_a_client_error(body):
    assert isinstance(outcome(body), ApiError)


def test_half_a_character_is_replaced():
    for half in (b"\\ud83d", b"\\ude00", b"\\ud83d\\u0041"):
        request = outcome(with_text(b"a" + half + b"b"))
        assert isinstance(request, ChatRequest)
        assert request.messages[0]["content"].replace("A", "") == "a?b"
    keyed = outcome(b'{"messages":[{"role":"user","content":"x"}],"metadata":{"a\\ud800":"b"}}')
    assert isinstance(keyed, ChatRequest)
    assert keyed.metadata == {"a?": "b"}
    whole = outcome(with_text(b"a\\ud83d\\ude00b"))
    assert isinstance(whole, ChatRequest)
    assert whole.messages[0]["content"] == "a😀b"


def test_every_check_sees_the_last_of_duplicate_keys():
    body = b'{"messages":[{"role":"user","content":"x"}],"n":2,"n":1,"temperature":1,"temperature":9}'
    error = outcome(body)
    assert isinstance(error, ApiError)
    assert error.param == "temperature"


def test_ten_megabytes_are_parsed_quickly():
    texts = [with_text(b"x" * 10_000_000), with_text(b"\\n" * 5_000_000), with_text(b"\\ud800" + b"x" * 10_000_000)]
    many = b'{"messages":[%b]}' % b",".join([b'{"role":"user","content":"0123456789"}'] * 250_000)
    flood = b"{%b}" % b",".join(b'"k%d":0' % number for number in range(500_000))
    started = time.process_time()
    assert all(isinstance(outcome(text), ChatRequest) for text in texts)
    assert isinstance(outcome(many), ApiError)
    assert isinstance(outcome(flood), ApiError)
    assert time.process_time() - started < 10


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "refusal", "file"])},
    optional={
        "text": st.text(max_size=5) | LEAVES,
        "image_url": st.just({"url": PIXEL}) | LEAVES,
        "refusal": st.text(max_size=3),
    },
)
CALL = st.fixed_dictionaries(
    {"id": st.sampled_from("ab"), "function": st.just({"name": "look", "arguments": "{}"})},
    optional={"type": st.sampled_from(["function", "custom"])},
)
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES},
    optional={
        "content": st.text(max_size=5) | st.lists(PART, max_size=3) | LEAVES,
        "tool_calls": st.lists(CALL, max_size=3) | st.none(),
        "tool_call_id": st.sampled_from("ab"),
        "name": st.text(max_size=3),
        "refusal": st.text(max_size=3) | st.none(),
    },
)
FIELDS = {
    name: st.just(OPTIONS.get(name)) | LEAVES for name in [*OPTIONS, "n", "stream", "stream_options", "model", "odd"]
}
TOOLS = st.lists(st.just(tool()) | st.just(tool("other")), max_size=2)
BODY = st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=6)}, optional={**FIELDS, "tools": TOOLS})


@settings(max_examples=150)
@given(BODY)
def test_anything_that_looks_like_a_request_is_read_or_refused(body):
    outcome(json.dumps(body).encode())


@given(
    st.binary(max_size=200) | st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
)
def test_any_body_is_read_or_refused(value):
    outcome(value if isinstance(value, bytes) else json.dumps(value).encode())


TALK = st.lists(st.sampled_from(["user", "system", "assistant", "calls"]), max_size=8)


@given(TALK, st.data())
def test_every_valid_conversation_is_accepted(roles, data):
    messages: list[dict[str, Any]] = []
    for role in roles:
        if role == "calls":
            ids = data.draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
            messages += [calls(*ids), *(result(id) for id in data.draw(st.permutations(ids)))]
        else:
            messages.append({"role": role, "content": data.draw(st.text(max_size=3))})
    request = outcome(json.dumps({"messages": [*messages, HELLO]}).encode())
    assert isinstance(request, ChatRequest)
    assert request.messages[-1] == HELLO

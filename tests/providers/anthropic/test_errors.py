"""Errors in one line without the key, and whether a retry may help."""

from __future__ import annotations

import time

import pytest

from everloop.providers.anthropic import AnthropicProvider, Timeouts
from everloop.providers.base import Delta, ProviderError
from everloop.providers.retry import Resilient
from everloop.testing import FakeAnthropic, call

from .streams import ASK, ECHO, SECRET, begin, end, event, message, sse, text, watch


async def test_the_error_of_a_request_without_a_key_names_the_setting(server):
    provider = AnthropicProvider(None, "tools-0x0", base_url=server.base_url)
    with pytest.raises(ProviderError, match=r"HTTP 401: .*EVERLOOP_API_KEY"):
        await provider.chat(ASK)
    await provider.close()


@pytest.mark.parametrize(
    ("kind", "retryable", "status"),
    [
        ("overloaded_error", True, 529),
        ("api_error", True, 500),
        ("rate_limit_error", True, 429),
        ("timeout_error", True, 504),
        ("invalid_request_error", False, 400),
        ("authentication_error", False, 401),
        ("billing_error", False, 402),
        ("permission_error", False, 403),
        ("not_found_error", False, 404),
        ("request_too_large", False, 413),
        ("something_new", True, None),
    ],
)
async def test_an_error_in_the_middle_of_an_answer_is_raised(server, provider, kind, retryable, status):
    fault = {"type": kind, "message": f"Overloaded\x1b[2J {SECRET}"}
    server.raw(event("message_start", message={}) + text("half an") + event("error", error=fault))
    stream = provider.stream(ASK)
    assert await anext(stream) == Delta("half an")
    with pytest.raises(ProviderError, match="Overloaded") as error:
        await anext(stream)
    assert (error.value.retryable, error.value.status) == (retryable, status)
    assert SECRET not in str(error.value)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("fault", [None, "plain words", {"message": None}, [1], {"type": ["x"]}])
async def test_an_error_of_any_shape_is_an_error(server, provider, fault):
    server.raw(event("error", error=fault))
    server.raw(b'{"type":"error","error":{"type":"api_error","message":"odd"}}', content_type="application/json")
    for ask in (watch(provider), provider.chat(ASK)):
        with pytest.raises(ProviderError, match="reported an error"):
            await ask


@pytest.mark.parametrize(
    "data",
    [b"{nonsense", b'{"type": "content_block_delta", "delta": 5}', b"{" * 5000, b"{}", b"{%b}" % SECRET.encode()],
)
async def test_broken_json_is_a_temporary_error_that_shows_it_without_the_key(server, provider, data):
    server.raw(data, content_type="application/json")
    server.raw(b"data: " + data + b"\n\n")
    for ask in (provider.chat(ASK), watch(provider)):
        with pytest.raises(ProviderError, match="not a message") as error:
            await ask
        assert error.value.retryable
        assert SECRET not in str(error.value)


async def test_a_stream_that_ends_without_a_reason_is_a_temporary_error(server, provider):
    server.raw(event("message_start", message={}) + text("half an ans"))
    server.raw(b"")
    for _ in range(2):
        with pytest.raises(ProviderError, match="ended in the middle") as error:
            await watch(provider)
        assert error.value.retryable


async def test_an_overloaded_server_is_asked_again_and_nothing_is_shown_twice(server):
    provider = AnthropicProvider(SECRET, "m", base_url=server.base_url)
    again = Resilient([(provider, None)], retries=3, base_delay=0.001)
    server.fail(529, "Overloaded")
    server.raw(event("message_start", message={}) + text("one ") + event("error", error={"type": "overloaded_error"}))
    server.cut(2, "one two three")
    server.reply("one two three")
    shown, answer = await watch(again)
    assert "".join(delta.text for delta in shown) == answer.content == "one two three"
    assert not any(delta.restart for delta in shown)
    assert len(server.requests) == 4
    await again.close()


# ---------------------------------------------------------------------------------------------- time


def timed(server: FakeAnthropic, **seconds: float) -> AnthropicProvider:
    return AnthropicProvider("k", "m", base_url=server.base_url, timeouts=Timeouts(**seconds))


async def test_pings_before_an_answer_do_not_count_as_one(server):
    provider = timed(server, first_token=0.15, token=5)
    server.raw(event("ping") * 1000, piece=len(event("ping")), token_delay=0.01)
    started = time.monotonic()
    with pytest.raises(ProviderError, match=r"no first token within 0.15 s"):
        await watch(provider)
    assert time.monotonic() - started < 9  # of ten and more
    await provider.close()


async def test_a_model_that_thinks_silently_is_waited_for_while_there_are_signs_of_life(server):
    provider = timed(server, first_token=20, token=1.5)
    data = text("one ") + event("ping") * 50 + text("two") + end()
    server.raw(data, piece=len(event("ping")), token_delay=0.04)
    assert (await watch(provider))[1].content == "one two"
    await provider.close()


async def test_signs_of_life_do_not_keep_a_dead_answer_forever(server):
    provider = timed(server, first_token=2, token=0.2)
    server.raw(text("one ") + event("ping") * 1000, piece=len(event("ping")), token_delay=0.01)
    started = time.monotonic()
    with pytest.raises(ProviderError, match=r"nothing came for 0.2 s"):
        await watch(provider)
    assert time.monotonic() - started < 9  # of ten and more
    await provider.close()


async def test_a_models_text_is_never_an_error_of_the_api(server, provider):
    words = '{"type":"error","error":{"type":"api_error"}}'
    server.reply(words)
    assert (await watch(provider))[1].content == words
    server.calls(call("echo", text=words))
    assert (await watch(provider, tools=ECHO))[1].tool_calls[0].arguments == {"text": words}
    server.raw(sse(begin(0, "text", text=words)))
    assert (await watch(provider))[1].content == words
    server.raw(message({"type": "text", "text": words}), content_type="application/json")
    assert (await provider.chat(ASK)).content == words

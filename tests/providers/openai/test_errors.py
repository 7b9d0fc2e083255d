"""Errors in one line, and whether a retry may help."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from email.utils import formatdate

import pytest

from everloop.providers.base import ProviderError
from everloop.providers.openai import OpenAIProvider

from .streams import ASK, END, sse, watch


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>Bad Gateway</html>", "HTTP 502: <html>Bad Gateway</html>"),
        (b"", "HTTP 502: Bad Gateway"),
        ({"error": "plain words"}, "HTTP 502: plain words"),
        ({"message": "vllm's way", "code": 1}, "HTTP 502: vllm's way"),
        ({"detail": [{"msg": "x"}]}, 'HTTP 502: [{"msg": "x"}]'),
        (b"x" * 100_000, "HTTP 502: " + "x" * 299 + "…"),
        ({"error": {"message": "bad key secret-key"}}, "HTTP 502: bad key ***"),
    ],
)
async def test_an_error_body_of_any_shape_is_one_readable_line_without_the_key(server, provider, body, says):
    server.fail(502, body)
    with pytest.raises(ProviderError) as error:
        await provider.chat(ASK)
    assert str(error.value).split(": ", 1)[1] == says


async def test_a_placeholder_for_no_key_stays_in_an_error(server):
    provider = OpenAIProvider(server.base_url, "ollama", "some-model")
    server.fail(500, {"error": "ollama has no such model"})
    with pytest.raises(ProviderError, match="HTTP 500: ollama has no such model"):
        await provider.chat(ASK)
    await provider.close()


async def test_an_exhausted_balance_is_not_worth_waiting_for(server, provider):
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
async def test_a_wait_requested_by_the_server_is_read(server, provider, headers, seconds):
    server.fail(429, headers=headers)
    with pytest.raises(ProviderError) as error:
        await provider.chat(ASK)
    assert error.value.retry_after == seconds


async def test_a_wait_given_as_a_date_is_the_time_until_then(server, provider):
    server.fail(503, headers={"Retry-After": formatdate(time.time() + 30, usegmt=True)})
    with pytest.raises(ProviderError) as error:
        await provider.chat(ASK)
    assert 25 < (error.value.retry_after or 0) <= 30


async def test_a_stream_that_ends_without_a_finish_is_a_temporary_error(server, provider):
    server.raw(sse({"content": "half an ans"}, done=False))
    server.raw(b"")
    for _ in range(2):
        with pytest.raises(ProviderError, match="ended in the middle") as error:
            await watch(provider)
        assert error.value.retryable


async def test_a_finished_answer_is_complete_wherever_its_last_bytes_are_cut(server, provider):
    said = sse({"content": "one"}, END, done=False)
    last = sse({"choices": [], "usage": {"total_tokens": 5}})
    for cut in range(len(last)):
        server.raw(said + last[:cut])
        assert (await watch(provider))[1].content == "one"


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
async def test_a_missing_server_is_named(streamed):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        provider = OpenAIProvider(f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
        with pytest.raises(
            ProviderError, match=r"cannot reach http://127.0.0.1:\d+: .*is the server running\?"
        ) as error:
            await (watch(provider) if streamed else provider.chat(ASK))
    assert error.value.retryable
    await provider.close()


async def test_a_server_that_does_not_use_http_is_an_error():
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        provider = OpenAIProvider(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(ProviderError):
            await provider.chat(ASK)
        await provider.close()

"""What holds for OpenAI's and Anthropic's API alike: streams, the length limit, errors, timeouts, cancelled calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from everloop.providers.anthropic import AnthropicProvider
from everloop.providers.base import Delta, ProviderError
from everloop.providers.http import Timeouts
from everloop.providers.openai import OpenAIProvider
from everloop.testing import FakeAnthropic, FakeOpenAI

from .openai.streams import ASK, until, watch

Provider = OpenAIProvider | AnthropicProvider
Server = FakeOpenAI | FakeAnthropic
Connect = Callable[..., Provider]
KEY = "canary-key-4711"


@pytest.fixture(params=[FakeOpenAI, FakeAnthropic])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    async with request.param() as running:
        yield running


@pytest.fixture
async def connect(server: Server) -> AsyncIterator[Connect]:
    """Makes a provider with these timeouts and this limit."""
    made: list[Provider] = []

    def provider(answer_limit: int = 1_000_000, **seconds: float) -> Provider:
        options: dict[str, Any] = {"model": "m", "answer_limit": answer_limit, "timeouts": Timeouts(**seconds)}
        if isinstance(server, FakeOpenAI):
            made.append(OpenAIProvider(server.base_url, KEY, **options))
        else:
            made.append(AnthropicProvider(KEY, base_url=server.base_url, **options))
        return made[-1]

    yield provider
    for one in made:
        await one.close()


# ---------------------------------------------------------------------------------------------- answers


async def test_a_stream_shows_each_token_and_ends_with_the_whole_answer(server, connect):
    server.reply("one two three", reasoning="think first")
    shown, answer = await watch(connect())
    assert [delta.reasoning for delta in shown if delta.reasoning] == ["think ", "first"]
    assert [delta.text for delta in shown if delta.text] == ["one ", "two ", "three"]
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("one two three", "think first", "stop")
    assert answer.usage["completion_tokens"] == 3


@pytest.mark.parametrize("streamed", [True, False])
async def test_text_beyond_the_limit_is_cut_and_says_so(server, connect, streamed):
    provider = connect(answer_limit=20)
    server.reply("word " * 50, token_delay=0.001 if streamed else 0)
    shown, answer = await watch(provider) if streamed else ([], await provider.chat(ASK))
    assert answer.content == "word " * 4 + "\n\n[The answer was cut at 20 characters.]"
    assert answer.finish_reason == "length"
    if streamed:
        assert "".join(delta.text for delta in shown) == answer.content
        await until(lambda: server.requests[0].gone)


# ---------------------------------------------------------------------------------------------- errors


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
        (413, False, "HTTP 413"),
        (425, True, "HTTP 425"),
        (429, True, "HTTP 429"),
        (500, True, "HTTP 500: too long"),
        (503, True, "HTTP 503"),
        (529, True, "HTTP 529"),
    ],
)
async def test_a_refused_request_says_why_and_whether_to_retry(server, connect, streamed, status, retryable, says):
    server.fail(status, f"too\n long {KEY}", {"Retry-After": "7"})
    with pytest.raises(ProviderError) as error:
        await (watch(connect()) if streamed else connect().chat(ASK))
    assert (error.value.retryable, error.value.status, error.value.retry_after) == (retryable, status, 7)
    assert says in str(error.value)
    assert "127.0.0.1:" in str(error.value)
    assert "\n" not in str(error.value)
    assert KEY not in str(error.value)


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_page_instead_of_an_answer_points_to_the_base_url(server, connect, streamed):
    server.raw(b"<html>Welcome!</html>", content_type="text/html")
    with pytest.raises(ProviderError, match=r"not JSON.*base URL.*Welcome") as error:
        await (watch(connect()) if streamed else connect().chat(ASK))
    assert not error.value.retryable


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_connection_lost_in_the_middle_is_a_temporary_error(server, connect, streamed):
    server.cut(2)
    with pytest.raises(ProviderError, match="broke") as error:
        await (watch(connect()) if streamed else connect().chat(ASK))
    assert error.value.retryable


async def test_a_failure_after_the_end_of_an_answer_does_not_matter(server, connect):
    server.reply("one two", cut_after=3)
    assert (await watch(connect()))[1].content == "one two"


# ---------------------------------------------------------------------------------------------- timeouts


async def test_a_missing_first_token_ends_the_wait(server, connect):
    server.hang(5)
    with pytest.raises(ProviderError, match=r"no first token within 0.1 s") as error:
        await watch(connect(first_token=0.1))
    assert error.value.retryable


async def test_a_stream_that_falls_silent_is_abandoned(server, connect):
    server.hang(20, after_chunks=2, text="one two three")
    stream = connect(first_token=20, token=1).stream(ASK)
    shown: list[Any] = [await anext(stream), await anext(stream)]
    started = time.monotonic()
    with pytest.raises(ProviderError, match=r"nothing came for 1 s") as error:
        await anext(stream)
    assert time.monotonic() - started < 10
    assert [delta.text for delta in shown] == ["one ", "two "]
    assert error.value.retryable


async def test_a_finished_answer_does_not_wait_long_for_the_last_bytes(server, connect, monkeypatch):
    monkeypatch.setattr("everloop.providers.http.LAST_EVENTS_SECONDS", 0.1)
    server.hang(20, after_chunks=3, text="one two")
    started = time.monotonic()
    assert (await watch(connect(token=30)))[1].content == "one two"
    assert time.monotonic() - started < 10


async def test_an_unstreamed_answer_has_a_total_time_limit(server, connect):
    provider = connect(total=0.1)
    server.hang(5)
    server.reply("x", hang_after=1, hang=5)
    for _ in range(2):
        with pytest.raises(ProviderError, match=r"no answer within 0.1 s") as error:
            await provider.chat(ASK)
        assert error.value.retryable


# ---------------------------------------------------------------------------------------------- cancelled calls


@pytest.mark.parametrize("streamed", [True, False])
async def test_cancelling_closes_the_connection_at_once(server, connect, streamed):
    server.reply("a b c", token_delay=30)
    task = asyncio.create_task(watch(connect()) if streamed else connect().chat(ASK))
    await until(lambda: server.requests)
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: server.requests[0].gone)


async def test_leaving_a_stream_closes_the_connection_at_once(server, connect):
    server.reply("a b c", token_delay=30)
    stream = connect().stream(ASK)
    assert await anext(stream) == Delta("a ")
    await stream.aclose()
    await until(lambda: server.requests[0].gone)

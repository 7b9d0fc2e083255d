"""Time limits of answers that are late or fall silent; `test_both_apis.py` has those that Anthropic's API shares."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import pytest

from everloop.providers.base import Delta, ProviderError
from everloop.providers.openai import OpenAIProvider, Timeouts
from everloop.testing import FakeOpenAI

from .streams import ASK, END, sse, until, watch

COMMENT = b": reading the prompt\n\n"


def timed(server: FakeOpenAI, **seconds: float) -> OpenAIProvider:
    return OpenAIProvider(server.base_url, model="m", timeouts=Timeouts(**seconds))


async def test_a_server_that_reads_its_prompt_is_waited_for_while_there_are_signs_of_life(server):
    provider = timed(server, first_token=1.5, token=1.5, total=30)
    server.raw(COMMENT * 80 + sse({"content": "read"}, END), piece=len(COMMENT), token_delay=0.025)
    started = time.monotonic()
    assert (await watch(provider))[1].content == "read"
    assert time.monotonic() - started > 1.8
    await provider.close()


async def test_signs_of_life_do_not_keep_an_answer_that_never_begins_forever(server):
    provider = timed(server, first_token=1, token=1, total=1.5)
    server.raw(COMMENT * 1000, piece=len(COMMENT), token_delay=0.01)
    started = time.monotonic()
    with pytest.raises(ProviderError, match=r"no token") as error:
        await watch(provider)
    assert 1.4 < time.monotonic() - started < 9  # of ten and more
    assert error.value.retryable
    await provider.close()


async def test_signs_of_life_do_not_keep_a_dead_answer_forever(server):
    provider = timed(server, first_token=2, token=0.15)
    server.raw(sse({"content": "one "}, done=False) + COMMENT * 1000, piece=len(COMMENT), token_delay=0.01)
    started = time.monotonic()
    with pytest.raises(ProviderError, match=r"nothing came for 0.15 s"):
        await watch(provider)
    assert time.monotonic() - started < 9  # of ten and more
    await provider.close()


async def test_a_sign_of_life_never_shortens_the_wait_for_the_first_token(server):
    provider = timed(server, first_token=5, token=0.1)
    server.raw(COMMENT + sse({"content": "late"}, END), piece=len(COMMENT), token_delay=0.3)
    stream = provider.stream(ASK)
    assert await anext(stream) == Delta("late")
    await stream.aclose()
    await provider.close()


async def test_a_slow_but_steady_stream_is_not_abandoned(server):
    provider = timed(server, first_token=1, token=1, total=1)
    server.reply("a b c d e f g h", token_delay=0.2)
    assert (await watch(provider))[1].content == "a b c d e f g h"
    await provider.close()


async def test_the_clock_stands_still_while_the_subscriber_is_slow(server):
    provider = timed(server, first_token=20, token=0.5)
    server.reply("a b c", token_delay=0.01)
    answer: Any = None
    async for item in provider.stream(ASK):
        answer = item
        await asyncio.sleep(0.6)
    assert answer.content == "a b c"
    await provider.close()


EMPTY = sse({}, done=False)


async def test_empty_chunks_do_not_keep_a_dead_answer_forever(server):
    provider = timed(server, first_token=30, token=0.5, total=1)
    server.raw(sse({"content": "one "}, done=False) + EMPTY * 1000, piece=len(EMPTY), token_delay=0.01)
    with pytest.raises(ProviderError, match=r"nothing came for 0.5 s") as error:
        await watch(provider)
    assert error.value.retryable
    await provider.close()


@pytest.mark.parametrize("chatter", [EMPTY, COMMENT])
async def test_a_finished_answer_is_not_delayed_by_what_follows_it(server, monkeypatch, chatter):
    monkeypatch.setattr("everloop.providers.http.LAST_EVENTS_SECONDS", 0.5)
    provider = timed(server, token=30)
    server.raw(sse({"content": "one"}, END, done=False) + chatter * 1000, piece=len(chatter), token_delay=0.01)
    assert (await watch(provider))[1].content == "one"
    await until(lambda: server.requests[0].gone)  # before all of it had arrived
    await provider.close()


async def test_a_connection_that_is_never_established_times_out():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = []
        for _ in range(4):  # fills the queue of connections that are not accepted
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

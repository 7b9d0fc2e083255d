"""The bodies of requests and responses, in every framing and at every speed."""

from __future__ import annotations

import asyncio

import pytest

from everloop.providers import http
from everloop.providers.base import ProviderError
from everloop.providers.http import Pool, origin_of
from everloop.providers.openai import OpenAIProvider, Timeouts
from everloop.testing.openai_server import FakeOpenAI

from .servers import BODY, CHUNKED, MEGABYTE, Peer, Server, answer, chunked, client, failure, once, posted, raw, say


@pytest.mark.parametrize(
    "reply",
    [
        answer("which"),
        raw(CHUNKED, body=chunked(BODY)),
        raw(CHUNKED, body=chunked(BODY[:7], BODY[7:], extension=b';name="value"')),
        raw(CHUNKED, body=chunked(BODY, end=b"0\r\nX-Sum: 1\r\nContent-Type: text/html\r\n\r\n")),
        raw("TRANSFER-ENCODING: Chunked", "Content-Encoding: identity", body=chunked(BODY)),
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer("which"),
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
        + raw(CHUNKED, body=chunked(BODY)),
    ],
)
@pytest.mark.parametrize("size", [1, 10_000])
async def test_a_body_arrives_complete_in_every_framing_and_its_connection_is_reused(reply, size):
    blocks = [reply[at : at + size] for at in range(0, len(reply), size)]
    async with Server(once(*blocks)) as server, client(server.url) as provider:
        assert await say(provider) == "which"
        assert await say(provider) == "second on the same connection"


async def test_a_body_may_end_with_the_connection():
    async def closing(peer: Peer) -> None:
        await peer.request()
        await peer.send(raw("Content-Type: application/json"), BODY[:5], BODY[5:])

    async with Server(closing) as server, client(server.url) as provider:
        assert [await say(provider), await say(provider)] == ["which", "which"]
        assert server.connections == 2


async def test_a_response_without_a_body_says_so_and_its_connection_is_reused():
    async with Server(once(b"HTTP/1.1 204 No Content\r\n\r\n")) as server, client(server.url) as provider:
        assert "HTTP 204" in str(await failure(provider))
        assert await say(provider) == "second on the same connection"


async def test_the_headers_of_an_interim_response_are_not_the_final_ones():
    early = b"HTTP/1.1 103 Early\r\nRetry-After: 7\r\n\r\nHTTP/1.1 503 \r\nContent-Length: 0\r\n\r\n"
    async with Server(once(early)) as server, client(server.url) as provider:
        error = await failure(provider)
    assert "no reason given" in str(error)
    assert error.retry_after is None


@pytest.mark.parametrize(
    "packed", [["Content-Encoding: gzip", "Transfer-Encoding: chunked"], ["Transfer-Encoding: gzip, chunked"]]
)
async def test_a_body_that_is_compressed_without_being_asked_is_a_clear_error(packed):
    packed = raw(*packed, body=chunked(b"\x1f\x8b"))
    async with Server(once(packed)) as server, client(server.url) as provider:
        error = await failure(provider)
    assert "compressed its answer (gzip" in str(error)
    assert not error.retryable


async def test_a_compressed_refusal_keeps_its_status():
    refusal = b"HTTP/1.1 401 Not you\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x8b\0"
    async with Server(once(refusal)) as server, client(server.url) as provider:
        error = await failure(provider)
    assert "HTTP 401: Not you" in str(error)


async def test_a_slow_reader_makes_the_server_wait_and_the_connection_is_reused():
    sent = 0

    async def generous(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(raw(f"Content-Length: {20 * MEGABYTE}"))
        for _ in range(20 * 16):
            await peer.send(b"x" * (MEGABYTE // 16))
            sent += MEGABYTE // 16
        await peer.request()
        await peer.send(answer("again"))

    async with Server(generous) as server:
        pool = Pool(origin_of(server.url), {})
        response = await posted(pool)
        await asyncio.sleep(0.2)
        assert sent < 20 * MEGABYTE  # the system's buffers hold some of it
        assert response._size < 1 * MEGABYTE
        size = 0
        while data := await response.read():
            size += len(data)
            assert len(data) < 1 * MEGABYTE
        assert size == 20 * MEGABYTE
        assert b"again" in await (await posted(pool)).read()
        assert server.connections == 1
        pool.close()
        await asyncio.sleep(0)


REFUSED = b"HTTP/1.1 413 Too Large\r\nContent-Length: 5\r\n\r\nlarge"


@pytest.mark.parametrize(
    ("reply", "hangs_up"),
    [
        (REFUSED, True),
        (REFUSED, False),
        (b"HTTP/1.1 413 Too Large\r\n\r\n", True),
        (b"HTTP/1.1 413 Too Large\r\n\r\n", False),
        (b"HTTP/1.1 413 Too Large\r\nContent-Length: 900\r\n\r\n", True),
    ],
)
async def test_a_refusal_sent_before_the_request_was_read_is_reported(monkeypatch, reply, hangs_up):
    monkeypatch.setattr(http, "ERROR_SECONDS", 0.2)

    async def early(peer: Peer) -> None:
        await peer.head()
        await peer.send(reply if peer.number == 1 else answer("fresh"))
        if not hangs_up:
            await asyncio.sleep(60)

    async with Server(early) as server, client(server.url) as provider:
        with pytest.raises(ProviderError) as caught:
            await provider.chat([{"role": "user", "content": "x" * 20 * MEGABYTE}])
        assert await say(provider) == "fresh"  # the partly written request is not continued
    assert "HTTP 413" in str(caught.value)
    assert not caught.value.retryable


async def test_a_server_that_stops_reading_the_request_is_abandoned():
    async def deaf(peer: Peer) -> None:
        await peer.head()
        await asyncio.sleep(60)

    times = Timeouts(total=0.3, first_token=0.3)
    async with Server(deaf) as server, client(server.url, timeouts=times) as provider:
        long = [{"role": "user", "content": "x" * 20 * MEGABYTE}]
        with pytest.raises(ProviderError, match=r"gave no answer within 0\.3 s"):
            await provider.chat(long)
        with pytest.raises(ProviderError, match=r"no first token within 0\.3 s"):
            async for _ in provider.stream(long):
                pass


@pytest.mark.parametrize(
    ("start", "rest"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"X-Name: some value\r\n" * 50),
        (b"HTTP/1.1 200 OK\r\nX: ", b"y" * 1000),
        (b"HTTP/1.1 200 O", b"K" * 1000),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 50),
        (raw(CHUNKED) + b"1\r\n{\r\n0\r\n", b"X-Name: some value\r\n" * 50),
        (raw(CHUNKED) + b"1\r\n{\r\n0\r\nX: ", b"y" * 1000),
        (raw(CHUNKED) + b"1;", b"y" * 1000),
    ],
    ids=["headers", "one header", "reason", "interim", "trailers", "one trailer", "extension"],
)
async def test_endless_headers_are_abandoned_soon(start, rest):
    sent = 0

    async def flood(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(start)
        while True:
            await peer.send(rest)
            sent += len(rest)
            await asyncio.sleep(0)

    async with Server(flood) as server, client(server.url) as provider:
        error = await failure(provider)
        assert "headers have no end" in str(error) or "is not HTTP" in str(error)
        assert sent < 10 * MEGABYTE


async def test_a_servers_text_cannot_control_a_terminal():
    async with FakeOpenAI() as server:
        server.fail(400, {"error": {"message": "no \x1b]0;title\x07 \x9b31m here"}})
        provider = OpenAIProvider(server.base_url, model="m")
        with pytest.raises(ProviderError) as refused:
            await provider.chat([{"role": "user", "content": "hi"}])
        assert str(refused.value).isprintable()
        await provider.close()

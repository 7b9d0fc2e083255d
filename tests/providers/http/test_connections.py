"""Connections that are reused, and those that must not be."""

from __future__ import annotations

import asyncio

import pytest

from everloop.providers import http
from everloop.providers.http import Timeouts

from .servers import BODY, LENGTH, Peer, Server, answer, client, failure, once, polite, raw, say


async def test_a_connection_is_reused():
    async with Server(polite) as server, client(server.url) as provider:
        assert [await say(provider, str(number)) for number in range(5)] == list("01234")
        assert server.connections == 1


@pytest.mark.parametrize(
    ("first", "connections"),
    [
        (answer("first", "Connection: close"), 2),
        (answer("first", status="HTTP/1.0 200 OK"), 2),
        (answer("first", "Connection: keep-alive", status="HTTP/1.0 200 OK"), 1),
    ],
)
async def test_the_server_decides_whether_a_connection_is_reused(first, connections):
    async with Server(once(first)) as server, client(server.url) as provider:
        assert await say(provider) == "first"
        await say(provider)
        assert server.connections == connections


async def test_a_connection_that_was_idle_for_long_is_not_reused(monkeypatch):
    async with Server(polite) as server, client(server.url) as provider:
        await say(provider)
        monkeypatch.setattr(http, "IDLE_SECONDS", 0.01)
        await asyncio.sleep(0.02)
        await say(provider)
        assert server.connections == 2


async def test_a_connection_that_closes_as_we_write_is_replaced_silently():
    requests = 0

    async def tired(peer: Peer) -> None:
        nonlocal requests
        await peer.request()
        requests += 1
        await peer.send(answer(f"on {peer.number}"))
        await peer.head()  # the second request is read and not answered
        requests += 1

    async with Server(tired) as server, client(server.url) as provider:
        assert await say(provider) == "on 1"
        assert await say(provider) == "on 2"
        assert (server.connections, requests) == (2, 3)


async def test_a_fresh_connection_that_closes_is_an_error_and_not_retried_here():
    async with Server(Peer.head) as server, client(server.url) as provider:
        error = await failure(provider)
        assert server.connections == 1
    assert "broke: the server closed it" in str(error)
    assert error.retryable


async def test_a_request_whose_answer_had_begun_is_not_sent_again():
    async def cut(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer("whole"))
        await peer.request()
        await peer.send(b"HTTP/1.1 2")

    async with Server(cut) as server, client(server.url) as provider:
        await say(provider)
        assert "broke" in str(await failure(provider))
        assert server.connections == 1


async def test_unrequested_bytes_end_an_idle_connection():
    async def chatty(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(f"on {peer.number}"))
        await asyncio.sleep(0.01)
        await peer.send(answer("smuggled"))
        await peer.gone()

    async with Server(chatty) as server, client(server.url) as provider:
        assert await say(provider) == "on 1"
        await asyncio.sleep(0.05)
        assert await say(provider) == "on 2"


async def test_a_second_answer_before_the_next_request_is_not_taken_for_its_answer():
    peers: list[Peer] = []

    async def once_each(peer: Peer) -> None:
        peers.append(peer)
        await peer.request()
        await peer.send(answer(f"on {peer.number}"))
        await peer.gone()

    async with Server(once_each) as server, client(server.url) as provider:
        assert await say(provider) == "on 1"
        peers[0].writer.write(answer("smuggled"))  # it is in the system's buffer when the next request is made
        assert await say(provider) == "on 2"


@pytest.mark.parametrize("cut", [1, 20, 60, 10_000])
async def test_a_second_answer_to_one_request_is_never_taken_for_the_next_ones(cut):
    smuggled = answer("smuggled")
    tail = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" if cut == 20 else smuggled[cut:]
    handler = once(answer("first") + smuggled[:cut], then=tail + smuggled)
    async with Server(handler) as server, client(server.url) as provider:
        assert await say(provider) == "first"
        assert await say(provider) == "fresh"
        assert server.connections == 2


@pytest.mark.parametrize(
    "head",
    [
        raw(f"Content-Length: {LENGTH}", "Transfer-Encoding: chunked"),
        raw("Transfer-Encoding: chunked", f"Content-Length: {LENGTH}"),
        raw(f"Content-Length: {LENGTH}", f"Content-Length: {LENGTH + 5}"),
        raw(f"Content-Length: {LENGTH}, {LENGTH + 5}"),
        raw("Content-Length: -5"),
        raw("Content-Length: +5"),
        raw("Content-Length: 99999999999999999999999999"),
        raw("Content-Length: 0x10"),
        raw("Content-Length : 5"),
        raw("X: a\r\n b"),
        raw("X: a\0b", f"Content-Length: {LENGTH}"),
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"\0\0\0",
    ],
)
async def test_an_answer_of_ambiguous_length_or_form_is_an_error_and_its_connection_ends(head):
    async with Server(once(head + BODY)) as server, client(server.url) as provider:
        error = await failure(provider)
        assert "broke: " in str(error)
        assert await say(provider) == "fresh"
        assert server.connections == 2


async def test_an_answer_shorter_than_announced_is_an_error():
    async def short(peer: Peer) -> None:
        await peer.request()
        await peer.send(raw(f"Content-Length: {LENGTH + 1}", body=BODY))

    async with Server(short) as server, client(server.url) as provider:
        assert "broke: the server closed it" in str(await failure(provider))


async def test_the_time_limit_of_one_request_does_not_end_the_next_one_on_its_connection():
    async def slower_and_slower(peer: Peer) -> None:
        for wait in (0.0, 0.8):
            await peer.request()
            await asyncio.sleep(wait)
            await peer.send(answer("in time"))
        await peer.gone()

    async with Server(slower_and_slower) as server, client(server.url, timeouts=Timeouts(total=2)) as provider:
        assert await say(provider) == "in time"
        await asyncio.sleep(1.5)  # the limit of the first is reached while the second waits
        assert await say(provider) == "in time"
        assert server.connections == 1

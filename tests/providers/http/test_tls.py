"""TLS: which certificates it trusts, and handshakes that fail."""

from __future__ import annotations

import asyncio

import pytest

from everloop.providers.http import Pool, origin_of
from everloop.providers.openai import Timeouts

from .servers import MEGABYTE, Peer, Proxy, Server, answer, client, failure, polite, posted, raw, say, server_tls


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_server_with_a_trusted_certificate_is_used_over_tls(trusted, host):
    async with Server(polite, server_tls()) as server, client(f"https://{host}:{server.port}") as provider:
        assert await say(provider, "one") == "one"
        assert await say(provider, "two") == "two"
        assert server.connections == 1


async def test_an_untrusted_certificate_is_a_permanent_error():
    async with Server(polite, server_tls()) as server, client(server.url) as provider:
        error = await failure(provider)
    assert str(error).startswith(f"no secure connection to {server.url}: ")
    assert "certificate" in str(error).lower()
    assert not error.retryable


async def test_a_certificate_of_another_host_is_a_permanent_error(trusted, monkeypatch):
    async with Server(polite, server_tls()) as origin, Proxy(origin.port) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        async with client("https://other.example") as provider:
            error = await failure(provider)
    assert str(error).startswith("no secure connection to https://other.example: ")
    assert "'other.example'" in str(error)
    assert not error.retryable


async def test_tls_to_a_plain_http_server_is_a_clear_error():
    async def plain(peer: Peer) -> None:
        await peer.reader.read(100)
        await peer.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await peer.gone()

    async with Server(plain) as server, client(server.url.replace("http", "https")) as provider:
        error = await failure(provider)
    assert str(error).startswith("no secure connection to https://")
    assert not error.retryable


async def test_a_handshake_that_never_ends_is_a_connection_timeout():
    async with Server(Peer.gone) as server:
        times = Timeouts(connect=0.2)
        async with client(server.url.replace("http", "https"), timeouts=times) as provider:
            error = await failure(provider)
    assert "no connection within 0.2 s" in str(error)
    assert error.retryable


async def test_a_server_that_disconnects_in_the_handshake_is_reported():
    async def rude(peer: Peer) -> None:
        await peer.reader.read(10)

    async with Server(rude) as server, client(server.url.replace("http", "https")) as provider:
        error = await failure(provider)
    assert "cannot reach https://" in str(error)
    assert ": :" not in str(error)
    assert error.retryable


async def test_an_idle_tls_connection_that_the_server_closed_is_not_reused(trusted):
    async def one_each(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(str(peer.number)))

    async with Server(one_each, server_tls()) as server, client(server.url) as provider:
        assert await say(provider) == "1"
        await asyncio.sleep(0.05)
        assert await say(provider) == "2"


async def test_a_large_tls_body_that_ends_with_the_connection_arrives_complete_at_a_slow_reader(trusted):
    async def generous(peer: Peer) -> None:
        await peer.request()
        await peer.send(raw(), *[b"x" * MEGABYTE] * 5)

    async with Server(generous, server_tls()) as server:
        pool = Pool(origin_of(server.url), {})
        response = await posted(pool)
        size = 0
        while data := await response.read():
            size += len(data)
            await asyncio.sleep(0.001)
        assert size == 5 * MEGABYTE
        pool.close()
        await asyncio.sleep(0)

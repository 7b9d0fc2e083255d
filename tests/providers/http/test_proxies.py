"""Proxies: they learn no more than necessary, and errors name them."""

from __future__ import annotations

import asyncio
import base64

import pytest

from everloop.providers.openai import Timeouts

from .servers import Peer, Proxy, Server, client, failure, keeping, say, server_tls


@pytest.mark.parametrize(
    "reply",
    [
        "HTTP/1.1 200 Connection established\r\n\r\n",
        "HTTP/1.0 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",  # against the standard, but seen in practice
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        "HTTP/1.1 204 Fine\r\n\r\n",
    ],
)
async def test_an_https_server_is_reached_through_a_proxy_that_sees_neither_key_nor_request(
    trusted, monkeypatch, reply
):
    heads: list[str] = []
    async with Server(keeping(heads), server_tls()) as origin, Proxy(origin.port, reply) as proxy:
        monkeypatch.setenv("https_proxy", f"http://us%40er:pass%3Aword@127.0.0.1:{proxy.port}")
        async with client("https://model.example") as provider:
            assert list(await asyncio.gather(say(provider), say(provider))) == ["from the origin"] * 2
            assert await say(provider) == "from the origin"
    assert proxy.connections == 2
    credentials = base64.b64encode(b"us@er:pass:word").decode()
    for head in proxy.heads:
        assert head.startswith("CONNECT model.example:443 HTTP/1.1\r\nHost: model.example:443\r\n")
        assert f"Proxy-Authorization: Basic {credentials}\r\n" in head
        assert "secret-key" not in head
    assert len(heads) == 3
    assert all(head.startswith("POST /v1/chat/completions HTTP/1.1\r\nHost: model.example\r\n") for head in heads)
    assert all("proxy" not in head.lower() and credentials not in head for head in heads)
    assert all("Authorization: Bearer secret-key\r\n" in head for head in heads)


async def test_a_proxy_may_be_reached_over_tls(trusted, monkeypatch):
    heads: list[str] = []
    async with Server(keeping(heads), server_tls()) as origin, Proxy(origin.port, tls=server_tls()) as proxy:
        monkeypatch.setenv("https_proxy", f"https://localhost:{proxy.port}")
        async with client("https://model.example") as provider:
            assert await say(provider) == "from the origin"
    assert proxy.connections == 1


@pytest.mark.parametrize(("status", "retryable"), [("407 Who are you", False), ("403 No", False), ("502 X", True)])
async def test_a_proxy_that_refuses_is_named_without_its_password(monkeypatch, status, retryable):
    gone = asyncio.Event()

    async def refuse(peer: Peer) -> None:
        await peer.head()
        await peer.send(f"HTTP/1.1 {status}\r\nContent-Length: 3\r\n\r\nno!".encode())
        await peer.gone()
        gone.set()

    async with Server(refuse) as proxy:
        monkeypatch.setenv("https_proxy", f"http://user:password@127.0.0.1:{proxy.port}")
        async with client("https://model.example") as provider:
            error = await failure(provider)
            async with asyncio.timeout(20):
                await gone.wait()
    assert f"cannot reach https://model.example: the proxy http://127.0.0.1:{proxy.port} refused" in str(error)
    assert f"HTTP {status[:3]}" in str(error)
    assert "check the proxy" in str(error)
    assert "password@" not in str(error)
    assert error.retryable is retryable


async def test_a_proxy_that_closes_or_is_missing_is_named(monkeypatch):
    async with Server(Peer.head) as proxy:
        monkeypatch.setenv("https_proxy", f"http://u:password@127.0.0.1:{proxy.port}")
        async with client("https://model.example") as provider:
            closed = await failure(provider)
            proxy._server.close()
            refused = await failure(provider)
    for error in (closed, refused):
        assert f"cannot reach https://model.example: through the proxy http://127.0.0.1:{proxy.port}: " in str(error)
        assert "password" not in str(error)
        assert error.retryable
    assert "refused" in str(refused)


async def test_a_proxy_that_never_opens_the_tunnel_is_a_connection_timeout(monkeypatch):
    async with Server(Peer.gone) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        async with client("https://model.example", timeouts=Timeouts(connect=0.2)) as provider:
            error = await failure(provider)
    assert "no connection within 0.2 s" in str(error)


@pytest.mark.parametrize("scheme", ["http://", ""])
async def test_a_plain_server_is_requested_with_the_full_url_through_a_proxy(monkeypatch, scheme):
    heads: list[str] = []
    async with Server(keeping(heads)) as proxy:
        monkeypatch.setenv("http_proxy", f"{scheme}user:word@127.0.0.1:{proxy.port}")
        async with client("http://name:pass@model.example:8080/v1?tier=1", api_key=None) as provider:
            assert await say(provider) == "from the origin"
    first, *lines = heads[0].split("\r\n")
    assert first == "POST http://model.example:8080/v1/chat/completions?tier=1 HTTP/1.1"
    assert lines[0] == "Host: model.example:8080"
    assert f"Proxy-Authorization: Basic {base64.b64encode(b'user:word').decode()}" in lines
    assert f"Authorization: Basic {base64.b64encode(b'name:pass').decode()}" in lines


async def test_a_proxy_that_is_not_a_url_is_a_clear_error_without_its_password(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://user:password@host:99999")
    async with client("https://model.example") as provider:
        error = await failure(provider)
    assert "the proxy for https://model.example (HTTPS_PROXY, …) is not a valid URL" in str(error)
    assert "password" not in str(error)
    assert not error.retryable

"""The HTTP client under the providers, against servers that are slow, rude or broken in every way we know."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everloop.errors import ConfigError
from everloop.providers import http
from everloop.providers import pool as pool_room
from everloop.providers.base import LLMResponse, ProviderError
from everloop.providers.openai import OpenAIProvider, Timeouts
from everloop.providers.origin import origin_of
from everloop.providers.pool import Pool
from everloop.providers.wire import ConnectionBroke
from everloop.testing.openai_server import FakeOpenAI

ASK = [{"role": "user", "content": "hello"}]
CERTIFICATES = Path(__file__).parent / "certificates"
MEGABYTE = 1 << 20


class Peer:
    """One connection as a server sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.reader, self.writer, self.number = reader, writer, number

    async def head(self) -> str:
        return (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")

    async def request(self) -> tuple[str, bytes]:
        """The next request: its head and its body."""
        head = await self.head()
        size = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0] or 0)
        return head, await self.reader.readexactly(size)

    async def send(self, *blocks: bytes) -> None:
        for block in blocks:
            self.writer.write(block)
            await self.writer.drain()

    async def gone(self) -> bool:
        """Wait for the client to hang up."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(MEGABYTE):
                pass
        return True


Handler = Callable[[Peer], Awaitable[Any]]


class Server:
    """A server on loopback whose behaviour is one function, called for every connection."""

    def __init__(self, handler: Handler, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        self.connections = 0
        self.heads: list[str] = []
        self._handler, self._tls, self._host = handler, tls, host
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Server:
        # Clients that hang up in the middle of a handshake are no news.
        asyncio.get_running_loop().set_exception_handler(self._unheard)
        self._server = await asyncio.start_server(self._serve, self._host, 0, ssl=self._tls, limit=MEGABYTE)
        self.port: int = self._server.sockets[0].getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{'https' if self._tls else 'http'}://{host}:{self.port}"
        return self

    def _unheard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), ConnectionError | ssl.SSLError):
            loop.default_exception_handler(context)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            await self._handler(Peer(reader, writer, self.connections))
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError, asyncio.CancelledError):
            pass  # the client went away, or the test is over
        finally:
            self._tasks.discard(task)
            writer.close()

    async def __aexit__(self, *_: Any) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)


def completion(text: str) -> bytes:
    message = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
    return json.dumps(message).encode()


def answer(text: str = "well", *headers: str, status: str = "HTTP/1.1 200 OK") -> bytes:
    """A whole HTTP answer with its length."""
    body = completion(text)
    lines = [status, "Content-Type: application/json", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def raw(*headers: str, body: bytes = b"") -> bytes:
    """An HTTP answer with just these headers."""
    return "\r\n".join(["HTTP/1.1 200 OK", *headers]).encode() + b"\r\n\r\n" + body


async def polite(peer: Peer) -> None:
    """Answers every request, on as many as a connection brings."""
    while True:
        _, body = await peer.request()
        await peer.send(answer(json.loads(body)["messages"][0]["content"]))


def once(*blocks: bytes, then: bytes | None = None) -> Handler:
    """The first connection gets these bytes for its first request; after that all is well, or `then` is sent."""

    async def handler(peer: Peer) -> None:
        await peer.request()
        if peer.number == 1:
            await peer.send(*blocks)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await peer.request()
                    await peer.send(then or answer("second on the same connection"))
                    await peer.gone()
        else:
            await peer.send(answer("fresh"))
            await peer.gone()

    return handler


def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / "localhost.pem", CERTIFICATES / "localhost.key")
    return context


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine trusts the tests' authority."""
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATES / "ca.pem"))


@pytest.fixture(autouse=True)
async def _nothing_is_left() -> AsyncIterator[None]:
    """A task, a transport or an exception that nobody looked at fails the test."""
    before = asyncio.all_tasks()
    yield
    for _ in range(5):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, f"still running: {left}"
    gc.collect()


@contextlib.asynccontextmanager
async def client(url: str, **options: Any) -> AsyncIterator[OpenAIProvider]:
    options.setdefault("timeouts", Timeouts(connect=5, first_token=5, token=5, total=5))
    provider = OpenAIProvider(url + ("" if "?" in url else "/v1"), options.pop("api_key", "secret-key"), "m", **options)
    try:
        yield provider
    finally:
        await provider.close()


async def say(provider: OpenAIProvider, text: str = "hello") -> str:
    return (await provider.chat([{"role": "user", "content": text}])).content or ""


async def failure(provider: OpenAIProvider) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        await provider.chat(ASK)
    return caught.value


# TLS


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_server_whose_certificate_is_trusted_is_spoken_to_over_tls(trusted, host):
    async with Server(polite, server_tls()) as server, client(f"https://{host}:{server.port}") as provider:
        assert await say(provider, "one") == "one"
        assert await say(provider, "two") == "two"
        assert server.connections == 1


async def test_an_untrusted_certificate_is_an_error_that_asking_again_does_not_cure():
    async with Server(polite, server_tls()) as server, client(server.url) as provider:
        error = await failure(provider)
    assert str(error).startswith(f"no safe connection to {server.url}: ")
    assert "certificate" in str(error).lower()
    assert not error.retryable


async def test_a_certificate_of_another_host_is_an_error_that_asking_again_does_not_cure(trusted, monkeypatch):
    async with Server(polite, server_tls()) as origin, Proxy(origin.port) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        async with client("https://other.example") as provider:
            error = await failure(provider)
    assert str(error).startswith("no safe connection to https://other.example: ")
    assert "'other.example'" in str(error)
    assert not error.retryable


async def test_tls_to_a_server_that_speaks_plain_http_is_a_clear_error():
    async def plain(peer: Peer) -> None:
        await peer.reader.read(100)
        await peer.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await peer.gone()

    async with Server(plain) as server, client(server.url.replace("http", "https")) as provider:
        error = await failure(provider)
    assert str(error).startswith("no safe connection to https://")
    assert not error.retryable


async def test_a_handshake_that_never_ends_is_a_connection_that_was_not_made_in_time():
    async with Server(Peer.gone) as server:
        times = Timeouts(connect=0.2)
        async with client(server.url.replace("http", "https"), timeouts=times) as provider:
            error = await failure(provider)
    assert "no connection within 0.2 s" in str(error)
    assert error.retryable


async def test_a_server_that_hangs_up_in_the_handshake_is_said_to():
    async def rude(peer: Peer) -> None:
        await peer.reader.read(10)

    async with Server(rude) as server, client(server.url.replace("http", "https")) as provider:
        error = await failure(provider)
    assert "cannot reach https://" in str(error)
    assert ": :" not in str(error)
    assert error.retryable


async def test_an_idle_tls_connection_that_the_server_closed_is_not_used_again(trusted):
    async def one_each(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(str(peer.number)))

    async with Server(one_each, server_tls()) as server, client(server.url) as provider:
        assert await say(provider) == "1"
        await asyncio.sleep(0.05)
        assert await say(provider) == "2"


async def test_a_large_body_over_tls_that_ends_with_the_connection_comes_whole_to_a_slow_reader(trusted):
    async def generous(peer: Peer) -> None:
        await peer.request()
        await peer.send(raw(), *[b"x" * MEGABYTE] * 5)

    async with Server(generous, server_tls()) as server:
        pool = Pool(origin_of(server.url), {})
        response = await pool.post([b"{}"], 5)
        size = 0
        while data := await response.read():
            size += len(data)
            await asyncio.sleep(0.001)
        assert size == 5 * MEGABYTE
        pool.close()
        await asyncio.sleep(0)


# proxies


class Proxy(Server):
    """Lets CONNECT requests through to one place, whatever place they name."""

    def __init__(self, port: int, reply: str = "HTTP/1.1 200 Connection established\r\n\r\n", **options: Any) -> None:
        self._port, self._reply = port, reply
        super().__init__(self._tunnel, **options)

    async def _tunnel(self, peer: Peer) -> None:
        self.heads.append(await peer.head())
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await peer.send(self._reply.encode())
            await asyncio.gather(_copy(peer.reader, writer), _copy(reader, peer.writer))
        finally:
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(MEGABYTE):
            writer.write(data)
            await writer.drain()
    writer.close()


def keeping(heads: list[str]) -> Handler:
    """Polite, and keeps the heads it was sent."""

    async def handler(peer: Peer) -> None:
        while True:
            head, _ = await peer.request()
            heads.append(head)
            await peer.send(answer("from the origin"))

    return handler


@pytest.mark.parametrize(
    "reply",
    [
        "HTTP/1.1 200 Connection established\r\n\r\n",
        "HTTP/1.0 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",  # against the standard, and seen
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


async def test_a_proxy_may_be_reached_over_tls_itself(trusted, monkeypatch):
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
            async with asyncio.timeout(5):
                await gone.wait()
    assert f"cannot reach https://model.example: the proxy http://127.0.0.1:{proxy.port} refused" in str(error)
    assert f"HTTP {status[:3]}" in str(error)
    assert "check the proxy" in str(error)
    assert "password@" not in str(error)
    assert error.retryable is retryable


async def test_a_proxy_that_closes_or_is_not_there_is_named(monkeypatch):
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


async def test_a_proxy_that_never_lets_us_through_is_a_connection_that_was_not_made_in_time(monkeypatch):
    async with Server(Peer.gone) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        async with client("https://model.example", timeouts=Timeouts(connect=0.2)) as provider:
            error = await failure(provider)
    assert "no connection within 0.2 s" in str(error)


@pytest.mark.parametrize("scheme", ["http://", ""])
async def test_a_plain_server_is_asked_for_in_full_through_a_proxy(monkeypatch, scheme):
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


async def test_a_proxy_that_is_no_url_is_a_clear_error_without_its_password(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://user:password@host:99999")
    async with client("https://model.example") as provider:
        error = await failure(provider)
    assert "the proxy for https://model.example (HTTPS_PROXY, …) is no URL" in str(error)
    assert "password" not in str(error)
    assert not error.retryable


# connections that are used again


async def test_a_connection_is_used_again():
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
async def test_the_server_says_whether_a_connection_is_used_again(first, connections):
    async with Server(once(first)) as server, client(server.url) as provider:
        assert await say(provider) == "first"
        await say(provider)
        assert server.connections == connections


async def test_a_connection_that_was_idle_for_long_is_not_used(monkeypatch):
    async with Server(polite) as server, client(server.url) as provider:
        await say(provider)
        monkeypatch.setattr(pool_room, "IDLE_SECONDS", 0.01)
        await asyncio.sleep(0.02)
        await say(provider)
        assert server.connections == 2


async def test_a_connection_that_closes_just_as_we_write_is_replaced_unseen():
    requests = 0

    async def tired(peer: Peer) -> None:
        nonlocal requests
        await peer.request()
        requests += 1
        await peer.send(answer(f"on {peer.number}"))
        await peer.head()  # the second request is read, and nothing is said to it
        requests += 1

    async with Server(tired) as server, client(server.url) as provider:
        assert await say(provider) == "on 1"
        assert await say(provider) == "on 2"
        assert (server.connections, requests) == (2, 3)


async def test_a_fresh_connection_that_closes_is_an_error_and_not_tried_again_here():
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


async def test_bytes_that_nobody_asked_for_end_an_idle_connection():
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


async def test_a_second_answer_that_came_before_the_next_request_was_sent_is_not_taken_for_its_answer():
    peers: list[Peer] = []

    async def once_each(peer: Peer) -> None:
        peers.append(peer)
        await peer.request()
        await peer.send(answer(f"on {peer.number}"))
        await peer.gone()

    async with Server(once_each) as server, client(server.url) as provider:
        assert await say(provider) == "on 1"
        peers[0].writer.write(answer("smuggled"))  # it lies in the system's buffer when the next request is made
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


BODY = completion("which")
LENGTH = len(BODY)


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
async def test_an_answer_of_doubtful_length_or_form_is_an_error_and_its_connection_ends(head):
    async with Server(once(head + BODY)) as server, client(server.url) as provider:
        error = await failure(provider)
        assert "broke: " in str(error)
        assert await say(provider) == "fresh"
        assert server.connections == 2


async def test_an_answer_that_is_shorter_than_it_said_is_an_error():
    async def short(peer: Peer) -> None:
        await peer.request()
        await peer.send(raw(f"Content-Length: {LENGTH + 1}", body=BODY))

    async with Server(short) as server, client(server.url) as provider:
        assert "broke: the server closed it" in str(await failure(provider))


# bodies


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n", extension: bytes = b"") -> bytes:
    return b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces) + end


CHUNKED = "Transfer-Encoding: chunked"


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
async def test_a_body_comes_whole_in_every_framing_and_its_connection_is_used_again(reply, size):
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


async def test_an_answer_without_a_body_says_so_and_its_connection_is_used_again():
    async with Server(once(b"HTTP/1.1 204 No Content\r\n\r\n")) as server, client(server.url) as provider:
        assert "HTTP 204" in str(await failure(provider))
        assert await say(provider) == "second on the same connection"


async def test_the_words_of_an_interim_answer_are_not_the_real_ones():
    early = b"HTTP/1.1 103 Early\r\nRetry-After: 7\r\n\r\nHTTP/1.1 503 \r\nContent-Length: 0\r\n\r\n"
    async with Server(once(early)) as server, client(server.url) as provider:
        error = await failure(provider)
    assert "no reason given" in str(error)
    assert error.retry_after is None


@pytest.mark.parametrize(
    "packed", [["Content-Encoding: gzip", "Transfer-Encoding: chunked"], ["Transfer-Encoding: gzip, chunked"]]
)
async def test_a_body_that_is_compressed_against_our_wish_is_a_clear_error(packed):
    packed = raw(*packed, body=chunked(b"\x1f\x8b"))
    async with Server(once(packed)) as server, client(server.url) as provider:
        error = await failure(provider)
    assert "compressed its answer (gzip" in str(error)
    assert not error.retryable


async def test_a_refusal_that_is_compressed_keeps_its_status():
    refusal = b"HTTP/1.1 401 Not you\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x8b\0"
    async with Server(once(refusal)) as server, client(server.url) as provider:
        error = await failure(provider)
    assert "HTTP 401: Not you" in str(error)


async def test_a_slow_reader_makes_the_server_wait_and_the_connection_is_used_again():
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
        response = await pool.post([b"{}"], 5)
        await asyncio.sleep(0.2)
        assert sent < 20 * MEGABYTE  # the system's buffers hold some of it
        assert response._size < 1 * MEGABYTE
        size = 0
        while data := await response.read():
            size += len(data)
            assert len(data) < 1 * MEGABYTE
        assert size == 20 * MEGABYTE
        assert b"again" in await (await pool.post([b"{}"], 5)).read()
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
async def test_a_server_that_refuses_a_large_request_before_it_has_read_it_is_heard(monkeypatch, reply, hangs_up):
    monkeypatch.setattr(http, "ERROR_SECONDS", 0.2)

    async def early(peer: Peer) -> None:
        await peer.head()
        await peer.send(reply if peer.number == 1 else answer("fresh"))
        if not hangs_up:
            await asyncio.sleep(60)

    async with Server(early) as server, client(server.url) as provider:
        with pytest.raises(ProviderError) as caught:
            await provider.chat([{"role": "user", "content": "x" * 20 * MEGABYTE}])
        assert await say(provider) == "fresh"  # what was half written is not written on
    assert "HTTP 413" in str(caught.value)
    assert not caught.value.retryable


async def test_a_server_that_stops_reading_our_request_is_given_up():
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
async def test_headers_without_end_are_given_up_soon(start, rest):
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
        assert "headers have no end" in str(error) or "is no HTTP" in str(error)
        assert sent < 10 * MEGABYTE


# cancelling


def stuck_listener() -> Iterator[int]:
    """A port whose queue is full: a connection to it is never made."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@pytest.fixture
def stuck() -> Iterator[int]:
    yield from stuck_listener()


async def test_a_connection_that_is_never_made_is_given_up_and_can_be_cancelled(stuck):
    async with client(f"http://127.0.0.1:{stuck}", timeouts=Timeouts(connect=0.1)) as provider:
        assert "no connection within 0.1 s" in str(await failure(provider))
    async with client(f"http://127.0.0.1:{stuck}") as provider:
        task = asyncio.create_task(provider.chat(ASK))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def _stall(peer: Peer, stage: str) -> None:
    if stage in ("handshake", "connect"):
        await peer.reader.read(1)
    elif stage == "tunnelled handshake":
        await peer.head()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\n")
        await peer.reader.read(1)
    elif stage == "writing":
        await peer.head()
    else:
        await peer.request()
        if stage == "reading":
            await peer.send(raw("Content-Length: 1000", body=b"{"))
        elif stage == "streaming":
            await peer.send(raw("Content-Type: text/event-stream"), b"data: {}\n\n")


async def _ask(provider: OpenAIProvider, stage: str) -> None:
    """A call that comes to this stage."""
    content = "x" * (20 * MEGABYTE if stage == "writing" else 1)
    if stage == "streaming":
        async for _ in provider.stream(ASK):
            pass
    else:
        await provider.chat([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "stage", ["handshake", "connect", "tunnelled handshake", "writing", "waiting", "reading", "streaming"]
)
async def test_a_call_that_is_cancelled_ends_its_connection_at_once(monkeypatch, stage):
    reached, gone = asyncio.Event(), asyncio.Event()

    async def handler(peer: Peer) -> None:
        await _stall(peer, stage)
        reached.set()
        await peer.gone()
        gone.set()

    async with Server(handler) as server:
        url = server.url.replace("http", "https") if stage == "handshake" else server.url
        if stage in ("connect", "tunnelled handshake"):
            monkeypatch.setenv("https_proxy", server.url)
            url = "https://model.example"
        async with client(url) as provider:
            task = asyncio.create_task(_ask(provider, stage))
            async with asyncio.timeout(5):
                await reached.wait()
                await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await gone.wait()
            pool = provider._endpoint._pool
            assert pool is not None
            assert not pool._idle
            assert not pool._all


@pytest.mark.parametrize("secure", [False, True])
async def test_a_call_may_be_cancelled_at_any_instant(trusted, secure):
    open_now: set[int] = set()

    async def counted(peer: Peer) -> None:
        open_now.add(peer.number)
        try:
            await polite(peer)
        finally:
            open_now.discard(peer.number)

    async with Server(counted, server_tls() if secure else None) as server, client(server.url) as provider:
        await say(provider)
        for fresh in (False, True):
            for steps in range(25):
                if fresh:
                    await provider.close()
                task = asyncio.create_task(say(provider, "cancelled"))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                assert await say(provider, str(steps)) == str(steps)
        async with asyncio.timeout(5):
            while len(open_now) > 1:
                await asyncio.sleep(0.01)


# many at once


async def test_a_hundred_calls_at_once_each_get_their_own_answer():
    async def jittery(peer: Peer) -> None:
        while True:
            _, body = await peer.request()
            text = json.loads(body)["messages"][0]["content"]
            await asyncio.sleep(int(text) % 7 / 1000)
            reply = answer(text)
            await peer.send(reply[:50], reply[50:])

    async with Server(jittery) as server, client(server.url) as provider:
        for _ in range(3):
            texts = [str(number) for number in range(100)]
            assert await asyncio.gather(*(say(provider, text) for text in texts)) == texts
        assert server.connections == 100


@pytest.mark.parametrize("stage", ["waiting", "reading", "streaming", "writing"])
async def test_closing_while_a_call_runs_is_a_clear_error_and_no_hang(stage):
    reached, gone = asyncio.Event(), asyncio.Event()

    async def handler(peer: Peer) -> None:
        await _stall(peer, stage)
        reached.set()
        await peer.gone()
        gone.set()

    async with Server(handler) as server, client(server.url) as provider:
        task = asyncio.create_task(_ask(provider, stage))
        async with asyncio.timeout(5):
            await reached.wait()
            await asyncio.sleep(0.01)
            await provider.close()
            with pytest.raises(ProviderError, match="it was closed on this side"):
                await task
            await gone.wait()
        assert server.connections == 1


async def test_closing_while_a_connection_is_made_leaves_none_behind():
    async with Server(polite) as server:
        pool = Pool(origin_of(server.url), {})
        task = asyncio.create_task(pool.post([b"{}"], 5))
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(ConnectionBroke, match="closed on this side"):
            await task


async def test_an_answer_that_ends_with_the_connection_is_not_whole_when_we_are_the_ones_who_end_it():
    async def half(peer: Peer) -> None:
        await peer.request()
        await peer.send(raw(body=b"half"))
        await peer.gone()

    async with Server(half) as server:
        pool = Pool(origin_of(server.url), {})
        response = await pool.post([b"{}"], 5)
        assert await response.read() == b"half"
        response.close()
        with pytest.raises(ConnectionBroke):
            await response.read()
        pool.close()


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_provider_works_in_one_event_loop_after_another(closes):
    provider: list[OpenAIProvider] = []

    async def use() -> tuple[str, str]:
        async with Server(polite) as server:
            if not provider:
                provider.append(OpenAIProvider(server.url + "/v1", None, "m"))
            else:  # the same provider, and a server that has moved
                provider[0]._endpoint._origin = origin_of(server.url + "/v1")
            said = await say(provider[0], "a"), await say(provider[0], "b")
            if closes:
                await provider[0].close()
            return said

    for _ in range(3):
        assert asyncio.run(use()) == ("a", "b")
    asyncio.run(provider[0].close())  # of connections whose loop has ended
    provider.clear()
    gc.collect()


# what is sent


@pytest.mark.parametrize("letter", ["\r", "\n", "\0", "\r\nX-Evil: 1", "\x7f", "€"])
async def test_what_no_header_may_have_is_refused_at_once(letter):
    with pytest.raises(ConfigError, match="the header X-Tenant has a line end or another character"):
        OpenAIProvider("http://127.0.0.1/v1", None, "m", headers={"X-Tenant": f"sec{letter}ret"})
    with pytest.raises(ConfigError, match="cannot be a header"):
        OpenAIProvider("http://127.0.0.1/v1", None, "m", headers={f"X{letter}": "1"})


@pytest.mark.parametrize("name", ["", "X Y", "X:", "Content-Length", "transfer-encoding", "HOST"])
def test_a_header_that_would_make_another_request_is_refused(name):
    with pytest.raises(ConfigError, match="cannot be a header"):
        OpenAIProvider("http://127.0.0.1/v1", None, "m", headers={name: "1"})


@pytest.mark.parametrize("key", ["sk-123\n", "sk-123\r\nX-Evil: 1", "sk\0", "sk-„123”", "sk 123", " "])
def test_an_api_key_that_was_pasted_badly_is_a_clear_error_that_does_not_show_it(key):
    with pytest.raises(ConfigError, match="set EVERLOOP_API_KEY to the key alone") as caught:
        OpenAIProvider("http://127.0.0.1/v1", key, "m")
    assert "sk" not in str(caught.value)


@pytest.mark.parametrize("part", ["\r\n", "\n", "\0", "\t", " ", "é"])
def test_what_no_url_may_have_is_refused_at_once(part):
    with pytest.raises(ConfigError, match="is not a URL"):
        OpenAIProvider(f"http://127.0.0.1/a{part}b/v1", None, "m")


@pytest.mark.parametrize("url", ["http://a..b", f"http://{'a' * 64}.de", "http://[::1", "http://h:99999", "http://h:x"])
def test_a_host_that_cannot_be_is_refused_at_once(url):
    with pytest.raises(ConfigError, match="is not a URL"):
        OpenAIProvider(url, None, "m")


async def test_each_header_is_sent_once_and_the_callers_wins():
    heads: list[str] = []
    headers = {"content-type": "application/x", "user-agent": "me"}
    async with Server(keeping(heads)) as server, client(server.url, headers=headers) as provider:
        await say(provider)
    names = [line.partition(":")[0].lower() for line in heads[0].split("\r\n")[1:-2]]
    assert sorted(names) == ["accept-encoding", "authorization", "content-length", "content-type", "host", "user-agent"]
    assert "content-type: application/x\r\n" in heads[0]


@pytest.mark.platform("IPv6 may be off")
async def test_an_address_of_ipv6_is_reached():
    heads: list[str] = []
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with Server(keeping(heads), host="::1") as server, client(server.url) as provider:
        assert await say(provider) == "from the origin"
    assert f"Host: [::1]:{server.port}\r\n" in heads[0]


async def test_a_host_is_named_in_small_letters_and_the_query_and_password_of_a_url_are_sent():
    heads: list[str] = []
    async with Server(keeping(heads)) as server:
        url = f"http://us%40er:pass@LOCALHOST:{server.port}/Path?api-version=1&x=%20"
        async with client(url, api_key=None) as provider:
            assert await say(provider) == "from the origin"
    assert heads[0].startswith("POST /Path/chat/completions?api-version=1&x=%20 HTTP/1.1\r\n")
    assert f"Host: localhost:{server.port}\r\n" in heads[0]
    assert f"Authorization: Basic {base64.b64encode(b'us@er:pass').decode()}\r\n" in heads[0]


# anything at all

PIECES = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.0 200 OK\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 204 No\r\n",
        b"HTTP/1.1 500 \r\n",
        b"HTTP/1.1 302 Away\r\nLocation: \xff\r\n",
        b"HTTP/1.1 101 Switch\r\nUpgrade: x\r\nConnection: upgrade\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: 0\r\n",
        b"Content-Type: text/event-stream\r\n",
        b"Content-Type: application/json\r\n",
        b"Content-Encoding: gzip\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: close\r\n",
        b"Connection: keep-alive\r\n",
        b"Retry-After: 1e999\r\n",
        b"\r\n",
        b"5\r\n{}   \r\n",
        b"0\r\n\r\n",
        b"{}   ",
        b'data: {"choices":[{"delta":{"content":"fuzz"}}]}\n\n',
        b"data: [DONE]\n\n",
        answer("fuzz"),
        raw(CHUNKED, body=chunked(BODY)),
    ]
)
ANYTHING = st.lists(PIECES | st.binary(max_size=20), max_size=10)


@settings(max_examples=100)
@given(blocks=ANYTHING, streams=st.booleans(), splits=st.booleans())
def test_whatever_a_server_sends_a_call_ends_and_the_next_one_gets_its_own_answer(blocks, streams, splits):
    said = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.request()
        if peer.number == 1:
            for block in blocks if splits else [b"".join(blocks)]:
                await peer.send(block)
                await asyncio.sleep(0)
            said.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await peer.request()
                    await peer.send(answer("the next one's"))
                    await peer.gone()
        else:
            await peer.send(answer("the next one's"))
            await peer.gone()

    async def run() -> None:
        async with Server(handler) as server, client(server.url) as provider, asyncio.timeout(3):
            with contextlib.suppress(ProviderError):
                if streams:
                    items = [item async for item in provider.stream(ASK)]
                    assert isinstance(items[-1], LLMResponse)
                else:
                    await provider.chat(ASK)
            await asyncio.wait([waiting := asyncio.create_task(said.wait())], timeout=0.05)
            waiting.cancel()
            assert await say(provider) == "the next one's"

    asyncio.run(run())


def test_a_base_url_that_is_none_is_shown_without_its_password():
    with pytest.raises(ConfigError) as refused:
        OpenAIProvider("ftp://me:hunter2@host/v1", model="m")
    assert "hunter2" not in str(refused.value)
    assert "host/v1" in str(refused.value)


async def test_what_a_server_says_cannot_drive_a_terminal():
    async with FakeOpenAI() as server:
        server.fail(400, {"error": {"message": "no \x1b]0;title\x07 \x9b31m here"}})
        provider = OpenAIProvider(server.base_url, model="m")
        with pytest.raises(ProviderError) as refused:
            await provider.chat([{"role": "user", "content": "hi"}])
        assert str(refused.value).isprintable()
        await provider.close()

"""Calls that are cancelled or closed at any instant, and many of them at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from everloop.providers.base import ProviderError
from everloop.providers.http import Connection, ConnectionBroke, Pool, origin_of
from everloop.providers.openai import OpenAIProvider, Timeouts

from .servers import ASK, MEGABYTE, Peer, Server, answer, client, failure, polite, posted, raw, say, server_tls


def stuck_listener() -> Iterator[int]:
    """A port whose queue is full: a connection to it is never established."""
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


async def test_connecting_times_out_and_can_be_cancelled(stuck):
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
    """A call that reaches this stage."""
    content = "x" * (20 * MEGABYTE if stage == "writing" else 1)
    if stage == "streaming":
        async for _ in provider.stream(ASK):
            pass
    else:
        await provider.chat([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "stage", ["handshake", "connect", "tunnelled handshake", "writing", "waiting", "reading", "streaming"]
)
async def test_a_cancelled_call_ends_its_connection_at_once(monkeypatch, stage):
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
            async with asyncio.timeout(20):
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
        async with asyncio.timeout(20):
            while len(open_now) > 1:
                await asyncio.sleep(0.01)


async def test_a_call_cancelled_as_its_answer_ends_leaves_its_connection_to_the_next(monkeypatch):
    asked: list[str] = []

    async def counted(peer: Peer) -> None:
        while True:
            _, body = await peer.request()
            asked.append(json.loads(body)["messages"][0]["content"])
            await peer.send(answer(asked[-1]))

    took = Connection.buffer_updated
    second: list[asyncio.Task[str]] = []

    def updated(self: Connection, size: int) -> None:
        if not second:  # both happen between the end of the first answer and the moment its caller learns of it
            second.append(asyncio.create_task(say(provider, "second")))
            asyncio.get_running_loop().call_soon(first.cancel)
        took(self, size)

    monkeypatch.setattr(Connection, "buffer_updated", updated)
    async with Server(counted) as server, client(server.url) as provider:
        first = asyncio.create_task(say(provider, "first"))
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await second[0] == "second"
        assert asked == ["first", "second"]
        assert server.connections == 1


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
async def test_closing_during_a_call_is_a_clear_error_and_no_hang(stage):
    reached, gone = asyncio.Event(), asyncio.Event()

    async def handler(peer: Peer) -> None:
        await _stall(peer, stage)
        reached.set()
        await peer.gone()
        gone.set()

    async with Server(handler) as server, client(server.url) as provider:
        task = asyncio.create_task(_ask(provider, stage))
        async with asyncio.timeout(20):
            await reached.wait()
            await asyncio.sleep(0.01)
            await provider.close()
            with pytest.raises(ProviderError, match="it was closed on this side"):
                await task
            await gone.wait()
        assert server.connections == 1


async def test_closing_while_a_connection_is_established_leaves_none_behind():
    async with Server(polite) as server:
        pool = Pool(origin_of(server.url), {})
        task = asyncio.create_task(posted(pool))
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(ConnectionBroke, match="closed on this side"):
            await task


async def test_an_answer_that_ends_with_the_connection_is_incomplete_if_we_close_it():
    async def half(peer: Peer) -> None:
        await peer.request()
        await peer.send(raw(body=b"half"))
        await peer.gone()

    async with Server(half) as server:
        pool = Pool(origin_of(server.url), {})
        response = await posted(pool)
        assert await response.read() == b"half"
        response.close()
        with pytest.raises(ConnectionBroke):
            await response.read()
        pool.close()


async def test_two_event_loops_at_once_each_keep_their_connection():
    other = asyncio.new_event_loop()
    thread = threading.Thread(target=other.run_forever)
    thread.start()
    try:
        async with Server(polite) as server, client(server.url) as provider:
            for number in range(5):
                assert await say(provider, str(number)) == str(number)
                there = asyncio.run_coroutine_threadsafe(say(provider, f"there {number}"), other)
                assert await asyncio.wrap_future(there) == f"there {number}"
            assert server.connections == 2
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(provider.close(), other))
            assert await say(provider, "again") == "again"
            assert server.connections == 3
    finally:
        other.call_soon_threadsafe(other.stop)
        await asyncio.to_thread(thread.join)
        other.close()


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

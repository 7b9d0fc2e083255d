"""Whatever a server sends."""

from __future__ import annotations

import asyncio
import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from everloop.providers.base import LLMResponse, ProviderError

from .servers import ASK, BODY, CHUNKED, Peer, Server, answer, chunked, client, raw, say

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
            try:
                for block in blocks if splits else [b"".join(blocks)]:
                    await peer.send(block)
                    await asyncio.sleep(0)
            finally:
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
        async with Server(handler) as server, client(server.url) as provider, asyncio.timeout(30):
            with contextlib.suppress(ProviderError):
                if streams:
                    items = [item async for item in provider.stream(ASK)]
                    assert isinstance(items[-1], LLMResponse)
                else:
                    await provider.chat(ASK)
            await said.wait()
            assert await say(provider) == "the next one's"

    asyncio.run(run())

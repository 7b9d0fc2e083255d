"""A streamed answer, read piece by piece: the one loop that every provider's stream goes through."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from ..text import one_line
from .base import Delta, LLMResponse, ProviderError
from .http import Endpoint, TimedReader
from .sse import BYTE_ORDER_MARK, Lines

LAST_WORDS = 5.0  # seconds a server has for its last events once the answer has ended


class Growing(Protocol):
    """An answer as it grows: `ended` once its last event is in, `over` also when no more of it is taken in."""

    finish_reason: str
    ended: bool

    def feed(self, payload: bytes) -> Delta | None: ...

    def over(self) -> bool: ...

    def size(self) -> int: ...

    def response(self) -> LLMResponse: ...


async def stream_answer(
    endpoint: Endpoint, body: Sequence[bytes], answer: Growing, limit: int
) -> AsyncGenerator[Delta | LLMResponse, None]:
    """Send a request and show its answer as it comes; `limit` is how many bytes a whole answer or a line may have."""
    clock = asyncio.get_running_loop().time
    started = clock()
    response = await endpoint.open(body)
    if response.content_type.endswith(("json", "html")):  # a server that does not stream, or no model server
        if delta := feed_whole(answer, await endpoint.read_whole(response, limit), endpoint.where):
            yield delta
        yield answer.response()
        return
    lines, reader = Lines(limit), TimedReader(endpoint, response, started)
    ping, last = False, -math.inf  # whether the next data is only a sign of life, and when there was other data
    patience = endpoint.timeouts.first_token
    size, grown = 0, started  # of the answer, and when it last was more: a chunk may have nothing in it
    try:
        while not answer.over():
            data = await _read(reader, answer, grown + LAST_WORDS - clock())
            for line in lines.feed(data) if data else (lines.rest(),):
                if line[:5] != b"data:":
                    if line[:1] != b":":
                        ping = line[:6] == b"event:" and line[6:].strip() == b"ping"
                    elif clock() < (started + endpoint.timeouts.total if last < 0 else last + patience):
                        reader.alive()  # such as a local server's while it reads a long prompt
                    continue
                if ping:
                    # A model may think in silence, so a sign of life counts, but not for ever.
                    if clock() < last + patience:
                        reader.alive()
                    continue
                last = clock()
                if (payload := line[5:].strip()) and (delta := _feed(answer, payload, cut=not data)):
                    yield delta
                if (now := answer.size()) > size:
                    size, grown = now, last
                reader.heard = last < grown + endpoint.timeouts.total
                if answer.over():
                    break
            if not data:
                break
    finally:
        reader.stop()
        if answer.ended:
            response.leave()
        else:
            response.close()
    if not (answer.ended or answer.finish_reason):
        raise ProviderError(f"the stream from {endpoint.where} ended in the middle of the answer", retryable=True)
    yield answer.response()


def feed_whole(answer: Growing, data: bytes, where: str) -> Delta | None:
    """Take a whole body in; what is no JSON at all is mostly the wrong address."""
    data = data.removeprefix(BYTE_ORDER_MARK)
    if data.lstrip()[:1] != b"{":
        raise ProviderError(
            f"{where} answered with something that is not JSON (is the base URL right? it mostly "
            f"ends in /v1): "
            f"{one_line(data[:300].decode('utf-8', 'replace'))}"
        )
    return answer.feed(data)


def _feed(answer: Growing, payload: bytes, cut: bool) -> Delta | None:
    """Take a line in. One that is `cut` off does not matter once the answer has ended."""
    try:
        return answer.feed(payload)
    except ProviderError:
        if cut and answer.finish_reason:
            return None
        raise


async def _read(reader: TimedReader, answer: Growing, patience: float) -> bytes:
    """The next bytes; once the answer has ended, whatever is wrong with the connection is its end, and there is only
    so much `patience` for more."""
    if not answer.finish_reason:
        return await reader.read()
    try:
        return await reader.read(patience)
    except ProviderError:
        return b""

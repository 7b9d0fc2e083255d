"""A streamed answer: what is written for a turn's events, and how often."""

from __future__ import annotations

import asyncio

from everloop import events
from everloop.server.responses import Chunks
from everloop.server.sse import AnswerStream

PING = b": ping\n\n"


def ended(stream: AnswerStream) -> None:
    run = asyncio.get_running_loop().create_future()
    run.set_result(None)
    stream.end(run)


async def test_texts_that_came_before_a_client_reads_are_written_at_once_and_in_order():
    chunks = Chunks("id", 0, "m")
    stream = AnswerStream(chunks, ping_seconds=60)
    for word in ("one ", "two ", "three"):
        stream.show(1, events.Text(word))
    ended(stream)
    assert [data async for data in stream.chunks()] == [b"".join(map(chunks.text, ("one ", "two ", "three")))]


async def test_a_client_that_does_not_read_gathers_no_pings():
    stream = AnswerStream(Chunks("id", 0, "m"), ping_seconds=0.01)
    reading = stream.chunks()
    assert await anext(reading) == PING
    await asyncio.sleep(0.2)  # twenty times as long as until the next ping
    ended(stream)
    assert b"".join([data async for data in reading]).count(PING) <= 1


async def test_no_timer_is_left_behind_a_stream():
    stream = AnswerStream(Chunks("id", 0, "m"), ping_seconds=0.01)
    reading = stream.chunks()
    assert await anext(reading) == PING
    ended(stream)
    assert stream._timer is not None
    assert stream._timer.cancelled()

"""A streamed answer: what is written for a turn's events, and how often."""

from __future__ import annotations

import asyncio

from everloop import events
from everloop.server.openai_chat import Chunks
from everloop.server.sse import AnswerStream, Write

PING = b": ping\n\n"


def ended(stream: AnswerStream) -> None:
    run = asyncio.get_running_loop().create_future()
    run.set_result(None)
    stream.end(run)


class Written:
    """A response that keeps what is written to it, once it `may_write`."""

    def __init__(self, may_write: asyncio.Event | None = None) -> None:
        self.blocks: list[bytes] = []
        self.has_begun = False
        self.first = asyncio.Event()
        self.may_write = may_write or asyncio.Event()
        if may_write is None:
            self.may_write.set()

    async def begin(self) -> Write:
        self.has_begun = True
        return self.write

    async def write(self, data: bytes) -> None:
        await self.may_write.wait()
        self.blocks.append(data)
        self.first.set()


async def test_texts_that_arrive_before_a_client_reads_are_written_at_once_and_in_order():
    chunks = Chunks("id", 0, "m")
    stream = AnswerStream(chunks, ping_seconds=60)
    for word in ("one ", "two ", "three"):
        stream.show(1, events.Text(word))
    ended(stream)
    written = Written()
    assert await stream.write_to(written.begin, b"start ") == b""
    assert written.blocks == [b"start " + b"".join(map(chunks.text, ("one ", "two ", "three")))]


async def test_a_stream_without_content_does_not_begin_its_response():
    stream, written = AnswerStream(Chunks("id", 0, "m"), ping_seconds=60), Written()
    ended(stream)
    assert await stream.write_to(written.begin, b"start ") == b"start "
    assert not written.has_begun


async def test_a_client_that_does_not_read_accumulates_no_pings():
    stream = AnswerStream(Chunks("id", 0, "m"), ping_seconds=0.01)
    written = Written(may_write=asyncio.Event())
    writing = asyncio.create_task(stream.write_to(written.begin, b""))
    await asyncio.sleep(0.2)  # twenty times as long as until the next ping
    ended(stream)
    written.may_write.set()
    await writing
    assert b"".join(written.blocks).count(PING) <= 2


async def test_a_stream_leaves_no_timer_behind():
    stream = AnswerStream(Chunks("id", 0, "m"), ping_seconds=0.01)
    written = Written()
    writing = asyncio.create_task(stream.write_to(written.begin, b""))
    await written.first.wait()
    ended(stream)
    await writing
    assert written.blocks[0] == PING
    assert stream._timer is not None
    assert stream._timer.cancelled()

"""A consumer of the outbox that was frozen for longer than its lease sends nothing that another one has taken over."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from everloop.bus import InboundMessage, OutboundMessage
from everloop.runtime.durable_bus import DurableBus
from everloop.store.base import Store
from everloop.store.peers import SENDING
from everloop.store.postgres.store import PostgresStore
from tests.support.commands import until

LEASE = 1.0
# Sends what it gets, and freezes after the first of the messages that it has taken together.
CONSUMER = """
import asyncio, os, signal, sys
from everloop.runtime.durable_bus import DurableBus
from everloop.store.postgres.store import PostgresStore

async def main(dsn, lease):
    store = PostgresStore(dsn, lease_seconds=float(lease))
    bus = DurableBus(store)
    content = ""
    while content != "last":
        message = await bus.consume_outbound()
        content = message.content
        print(content, message.repeat, flush=True)
        await bus.sent(message)
        if content == "one":
            os.kill(os.getpid(), signal.SIGSTOP)
    await bus.close()
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def say(store: Store, *texts: str) -> None:
    """Put messages into the outbox."""
    messages = [OutboundMessage("test", "one", text) for text in texts]
    await store.answer(InboundMessage("test", "user", "one", "/help"), messages)
    await store.wake(SENDING)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@asynccontextmanager
async def frozen_consumer(dsn: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A consumer that has sent the first of three messages and is frozen."""
    command = [sys.executable, "-c", CONSUMER, dsn, str(LEASE)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"one False\n"
        await until(lambda: is_stopped(process.pid))
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def sent_after_its_thaw(process: asyncio.subprocess.Process, store: Store) -> list[str]:
    os.kill(process.pid, signal.SIGCONT)
    await say(store, "last")
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    return out.decode().splitlines()


async def test_a_message_that_another_consumer_has_taken_over_is_not_sent_without_a_mark(database: str):
    store = PostgresStore(database, lease_seconds=LEASE)
    bus = DurableBus(store)
    try:
        await say(store, "one", "two", "three")
        async with frozen_consumer(database) as frozen:
            async with asyncio.timeout(60):
                taken_over = [await bus.consume_outbound() for _ in range(2)]
            assert [(one.content, one.repeat) for one in taken_over] == [("two", True), ("three", True)]
            for one in taken_over:
                await bus.sent(one)
            await bus.close()
            assert await sent_after_its_thaw(frozen, store) == ["last False"]
    finally:
        await store.close()


async def test_a_message_that_no_other_consumer_has_taken_over_is_sent(database: str):
    store = PostgresStore(database, lease_seconds=LEASE)
    try:
        await say(store, "one", "two", "three")
        async with frozen_consumer(database) as frozen:
            async with asyncio.timeout(60):
                while await store.workers():  # its lease has not expired
                    await asyncio.sleep(0.05)
            assert await sent_after_its_thaw(frozen, store) == ["two False", "three False", "last False"]
    finally:
        await store.close()

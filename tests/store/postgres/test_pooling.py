"""Poolers: one that gives each transaction another connection is refused, every other is accepted."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import tempfile
from pathlib import Path

import psycopg
import pytest

from everloop.bus import InboundMessage
from everloop.errors import StoreError
from everloop.store.peers import new_worker, retire
from everloop.store.postgres.store import PostgresStore
from tests.support.commands import everloop

from .pooler import pooling
from .proxy import SOCKET
from .server import Server


def through(dsn: str, folder: str) -> str:
    return dsn.partition("?host=")[0] + f"?host={folder}"


async def test_a_pooler_in_transaction_mode_is_refused_in_one_line(postgres: Server, database: str):
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        async with pooling(postgres.folder, Path(folder), "transaction"):
            store = PostgresStore(through(database, folder))
            with pytest.raises(StoreError, match="pooler") as told:
                await store.workers()
            assert "\n" not in str(told.value)
            await store.close()
            done = await everloop("token", "list", EVERLOOP_STORE=through(database, folder))
            assert done.status == 2
            assert len(done.err.splitlines()) == 1


async def test_a_pooler_in_session_mode_is_as_good_as_the_server(postgres: Server, database: str):
    worker = new_worker()
    with tempfile.TemporaryDirectory() as folder:
        async with pooling(postgres.folder, Path(folder), "session"):
            store = PostgresStore(through(database, folder))
            woken = asyncio.Event()
            place = store.peer(worker, lambda _: woken.set())
            await place.join()
            await store.accept(InboundMessage("test", "user", "1", "hi").addressed())
            await store.wake()
            async with asyncio.timeout(30):
                await woken.wait()
            assert await store.ready(worker) == [("me", "test:1")]
            await place.leave()
            await store.close()
    retire(worker)


async def test_the_pooler_of_these_tests_does_lend_each_transaction_another_connection(postgres: Server, database: str):
    """Otherwise the tests above would prove nothing."""

    def processes(address: str) -> tuple[int, int]:
        with psycopg.connect(address, autocommit=True) as one, psycopg.connect(address, autocommit=True) as two:
            with one.transaction():
                held = one.execute("SELECT pg_backend_pid()").fetchone()
                two.execute("SELECT 1")
            with two.transaction():
                then = two.execute("SELECT pg_backend_pid()").fetchone()
                assert one.execute("SELECT 1").fetchone() == (1,)
            assert held is not None
            assert then is not None
            return held[0], then[0]

    with tempfile.TemporaryDirectory() as folder:
        async with pooling(postgres.folder, Path(folder), "transaction"):
            held, then = await asyncio.to_thread(processes, through(database, folder))
            assert held == then
    held, then = await asyncio.to_thread(processes, database)
    assert held != then


async def test_the_pooler_leaves_nothing_open_whenever_its_last_clients_came(recwarn: pytest.WarningsRecorder):
    """They are closed while they are accepted, greeted, or connected to the server."""
    with tempfile.TemporaryDirectory() as server:
        listening = await asyncio.start_unix_server(lambda reader, writer: writer.close(), Path(server) / SOCKET)
        for rounds in range(10):
            with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as client:
                async with pooling(Path(server), Path(folder), "session"):
                    client.connect(str(Path(folder) / SOCKET))
                    client.send(struct.pack("!ii", 8, 196608))
                    for _ in range(rounds):
                        await asyncio.sleep(0)
                left = [task.get_coro() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
                assert [one for one in left if "pooler" in repr(one) or "accept" in repr(one)] == [], rounds
        listening.close()
    gc.collect()
    assert [str(one.message) for one in recwarn] == []


async def test_the_pooler_closes_connections_that_the_server_has_not_answered_yet():
    ended, asked = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        asked.set()
        await reader.read()
        ended.set()
        writer.close()

    with tempfile.TemporaryDirectory() as server, tempfile.TemporaryDirectory() as folder:
        listening = await asyncio.start_unix_server(silent, Path(server) / SOCKET)
        async with listening, asyncio.timeout(30):
            async with pooling(Path(server), Path(folder), "session"):
                _, writer = await asyncio.open_unix_connection(Path(folder) / SOCKET)
                writer.write(struct.pack("!ii", 8, 196608))
                await asked.wait()
            await ended.wait()
            writer.close()
            await writer.wait_closed()

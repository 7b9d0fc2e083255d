"""Leases that expire: which worker is alive, which takes over, and that a stale worker can do nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from everloop.bus import InboundMessage, OutboundMessage
from everloop.errors import StaleLease, StoreError
from everloop.log import CallEnded, ModelAnswered, TurnEnded
from everloop.store.base import Busy
from everloop.store.peers import new_worker, process_of, retire
from everloop.store.postgres.store import PostgresStore
from everloop.testing import call
from everloop.testing.openai_server import FakeOpenAI
from tests.support.commands import environment, start, until

from .proxy import SOCKET, proxied
from .server import name_of

ELSEWHERE = "anothermachine.1.77.88.1"  # a worker of which only the row is known here
LEASE = 3.0  # seconds; a busy machine may let a worker renew it a second late


@asynccontextmanager
async def opened(dsn: str, **options: Any) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(dsn, **{"lease_seconds": LEASE, **options})
    try:
        yield store
    finally:
        await store.close()


def said(text: str = "hi", chat: str = "1") -> InboundMessage:
    return InboundMessage("test", "user", chat, text).addressed()


# ---------------------------------------------------------------------------------------------- in one process


async def test_a_heartbeat_that_ends_before_it_is_woken_is_no_error(database, monkeypatch):
    """It sees at its next beat that it is to end, before its caller has come to waking it."""
    write = os.write

    def late(*given: Any) -> int:
        time.sleep(0.2)
        return write(*given)

    async with opened(database, lease_seconds=0.05) as store:
        store.heartbeat.start()
        await asyncio.sleep(0.1)
        monkeypatch.setattr(os, "write", late)
        await store.heartbeat.close()


async def test_a_lease_lasts_as_long_as_its_worker_is_there(database, worker):
    other = new_worker()
    async with opened(database) as store, opened(database) as there:
        claim = await store.begin("me", "test:1", worker, said())
        assert claim is not None
        for _ in range(4):
            await asyncio.sleep(LEASE / 2)
            assert await there.ready(other) == []
            with pytest.raises(Busy) as busy:
                await there.begin("me", "test:1", other)
            assert busy.value.worker == worker
        await store.append(claim, [ModelAnswered("still mine")])
    retire(other)


async def test_a_worker_of_another_machine_is_dead_when_it_has_not_renewed_and_its_writes_are_refused(database, worker):
    async with opened(database) as store, opened(database) as there:
        heard = asyncio.Event()
        company = store.peer(worker, lambda _: heard.set())
        await company.join()
        claim = await there.begin("me", "test:1", ELSEWHERE, said())
        assert claim is not None
        assert await store.is_alive(ELSEWHERE)
        with pytest.raises(Busy):
            await store.begin("me", "test:1", worker)
        async with asyncio.timeout(30):
            alive = True
            while alive:  # it gets other notices too; and there was no polling
                await heard.wait()
                heard.clear()
                alive = await store.is_alive(ELSEWHERE)
        assert await store.ready(worker) == [("me", "test:1")]
        taken = await store.begin("me", "test:1", worker)
        assert taken is not None
        assert taken.resumed
        with pytest.raises(StaleLease):
            await there.append(claim, [ModelAnswered("late")])
        with pytest.raises(StaleLease):
            await there.finish(claim, [TurnEnded("answer", "late")])
        await there.release(claim)
        await store.append(taken, [ModelAnswered("mine")])
        await company.leave()


async def test_a_wake_up_reaches_the_workers_of_every_process_of_the_store_and_of_no_other(postgres, database, worker):
    with postgres.database() as elsewhere:
        async with opened(database) as here, opened(database) as there, opened(elsewhere) as other:
            heard, unheard, second = asyncio.Event(), asyncio.Event(), new_worker()
            ours, theirs = (
                here.peer(worker, lambda _: heard.set()),
                other.peer(second, lambda _: unheard.set()),
            )
            await ours.join()
            await theirs.join()
            await until(lambda: heard.is_set() and unheard.is_set())  # that they have joined
            await asyncio.sleep(0.3)
            for _ in range(3):
                heard.clear()
                unheard.clear()
                await there.wake()
                async with asyncio.timeout(20):
                    await heard.wait()
            await asyncio.sleep(0.1)
            assert not unheard.is_set()
            await ours.leave()
            await theirs.leave()
            assert await here.workers() == []
            heard.clear()
            await there.wake()
            await asyncio.sleep(0.2)
            assert not heard.is_set()
            retire(second)


async def test_a_worker_that_got_no_notices_for_a_while_looks_for_itself(postgres, database, worker):
    name = name_of(database)
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND query NOT LIKE '%%pid%%'"
    async with opened(database, lease_seconds=60) as store:
        heard = asyncio.Event()
        company = store.peer(worker, lambda _: heard.set())
        await company.join()
        await asyncio.sleep(0.5)
        heard.clear()
        assert postgres.sql(kill, name)
        async with asyncio.timeout(30):
            await heard.wait()
        await company.leave()


async def test_after_an_outage_no_worker_is_dead_until_it_had_time_to_renew(postgres, database, worker):
    """Recognised by the server's own start: an older row says nothing."""
    async with opened(database, lease_seconds=1e6) as store:
        assert await store.begin("me", "test:1", ELSEWHERE, said()) is not None
        name = name_of(database)
        postgres.sql("UPDATE worker SET at = 1.0", database=name)
        assert await store.is_alive(ELSEWHERE)
    async with opened(database, lease_seconds=0.01) as store:
        assert not await store.is_alive(ELSEWHERE)


# ---------------------------------------------------------------------------------------------- at the same moment


@asynccontextmanager
async def under_way(database: str, *statements: str) -> AsyncIterator[None]:
    """A transaction of another worker, open until the block ends, and then committed."""
    with psycopg.connect(database) as connection:
        for statement in statements:
            connection.execute(statement)
        yield
        connection.commit()


async def test_a_write_that_meets_a_takeover_in_progress_waits_for_it_and_is_refused(database, worker):
    async with opened(database) as store:
        claim = await store.begin("me", "test:1", worker, said())
        assert claim is not None
        async with under_way(database, "UPDATE session SET fence = fence + 1"):
            writes: list[Any] = [store.append(claim, [ModelAnswered("late")])]
            writes.append(store.post(claim, OutboundMessage("test", "1", "late"), "key", None))
            writes.append(store.finish(claim, [TurnEnded("answer", "late")]))
            await asyncio.sleep(0.3)
            assert not any(write.done() for write in writes)
        for write in writes:
            with pytest.raises(StaleLease):
                await write
        assert len(await store.read_log(claim.session)) == 1


async def test_of_two_workers_that_begin_at_once_one_finds_the_session_busy(database, worker):
    """A worker with a message waits until it is known whether it begins the turn; one that looks for work does not."""
    async with opened(database, lease_seconds=60) as store:
        await store.accept(said())
        taken = f"UPDATE session SET fence = fence + 1, worker = '{ELSEWHERE}'"
        known = f"INSERT INTO worker (id, at) VALUES ('{ELSEWHERE}', extract(epoch FROM clock_timestamp()))"
        async with under_way(database, taken, known):
            with pytest.raises(Busy) as busy:
                await store.begin("me", "test:1", worker)
            assert busy.value.worker == ""
            begin = asyncio.create_task(store.begin("me", "test:1", worker, said("one more")))
            await asyncio.sleep(0.3)
            assert not begin.done()
            await store.accept(said("more"))  # which does not wait
        with pytest.raises(Busy) as busy:
            await begin
        assert (busy.value.worker, busy.value.accepted is not None) == (ELSEWHERE, True)


async def test_two_senders_at_once_never_take_the_same_message(database, worker):
    other = new_worker()
    async with opened(database) as store, opened(database) as there:
        claim = await store.begin("me", "test:1", worker, said())
        assert claim is not None
        outgoing = [OutboundMessage("test", "1", str(n)) for n in range(200)]
        await store.finish(claim, [TurnEnded("answer", "x")], outgoing)
        takes = [(store, worker), (there, other)] * 20
        taken = await asyncio.gather(*(one.take_outgoing(who, 7) for one, who in takes))
        ids = [row.id for rows in taken for row in rows]
        assert len(ids) == len(set(ids)) == 200
    retire(other)


# ---------------------------------------------------------------------------------------------- real workers


@asynccontextmanager
async def at_work(database: str, server: FakeOpenAI, lease: float = 2.0) -> AsyncIterator[Any]:
    """`everloop worker` as a process."""
    home = Path(os.environ["EVERLOOP_HOME"])
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(f"[worker]\nlease_seconds = {lease}\n")
    process = await start("worker", env=environment(server, EVERLOOP_STORE=database))
    try:
        async with asyncio.timeout(40):
            line = (await process.stderr.readline()).decode()
        assert "is ready" in line
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def answered(store: PostgresStore, worker: str) -> str:
    async with asyncio.timeout(30):
        while not (rows := await store.take_outgoing(worker)):
            await asyncio.sleep(0.05)
    assert len(rows) == 1
    await store.sent([rows[0].id])
    return rows[0].message.content


async def test_a_worker_that_was_frozen_past_its_lease_writes_nothing(database, worker):
    async with FakeOpenAI() as server, opened(database) as store, at_work(database, server) as frozen:
        server.reply("of the frozen one", delay=4)
        server.reply("of the other")
        await store.accept(said())
        await store.wake()
        await until(lambda: len(server.requests) == 1)
        frozen.send_signal(signal.SIGSTOP)
        async with at_work(database, server) as other:
            assert await answered(store, worker) == "of the other"
            await until(lambda: time.time() - server.requests[0].time > 4.2)  # its model has answered
            frozen.send_signal(signal.SIGCONT)
            async with asyncio.timeout(30):
                line = (await frozen.stderr.readline()).decode()  # it reports that it was taken over
            assert "test:1" in line
            info = await store.session("me", "test:1")
            assert info is not None
            log = [one.entry for one in await store.read_log(info.id)]
            assert [one.content for one in log if isinstance(one, ModelAnswered)] == ["of the other"]
            assert [one.text for one in log if isinstance(one, TurnEnded)] == ["of the other"]
            assert await store.take_outgoing(worker) == []
            other.kill()
            await other.wait()
            server.reply("of the one that was frozen")  # which continues
            await store.accept(said("more", "2"))
            await store.wake()
            assert await answered(store, worker) == "of the one that was frozen"


async def test_a_worker_killed_in_the_middle_of_a_turn_is_succeeded_by_another_at_once(database, worker):
    async with (
        FakeOpenAI() as server,
        opened(database) as store,
        at_work(database, server, 60) as one,
        at_work(database, server, 60) as two,
    ):
        server.calls(call("list_dir", path="."))
        server.reply("never heard", delay=30)
        server.reply("of whoever is left")
        await store.accept(said())
        await store.wake()
        await until(lambda: len(server.requests) == 2)
        info = await store.session("me", "test:1")
        assert info is not None
        assert info.worker is not None
        holder = next(process for process in (one, two) if process.pid == process_of(info.worker))
        holder.kill()
        async with asyncio.timeout(30):  # without waiting for its lease of a minute: its death is detected
            assert await answered(store, worker) == "of whoever is left"
        log = [one.entry for one in await store.read_log(info.id)]
        assert sum(isinstance(one, CallEnded) for one in log) == 1
        assert sum(isinstance(one, ModelAnswered) for one in log) == 2
        assert len(server.requests) == 3


async def test_a_wake_up_that_could_not_be_sent_is_sent_when_the_server_is_back(
    database: str, tmp_path: Path, worker: str
):
    heard = asyncio.Event()
    async with proxied(database, tmp_path) as (proxy, through):
        cut_off, listening = PostgresStore(through, lease_seconds=1.5, patience=0.5), PostgresStore(database)
        try:
            await cut_off.join(worker, "work")
            listening.heartbeat.listen(heard, asyncio.get_running_loop(), lambda _: heard.set())
            await asyncio.sleep(0.5)
            (tmp_path / SOCKET).rename(tmp_path / "away")
            proxy.cut_all()
            with pytest.raises(StoreError):
                await cut_off.wake()
            heard.clear()
            (tmp_path / "away").rename(tmp_path / SOCKET)
            async with asyncio.timeout(30):
                await heard.wait()
        finally:
            await cut_off.close()
            await listening.close()

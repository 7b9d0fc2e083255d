"""Connections that break and servers that go away: nothing is lost, and nothing is done twice."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from everloop.bus import InboundMessage, OutboundMessage
from everloop.errors import StoreError
from everloop.log import ModelAnswered, TurnEnded
from everloop.store.base import Spent
from everloop.store.peers import new_worker
from everloop.store.postgres.connections import UNMARKED, ThreadState
from everloop.store.postgres.store import PostgresStore

from .proxy import proxied
from .server import Server, name_of, own_server


@asynccontextmanager
async def opened(dsn: str, **options: Any) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(dsn, **options)
    try:
        yield store
    finally:
        await store.close()


def said(text: str = "hi", **options: Any) -> InboundMessage:
    return InboundMessage("test", "user", "1", text, **options).addressed()


ANSWER = OutboundMessage("test", "1", "hello")


async def whole_turn(store: PostgresStore, worker: str) -> None:
    """A turn with everything that would show if it were done twice."""
    claim = await store.begin("me", "test:1", worker, said())
    assert claim is not None
    await store.append(claim, [ModelAnswered("one")])
    claim.spent.append(Spent("day", 3, 0.5))
    await store.append(claim, [ModelAnswered("two")])
    assert await store.post(claim, ANSWER, "key", None) is not None
    follows = InboundMessage("test", "user", "2", "follows").addressed()
    finished = await store.finish(claim, [TurnEnded("answer", "x")], [ANSWER], incoming=[follows])
    assert len(finished.outbox) == 1
    assert not finished.more


def traces(server: Server, dsn: str) -> dict[str, Any]:
    """Return what the turn has left in each table."""
    database = name_of(dsn)
    tables = ("session", "entry", "inbox", "outbox")
    counts = {name: server.sql(f"SELECT count(*) FROM {name}", database=database)[0][0] for name in tables}
    counts["spent"] = server.sql("SELECT tokens, cost FROM spent", database=database)
    return counts


ONCE = {"session": 2, "entry": 4, "inbox": 2, "outbox": 2, "spent": [(3, 0.5)]}


@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("write", range(5))
async def test_a_commit_whose_response_was_lost_is_looked_up_and_not_repeated(postgres, database, worker, cut, write):
    with tempfile.TemporaryDirectory() as folder:
        async with proxied(database, Path(folder)) as (proxy, dsn), opened(dsn) as store:
            await store.workers()  # the tables exist
            number = 0

            def cut_one(when: str) -> None:
                nonlocal number
                if when == "before" and proxy.cuts == 0:
                    if number == write:
                        proxy.cut = cut
                    number += 1

            store.connections.commit_hooks.add(cut_one)
            await whole_turn(store, worker)
            assert proxy.cuts == 1
            assert [row.message.content for row in await store.waiting("me", "test:2")] == ["follows"]
    assert traces(postgres, database) == ONCE


@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("write", range(5))
async def test_a_step_whose_response_was_lost_is_looked_up_and_not_repeated(postgres, database, worker, cut, write):
    """Each of these is one statement that commits by itself."""
    with tempfile.TemporaryDirectory() as folder:
        async with proxied(database, Path(folder)) as (proxy, dsn), opened(dsn) as store:
            first = await store.begin("me", "test:1", worker, said())
            assert first is not None
            await store.finish(first, [TurnEnded("answer", "x")])  # the worker and its session are known
            number = 0

            def cut_one(when: str) -> None:
                nonlocal number
                if when == "before" and proxy.cuts == 0:
                    if number == write:
                        proxy.cut = cut
                    number += 1

            store.connections.commit_hooks.add(cut_one)
            row = await store.accept(said("two"))
            claim = await store.begin("me", "test:1", worker)
            assert claim is not None
            assert (claim.inbox, claim.fence, claim.resumed) == ([row.id], 2, False)
            claim.spent.append(Spent("day", 3, 0.5))
            await store.append(claim, [ModelAnswered("one")], flush=False)
            finished = await store.finish(claim, [TurnEnded("answer", "y")], [ANSWER])
            taken = await store.take_outgoing(worker)
            assert [one.id for one in taken] == finished.outbox
            assert [(one.message.content, one.message.repeat) for one in taken] == [("hello", False)]
            await store.sent(finished.outbox)
            assert (proxy.cuts, number) == (1, write + 1)
            assert await store.take_outgoing(new_worker()) == []
    once = {"session": 1, "entry": 5, "inbox": 2, "outbox": 1, "spent": [(3, 0.5)]}
    assert traces(postgres, database) == once


async def test_a_step_that_reaches_the_server_after_its_outcome_was_looked_up_is_refused(postgres, database, worker):
    """Its response was lost, and it was still on its way: it must not be done after it was done again."""
    async with opened(database) as store:
        await store.accept(said())
        row = await store.accept(said("two"))
        name = name_of(database)
        lane, number = postgres.sql("SELECT id, number FROM lane ORDER BY number DESC LIMIT 1", database=name)[0]
        state = ThreadState()
        state.name, state.number, state.has_row = lane, number + 1, True
        assert await asyncio.to_thread(store.connections._outcome, state, time.monotonic() + 5) is None
        late = "SELECT everloop_accept(%s, %s, 'me', 'test:1', NULL, 'message', '{}')"
        with pytest.raises(psycopg.errors.Error) as refused:
            postgres.sql(late, lane, number + 1, database=name)
        assert refused.value.sqlstate == UNMARKED
        assert state.connection is not None
        state.connection.close()
        assert [one.id for one in await store.waiting("me", "test:1")][-1] == row.id


async def test_killing_a_backend_in_the_middle_of_a_write_costs_nothing(postgres, database, worker):
    name = name_of(database)
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()"
    async with opened(database) as store:
        killed = 0

        def kill_all(when: str) -> None:
            nonlocal killed
            if when == "before" and killed < 5:
                killed += len(postgres.sql(kill, name))

        await store.workers()
        store.connections.commit_hooks.add(kill_all)
        await whole_turn(store, worker)
        assert killed >= 5
    assert traces(postgres, database) == ONCE


async def test_a_server_restarted_under_load_loses_nothing_and_is_found_again(worker):
    with own_server() as server, server.database() as dsn:
        async with opened(dsn) as store:
            stop, told = asyncio.Event(), 0

            async def chat(name: str) -> int:
                turns = 0
                while not stop.is_set():
                    text = f"{name} {turns}"
                    message = InboundMessage("test", "user", name, text, id=text).addressed()
                    claim = await store.begin("me", f"test:{name}", worker, message)
                    assert claim is not None
                    await store.append(claim, [ModelAnswered(f"so {text}")])
                    await store.finish(claim, [TurnEnded("answer", text)], [OutboundMessage("test", name, text)])
                    turns += 1
                return turns

            chats = [asyncio.create_task(chat(f"c{n}")) for n in range(6)]
            for mode in ("immediate", "fast", "immediate", "immediate"):
                await asyncio.sleep(0.5)
                await asyncio.to_thread(server.restart, mode)
            await asyncio.sleep(0.5)
            stop.set()
            for n, turns in enumerate(await asyncio.gather(*chats)):
                info = await store.session("me", f"test:c{n}")
                assert info is not None
                log = await store.read_log(info.id)
                assert [one.seq for one in log] == list(range(1, 3 * turns + 1))
                texts = [one.entry.text for one in log if isinstance(one.entry, TurnEnded)]
                assert texts == [f"c{n} {turn}" for turn in range(turns)]
                told += turns
            assert told > 6
            sent = [row.message.content for row in await store.take_outgoing(new_worker(), 100_000)]
            assert len(sent) == len(set(sent)) == told


async def test_a_server_that_stays_away_is_one_clear_error_and_work_resumes_when_it_is_back(worker):
    with own_server() as server, server.database() as dsn:
        async with opened(dsn, patience=1.0) as store:
            claim = await store.begin("me", "test:1", worker, said())
            assert claim is not None
            await asyncio.to_thread(server.stop)
            for _ in range(2):
                with pytest.raises(StoreError) as raised:
                    await store.append(claim, [ModelAnswered("lost")])
                assert len(str(raised.value).splitlines()) == 1
                claim.next_seq -= 1
                with pytest.raises(StoreError):
                    await store.sessions("me")
            await asyncio.to_thread(server.start)
            await store.append(claim, [ModelAnswered("kept")])
            assert len(await store.read_log(claim.session)) == 2


async def test_a_refused_write_does_not_fail_its_neighbours(database, worker):
    async with opened(database) as store:
        claim = await store.begin("me", "test:1", worker, said())
        assert claim is not None
        held = await store.begin("me", "test:1", worker)  # the first claim is stale from here on
        assert held is not None
        writes = []
        for n in range(20):
            late = claim if n % 2 else held
            writes.append(store.append(late, [ModelAnswered(f"{n}")]))
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert [isinstance(result, StoreError) for result in results] == [bool(n % 2) for n in range(20)]
        texts = [
            one.entry.content for one in await store.read_log(held.session) if isinstance(one.entry, ModelAnswered)
        ]
        assert texts == [str(n) for n in range(0, 20, 2)]


async def test_nothing_is_left_of_a_write_that_is_refused_among_others(database, worker):
    async with opened(database) as store:
        claim = await store.begin("me", "test:1", worker, said())
        assert claim is not None
        held = await store.begin("me", "test:1", worker)
        assert held is not None
        good: list[Any] = [store.append(held, [ModelAnswered(str(n))]) for n in range(5)]
        late = store.finish(claim, [TurnEnded("answer", "late")], [ANSWER])
        good += [store.append(held, [ModelAnswered(str(n))]) for n in range(5)]
        with pytest.raises(StoreError):
            await late
        await asyncio.gather(*good)
        assert await store.take_outgoing(worker) == []
        assert not (await store.incoming(held.inbox[0])).done
        assert len(await store.read_log(held.session)) == 11


async def test_data_that_postgresql_cannot_store_is_one_clear_error_and_touches_nothing_else(database, worker):
    async with opened(database) as store:
        good = store.accept(said("fine"))
        with pytest.raises(StoreError) as raised:
            await store.accept(said("x", id="a\0b"))
        assert len(str(raised.value).splitlines()) == 1
        await good
        await store.accept(said("nul \0 in a text is fine"))
        assert [row.message.content for row in await store.waiting("me", "test:1")] == [
            "fine",
            "nul \0 in a text is fine",
        ]


async def test_a_write_cannot_be_cancelled_halfway(database, worker):
    async with opened(database) as store:
        claim = await store.begin("me", "test:1", worker, said())
        assert claim is not None
        write = asyncio.ensure_future(store.append(claim, [ModelAnswered("kept")]))
        assert not write.cancel()
        await write
        assert len(await store.read_log(claim.session)) == 2


async def test_many_concurrent_writes_are_few_transactions(database, worker):
    async with opened(database) as store:
        claim = await store.begin("me", "test:1", worker, said())
        assert claim is not None
        before, began = store.connections.commits, time.monotonic()
        await asyncio.gather(*(store.append(claim, [ModelAnswered(str(n))]) for n in range(200)))
        assert store.connections.commits - before < 20
        assert time.monotonic() - began < 20


async def test_connections_that_the_server_ends_at_any_point_fail_no_call(postgres, database):
    """Whatever was in progress is done on another connection."""
    name = name_of(database)
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND application_name = 'everloop'"
    over, done = False, 0
    async with opened(database) as store:
        await store.sessions("me")

        async def use(chat: int) -> None:
            nonlocal done
            while not over:
                row = await store.accept(InboundMessage("test", "user", str(chat), "x" * 3000).addressed())
                await store.look("")
                await store.sent([row.id])
                done += 1

        users = [asyncio.create_task(use(chat)) for chat in range(16)]
        for number in range(80):
            # Ten failures are final: on a busy machine nothing would be done between two of these.
            enough = done + len(users)
            while done < enough and not any(user.done() for user in users):
                await asyncio.sleep(0.002)
            await asyncio.sleep(number % 5 * 0.005)
            await asyncio.to_thread(postgres.sql, end, name)
        over = True
        await asyncio.gather(*users)
    assert done

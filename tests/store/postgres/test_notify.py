"""Which workers a notice wakes: a message costs the same, however many workers there are."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from everloop.bus import InboundMessage
from everloop.errors import StoreError
from everloop.store.peers import (
    ANY,
    ENDED,
    SENDING,
    TIMERS,
    WORK,
    Notice,
    decode_notice,
    encode_notice,
    new_worker,
    retire,
)
from everloop.store.postgres import heartbeat, notify
from everloop.store.postgres.store import PostgresStore

from .proxy import SOCKET, proxied
from .wrapped import Wrapped

ELSEWHERE = "anothermachine.1.77.88.1"  # a worker of which only the row is known here


class Worker:
    """A process among the others, and the notices it has received."""

    def __init__(self, store: PostgresStore, takes: bool) -> None:
        self.name = new_worker()
        self.heard: list[Notice] = []
        self.place = store.peer(self.name, self.heard.append, takes)

    @property
    def looks_around(self) -> bool:
        """As it does when another one joins, followed by its notice."""
        place: Any = self.place
        return bool(place._tasks)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker looks for work that another one was told of: the test ends sooner, however busy the machine is."""
    monkeypatch.setattr(notify, "LATE_SECONDS", 60.0)


@pytest.fixture
async def store(database: str) -> AsyncIterator[PostgresStore]:
    made = PostgresStore(database, lease_seconds=30)
    yield made
    await made.close()


@contextlib.asynccontextmanager
async def company(store: PostgresStore, *takes: bool) -> AsyncIterator[list[Worker]]:
    workers = [Worker(store, one) for one in takes]
    try:
        for worker in workers:
            await worker.place.join()
        await quiet(store, workers)
        yield workers
    finally:
        for worker in workers:
            await worker.place.leave()
            retire(worker.name)


async def quiet(store: PostgresStore, workers: list[Worker]) -> None:
    """Wait until the notices of their joining have arrived: earlier notices arrive before later ones."""
    for number in range(20):  # the first may be sent before they listen
        word = Notice(ENDED, "", (number,))
        await store.wake(ENDED, [number])
        with contextlib.suppress(TimeoutError):
            await until(lambda word=word: all(word in worker.heard for worker in workers), 1.0)
            break
    else:
        raise AssertionError("they do not hear each other")
    await asyncio.sleep(0.05)
    await until(lambda: not any(worker.looks_around for worker in workers))
    for worker in workers:
        worker.heard.clear()


def said(chat: str = "1") -> InboundMessage:
    return InboundMessage("test", "user", chat, "hi").addressed()


async def until(condition: object, seconds: float = 20.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_message_wakes_one_of_the_workers_and_each_gets_some(store, patient):
    async with company(store, True, True, True, False) as workers:
        sessions = [(await store.accept(said(str(chat)))).session for chat in range(60)]
        for session in sessions:
            await store.wake(WORK, [session])
        await until(lambda: sum(len(worker.heard) for worker in workers) >= 60)
        assert sorted(id for worker in workers for news in worker.heard for id in news.ids) == sorted(sessions)
        assert [len(worker.heard) > 5 for worker in workers] == [True, True, True, False]


async def test_many_messages_at_once_are_one_notice_per_worker(store, patient):
    async with company(store, True, True) as workers:
        sessions = [(await store.accept(said(str(chat)))).session for chat in range(700)]
        await asyncio.gather(*(store.wake(WORK, [session]) for session in sessions))
        await until(lambda: sum(len(news.ids) for worker in workers for news in worker.heard) == 700)
        assert sum(len(worker.heard) for worker in workers) < 20


async def test_a_message_for_a_held_session_wakes_its_holder_even_one_that_takes_no_other_work(store):
    async with company(store, True, True, True, False) as workers:
        for number in range(8):
            holder = workers[number % 4]
            claim = await store.begin("me", f"test:{number}", holder.name, said(str(number)))
            assert claim is not None
            await store.wake(WORK, [claim.session])
            await until(lambda holder=holder: holder.heard)
            assert [worker.heard for worker in workers if worker is not holder] == [[], [], []]
            assert holder.heard == [Notice(WORK, holder.name, (claim.session,))]
            holder.heard.clear()


async def test_work_that_the_notified_worker_does_not_take_is_announced_to_others_later(store):
    async with company(store, True, True, True, False) as workers:
        row = await store.accept(said())
        began = time.monotonic()
        await store.wake(WORK, [row.session])
        await until(lambda: sum(bool(worker.heard) for worker in workers) == 3)
        assert time.monotonic() - began > 0.9
        assert sorted(worker.heard[0] for worker in workers[:3])[:2] == [Notice(WORK), Notice(WORK)]
        assert workers[3].heard == []


async def test_a_worker_that_rests_has_left_or_died_gets_no_notice_of_work(store, patient):
    async with company(store, True, True, True) as (one, two, three):
        await three.place.drain()
        await store.leave(two.name)
        for chat in range(12):
            await store.wake(WORK, [(await store.accept(said(str(chat)))).session])
        await until(lambda: len(one.heard) == 12)
        assert (two.heard, three.heard) == ([], [])
        await store.wake(ENDED, [1])
        await until(lambda: three.heard)


async def test_a_notice_that_could_not_be_sent_delays_no_other(database, tmp_path):
    """As when the server accepts no more connections for a while."""
    async with proxied(database, tmp_path) as (_, address):
        made = PostgresStore(address, lease_seconds=30, patience=0.2)
        row = await made.accept(said())
        await made.connections.close()  # the next one needs a new connection
        (tmp_path / SOCKET).rename(tmp_path / "away")
        for _ in range(2):
            with pytest.raises(StoreError):
                await made.wake(WORK, [row.session])
        (tmp_path / "away").rename(tmp_path / SOCKET)
        async with company(made, True) as (one,):
            await made.wake(WORK, [row.session])
            await until(lambda: Notice(WORK, one.name, (row.session,)) in one.heard)
        await made.close()


async def test_a_dead_worker_that_was_removed_is_announced_even_if_its_remover_fails(database, store, monkeypatch):
    """The connection breaks after the removal, before it is announced."""
    monkeypatch.setattr(heartbeat, "RENEWALS", 100)  # workers that live do so for one with a shorter lease too
    made = PostgresStore(database, lease_seconds=3)
    connect = made.heartbeat._connect
    loop, broken = asyncio.get_running_loop(), asyncio.Event()

    class Breaking(Wrapped):
        def execute(self, query: str, values: Any = ()) -> Any:
            done = self.real.execute(query, values)
            if query == heartbeat.REMOVE_DEAD and done.rowcount and not broken.is_set():
                loop.call_soon_threadsafe(broken.set)
                self.real.close()
                raise psycopg.OperationalError("the connection is lost")
            return done

    made.heartbeat._connect = lambda: Breaking(connect())  # type: ignore[assignment,return-value]
    async with company(store, True) as (one,):
        await store.join(ELSEWHERE, "work")
        made.heartbeat.start()
        await asyncio.wait_for(broken.wait(), 20)
        await until(lambda: Notice() in one.heard)
    await made.close()


async def test_all_get_notices_that_concern_all(store):
    async with company(store, True, False) as workers:
        await store.wake(ENDED, [5, 7])
        await store.wake(SENDING)
        await store.wake(TIMERS)
        await store.wake()
        takes_work, sends = workers
        await until(lambda: (len(takes_work.heard), len(sends.heard)) == (3, 4))
        for_all = [Notice(ENDED, "", (5, 7)), Notice(TIMERS), Notice(ANY)]
        assert sorted(takes_work.heard) == sorted(for_all)
        assert sorted(sends.heard) == sorted([*for_all, Notice(SENDING)])


async def test_if_no_worker_takes_work_a_message_wakes_all(store):
    async with company(store, False) as (only,):
        row = await store.accept(said())
        await store.wake(WORK, [row.session])
        await until(lambda: only.heard)
        assert only.heard == [Notice(WORK, "", (row.session,))]


@pytest.mark.parametrize("word", ["", "x", "w x 1,b", "{}", "a", "z 1 2 3", "w  1 2"])
def test_an_unknown_notice_may_mean_anything(word: str):
    assert decode_notice(word) == Notice(ANY)


@pytest.mark.parametrize(
    "news", [Notice(WORK, "w.1.2.3.4", (1, 2**60)), Notice(ENDED, "", (3,)), Notice(TIMERS), Notice(WORK)]
)
def test_notices_arrive_as_they_were_sent(news: Notice):
    assert decode_notice(encode_notice(*news)) == news

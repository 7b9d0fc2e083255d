"""A primary that dies and a synchronous standby that takes its place: nothing is lost, doubled or issued twice."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from everloop.bus import InboundMessage
from everloop.config.sources import DSN
from everloop.observability.metrics import Meters, Page
from everloop.store.base import Busy
from everloop.store.peers import new_worker, retire
from everloop.store.postgres import heartbeat, replication
from everloop.store.postgres.connect import Primary, Unreachable
from everloop.store.postgres.store import PostgresStore
from tests.support.commands import everloop, until

from . import failover_load
from .failover_load import Load, closing, load
from .network import lines
from .pgbouncer import pgbouncer
from .standby import Pair, pair

if TYPE_CHECKING:
    from everloop.store.postgres.connect import Connection

LONG = pytest.param(50, marks=[pytest.mark.chaos, pytest.mark.timeout(3600)])
_numbers = itertools.count(1)
CONNECTING = 3.5  # seconds; more than `connect_timeout` for one of several servers
# Until a server that is silent is given up, at most: the heartbeat asks it, waits, and is watched.
DETECTION = replication.LOOK_SECONDS + heartbeat.SILENT_SECONDS + heartbeat.WATCH_SECONDS
SLACK = 1.0  # seconds from then on, until messages are acknowledged again


@pytest.fixture(scope="module")
def machines() -> Iterator[Pair]:
    with pair() as made:
        yield made


@pytest.fixture
def servers(machines: Pair) -> Pair:
    """A primary with its synchronous standby, whatever state the previous test has left."""
    machines.repair()
    return machines


@pytest.fixture
def name(servers: Pair) -> str:
    """A database with our tables."""
    made = f"ha{next(_numbers)}"
    servers.primary.sql(f"CREATE DATABASE {made} TEMPLATE everloop_template")
    return made


async def standbys_told(dsn: str) -> dict[str, Any]:
    """Return what `everloop doctor` says about standbys."""
    done = await everloop("doctor", "--json", EVERLOOP_STORE=dsn)
    return next(check for check in done.json["checks"] if check["name"] == "standbys")


def said(text: str, chat: str = "1") -> InboundMessage:
    return InboundMessage("test", "user", chat, text, id=text).addressed()


@pytest.mark.parametrize("times", [2, LONG])
async def test_nothing_is_lost_or_doubled_and_no_fence_comes_twice_over_failovers(servers, name, times, capsys):
    async with load(servers.dsn(name)) as work:
        for number in range(times):
            await work.until(20)
            await asyncio.to_thread(servers.fail_over)
            await work.until(10)
            progress(capsys, number, times)
            if number + 1 < times:
                await asyncio.to_thread(servers.add_standby)
    assert await asyncio.to_thread(work.problems, servers.primary, name) == []
    assert work.errors == []
    with capsys.disabled():
        if times > 2:
            figures = f"{times} failovers: {len(work.said)} messages, {len(work.fences)} fences"
            print(f"{figures}, longest wait {work.longest:.1f} s")


MANY = pytest.param(10, marks=[pytest.mark.chaos, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("times", [1, MANY])
async def test_a_frozen_primary_that_returns_has_lost_and_doubled_nothing(servers, name, times, capsys, monkeypatch):
    """All of its processes stop, and its connections stay.

    The standby is promoted; then the old primary continues, with whatever it had read, and is fenced only after a
    while.
    """
    longest: list[float] = []
    if times == 1:
        monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 2.0)
    async with load(servers.dsn(name)) as work:
        for number in range(times):
            await work.until(20)
            old = servers.primary
            work.measure()
            await asyncio.to_thread(old.freeze)
            await asyncio.to_thread(servers.promote)
            await work.until(10)
            longest.append(work.longest)
            await asyncio.to_thread(old.thaw)
            await work.until(30)  # nothing is fenced yet
            await asyncio.to_thread(old.crash)
            await work.until(10)
            progress(capsys, number, times)
            if number + 1 < times:
                await asyncio.to_thread(servers.add_standby)
    assert await asyncio.to_thread(work.problems, servers.primary, name) == []
    report(capsys, f"{times} primaries frozen and back", work, times, longest)
    assert times == 1 or max(longest) <= DETECTION + SLACK, longest


@pytest.mark.parametrize("times", [1, MANY])
async def test_a_primary_behind_a_cut_network_is_given_up_and_passed_over_when_it_is_back(
    servers, name, times, capsys, monkeypatch
):
    """Packets between the workers and the primary are lost silently.

    The standby is promoted. When the network is repaired, the old primary, which comes first in the address, is not
    used.
    """
    longest: list[float] = []
    if times == 1:
        monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 2.0)
    both = (servers.primary.folder, servers.standby.folder)
    async with lines(both, name) as (ways, dsn), load(dsn) as work:
        for number in range(times):
            await work.until(20)
            old = servers.primary
            way = next(one for one in ways if one.server == old.folder)
            work.measure()
            way.cut()
            await asyncio.to_thread(servers.promote)
            await work.until(10)
            longest.append(work.longest)
            with monkeypatch.context() as patch:
                # The old one is not skipped because of its silence.
                patch.setattr(Primary, "_to_try", lambda primary: list(range(primary._dsn.hosts)))
                way.mend()
                await asyncio.sleep(CONNECTING)  # no thread is still about to connect elsewhere
                for store in work.stores:
                    store.connections.break_all()  # all reconnect while there are two primaries
                await work.until(30)
                await asyncio.to_thread(old.crash)
            await work.until(10)
            progress(capsys, number, times)
            if number + 1 < times:
                await asyncio.to_thread(servers.add_standby)
    assert await asyncio.to_thread(work.problems, servers.primary, name) == []
    report(capsys, f"{times} networks cut", work, times, longest)
    assert times == 1 or max(longest) <= DETECTION + SLACK, longest


@pytest.mark.parametrize("times", [1, MANY])
async def test_nothing_is_lost_or_doubled_while_the_standby_or_the_pooler_is_lost(servers, name, times, capsys):
    with pgbouncer(servers.primary.folder) as pooler:
        async with load(servers.dsn(name), pooler.dsn(name)) as work:
            for number in range(times):
                await work.until(20)
                await asyncio.to_thread(pooler.kill)
                await asyncio.to_thread(pooler.start)
                await work.until(10)
                await asyncio.to_thread(servers.standby.crash)
                said = len(work.said)
                await asyncio.to_thread(servers.standby.start)
                await asyncio.to_thread(servers.wait_for_standby)
                await work.until(10)
                assert len(work.said) > said
                progress(capsys, number, times)
    assert await asyncio.to_thread(work.problems, servers.primary, name) == []
    assert work.errors == []
    report(capsys, f"{times} poolers and {times} standbys lost", work, times)


async def test_a_process_that_is_still_connected_to_the_old_primary_finds_the_new_one(servers: Pair, name: str) -> None:
    """Nothing has broken its connections. Its writes wait for a standby that is a primary now."""
    store, worker, old = PostgresStore(servers.dsn(name)), new_worker(), servers.primary
    async with closing(store):
        peer = store.peer(worker, lambda _: None)
        await peer.join()
        await store.accept(said("before"))
        await asyncio.to_thread(servers.promote)
        accepting = asyncio.ensure_future(store.accept(said("after")))
        await asyncio.wait([accepting], timeout=failover_load.UNTIL_SECONDS)  # if cancelled, it would keep waiting
        assert accepting.done()
        row = await accepting
        found = servers.primary.sql("SELECT id FROM inbox WHERE message_id = 'after'", database=name)
        assert found == [(row.id,)]
        await asyncio.to_thread(old.crash)
        await peer.leave()
    retire(worker)


async def test_the_other_servers_are_tried_before_one_that_is_given_up(servers, name):
    """The frozen one comes first in the address, and a connection to it would take three seconds to fail."""
    old, both = servers.primary, f"{servers.primary.folder},{servers.standby.folder}"
    primary = Primary(DSN(f"postgresql://postgres@/{name}?host={both}"), lambda: None)
    connection = await asyncio.to_thread(primary.connect)
    await asyncio.to_thread(old.freeze)
    await asyncio.to_thread(servers.promote)
    primary.give_up(connection)
    began = time.monotonic()
    (await asyncio.to_thread(primary.connect)).close()
    assert time.monotonic() - began < 2.5
    connection.close()
    await asyncio.to_thread(old.crash)


def progress(capsys: pytest.CaptureFixture[str], number: int, times: int) -> None:
    """Print the progress in the long form of a test."""
    with capsys.disabled():
        if times > 2:
            print(f"{number + 1} of {times}", end="\n" if number + 1 == times else ", ", flush=True)


def report(
    capsys: pytest.CaptureFixture[str], what: str, work: Load, times: int, longest: Sequence[float] = ()
) -> None:
    with capsys.disabled():
        if times > 1:
            print(f"{what}: {len(work.said)} messages, longest wait {max(longest, default=work.longest):.1f} s")


async def test_an_address_of_two_servers_leads_to_the_primary_in_either_order(servers, name):
    first, second = servers.primary.folder, servers.standby.folder
    for hosts in (f"{first},{second}", f"{second},{first}"):
        store = PostgresStore(f"postgresql://postgres@/{name}?host={hosts}", patience=0.1)
        await store.accept(said(hosts))
        await store.close()


@pytest.mark.parametrize("times", [1, MANY])
async def test_the_same_holds_behind_a_pooler_that_is_directed_to_the_standby_before_its_promotion(
    servers, name, times, capsys
):
    here = "SELECT 1 FROM pg_stat_activity WHERE datname = %s"
    with pgbouncer(servers.primary.folder) as pooler:
        async with load(servers.dsn(name), pooler.dsn(name)) as work:
            for number in range(times):
                await work.until(20)
                await asyncio.to_thread(servers.primary.crash)
                await asyncio.to_thread(pooler.lead_to, servers.standby.folder)
                async with asyncio.timeout(30):  # it is asked to write, and cannot yet
                    while not await asyncio.to_thread(servers.standby.sql, here, name):
                        await asyncio.sleep(0.02)
                await asyncio.to_thread(servers.promote)
                await work.until(10)
                progress(capsys, number, times)
                if number + 1 < times:
                    await asyncio.to_thread(servers.add_standby)
    assert await asyncio.to_thread(work.problems, servers.primary, name) == []
    assert work.errors == []


async def test_a_lost_standby_is_reported_and_everything_waits_until_it_is_back(servers, name, caplog):
    caplog.set_level(logging.WARNING)
    store, worker = PostgresStore(servers.dsn(name), lease_seconds=1.5), new_worker()  # renewed every half a second
    peer = store.peer(worker, lambda _: None)
    await peer.join()
    await store.accept(said("before"))
    await asyncio.to_thread(servers.standby.crash)
    waiting = asyncio.ensure_future(store.accept(said("now")))
    await until(lambda: "no synchronous standby" in caplog.text)
    assert store.standby_wait > 0
    assert not waiting.done()
    found = await store.standbys()
    assert (found.names, found.standbys, found.waiting) == ("*", (), 1)
    assert await store.is_alive(worker)  # its heartbeat waits for no standby
    text = (await Page(store, Meters()).text()).decode()
    assert float(text.partition("\neverloop_standby_wait_seconds ")[2].split()[0]) > 1
    told = await standbys_told(servers.dsn(name))
    assert (told["ok"], told["found"].partition(" that ")[0]) == (False, "1 write waits for a synchronous standby")
    await asyncio.to_thread(servers.standby.start)
    await waiting
    await until(lambda: "no longer wait" in caplog.text)
    assert store.standby_wait == 0
    await peer.leave()
    await store.close()
    retire(worker)


@pytest.mark.parametrize("writes", [True, False], ids=["a write waits", "nothing is written"])
async def test_a_lost_standby_is_in_the_log_the_metrics_and_the_doctor_within_five_seconds(
    servers, name, writes, caplog
):
    """Counted from the moment when the primary knows that it has none, with the lease and the intervals unchanged."""
    caplog.set_level(logging.WARNING)
    store, worker = PostgresStore(servers.dsn(name)), new_worker()
    peer = store.peer(worker, lambda _: None)
    told: dict[str, float] = {}
    async with closing(store):
        await peer.join()
        await store.accept(said("before"))
        await until(lambda: store.heartbeat.standby.is_needed)  # it has connected
        await asyncio.to_thread(servers.standby.crash)
        while await asyncio.to_thread(servers.primary.sql, "SELECT 1 FROM pg_stat_replication"):
            await asyncio.sleep(0.01)
        gone = time.monotonic()

        async def log_line() -> bool:
            return "the store has no synchronous standby" in caplog.text

        async def metric() -> bool:
            text = (await Page(store, Meters()).text()).decode()
            return float(text.partition("\neverloop_standby_wait_seconds ")[2].split()[0]) > 0

        async def doctor() -> bool:
            return not (await standbys_told(servers.dsn(name)))["ok"]

        async def when(what: str, is_told: Callable[[], Awaitable[bool]]) -> None:
            while not await is_told():
                await asyncio.sleep(0.02)
            told[what] = time.monotonic() - gone

        waiting = asyncio.ensure_future(store.accept(said("now"))) if writes else None
        async with asyncio.timeout(60):
            await asyncio.gather(when("log", log_line), when("metric", metric), when("doctor", doctor))
        assert ("writes will wait" in caplog.text) is not writes
        await asyncio.to_thread(servers.standby.start)
        if waiting is not None:
            await waiting
        await until(lambda: "no longer wait" in caplog.text)
        assert store.standby_wait == 0
        await peer.leave()
    retire(worker)
    assert max(told.values()) < 5, told


async def test_doctor_shows_standbys_and_warns_of_one_that_commits_do_not_wait_for(servers, name):
    told = await standbys_told(servers.dsn(name))
    assert told["ok"]
    assert "walreceiver (sync, streaming" in told["found"]
    await asyncio.to_thread(servers.configure, "synchronous_standby_names", "")
    async with asyncio.timeout(30):
        while (told := await standbys_told(servers.dsn(name)))["ok"]:  # the server reads its settings soon
            await asyncio.sleep(0.1)
    assert "async" in told["found"]
    assert "loses what it has not received" in told["fix"]
    await asyncio.to_thread(servers.wait_for_standby)


async def test_a_commit_that_is_visible_and_not_replicated_is_not_acknowledged(servers: Pair, name: str) -> None:
    """Its connection is ended while it waits for the standby: PostgreSQL then shows it to others, and would lose it in
    a failover.
    """
    store = PostgresStore(servers.dsn(name))
    waits = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"

    def sql(query: str, *values: object) -> list[tuple[int, ...]]:
        return servers.primary.sql(query, *values, database=name)

    message = InboundMessage("test", "user", "1", "now").addressed()  # without an id, its outcome is looked up
    async with closing(store):
        await store.accept(message)
        await asyncio.to_thread(servers.standby.crash)
        waiting = asyncio.ensure_future(store.accept(message))
        async with asyncio.timeout(30):
            while not (found := await asyncio.to_thread(sql, waits)):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(sql, "SELECT pg_terminate_backend(%s)", found[0][0])
            while (await asyncio.to_thread(sql, "SELECT count(*) FROM inbox")) != [(2,)]:
                await asyncio.sleep(0.01)  # it is visible
            while True:  # the lookup of its outcome waits too
                again = await asyncio.to_thread(sql, waits)
                assert not waiting.done()
                if again and again != found:
                    break
                await asyncio.sleep(0.01)
        await asyncio.to_thread(servers.primary.crash)
        await asyncio.to_thread(servers.standby.start)
        await asyncio.to_thread(servers.promote)
        row = await waiting
        assert sql("SELECT id FROM inbox ORDER BY id")[-1] == (row.id,)
        assert sql("SELECT count(*) FROM inbox") == [
            (2,)
        ]  # the message that was lost with the primary was written again


async def test_workers_that_could_not_renew_without_a_primary_keep_their_leases(servers, name, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    # So that it is not the first to reach the new primary, however long the promotion takes on a busy machine.
    monkeypatch.setattr(heartbeat, "RETRY_SECONDS", 8.0)
    lease = 3.0
    stores = [PostgresStore(servers.dsn(name), lease_seconds=lease) for _ in range(2)]
    workers = [new_worker(), "0123456789ab.1.1.1.1"]  # the second one is of another machine, and died with the primary
    peer = stores[0].peer(workers[0], lambda _: None)
    await peer.join()
    await stores[1].join(workers[1], "work")
    await until(lambda: stores[0].heartbeat.term is not None)  # its leases were renewed at least once
    await asyncio.to_thread(servers.primary.crash)
    await asyncio.sleep(lease + 0.5)
    await asyncio.to_thread(servers.promote)
    assert await stores[0].is_alive(workers[1])  # by a process that could not renew its own leases
    assert "failed over" not in caplog.text
    await until(lambda: "failed over" in caplog.text)
    assert await stores[1].is_alive(workers[1])
    await peer.leave()
    for store in stores:
        await store.close()
    retire(workers[0])


@pytest.mark.parametrize("joined", ["before", "after"])
async def test_a_process_that_has_renewed_nothing_yet_takes_no_others_work_after_a_failover(
    servers, name, joined, monkeypatch
):
    """It joined just before the primary died, or started after it: it is the first to see the new one, where all leases
    are older than `lease_seconds`.
    """
    lease, holder, mine = 3.0, "0123456789ab.1.1.1.1", new_worker()  # of another machine
    seen, first, new = new_worker(), PostgresStore(servers.dsn(name), lease_seconds=lease), None
    peer = first.peer(seen, lambda _: None)
    async with closing(first):
        await peer.join()
        await until(lambda: first.heartbeat.term is not None)
        assert await first.begin("me", "test:1", holder, said("held")) is not None
        new = PostgresStore(servers.dsn(name), lease_seconds=lease)
        async with closing(new):
            connect, promoted = new.heartbeat._connect, asyncio.Event()

            def late() -> Connection:
                if not promoted.is_set():
                    raise Unreachable("not yet")
                return connect()

            monkeypatch.setattr(new.heartbeat, "_connect", late)
            if joined == "before":
                await new.join(mine, "work")
            monkeypatch.setattr(heartbeat, "RETRY_SECONDS", 8.0)  # the other process comes later
            await asyncio.to_thread(servers.primary.crash)
            await asyncio.sleep(lease + 0.5)
            await asyncio.to_thread(servers.promote)
            assert await new.is_alive(holder)
            assert await new.ready(mine) == []
            assert await new.look(mine) == ([], [])
            with pytest.raises(Busy):
                await new.begin("me", "test:1", mine)
            promoted.set()
            await new.join(mine, "work")
            async with asyncio.timeout(30):
                while not await new.is_alive(mine) or new.heartbeat.term is None:
                    await asyncio.sleep(0.05)
            assert await new.is_alive(holder)
            async with asyncio.timeout(30):
                while await new.ready(mine) != [("me", "test:1")]:  # it has had the full time to renew
                    await asyncio.sleep(0.05)
            await peer.leave()
    retire(seen)
    retire(mine)

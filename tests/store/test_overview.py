"""The overview of a store."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing

import pytest

from everloop.log import CallsAsked, ModelAnswered, UserSaid
from everloop.store.overview import MAX_LISTED, PATIENCE, Overview, Unheld, WorkerSeen
from everloop.store.peers import process_of, retire
from everloop.store.sqlite import SQLiteStore
from everloop.store.sqlite.overview import COUNT, OPEN, TOTALS, UNSENT

from .steps import answer, begun, finish, message


async def test_a_new_store_is_empty(store):
    seen = await store.overview()
    assert (seen.sessions, seen.workers, seen.leases, seen.held) == (0, (), (), 0)
    assert (seen.unheld, seen.unheld_count, seen.stuck, seen.waited_out) == ((), 0, 0, 0)
    assert (seen.waiting, seen.oldest_waiting, seen.open_turns, seen.parked_turns) == (0, None, 0, 0)
    assert (seen.unsent, seen.oldest_unsent) == (0, None)
    assert (seen.waiting_seconds, seen.unsent_seconds) == (0.0, 0.0)
    assert abs(seen.at - time.time()) < 60


async def test_a_store_reports_its_standbys(store):
    seen = await store.standbys()
    if isinstance(store, SQLiteStore):
        assert seen is None
    else:
        assert (seen.names, seen.standbys, seen.waiting) == ("", (), 0)


async def test_work_of_all_owners_is_counted_and_finished_work_is_not(store, me):
    await finish(store, await begun(store, me, chat="done"))
    running = await begun(store, me, chat="running")
    await store.accept(message("behind it", "running"))
    await begun(store, me, chat="yours", owner="you")
    await store.accept(message("waits", "idle"))
    await store.accept(message("waits", "idle", owner="you"))
    await store.accept(message("/stop", "running"), "urgent")
    seen = await store.overview()
    assert (seen.sessions, seen.open_turns, seen.waiting, seen.parked_turns) == (5, 2, 3, 0)
    assert {(lease.owner, lease.key, lease.worker) for lease in seen.leases} == {
        ("me", "test:running", me),
        ("you", "test:yours", me),
    }
    assert seen.held == 2
    assert {(one.owner, one.key) for one in seen.unheld} == {("me", "test:idle"), ("you", "test:idle")}
    assert seen.unheld_count == 2
    assert running.key == "test:running"


async def test_the_oldest_waiting_message_is_reported_with_its_age(store, me):
    await begun(store, me, chat="busy")  # taken, so it does not wait
    await store.accept(message("/stop", "busy"), "urgent")
    await asyncio.sleep(0.05)
    first = time.time()
    await store.accept(message("one", "busy"))
    between = time.time()
    await asyncio.sleep(0.05)
    await store.accept(message("two", "other"))
    seen = await store.overview()
    assert seen.oldest_waiting is not None
    assert first - 0.01 <= seen.oldest_waiting <= between + 0.01
    assert 0.05 <= seen.waiting_seconds < 60


async def test_a_turn_that_waits_for_a_person_is_parked_and_messages_after_it_are_not_stuck(store, me):
    claim = await begun(store, me)
    await store.park(claim, [ModelAnswered("x"), CallsAsked(("c1",), "May I?")])
    await store.accept(message("hello?"))
    seen = await store.overview()
    assert (seen.open_turns, seen.parked_turns, seen.waiting, seen.held) == (0, 1, 1, 0)
    assert seen.unheld == ()
    assert seen.stuck == 0
    await store.decide("me", "test:1", True)
    seen = await store.overview()
    assert (seen.open_turns, seen.parked_turns, seen.unheld_count) == (1, 0, 1)


async def test_a_turn_that_has_taken_further_messages_is_one_turn(store, me):
    claim = await begun(store, me)
    rows = [await store.accept(message("and this")) for _ in range(2)]
    await store.append(claim, [UserSaid("and this")], took=[rows[0].id])
    seen = await store.overview()
    assert (seen.open_turns, seen.waiting) == (1, 1)
    asked = [ModelAnswered("x"), CallsAsked(("c1",), "May I?")]
    await store.park(claim, asked, took=[rows[1].id])
    seen = await store.overview()
    assert (seen.open_turns, seen.parked_turns, seen.waiting) == (0, 1, 0)


async def test_unsent_answers_are_counted_with_the_age_of_the_oldest(store, me):
    before = time.time()
    await finish(store, await begun(store, me), outgoing=[answer("one"), answer("two")])
    seen = await store.overview()
    assert seen.unsent == 2
    assert seen.oldest_unsent is not None
    assert before - 1 <= seen.oldest_unsent <= time.time() + 1
    (row, _) = await store.take_outgoing(me)
    await store.sent([row.id])
    assert (await store.overview()).unsent == 1


async def test_workers_are_shown_with_their_process_and_what_they_hold(store, me, other):
    await store.join(me, "/run/me")
    await begun(store, me, chat="1")
    await begun(store, me, chat="2")
    await begun(store, other, chat="3")
    seen = {worker.id: worker for worker in (await store.overview()).workers}
    assert set(seen) == {me, other}
    assert (seen[me].held, seen[me].takes_work, seen[me].process) == (2, True, process_of(me))
    assert (seen[other].held, seen[other].takes_work) == (1, False)
    assert all(0.0 <= worker.silent < 15.0 for worker in seen.values())
    assert (await store.overview()).processes == 1
    retire(me)
    left = await store.overview()
    assert [worker.id for worker in left.workers] == [other]
    assert left.processes == 0


async def test_a_dead_workers_work_is_held_by_no_worker(store, me, other):
    before = time.time()
    await begun(store, me)
    assert (await store.overview()).unheld == ()
    retire(me)
    seen = await store.overview()
    assert seen.leases == ()
    assert seen.held == 0
    assert [(one.owner, one.key) for one in seen.unheld] == [("me", "test:1")]
    assert before - 1 <= seen.unheld[0].since <= seen.at + 1
    assert seen.stuck == 1
    await store.begin("me", "test:1", other)
    assert (await store.overview()).unheld == ()


async def test_work_that_waits_briefly_next_to_a_living_worker_is_not_stuck(store, me):
    await store.accept(message("hi"))
    assert (await store.overview()).stuck == 1
    await store.join(me, "/run/me")
    seen = await store.overview()
    assert (seen.unheld_count, seen.stuck, seen.stuck_sessions()) == (1, 0, [])
    await store.leave(me)
    assert [one.key for one in (await store.overview()).stuck_sessions()] == ["test:1"]


async def test_unheld_work_is_listed_oldest_first(store, me):
    for chat in "abc":
        await finish(store, await begun(store, me, chat=chat))
    for chat in "cab":
        await asyncio.sleep(0.01)
        await store.accept(message("hi", chat))
    assert [one.key for one in (await store.overview()).unheld] == ["test:c", "test:a", "test:b"]


async def test_lists_are_limited_and_counts_are_exact(store, me):
    more = MAX_LISTED + 5
    for n in range(more):
        await store.accept(message("hi", f"free{n}"))
        await begun(store, me, chat=f"held{n}")
    seen = await store.overview()
    assert (len(seen.leases), seen.held, len(seen.unheld), seen.unheld_count) == (MAX_LISTED, more, MAX_LISTED, more)
    assert seen.waiting == more
    assert [one.key for one in seen.unheld[:3]] == ["test:free0", "test:free1", "test:free2"]
    assert [worker.held for worker in seen.workers] == [more]


async def test_the_overview_reads_only_open_rows_of_a_file(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")
    await store.accept(message())
    await store.close()
    with closing(sqlite3.connect(tmp_path / "store.db")) as db:
        for query in (TOTALS, OPEN, UNSENT, COUNT):
            plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {query}")]
            for step in plan:
                assert "SCAN" not in step or step.endswith(
                    ("inbox_open", "outbox_waiting", " i", "CONSTANT ROW", "deletion")
                ), plan


async def test_work_that_was_free_for_long_is_stuck_even_next_to_a_worker(tmp_path, me):
    store = SQLiteStore(tmp_path / "store.db")
    await store.accept(message())
    await store.join(me, "/run/me")
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as db:
        db.execute("UPDATE inbox SET at = at - 60")
        assert (await store.overview()).waited_out == 0  # the session was at work a moment ago
        db.execute("UPDATE session SET updated_at = updated_at - ?", (PATIENCE + 1,))
    seen = await store.overview()
    assert (seen.waited_out, seen.stuck) == (1, 1)
    await store.close()


# ---------------------------------------------------------------------------------------------- the rule


def overview(*since: float, workers: tuple[WorkerSeen, ...] = ()) -> Overview:
    """At second 100, with sessions that have been free since then."""
    unheld = tuple(Unheld("me", f"test:{at:g}", at) for at in since)
    late = sum(100.0 - at > PATIENCE for at in since)
    return Overview(100.0, 9, workers, (), 0, unheld, len(unheld), late, 0, None, 0, 0, 0, None)


TAKES = WorkerSeen("boot.1.7.8.1", 7, 0, 0.0, True)


@pytest.mark.parametrize(
    ("workers", "stuck"),
    [
        ((), ["test:50", "test:89", "test:91", "test:100"]),
        ((WorkerSeen("boot.1.7.8.1", 7, 1, 0.0, False),), ["test:50", "test:89", "test:91", "test:100"]),
        ((TAKES,), ["test:50", "test:89"]),
    ],
    ids=["nobody", "only a chat", "a worker"],
)
def test_work_is_stuck_if_no_worker_takes_it_or_it_was_free_for_over_ten_seconds(workers, stuck):
    seen = overview(50.0, 89.0, 91.0, 100.0, workers=workers)
    assert [one.key for one in seen.stuck_sessions()] == stuck
    assert seen.stuck == len(stuck)


def test_two_workers_of_one_process_are_one_process():
    workers = (TAKES, WorkerSeen("boot.1.7.8.2", 7, 0, 0.0, True), WorkerSeen("else.1.7.8.1", 7, 0, 0.0, True))
    assert overview(workers=workers).processes == 2

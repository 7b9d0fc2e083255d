"""The writer's thread when something ends or fails around it: a loop, a close, a transaction, the file itself."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from everloop.bus import InboundMessage
from everloop.errors import StaleLease, StoreError
from everloop.log import ModelAnswered, TurnEnded, UserSaid
from everloop.store.base import Claim
from everloop.store.peers import new_worker
from everloop.store.sqlite import SQLiteStore, writer
from everloop.store.sqlite.writer import CHECKPOINT_PAGES, PAGE_BYTES, SHORT


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SQLiteStore]:
    monkeypatch.setattr(writer, "SLOW_SECONDS", 60.0)  # a busy machine is no slow disk
    made = SQLiteStore(tmp_path / "store.db")
    yield made
    await made.close()


def message(text: str = "hi", **options: Any) -> InboundMessage:
    return InboundMessage("test", "user", "1", text, **options).addressed()


def said(path: Path) -> list[str]:
    """Return the inbox as another process sees it."""
    with sqlite3.connect(path) as db:
        found = [text for (text,) in db.execute("SELECT json_extract(data, '$.content') FROM inbox ORDER BY id")]
    db.close()
    return found


@pytest.mark.platform("counts the process's files in /proc")
def test_ended_event_loops_leave_no_file_open(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")

    async def use() -> None:
        await store.accept(message())

    def opened_after(loops: int) -> int:
        for _ in range(loops):
            asyncio.run(use())
        return len(os.listdir("/proc/self/fd"))

    first = opened_after(2)
    assert opened_after(20) == first
    asyncio.run(store.close())


async def test_a_second_close_waits_for_the_disk_too(store):
    gate = threading.Event()
    blocked = store.writer.submit(lambda db: gate.wait(30))
    late = asyncio.ensure_future(store.accept(message()))
    await asyncio.sleep(0)
    closing = [asyncio.create_task(store.close()) for _ in range(2)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert [task.done() for task in closing] == [False, False]
    gate.set()
    await closing[1]
    assert await asyncio.to_thread(said, store.path) == ["hi"]
    await asyncio.gather(blocked, late, closing[0])


async def test_a_transaction_that_cannot_be_repaired_is_given_up_and_the_next_one_kept(store):
    await store.accept(message("first"))

    def refuse(db: sqlite3.Connection) -> None:
        def deny(action: int, what: str | None, *_: object) -> int:
            undoes = action == sqlite3.SQLITE_SAVEPOINT and what == "ROLLBACK"
            return sqlite3.SQLITE_DENY if undoes else sqlite3.SQLITE_OK

        db.set_authorizer(deny)
        gate.wait(30)

    def bad(db: sqlite3.Connection) -> None:
        raise ValueError("no")

    gate = threading.Event()
    jobs = [store.writer.submit(refuse), store.writer.submit(bad)]
    gate.set()
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert [type(result) for result in results] == [ValueError, ValueError]  # neither was written
    claim = await store.begin("me", "test:1", new_worker())
    assert claim is not None
    await store.append(claim, [ModelAnswered("on disk")])
    await store.accept(message("second"))
    assert await asyncio.to_thread(said, store.path) == ["first", "second"]


async def test_a_message_whose_steering_was_not_written_is_not_done_with_the_turn(store):
    claim = await store.begin("me", "test:1", new_worker(), message("first"))
    assert claim is not None
    steered = await store.accept(message("second"))

    def fail(when: str) -> None:
        if when == "before":
            raise sqlite3.OperationalError("the disk says no")

    unhook = store.writer.commit_hooks.add(fail)
    with pytest.raises(StoreError, match="the disk says no"):
        await store.append(claim, [UserSaid("second")], took=[steered.id])
    unhook()
    finished = await store.finish(claim, [TurnEnded("cancelled", "Stopped.")])
    assert finished.more
    assert [row.message.content for row in await store.waiting("me", "test:1")] == ["second"]


@pytest.mark.parametrize("replaced", [True, False])
async def test_no_write_to_a_removed_file_is_reported_as_kept(store, replaced):
    claim = await store.begin("me", "test:1", new_worker(), message("first"))
    assert claim is not None
    away = store.path.with_name("away.db")

    def take_away() -> None:
        os.rename(store.path, away)
        if replaced:
            store.path.write_bytes(b"")

    await asyncio.to_thread(take_away)
    for writing in (store.accept(message("second")), store.append(claim, [ModelAnswered("lost")])):
        with pytest.raises(StoreError, match="was moved or deleted while it was in use"):
            await writing
    await asyncio.to_thread(os.replace, away, store.path)
    await store.accept(message("third"))
    assert await asyncio.to_thread(said, store.path) == ["first", "third"]


# ---------------------------------------------------------------------------------------------- short statements


def at(store: SQLiteStore) -> list[str]:
    """Return the threads in which the store commits from now on."""
    threads: list[str] = []
    store.writer.commit_hooks.add(
        lambda when: threads.append(threading.current_thread().name) if when == "before" else None
    )
    return threads


async def claimed(store: SQLiteStore) -> Claim:
    claim = await store.begin("me", "test:1", new_worker(), message("first"))
    assert claim is not None
    return claim


THERE, HERE = "everloop-writer", threading.main_thread().name


async def test_a_short_step_without_a_flush_is_written_directly(store):
    claim, threads = await claimed(store), at(store)
    assert store.append(claim, [ModelAnswered("one")], flush=False).done()
    await store.append(claim, [ModelAnswered("two")])
    await store.append(claim, [ModelAnswered("x" * SHORT)], flush=False)
    await store.append(claim, [ModelAnswered("three")], flush=False)
    assert threads == [HERE, THERE, THERE, HERE]
    assert len(await store.read_log(claim.session)) == 5


async def test_a_short_step_does_not_wait_for_the_writer(store):
    claim = await claimed(store)
    started, gate = threading.Event(), threading.Event()

    def work(db: sqlite3.Connection) -> None:
        started.set()
        gate.wait(30)

    blocked, threads = store.writer.submit(work), at(store)
    await asyncio.to_thread(started.wait, 30)
    written = store.append(claim, [ModelAnswered("one")], flush=False)
    assert not written.done()
    gate.set()
    await blocked
    await written
    assert set(threads) == {THERE}


async def test_a_short_step_waits_for_a_locked_file_in_the_writers_thread(tmp_path):
    store = SQLiteStore(tmp_path / "store.db", lock_seconds=3600)
    claim, threads = await claimed(store), at(store)
    with closing(sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        written = store.append(claim, [ModelAnswered("one")], flush=False)
        assert not written.done()
        other.execute("COMMIT")
    await written
    assert threads == [HERE, THERE]
    assert len(await store.read_log(claim.session)) == 2
    await store.close()


async def test_a_short_step_after_a_checkpoint_is_written_in_the_writers_thread(store):
    """It restarts the log, and SQLite flushes the header of a new log."""
    claim, threads = await claimed(store), at(store)
    with closing(sqlite3.connect(store.path)) as other:
        other.execute("PRAGMA wal_checkpoint(PASSIVE)")
    for text in ("one", "two"):
        await store.append(claim, [ModelAnswered(text)], flush=False)
    assert threads == [THERE, HERE]


async def test_short_steps_make_no_checkpoint(store):
    claim = await claimed(store)
    before = await asyncio.to_thread(os.stat, store.path)
    threads = at(store)
    while len(threads) < 2 * CHECKPOINT_PAGES // 20:
        await store.append(claim, [ModelAnswered("x" * 20 * PAGE_BYTES)], flush=False)
    assert (await asyncio.to_thread(os.stat, store.path)).st_mtime_ns == before.st_mtime_ns
    assert set(threads) == {HERE}
    await store.accept(message())
    assert (await asyncio.to_thread(os.stat, store.path)).st_mtime_ns != before.st_mtime_ns


async def test_after_a_slow_write_short_steps_go_to_the_writers_thread(store, monkeypatch):
    claim, threads = await claimed(store), at(store)
    monkeypatch.setattr(writer, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(writer, "AFTER_SLOW_SECONDS", 60.0)
    for text in ("one", "two"):
        await store.append(claim, [ModelAnswered(text)], flush=False)
    assert threads == [HERE, THERE]


async def test_a_short_step_under_a_stale_fence_is_refused(store):
    claim = await claimed(store)
    await store.release(claim)
    assert await store.begin("me", "test:1", new_worker()) is not None
    with pytest.raises(StaleLease):
        await store.append(claim, [ModelAnswered("one")], flush=False)
    assert len(await store.read_log(claim.session)) == 1


@pytest.mark.parametrize("replaced", [True, False])
async def test_a_short_step_to_a_removed_file_is_not_reported_as_kept(store, replaced):
    claim = await claimed(store)
    away = store.path.with_name("away.db")

    def take_away() -> None:
        os.rename(store.path, away)
        if replaced:
            store.path.write_bytes(b"")

    await asyncio.to_thread(take_away)
    with pytest.raises(StoreError, match="was moved or deleted while it was in use"):
        await store.append(claim, [ModelAnswered("lost")], flush=False)


async def test_a_closed_store_is_opened_again_for_a_short_step(store):
    claim = await claimed(store)
    await store.close()
    await store.append(claim, [ModelAnswered("one")], flush=False)
    assert len(await store.read_log(claim.session)) == 2

"""The writer's thread when something ends or fails around it: a loop, a close, a transaction, the file itself."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.bus import InboundMessage
from everloop.errors import StoreError
from everloop.log import ModelAnswered, TurnEnded, UserSaid
from everloop.store.peers import new_worker
from everloop.store.sqlite import SQLiteStore


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    made = SQLiteStore(tmp_path / "store.db")
    yield made
    await made.close()


def message(text: str = "hi", **options: Any) -> InboundMessage:
    return InboundMessage("test", "user", "1", text, **options).addressed()


def said(path: Path) -> list[str]:
    """What is in the inbox, for one who comes from outside."""
    with sqlite3.connect(path) as db:
        found = [text for (text,) in db.execute("SELECT json_extract(data, '$.content') FROM inbox ORDER BY id")]
    db.close()
    return found


@pytest.mark.platform("counts the process's files in /proc")
def test_event_loops_that_have_ended_leave_no_file_open(tmp_path):
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


async def test_whoever_closes_a_store_that_is_being_closed_waits_for_the_disk_too(store):
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


async def test_a_transaction_that_can_not_be_mended_is_given_up_and_the_next_one_is_kept(store):
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


async def test_a_message_whose_taking_was_not_written_is_not_done_with_the_turn(store):
    claim = await store.begin("me", "test:1", new_worker(), message("first"))
    assert claim is not None
    steered = await store.accept(message("second"))

    def fail(when: str) -> None:
        if when == "before":
            raise sqlite3.OperationalError("the disk says no")

    store.writer.hook = fail
    with pytest.raises(StoreError, match="the disk says no"):
        await store.append(claim, [UserSaid("second")], took=[steered.id])
    store.writer.hook = None
    finished = await store.finish(claim, [TurnEnded("cancelled", "Stopped.")])
    assert finished.more
    assert [row.message.content for row in await store.waiting("me", "test:1")] == ["second"]


@pytest.mark.parametrize("replaced", [True, False])
async def test_nothing_is_said_to_be_kept_in_a_file_that_was_taken_away(store, replaced):
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

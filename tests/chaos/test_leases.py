"""A worker that was considered dead cannot write."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everloop import InboundMessage, OutboundMessage
from everloop.errors import StaleLease
from everloop.log import ModelAnswered, TurnEnded, UserSaid
from everloop.store.base import Claim
from everloop.store.peers import new_worker, retire
from everloop.store.sqlite import SQLiteStore


def dump(path: Path) -> list[str]:
    db = sqlite3.connect(path)
    try:
        return [line for line in db.iterdump() if "commit_mark" not in line]  # it counts no-op statements, too
    finally:
        db.close()


@pytest.fixture
async def robbed(tmp_path: Path) -> AsyncIterator[tuple[SQLiteStore, Claim, Claim]]:
    """A store, the claim of a worker that was considered dead, and the claim of the session's new holder."""
    store = SQLiteStore(tmp_path / "store.db")
    old, new = new_worker(), new_worker()
    message = InboundMessage("test", "me", "a", "hello", id="m1").addressed()
    stale = await store.begin("me", "test:a", old, message)
    retire(old)
    fresh = await store.begin("me", "test:a", new)
    assert stale is not None
    assert fresh is not None
    assert fresh.fence > stale.fence
    yield store, stale, fresh
    retire(new)
    await store.close()


async def test_a_worker_that_lost_its_lease_can_append_nothing(robbed: tuple[SQLiteStore, Claim, Claim]) -> None:
    store, stale, fresh = robbed
    before = dump(store.path)
    with pytest.raises(StaleLease):
        await store.append(stale, [ModelAnswered("stale")])
    with pytest.raises(StaleLease):
        await store.append(stale, [ModelAnswered("stale"), ModelAnswered("stale")], took=[1])
    assert dump(store.path) == before
    await store.append(fresh, [ModelAnswered("fresh")])
    assert [one.entry for one in await store.read_log(fresh.session)] == [
        UserSaid("hello", "me"),
        ModelAnswered("fresh"),
    ]


async def test_a_worker_that_lost_its_lease_can_neither_finish_nor_release(
    robbed: tuple[SQLiteStore, Claim, Claim],
) -> None:
    store, stale, fresh = robbed
    before = dump(store.path)
    with pytest.raises(StaleLease):
        await store.finish(stale, [TurnEnded("answer", "stale")], [OutboundMessage("test", "a", "stale")])
    await store.release(stale)
    assert dump(store.path) == before
    await store.finish(fresh, [TurnEnded("answer", "fresh")], [OutboundMessage("test", "a", "fresh")])
    assert [row.message.content for row in await store.take_outgoing("someone")] == ["fresh"]


async def test_a_stale_write_does_not_fail_the_writes_grouped_with_it(
    robbed: tuple[SQLiteStore, Claim, Claim],
) -> None:
    store, stale, fresh = robbed
    writes = [
        store.append(claim, [ModelAnswered(f"{n}")])
        for n, claim in enumerate((fresh, stale, fresh, stale, stale, fresh))
    ]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [isinstance(result, StaleLease) for result in results] == [False, True, False, True, True, False]
    texts = [getattr(one.entry, "content", "") for one in await store.read_log(fresh.session)]
    assert texts == ["hello", "0", "2", "5"]

"""Rates: so many calls within a time and not one more, however many processes count."""

from __future__ import annotations

import asyncio

import pytest

from everloop.store.base import Store


async def counted(store: Store, tries: int, most: int, seconds: float = 60.0, owner: str = "anna") -> int:
    """Return how many of so many concurrent calls are allowed."""
    told = await asyncio.gather(*(store.admit(owner, "requests", most, seconds) for _ in range(tries)))
    return told.count(0.0)


async def test_exactly_as_many_are_allowed_as_configured(store):
    assert await counted(store, 5, 7) == 5
    assert await counted(store, 5, 7) == 2
    assert await counted(store, 5, 7) == 0


async def test_several_processes_together_allow_as_many_as_one(opened):
    stores = [await opened() for _ in range(4)]
    for one in stores:
        await one.sessions("anna")  # open, so that they ask at the same time
    assert sum(await asyncio.gather(*(counted(one, 20, 33) for one in stores))) == 33


async def test_a_refused_caller_is_told_when_to_retry_and_then_allowed(store):
    assert await store.admit("anna", "requests", 1, 2.0) == 0.0
    left = await store.admit("anna", "requests", 1, 2.0)
    assert 0.0 < left <= 2.0
    await asyncio.sleep(left + 0.01)
    assert await counted(store, 3, 1, 2.0) == 1


async def test_a_new_window_allows_as_many_again(store):
    for _ in range(2):
        assert await counted(store, 5, 3, 2.0) == 3
        await asyncio.sleep(2.01)


async def test_a_window_ends_at_the_age_of_its_first_call_however_late_the_others_were(store):
    assert await store.admit("anna", "requests", 2, 30.0) == 0.0
    await asyncio.sleep(0.6)
    assert await store.admit("anna", "requests", 2, 30.0) == 0.0
    assert await store.admit("anna", "requests", 2, 30.0) <= 29.5


async def test_refused_calls_do_not_lengthen_the_wait(store):
    assert await store.admit("anna", "requests", 1, 30.0) == 0.0
    first = await store.admit("anna", "requests", 1, 30.0)
    for _ in range(10):
        await store.admit("anna", "requests", 1, 30.0)
    assert await store.admit("anna", "requests", 1, 30.0) < first


async def test_owners_and_names_are_counted_separately(store):
    assert await counted(store, 3, 2) == 2
    assert await counted(store, 3, 2, owner="berta") == 2
    assert await store.admit("anna", "others", 2, 60.0) == 0.0


async def test_a_higher_limit_holds_at_once(store):
    assert await counted(store, 3, 2) == 2
    assert await counted(store, 3, 4) == 2


async def test_a_window_from_a_wrong_clock_locks_no_caller_out(store):
    await store.admit("anna", "requests", 1, 60.0)
    await _begin_later(store, 100_000.0)
    assert await store.admit("anna", "requests", 1, 60.0) == 0.0
    assert 0.0 < await store.admit("anna", "requests", 1, 60.0) <= 60.0


async def test_however_many_windows_there_were_one_row_remains(store):
    for _ in range(5):
        await store.admit("anna", "requests", 1, 0.001)
        await asyncio.sleep(0.005)
    assert await _read(store, "SELECT count(*) FROM rate") == 1


@pytest.mark.parametrize("name", ["", "'; DROP TABLE rate; --"])
async def test_characters_of_a_name_have_no_special_meaning(store, name):
    assert await store.admit("anna", name, 1, 60.0) == 0.0
    assert await store.admit("anna", name, 1, 60.0) > 0.0


async def _begin_later(store, seconds: float) -> None:
    def work(db) -> None:
        db.execute(f"UPDATE rate SET began = began + {seconds}")

    await (store.writer.submit(work) if hasattr(store, "writer") else store.connections.submit("writes", work))


async def _read(store, sql: str) -> int:
    def work(db) -> int:
        return int(db.execute(sql).fetchone()[0])

    return int(
        await (store.writer.submit(work) if hasattr(store, "writer") else store.connections.submit("reads", work))
    )

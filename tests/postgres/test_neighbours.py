"""A worker's place among the others of its store."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from everloop.dispatch.neighbours import Neighbours, _socket_path
from everloop.store.postgres.store import PostgresStore
from everloop.store.sqlite import SQLiteStore
from everloop.store.workers import new_worker, retire


def ears_of(store: Any) -> list[object]:
    """Where this process hears of what happens in the store."""
    if isinstance(store, PostgresStore):
        return list(store.pulse._listeners)
    return [one for one in os.listdir(_socket_path().parent) if one.startswith(f"{os.getpid()}-")]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_whoever_leaves_before_it_has_joined_leaves_nothing_behind(
    kind: str, tmp_path: Path, database: str
) -> None:
    store = SQLiteStore(tmp_path / "store.db") if kind == "sqlite" else PostgresStore(database)
    worker = new_worker()
    for quarter in range(16):
        place = Neighbours(store, worker, lambda _: None)
        joining = asyncio.create_task(place.join())
        await asyncio.sleep(quarter / 4000)
        await place.leave()
        await joining
        assert await asyncio.to_thread(ears_of, store) == []
    assert await store.workers() == []
    retire(worker)
    await store.close()

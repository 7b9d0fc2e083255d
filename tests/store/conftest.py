"""The stores that the suite runs with, and workers that use them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from everloop.store.base import Store
from everloop.store.peers import new_worker, retire

from .postgres.fixtures import database as database
from .postgres.fixtures import postgres as postgres


def in_sqlite(place: Path) -> Store:
    from everloop.store.sqlite import SQLiteStore

    return SQLiteStore(place / "store.db")


def in_postgres(place: str) -> Store:
    from everloop.store.postgres.store import PostgresStore

    return PostgresStore(place)


# For each one, the fixture that says where it is, and how to open it.
STORES: dict[str, tuple[str, Callable[[Any], Store]]] = {
    "sqlite": ("tmp_path", in_sqlite),
    "postgres": ("database", in_postgres),
}


@pytest.fixture(params=STORES)
async def opened(request) -> AsyncIterator[Callable[[], Awaitable[Store]]]:
    """Opens the same store, as often as it is called."""
    where, open_there = STORES[request.param]
    place = request.getfixturevalue(where)
    stores: list[Store] = []

    async def open_store() -> Store:
        stores.append(open_there(place))
        return stores[-1]

    yield open_store
    for store in stores:
        await store.close()


@pytest.fixture
async def store(opened) -> Store:
    return await opened()


@pytest.fixture
def workers() -> Any:
    made = [new_worker() for _ in range(3)]
    yield made
    for worker in made:
        retire(worker)


@pytest.fixture
def me(workers) -> str:
    return workers[0]


@pytest.fixture
def other(workers) -> str:
    return workers[1]

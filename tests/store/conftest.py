"""The stores that the suite is run with, and workers that use them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from everloop.store.base import Store
from everloop.store.workers import new_worker, retire


async def sqlite(folder: Path) -> Store:
    from everloop.store.sqlite import SQLiteStore

    return SQLiteStore(folder / "store.db")


STORES: dict[str, Callable[[Path], Awaitable[Store]]] = {"sqlite": sqlite}


@pytest.fixture(params=STORES)
async def opened(request, tmp_path) -> AsyncIterator[Callable[[], Awaitable[Store]]]:
    """Opens the same store, as often as it is asked to."""
    stores: list[Store] = []

    async def open_store() -> Store:
        stores.append(await STORES[request.param](tmp_path))
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

"""A job service whose clock is set by the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everloop.cron.service import CronService
from everloop.store.sqlite import SQLiteStore

from .clock import Clock


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SQLiteStore]:
    store = SQLiteStore(tmp_path / "store.db")
    yield store
    await store.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(store: SQLiteStore, clock: Clock) -> CronService:
    return CronService(store, clock=clock)

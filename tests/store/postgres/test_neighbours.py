"""A worker among the other workers of its store."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from everloop.errors import StoreError
from everloop.store.peers import new_worker, retire
from everloop.store.postgres.heartbeat import RENEW
from everloop.store.postgres.notify import NotifiedPeer
from everloop.store.postgres.store import PostgresStore
from everloop.store.sqlite import SQLiteStore
from everloop.store.sqlite.peers import _socket_path

from .wrapped import Wrapped


def ears_of(store: Any) -> list[object]:
    """The notices that this process gets of the store."""
    if isinstance(store, PostgresStore):
        return list(store.heartbeat._listeners)
    return [one for one in os.listdir(_socket_path().parent) if one.startswith(f"{os.getpid()}-")]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_worker_that_leaves_before_it_has_joined_leaves_nothing_behind(
    kind: str, tmp_path: Path, database: str
) -> None:
    store = SQLiteStore(tmp_path / "store.db") if kind == "sqlite" else PostgresStore(database)
    worker = new_worker()
    for quarter in range(16):
        place = store.peer(worker, lambda _: None)
        joining = asyncio.create_task(place.join())
        await asyncio.sleep(quarter / 4000)
        await place.leave()
        await joining
        assert await asyncio.to_thread(ears_of, store) == []
    await nobody_is_known(store)
    retire(worker)
    await store.close()


async def nobody_is_known(store: Any) -> None:
    """Soon: a beat in progress may briefly report the earlier state. The one after it comes after 5 seconds."""
    end = time.monotonic() + 4
    while found := await store.workers():
        assert time.monotonic() < end, found
        await asyncio.sleep(0.01)


class LateStore(PostgresStore):
    """Records no worker as alive until told to."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.gate = asyncio.Event()

    async def join(self, worker: str, address: str) -> None:
        await self.gate.wait()
        await super().join(worker, address)


@pytest.mark.parametrize("step", ["join", "rest"])
async def test_a_late_write_does_not_bring_back_a_worker_that_has_left(step: str, database: str) -> None:
    store = LateStore(database)
    worker = new_worker()
    place = NotifiedPeer(store, worker, lambda _: None, True)
    if step == "rest":
        store.gate.set()
        await place.join()
        store.gate.clear()
    coming = asyncio.create_task(place.join() if step == "join" else place.drain())
    await asyncio.sleep(0)
    await place.leave()
    store.gate.set()
    await coming
    await nobody_is_known(store)
    assert ears_of(store) == []
    retire(worker)
    await store.close()


async def test_a_beat_in_progress_does_not_bring_back_a_worker_that_has_left(database: str) -> None:
    """The worker leaves after the beat has looked up the workers and before it has written."""
    store = PostgresStore(database)
    worker, loop = new_worker(), asyncio.get_running_loop()
    connect, beats = store.heartbeat._connect, asyncio.Semaphore(0)

    class Beating(Wrapped):
        def execute(self, query: str, values: Any = ()) -> Any:
            if query != RENEW or values[1][0] is None:
                return self.real.execute(query, values)
            asyncio.run_coroutine_threadsafe(store.leave(worker), loop).result(20)
            done = self.real.execute(query, values)
            loop.call_soon_threadsafe(beats.release)
            return done

    store.heartbeat._connect = lambda: Beating(connect())  # type: ignore[assignment,return-value]
    await store.join(worker, "ear")
    await asyncio.wait_for(beats.acquire(), 10)
    await nobody_is_known(store)
    retire(worker)
    await store.close()


async def test_a_folder_whose_name_is_too_long_for_sockets_is_reported(tmp_path, monkeypatch) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    store, worker = SQLiteStore(tmp_path / "store.db"), new_worker()
    place = store.peer(worker, lambda _: None)
    try:
        with pytest.raises(StoreError, match="set XDG_RUNTIME_DIR to a folder with a shorter name"):
            await place.join()
    finally:
        await place.leave()
        retire(worker)
        await store.close()

"""A worker's membership among the workers of its store: joining, draining and leaving."""

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


def listeners_of(store: Any) -> list[object]:
    """Return what receives notices of the store in this process."""
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
        peer = store.peer(worker, lambda _: None)
        joining = asyncio.create_task(peer.join())
        await asyncio.sleep(quarter / 4000)
        await peer.leave()
        await joining
        assert await asyncio.to_thread(listeners_of, store) == []
    await no_worker_is_known(store)
    retire(worker)
    await store.close()


async def no_worker_is_known(store: Any) -> None:
    """Wait: a renewal in progress may briefly write the earlier state. The one after it comes after 5 seconds."""
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


@pytest.mark.parametrize("step", ["join", "drain"])
async def test_a_late_write_does_not_bring_back_a_worker_that_has_left(step: str, database: str) -> None:
    store = LateStore(database)
    worker = new_worker()
    peer = NotifiedPeer(store, worker, lambda _: None, True)
    if step == "drain":
        store.gate.set()
        await peer.join()
        store.gate.clear()
    coming = asyncio.create_task(peer.join() if step == "join" else peer.drain())
    await asyncio.sleep(0)
    await peer.leave()
    store.gate.set()
    await coming
    await no_worker_is_known(store)
    assert listeners_of(store) == []
    retire(worker)
    await store.close()


async def test_a_renewal_in_progress_does_not_bring_back_a_worker_that_has_left(database: str) -> None:
    """The worker leaves after the heartbeat has looked up the workers and before it writes them."""
    store = PostgresStore(database)
    worker, loop = new_worker(), asyncio.get_running_loop()
    connect, renewals = store.heartbeat._connect, asyncio.Semaphore(0)

    class Renewing(Wrapped):
        def execute(self, query: str, values: Any = ()) -> Any:
            if query != RENEW or values[1][0] is None:
                return self.real.execute(query, values)
            asyncio.run_coroutine_threadsafe(store.leave(worker), loop).result(20)
            done = self.real.execute(query, values)
            loop.call_soon_threadsafe(renewals.release)
            return done

    store.heartbeat._connect = lambda: Renewing(connect())  # type: ignore[assignment,return-value]
    await store.join(worker, "ear")
    await asyncio.wait_for(renewals.acquire(), 10)
    await no_worker_is_known(store)
    retire(worker)
    await store.close()


async def test_a_folder_whose_name_is_too_long_for_sockets_is_reported(tmp_path, monkeypatch) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    store, worker = SQLiteStore(tmp_path / "store.db"), new_worker()
    peer = store.peer(worker, lambda _: None)
    try:
        with pytest.raises(StoreError, match="set XDG_RUNTIME_DIR to a folder with a shorter name"):
            await peer.join()
    finally:
        await peer.leave()
        retire(worker)
        await store.close()

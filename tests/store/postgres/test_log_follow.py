"""`everloop log --follow` on PostgreSQL: notified of entries, whatever writes them, and silent otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from everloop.bus import InboundMessage
from everloop.cli import log as following
from everloop.cli.log import Query, SessionEvent
from everloop.config import Config
from everloop.config.sources import DSN
from everloop.log import ModelAnswered, Noted, TurnEnded
from everloop.store.peers import new_worker, retire
from everloop.store.postgres.notify import LogWatch
from everloop.store.postgres.store import PostgresStore


@pytest.fixture
async def store(database: str) -> AsyncIterator[PostgresStore]:
    made = PostgresStore(database)
    yield made
    await made.close()


def said(text: str = "hi") -> InboundMessage:
    return InboundMessage("test", "user", "1", text).addressed()


async def test_every_write_to_a_log_is_notified_and_nothing_else(database, store):
    other = PostgresStore(database)
    watch = LogWatch(other)
    worker = new_worker()
    await watch.start()
    try:
        assert not await heard(watch, 0.5)
        await store.accept(said())
        assert not await heard(watch, 0.5)
        claim = await store.begin("me", "test:1", worker)
        assert claim is not None
        assert await heard(watch)
        await store.append(claim, [ModelAnswered("one")], flush=False)
        assert await heard(watch)
        await store.finish(claim, [TurnEnded("answer", "one")])
        assert await heard(watch)
        await store.note("me", "test:2", [Noted({"role": "user", "content": "two"})])
        assert await heard(watch)
    finally:
        await watch.close()
        await other.close()
        retire(worker)


async def heard(watch: LogWatch, seconds: float = 20) -> bool:
    try:
        await asyncio.wait_for(watch.changed(), seconds)
    except TimeoutError:
        return False
    return True


async def test_without_followers_nothing_is_notified(database, store, postgres):
    other = PostgresStore(database)
    watch = LogWatch(other)
    await watch.start()
    await watch.close()
    await store.note("me", "test:2", [Noted({"role": "user", "content": "two"})])
    assert not await heard(watch, 0.5)
    await other.close()


async def test_a_follower_shows_what_another_process_writes_and_does_not_poll(database, store, tmp_path, monkeypatch):
    looks: list[float] = []
    look = following.Follower.look

    async def counted(self: Any, limit: int | None = None) -> None:
        looks.append(asyncio.get_running_loop().time())
        await look(self, limit)

    monkeypatch.setattr(following, "AGAIN_SECONDS", ())
    monkeypatch.setattr(following.Follower, "look", counted)
    seen: asyncio.Queue[SessionEvent] = asyncio.Queue()
    config = Config(store=DSN(database), home=tmp_path)
    await store.note("me", "test:1", [Noted({"role": "user", "content": "before"})])
    follow = asyncio.create_task(following.follow(config, Query("me", every=True), seen.put_nowait))  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(30):
            assert (await seen.get()).session == "test:1"
        await asyncio.sleep(0.6)
        before = len(looks)
        await asyncio.sleep(1.0)
        assert len(looks) == before
        await store.note("me", "test:2", [Noted({"role": "user", "content": "after"})])
        async with asyncio.timeout(30):
            assert (await seen.get()).session == "test:2"
    finally:
        follow.cancel()
        await asyncio.wait([follow])

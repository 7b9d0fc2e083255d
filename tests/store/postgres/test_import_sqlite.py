"""`everloop migrate`: everything arrives, or nothing does."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from everloop.bus import InboundMessage, OutboundMessage
from everloop.config.sources import DSN
from everloop.errors import StoreError
from everloop.log import Call, CallsAsked, Cleared, Compacted, ModelAnswered, Noted, TurnEnded
from everloop.store.base import Spent, Store, Timer, Waiting
from everloop.store.peers import new_worker, retire
from everloop.store.postgres import import_sqlite
from everloop.store.postgres.store import PostgresStore
from everloop.store.sqlite import SQLiteStore
from everloop.store.tokens import hash_of, new_token
from tests.support.commands import everloop

OWNERS = ("me", "anna")


@asynccontextmanager
async def opened(store: Any) -> AsyncIterator[Any]:
    try:
        yield store
    finally:
        await store.close()


def said(text: str, chat: str = "1", **options: Any) -> InboundMessage:
    return InboundMessage("test", "user", chat, text, **options).addressed()


async def fill(store: Store, worker: str) -> None:
    """Some of everything that a store keeps."""
    for owner in OWNERS:
        for n in range(3):
            claim = await store.begin(owner, "test:1", worker, said(f"é 😀 \0 {n}", owner=owner, id=f"m{n}"))
            assert claim is not None
            claim.spent.append(Spent("day", 5, 0.25))
            await store.append(claim, [ModelAnswered("beans and peas")])
            await store.post(claim, OutboundMessage("test", "1", "by a tool"), f"{owner}{n}", worker)
            await store.finish(claim, [TurnEnded("answer", f"{n}")], [OutboundMessage("test", "1", f"{owner} {n}")])
        await store.note(owner, "test:1", [Cleared(), Noted({"role": "user", "content": "x"}), Compacted(11, "s")])
        await store.accept(said("waits", owner=owner))
        asked = await store.begin(owner, "test:2", worker, said("may I?", "2", owner=owner))
        assert asked is not None
        await store.park(asked, [ModelAnswered(None, (Call("a", "exec"),)), CallsAsked(("a",), "?")])
        cut_off = await store.begin(owner, "test:3", worker, said("cut off", "3", owner=owner))
        assert cut_off is not None
        await store.append(cut_off, [ModelAnswered("half")])
        await store.release(cut_off)
        await store.set_timer(Timer(owner, "t", 12.5, {"x": [1, None]}))
        await store.keep_request_texts(owner, "", {"h": '"the prompt"'})
        await store.keep_request_texts(owner, "test:1", {"g": '"of a task"'})
        await store.note_flushes({asked.inbox[0]: 0.25})
    await store.add_token("laptop", "anna", hash_of("ev_secret"))
    revoked = await store.add_token("old", "anna", hash_of(new_token()))
    await store.revoke_token(revoked.id)


async def everything(store: Store) -> dict[str, Any]:
    """Return everything that can be read of it."""
    seen: dict[str, Any] = {"timers": await store.timers(), "tokens": await store.tokens()}
    for owner in OWNERS:
        for info in await store.sessions(owner):
            log = await store.read_log(info.id)
            seen[f"{owner}/{info.key}"] = (info.id, info.history_from, info.compacted, info.open_turn, info.parked, log)
        seen[f"{owner} turns"] = await store.turns(owner)
        seen[f"{owner} waiting"] = await store.waiting(owner, "test:1")
        seen[f"{owner} spent"] = await store.spent(owner, ["day"])
        seen[f"{owner} found"] = {found.text for found in await store.search(owner, "beans", 50)}
        seen[f"{owner} sent"] = await store.request_texts(owner, ["g", "h"])
        seen[f"{owner} known"] = await store.find(owner, "m1")
    return seen


@pytest.fixture
async def filled(tmp_path) -> Path:
    worker = new_worker()
    async with opened(SQLiteStore(tmp_path / "old.db")) as store:
        await fill(store, worker)
    retire(worker)
    return tmp_path / "old.db"


async def test_everything_arrives_and_work_resumes_where_it_stood(filled, database, postgres):
    done = await everloop("migrate", str(filled), database)
    assert (done.status, done.err) == (0, "")
    assert "6 sessions" in done.out
    worker = new_worker()
    async with opened(SQLiteStore(filled)) as old, opened(PostgresStore(database)) as new:
        before, after = await everything(old), await everything(new)
        assert after == before
        sent = [(row.message.content, row.message.repeat) for row in await new.take_outgoing(worker)]
        assert sent == [(row.message.content, row.message.repeat) for row in await old.take_outgoing(worker)]
        resumed = await new.begin("anna", "test:3", worker)
        assert resumed is not None
        assert resumed.resumed
        assert resumed.fence > 1
        await new.finish(resumed, [TurnEnded("answer", "done")])
        with pytest.raises(Waiting):
            await new.begin("anna", "test:2", worker)
        assert await new.decide("anna", "test:2", True) is not None
        row = await new.accept(said("newer", "9"))  # numbers continue after those that were moved
        assert row.id > max(waiting.id for owner in OWNERS for waiting in before[f"{owner} waiting"])
    retire(worker)


async def test_a_database_with_contents_is_refused_and_not_touched(filled, database, postgres):
    async with opened(PostgresStore(database)) as store:
        await store.set_timer(Timer("me", "precious", 1.0, {}))
        done = await everloop("migrate", str(filled), database)
        assert done.status == 2
        assert len(done.err.splitlines()) == 1
        assert [timer.id for timer in await store.timers()] == ["precious"]
        assert await store.sessions("me") == []


async def test_the_same_file_is_not_moved_twice(filled, database):
    assert (await everloop("migrate", str(filled), database)).status == 0
    assert (await everloop("migrate", str(filled), database)).status == 2


async def test_a_file_that_is_in_use_is_refused(filled, database):
    worker = new_worker()
    async with opened(SQLiteStore(filled)) as store:
        await store.join(worker, "/nowhere")
        with pytest.raises(StoreError):
            await asyncio.to_thread(import_sqlite.import_store, filled, DSN(database))
        await store.leave(worker)
        await asyncio.to_thread(import_sqlite.import_store, filled, DSN(database))
    retire(worker)


@pytest.mark.parametrize("where", ["entry", "inbox", "token"])
async def test_a_failure_in_the_middle_leaves_nothing_behind(filled, database, where, monkeypatch):
    columns = {**import_sqlite.TABLES, where: (*import_sqlite.TABLES[where], "missing")}
    monkeypatch.setattr(import_sqlite, "TABLES", columns)
    with pytest.raises(StoreError) as raised:
        await asyncio.to_thread(import_sqlite.import_store, filled, DSN(database))
    assert len(str(raised.value).splitlines()) == 1
    async with opened(PostgresStore(database)) as store:
        assert await store.sessions("me") == []
        assert await store.tokens() == []


async def test_a_log_that_arrives_changed_is_detected_and_nothing_is_kept(filled, database, monkeypatch):
    real = import_sqlite._fits

    def altered(table: str, columns: tuple[str, ...], row: tuple[Any, ...], value: Any, n: int) -> Any:
        return real(table, columns, row, value.replace("half", "more") if isinstance(value, str) else value, n)

    monkeypatch.setattr(import_sqlite, "_fits", altered)
    with pytest.raises(StoreError, match="session 3"):
        await asyncio.to_thread(import_sqlite.import_store, filled, DSN(database))
    async with opened(PostgresStore(database)) as store:
        assert await store.sessions("me") == []


async def test_what_cannot_be_a_store_is_one_line(tmp_path, database):
    (tmp_path / "text.db").write_text("no database at all, only text, and a good deal of it" * 20)
    with closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("CREATE TABLE shopping (list TEXT)")
    (tmp_path / "empty.db").touch()
    for name in ("text.db", "other.db", "empty.db", "missing.db"):
        done = await everloop("migrate", str(tmp_path / name), database)
        assert done.status == 2
        assert len(done.err.splitlines()) == 1
    for arguments in ((database, database), (str(tmp_path / "text.db"), str(tmp_path / "b.db"))):
        done = await everloop("migrate", *arguments)
        assert done.status == 2
        assert len(done.err.splitlines()) == 1

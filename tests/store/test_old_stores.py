"""Stores of an earlier version are opened, migrated and used.

The fixtures (SQLite schema 7, PostgreSQL schema 3) were left by a killed worker: an answered session with a compaction,
an open turn interrupted inside a call, a message after it, a parked turn, unsent answers, one of them taken by the dead
worker, another owner's session, a timer, tokens, spent tokens, a rate and a search index.
"""

from __future__ import annotations

import asyncio
import gzip
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, tool
from everloop.config import Config, Rule
from everloop.log import CallEnded, CallsDecided, Compacted
from everloop.runtime.durable_bus import DurableBus
from everloop.store.base import Store
from everloop.store.peers import new_worker, retire
from everloop.store.postgres.store import PostgresStore
from everloop.store.sqlite import SQLiteStore
from everloop.store.tokens import hash_of
from everloop.testing import ScriptedProvider

from .postgres.server import Server
from .steps import log_of, message

FIXTURES = Path(__file__).parent / "fixtures"
LEASE_SECONDS = 2.0
ANNAS_TOKEN = f"""INSERT INTO token (id, hash, name, owner, created_at)
    VALUES ('anna', '{hash_of("ev_anna")}', 'phone', 'anna', 1)"""


@pytest.fixture(params=["sqlite", "postgres"])
async def old(request, tmp_path) -> AsyncIterator[Store]:
    """The store of an earlier version, opened by this one."""
    if request.param == "sqlite":
        (tmp_path / "old.db").write_bytes(gzip.decompress((FIXTURES / "store-v7.db.gz").read_bytes()))
        with closing(sqlite3.connect(tmp_path / "old.db", isolation_level=None)) as db:
            db.execute(ANNAS_TOKEN)
        store: Any = SQLiteStore(tmp_path / "old.db")
        yield store
        await store.close()
        return
    server: Server = request.getfixturevalue("postgres")
    name = f"old_{tmp_path.name}".replace("-", "_").lower()[:60]
    server.sql(f'CREATE DATABASE "{name}"')
    try:
        server.sql((FIXTURES / "store-v3.sql").read_text(), database=name)
        server.sql(ANNAS_TOKEN, database=name)
        store = PostgresStore(server.dsn(name), lease_seconds=LEASE_SECONDS)
        yield store
        await store.close()
    finally:
        server.sql(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


async def test_all_data_is_still_there(old):
    infos = {info.key: info for info in await old.sessions("me")}
    assert infos.keys() == {"test:1", "test:open", "test:parked"}
    assert infos["test:parked"].parked
    assert infos["test:open"].open_turn is not None
    assert infos["test:1"].compacted == 7
    assert isinstance((await log_of(old))[6], Compacted)
    assert [info.key for info in await old.sessions("you")] == ["test:1"]
    assert [(timer.id, timer.due_at, timer.data) for timer in await old.timers("me")] == [
        ("job-1", 4102444800.0, {"name": "water"})
    ]
    assert await old.spent("me", ["day:2026-11-15"]) == {"day:2026-11-15": (12, 0.5)}
    assert {turn.reason for turn in await old.turns("me")} == {"answer", None}
    assert (await old.find("me", "m-1")).done


async def test_tokens_keep_their_rights_and_revoked_ones_stay_revoked(old):
    token = await old.token(hash_of("ev_fixture-token"))
    assert (token.name, token.owner) == ("laptop", "me")
    assert token.rights == {"use", "admin"}  # the machine's own person could see the numbers of all owners
    assert (await old.token(hash_of("ev_anna"))).rights == {"use"}
    assert await old.token(hash_of("ev_revoked-token")) is None


async def test_the_search_index_continues(old):
    assert [found.text for found in await old.search("me", "heron")] == ["Where is the heron?"]
    await old.accept(message())
    worker = new_worker()
    try:
        claim = await old.begin("you", "test:2", worker, message("A second heron.", "2", owner="you"))
        await old.release(claim)
        assert {found.text for found in await old.search("you", "heron")} == {
            "The heron of another owner.",
            "A second heron.",
        }
    finally:
        retire(worker)


async def test_the_open_turn_is_finished_the_parked_one_approved_and_the_answers_are_sent(old, tmp_path):
    launched: list[str] = []

    @tool
    async def launch(name: str) -> str:
        """Launch a rocket."""
        launched.append(name)
        return f"{name} is up"

    def model(messages: list[Any], tools: Any) -> str:
        last = messages[-1]
        return f"[{last['content']}]" if isinstance(last["content"], str) else "[…]"

    config = Config(policy=(Rule(do="ask", tool="launch", why="rockets are dear"),))
    provider = ScriptedProvider([model], repeat_last=True)
    if isinstance(old, PostgresStore):  # the dead worker's lease counts from the start of the server
        await _free(old)
    bus = DurableBus(old)
    (tmp_path / "workspace").mkdir()
    async with AgentLoop(bus, provider, tmp_path / "workspace", config=config, store=old) as agent:
        agent.tools.register(launch)
        await agent.resume("test:open")
        assert launched == []
        entries = await log_of(old, "test:open")
        (ended,) = [entry for entry in entries if isinstance(entry, CallEnded)]
        assert (ended.id, ended.status) == ("c2", "interrupted")
        answer = await agent.process_direct("/approve", "test:parked", attended=True)
        assert launched == ["ada"]
        assert "ada is up" in answer
    assert any(isinstance(entry, CallsDecided) and entry.allowed for entry in await log_of(old, "test:parked"))
    sent = await _sent(old)
    assert ("test", "1", "At the lake.", True) in sent
    assert ("slack", "9", "In the river.", False) in sent
    assert ("test", "parked", "May I launch ada?", False) in sent
    opened = [text for channel, chat, text, _ in sent if (channel, chat) == ("test", "open")]
    assert len(opened) == 2
    assert "interrupted" in opened[0]
    assert "Who is up?" in opened[1]
    seen = await old.overview()
    assert (seen.waiting, seen.open_turns, seen.parked_turns, seen.damaged) == (0, 0, 0, 0)


async def _free(store: Store) -> None:
    """Wait until the dead worker's sessions can be taken."""
    worker = new_worker()
    try:
        while ("me", "test:open") not in await store.ready(worker):
            await asyncio.sleep(0.05)
    finally:
        retire(worker)


async def _sent(store: Store) -> list[tuple[str, str, str, bool]]:
    worker = new_worker()
    try:
        rows = await store.take_outgoing(worker)
        await store.sent([row.id for row in rows])
        return [(row.message.channel, row.message.chat_id, row.message.content, row.message.repeat) for row in rows]
    finally:
        retire(worker)

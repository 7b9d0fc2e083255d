"""The overview of a PostgreSQL store: workers of other machines, and what it costs."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psycopg

from everloop.bus import InboundMessage
from everloop.store.overview import PATIENCE
from everloop.store.postgres.overview import OVERVIEW
from everloop.store.postgres.store import PostgresStore
from everloop.testing.openai_server import FakeOpenAI
from tests.support.commands import environment, everloop, finished, start

ELSEWHERE = "anothermachine.1.77.88.1"


def said(chat: str = "1") -> InboundMessage:
    return InboundMessage("test", "user", chat, "hi").addressed()


async def run(dsn: str, query: str) -> list[Any]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        done = await connection.execute(query)
        return await done.fetchall() if done.description else []


async def test_a_remote_worker_is_silent_while_it_does_not_renew_and_then_dead(database):
    store = PostgresStore(database, lease_seconds=30.0)
    try:
        await store.begin("me", "test:1", ELSEWHERE, said())
        await store.begin("me", "test:2", ELSEWHERE, said("2"))
        await run(database, "UPDATE worker SET at = at - 20")
        seen = await store.overview()
        (worker,) = seen.workers
        assert (worker.id, worker.process, worker.held) == (ELSEWHERE, 77, 2)
        assert 20.0 <= worker.silent < 30.0
        assert (seen.held, seen.unheld_count) == (2, 0)
        # No lease has had time to expire since the server started, so the test shortens the lease instead.
        late = PostgresStore(database, lease_seconds=0.0)
        try:
            seen = await late.overview()
            assert (seen.workers, seen.held) == ((), 0)
            assert [one.key for one in seen.unheld] == ["test:1", "test:2"]
        finally:
            await late.close()
    finally:
        await store.close()


async def test_work_is_free_since_its_worker_last_renewed(database):
    store = PostgresStore(database, lease_seconds=0.0)
    try:
        await store.begin("me", "test:1", ELSEWHERE, said())
        await run(database, "UPDATE session SET updated_at = updated_at - 1000")
        await run(database, "UPDATE inbox SET at = at - 1000")
        assert (await store.overview()).waited_out == 0
        await run(database, f"UPDATE worker SET at = at - {PATIENCE + 1}")
        assert (await store.overview()).waited_out == 1
    finally:
        await store.close()


async def test_finished_work_costs_nothing(database):
    store = PostgresStore(database)
    try:
        await store.accept(said())
    finally:
        await store.close()
    await run(
        database,
        """INSERT INTO session (owner, key, created_at, updated_at) SELECT 'me', 's' || n, 1, 1
            FROM generate_series(1, 3000) n;
        INSERT INTO inbox (owner, session, kind, state, data, at, opened)
            SELECT 'me', id, 'message', 'done', repeat('x', 300), 1, true FROM session, generate_series(1, 10)
            WHERE key LIKE 's%';
        INSERT INTO outbox (owner, session, data, at, sent_at)
            SELECT 'me', id, repeat('x', 300), 1, 1 FROM session, generate_series(1, 10);
        ANALYZE""",
    )
    plan = OVERVIEW
    for name, value in {"living": "'{}'::text[]", "counted": "10000", "most": "100", "patience": "10"}.items():
        plan = plan.replace(f"%({name})s", value)
    lines = [row[0] for row in await run(database, f"EXPLAIN {plan}")]
    assert [line for line in lines if "Scan on inbox" in line or "Scan on outbox" in line] == []
    assert any("inbox_open" in line for line in lines)
    assert any("outbox_waiting" in line for line in lines)


async def test_doctor_shows_a_frozen_worker_as_silent_and_its_work_as_stuck(database):
    lease = "[worker]\nlease_seconds = 4.0\n"
    async with FakeOpenAI() as fake:
        home = Path(os.environ["EVERLOOP_HOME"])
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_text(lease)
        settings = {"EVERLOOP_STORE": database, "EVERLOOP_API_KEY": "k"}
        fake.hang(40)
        store = PostgresStore(database)
        await store.accept(said("frozen"))
        await store.close()
        worker = await start("worker", env=environment(fake, **settings))
        try:
            async with asyncio.timeout(30):
                while not fake.requests:
                    await asyncio.sleep(0.05)
            seen = await everloop("doctor", "--json", server=fake, **settings)
            assert seen.status == 0, seen.out
            assert [(one["key"], one["owner"]) for one in seen.json["work"]["leases"]] == [("test:frozen", "me")]
            assert {one["process"] for one in seen.json["work"]["workers"]} == {worker.pid}
            worker.send_signal(signal.SIGSTOP)
            await asyncio.sleep(4.5)
            seen = await everloop("doctor", "--json", server=fake, **settings)
            assert seen.status == 1, seen.out
            assert seen.json["work"]["workers"] == []
            assert [one["key"] for one in seen.json["work"]["stuck"]] == ["test:frozen"]
            (failing,) = [check for check in seen.json["checks"] if not check["ok"]]
            assert (failing["name"], failing["fix"]) == ("sessions", "everloop worker")
        finally:
            worker.kill()
            await finished(worker)

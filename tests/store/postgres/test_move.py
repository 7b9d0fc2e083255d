"""`everloop move`: one owner's data goes to another database, and all others stay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from everloop.bus import InboundMessage
from everloop.config.sources import DSN
from everloop.errors import StoreError
from everloop.log import ModelAnswered, TurnEnded
from everloop.store.peers import new_worker, retire
from everloop.store.postgres.move_owner import move_owner
from everloop.store.postgres.store import PostgresStore
from tests.support.commands import everloop

from .server import Server
from .test_migrate import fill, opened

CHAT = "(SELECT key FROM session s WHERE s.id = session)"
TABLES = {
    "session": "key, fence, history_from, compacted, created_at, updated_at, title",
    "entry": "{chat}, seq, turn, kind, data, at",
    "inbox": "{chat}, at, message_id, kind, state, data, turn, first_seq, opened, flushed",
    "outbox": "{chat}, at, turn, data, tries, sent_at, key, channel, chat_id",
    "timer": "id, due_at, data",
    "spent": "scope, tokens, cost",
    "token": "id, hash, name, created_at, rights",
    "file_mark": "digest, tainted, path",
    "session_grant": "key, name, at",
    "request_text": "hash, key, data, at",
}
# 10,000 turns of four entries each over 50 sessions, without going through the store.
MANY = """
INSERT INTO session (owner, key, fence, created_at, updated_at)
    SELECT 'anna', 'test:' || n, 200, n, n FROM generate_series(1, 50) AS n;
INSERT INTO inbox (owner, session, message_id, kind, state, data, at, turn, first_seq, opened, ended_at, reason)
    SELECT 'anna', s.id, s.id || '-' || n, 'message', 'done', '{"content": "' || repeat('x', 200) || '"}', n,
        s.id || 't' || n, 4 * n - 3, true, n, 'answer' FROM session s, generate_series(1, 200) AS n;
INSERT INTO outbox (owner, session, turn, data, tries, at, sent_at, channel, chat_id)
    SELECT 'anna', session, turn, data, 1, at, at, 'test', '1' FROM inbox;
INSERT INTO entry (session, seq, turn, kind, data, at)
    SELECT s.id, n, s.id || 't' || (n + 3) / 4, 'answer', '{"content": "' || repeat('y', 800) || '"}', n
    FROM session s, generate_series(1, 800) AS n;
"""


@pytest.fixture
def other(postgres: Server) -> Iterator[str]:
    with postgres.database() as dsn:
        yield dsn


@pytest.fixture
def worker() -> Iterator[str]:
    name = new_worker()
    yield name
    retire(name)


def rows(postgres: Server, dsn: str, owner: str) -> dict[str, Any]:
    name = dsn.partition("@/")[2].partition("?")[0]
    whose = {"entry": "(SELECT owner FROM session s WHERE s.id = session)"}
    found = {}
    for table, columns in TABLES.items():
        query = (
            f"SELECT {columns.format(chat=CHAT)} FROM {table} WHERE {whose.get(table, 'owner')} = %s ORDER BY 1, 2, 3"
        )
        found[table] = postgres.sql(query, owner, database=name)
    return found


async def filled(postgres: Server, dsn: str, worker: str) -> None:
    """Some of everything, and no worker at work on it."""
    async with opened(PostgresStore(dsn)) as store:
        await fill(store, worker)
        await store.release_all(worker)
    name = dsn.partition("@/")[2].partition("?")[0]
    await asyncio.to_thread(postgres.sql, "UPDATE outbox SET worker = NULL", database=name)


async def test_everything_of_one_owner_arrives_and_all_others_stay(postgres, database, other, worker, tmp_path):
    await filled(postgres, database, worker)
    mine, theirs = rows(postgres, database, "anna"), rows(postgres, database, "me")
    assert all(
        mine[table] for table in ("session", "entry", "inbox", "outbox", "timer", "spent", "token", "request_text")
    )
    folder = tmp_path / "home" / "owners" / "anna" / "workspace" / "memory"
    await asyncio.to_thread(folder.mkdir, parents=True)
    await asyncio.to_thread((folder / "MEMORY.md").write_text, "likes peas")
    files = ("--files", str(tmp_path / "new"))
    done = await everloop("move", "anna", database, other, *files, EVERLOOP_HOME=str(tmp_path / "home"))
    assert (done.status, done.err) == (0, "")
    assert "the same, entry by entry" in done.out
    assert rows(postgres, other, "anna") == mine
    assert rows(postgres, database, "me") == theirs
    assert not any(rows(postgres, database, "anna").values())
    assert not any(rows(postgres, other, "me").values())
    copied = tmp_path / "new" / "owners" / "anna" / "workspace" / "memory" / "MEMORY.md"
    assert await asyncio.to_thread(copied.read_text) == "likes peas"
    async with opened(PostgresStore(other)) as store:
        ready = await store.ready(worker)
        assert ("anna", "test:3") in ready  # the interrupted turn continues
        claim = await store.begin("anna", "test:3", worker)
        assert claim is not None
        assert claim.resumed
        await store.finish(claim, [TurnEnded("answer", "done")])
        assert await store.search("anna", "peas") != []


async def test_a_move_interrupted_between_the_commits_is_completed_by_the_next(postgres, database, other, worker):
    await filled(postgres, database, worker)
    mine = rows(postgres, database, "anna")
    name = database.partition("@/")[2].partition("?")[0]
    postgres.sql(
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'cut off'; END$$", database=name
    )
    postgres.sql("CREATE TRIGGER no BEFORE DELETE ON session EXECUTE FUNCTION no()", database=name)
    with pytest.raises(StoreError, match="cut off"):
        await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other))
    assert rows(postgres, database, "anna") == rows(postgres, other, "anna") == mine
    postgres.sql("DROP TRIGGER no ON session", database=name)
    async with opened(PostgresStore(other)) as store:  # and the new one has continued
        await store.note("anna", "test:1", [])
        claim = await store.begin("anna", "test:3", worker)
        assert claim is not None
        await store.finish(claim, [TurnEnded("answer", "done")])
    await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other))
    assert not any(rows(postgres, database, "anna").values())
    assert len(rows(postgres, other, "anna")["entry"]) == len(mine["entry"]) + 1


async def test_work_continues_while_the_log_is_copied_and_arrives_too(postgres, database, other, worker):
    await filled(postgres, database, worker)
    there = other.partition("@/")[2].partition("?")[0]
    copying = "SELECT 1 FROM pg_stat_activity WHERE datname = %s AND state = 'idle in transaction'"
    async with opened(PostgresStore(database)) as store:
        claim = await store.begin("anna", "test:3", worker)
        assert claim is not None
        moving = asyncio.create_task(asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other)))
        async with asyncio.timeout(30):
            while not await asyncio.to_thread(postgres.sql, copying, there):  # it waits for the turn
                await asyncio.sleep(0.02)
        await store.append(claim, [ModelAnswered("more")])
        await store.accept(InboundMessage("test", "user", "9", "new", owner="anna").addressed())
        await store.finish(claim, [TurnEnded("answer", "done")])
        await moving
    assert not any(rows(postgres, database, "anna").values())
    async with opened(PostgresStore(other)) as store:
        info = await store.session("anna", "test:3")
        assert info is not None
        assert [type(one.entry) for one in await store.read_log(info.id)][-2:] == [ModelAnswered, TurnEnded]
        assert [row.message.content for row in await store.waiting("anna", "test:9")] == ["new"]


async def test_a_copy_that_fails_or_arrives_changed_moves_nothing(postgres, database, other, worker):
    await filled(postgres, database, worker)
    mine, there = rows(postgres, database, "anna"), other.partition("@/")[2].partition("?")[0]

    def fail() -> None:
        raise StoreError("the disk is full")

    with pytest.raises(StoreError, match="the disk is full"):
        await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other), fail)
    change = "CREATE FUNCTION change() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN NEW.at = 1; RETURN NEW; END$$"
    postgres.sql(change, database=there)
    postgres.sql("CREATE TRIGGER change BEFORE INSERT ON entry FOR EACH ROW EXECUTE FUNCTION change()", database=there)
    with pytest.raises(StoreError, match="arrived changed"):
        await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other))
    assert rows(postgres, database, "anna") == mine
    assert not any(rows(postgres, other, "anna").values())


async def test_what_cannot_be_moved_is_one_line(database, other, worker):
    async with opened(PostgresStore(database)) as store:
        claim = await store.begin(
            "anna", "test:1", worker, InboundMessage("t", "u", "1", "x", owner="anna").addressed()
        )
        assert claim is not None
        with pytest.raises(StoreError, match="working on test:1"):
            await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other), wait=0.2)
        await store.finish(claim, [TurnEnded("answer", "x")])
    for arguments in (
        ("nobody", database, other),
        ("anna", database, database),
        ("anna", database, "/some/file.db"),
        ("../anna", database, other),
    ):
        done = await everloop("move", *arguments)
        assert (done.status, len(done.err.splitlines())) == (2, 1), done


@pytest.mark.chaos
async def test_ten_thousand_turns_are_moved_within_five_seconds(postgres, database, other, capsys):
    await asyncio.to_thread(postgres.sql, MANY, database=database.partition("@/")[2].partition("?")[0])
    moved = await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other))
    with capsys.disabled():
        print(f"10,000 turns ({moved.rows['entry']:,} entries): the owner's work waited for {moved.pause:.1f} s")
    assert moved.rows["inbox"] == 10_000
    assert moved.pause <= 5

"""`everloop move`: one owner's data goes to another database, and all others stay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from everloop.bus import InboundMessage
from everloop.cli.stores import _Files
from everloop.config.sources import DSN
from everloop.errors import EverloopError, OwnerMoved, StoreError
from everloop.log import ModelAnswered, TurnEnded
from everloop.store.history_check import check_history
from everloop.store.postgres.move_owner import move_owner
from everloop.store.postgres.store import PostgresStore
from tests.support.commands import environment, everloop, start

from .server import Server, name_of
from .test_import_sqlite import fill, opened

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


def rows(postgres: Server, dsn: str, owner: str) -> dict[str, Any]:
    name = name_of(dsn)
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
    await unsent(postgres, dsn)


async def unsent(postgres: Server, dsn: str) -> None:
    """As when no worker has taken an answer to send it."""
    untaken = "UPDATE outbox SET tries = tries - 1, worker = NULL WHERE worker IS NOT NULL"
    await asyncio.to_thread(postgres.sql, untaken, database=name_of(dsn))


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


# Fails or delays each of the three commits of a move: by a trigger that runs at the end of the transaction.
COMMITS = {1: ("new", "INSERT"), 2: ("old", "DELETE"), 3: ("new", "UPDATE OF owner")}
AT_COMMIT = """
CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {does}; RETURN NULL; END$$;
CREATE CONSTRAINT TRIGGER at_commit AFTER {event} ON session DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION at_commit();
"""
LEFT = "SELECT count(*) FROM pg_class WHERE relname LIKE 'arriving%' AND relkind = 'r'"


async def cut_off(postgres: Server, old: str, new: str, commit: int, *, how: str) -> None:
    """Run a move whose commit fails, or which is killed while it waits for that commit."""
    where, event = COMMITS[commit]
    name = name_of(old if where == "old" else new)
    does = "RAISE 'cut off'" if how == "refused" else "PERFORM pg_sleep(0.2)"
    await asyncio.to_thread(postgres.sql, AT_COMMIT.format(does=does, event=event), database=name)
    if how == "refused":
        with pytest.raises(StoreError, match="cut off"):
            await asyncio.to_thread(move_owner, "anna", DSN(old), DSN(new))
    else:
        command = await start("move", "anna", old, new, env=environment())
        commits = "SELECT 1 FROM pg_stat_activity WHERE datname = %s AND state = 'active' AND query = 'COMMIT'"
        async with asyncio.timeout(30):
            while not await asyncio.to_thread(postgres.sql, commits, name):
                await asyncio.sleep(0.01)
            command.kill()
            await command.wait()
            while await asyncio.to_thread(postgres.sql, commits, name):
                await asyncio.sleep(0.01)
    await asyncio.to_thread(postgres.sql, "DROP FUNCTION at_commit CASCADE", database=name)


async def is_live(dsn: str, worker: str) -> bool:
    """Whether a database has any work, job, answer or token of anna."""
    async with opened(PostgresStore(dsn)) as store:
        found = [owner for owner, _ in await store.ready(worker)]
        found += [one.owner for one in (*await store.timers(), *await store.tokens())]
        found += [info.owner for info in await store.sessions("anna")]
        found += ["anna" for row in await store.take_outgoing(worker) if "anna" in str(row.message.content)]
        await store.release_all(worker)
    return "anna" in found


@pytest.mark.parametrize("how", ["refused", "killed"])
@pytest.mark.parametrize("commit", COMMITS)
async def test_a_move_that_is_cut_off_at_a_commit_leaves_the_owner_in_one_database_and_is_completed_by_the_next(
    postgres, database, other, worker, commit, how
):
    await filled(postgres, database, worker)
    mine = rows(postgres, database, "anna")
    await cut_off(postgres, database, other, commit, how=how)
    done = commit if how == "killed" else commit - 1  # a commit that the server has taken happens without its client
    assert await is_live(database, worker) == (done < 2)
    assert await is_live(other, worker) == (done == 3)
    await unsent(postgres, database)
    await unsent(postgres, other)
    if done < 2:  # the old database goes on
        async with opened(PostgresStore(database)) as store:
            claim = await store.begin("anna", "test:3", worker)
            assert claim is not None
            await store.finish(claim, [TurnEnded("answer", "done")])
            await store.accept(InboundMessage("test", "user", "1", "since then", owner="anna").addressed())
        mine = rows(postgres, database, "anna")
    # The new one takes nothing of the owner before the move is complete, and the old one nothing after it has left.
    for dsn in {0: (), 1: (other,), 2: (database, other), 3: (database,)}[done]:
        async with opened(PostgresStore(dsn)) as store:
            with pytest.raises(OwnerMoved):
                await store.accept(InboundMessage("test", "user", "1", "lost?", owner="anna").addressed())
    for dsn in (database, other):
        assert check_history(partial(postgres.sql, database=name_of(dsn))).violations == []
    again = await everloop("move", "anna", database, other)
    if done == 3:
        assert (again.status, again.err.count("\n")) == (2, 1)
        assert "anna has already moved to" in again.err
    else:
        assert (again.status, again.err) == (0, "")
    assert rows(postgres, other, "anna") == mine
    assert not any(rows(postgres, database, "anna").values())
    for dsn in (database, other):
        assert await asyncio.to_thread(postgres.sql, LEFT, database=name_of(dsn)) == [(0,)]
        assert check_history(partial(postgres.sql, database=name_of(dsn))).violations == []
    async with opened(PostgresStore(other)) as store:
        await store.accept(InboundMessage("test", "user", "1", "new", owner="anna").addressed())


async def test_a_token_whose_name_was_taken_during_an_interrupted_move_is_reported_and_not_lost(
    postgres, database, other, worker
):
    await filled(postgres, database, worker)
    mine = rows(postgres, database, "anna")
    await cut_off(postgres, database, other, 3, how="refused")
    values = "('x', 'x', 'laptop', 'ben', 1)"
    postgres.sql(f"INSERT INTO token (id, hash, name, owner, created_at) VALUES {values}", database=name_of(other))
    done = await everloop("move", "anna", database, other)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert 'another token named "laptop": revoke one of the two first' in done.err
    postgres.sql("UPDATE token SET revoked_at = 2 WHERE id = 'x'", database=name_of(other))
    assert (await everloop("move", "anna", database, other)).status == 0
    assert rows(postgres, other, "anna") == mine


async def test_what_an_interrupted_move_has_left_hinders_no_later_one(postgres, database, other, worker):
    """anna was on the way to a second database, and then moved to a third one."""
    await filled(postgres, database, worker)
    mine = rows(postgres, database, "anna")
    await cut_off(postgres, database, other, 2, how="refused")
    with postgres.database() as third:
        await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(third))
        with pytest.raises(StoreError, match=r"complete that move first, with `everloop move anna postgresql://"):
            await asyncio.to_thread(move_owner, "anna", DSN(third), DSN(other))
        with pytest.raises(StoreError, match="has already moved to"):
            await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other))
        assert postgres.sql(LEFT, database=name_of(other)) == [(0,)]
        await asyncio.to_thread(move_owner, "anna", DSN(third), DSN(other))
    assert rows(postgres, other, "anna") == mine


async def test_what_is_in_the_way_is_named_and_nothing_is_moved(postgres, database, other, worker):
    await filled(postgres, database, worker)
    mine = rows(postgres, database, "anna")
    for table, insert, line in (
        ("session", "(owner, key, created_at, updated_at) VALUES ('anna', 'test:1', 1, 1)", "another session test:1"),
        ("timer", "(owner, id, due_at, data) VALUES ('anna', 't', 1, '{}')", "another job t"),
        (
            "token",
            "(id, hash, name, owner, created_at) VALUES ('x', 'x', 'laptop', 'ben', 1)",
            'another token named "laptop"',
        ),
    ):
        postgres.sql(f"INSERT INTO {table} {insert}", database=name_of(other))
        with pytest.raises(StoreError, match=line):
            await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other))
        postgres.sql(f"DELETE FROM {table}", database=name_of(other))
    assert rows(postgres, database, "anna") == mine
    await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other))
    assert rows(postgres, other, "anna") == mine


async def test_the_database_that_fails_is_the_one_that_is_named(postgres, database, other, worker):
    await filled(postgres, database, worker)
    full = "RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'x' USING ERRCODE = '53100'; END$$"
    for dsn, event in ((other, "INSERT"), (database, "DELETE")):
        postgres.sql(f"CREATE FUNCTION is_full() {full}", database=name_of(dsn))
        trigger = f"CREATE TRIGGER is_full BEFORE {event} ON entry FOR EACH ROW EXECUTE FUNCTION is_full()"
        postgres.sql(trigger, database=name_of(dsn))
        done = await everloop("move", "anna", database, other)
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert f"the disk of the store {DSN(dsn)} is full: free some space" in done.err
        postgres.sql("DROP FUNCTION is_full CASCADE", database=name_of(dsn))


def test_files_are_copied_while_work_continues_and_only_what_has_changed_is_copied_again(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "memory").mkdir(parents=True)
    for name in ("kept", "changed", "deleted"):
        (source / "memory" / name).write_text(name)
    (source / "link").symlink_to("memory/kept")
    files = _Files(source, target)
    files.copy()
    first = (target / "memory" / "kept").stat().st_ino
    (source / "memory" / "changed").write_text("since")
    (source / "memory" / "deleted").unlink()
    (source / "new").mkdir()
    (source / "new" / "file").write_text("new")
    files.copy()
    assert (target / "memory" / "kept").stat().st_ino == first
    found = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
    assert found == {"memory/kept", "memory/changed", "new/file", "link"}
    assert (target / "memory" / "changed").read_text() == "since"
    assert (target / "link").readlink() == Path("memory/kept")
    assert (target / "memory" / "kept").stat().st_mtime == (source / "memory" / "kept").stat().st_mtime
    _Files(source, target).copy()  # as when the command is run again
    (target / "memory" / "changed").unlink()
    (target / "memory" / "changed").mkdir()
    with pytest.raises(EverloopError, match="the files cannot be copied"):
        files.copy()


async def test_two_moves_of_one_owner_at_once_are_one(postgres, database, other, worker):
    await filled(postgres, database, worker)
    errors: list[str] = []

    def again() -> None:
        try:
            move_owner("anna", DSN(database), DSN(other))
        except StoreError as error:
            errors.append(str(error))

    await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other), again)
    assert errors == ["another command is currently moving anna: wait until it ends"]


async def test_work_continues_while_the_log_is_copied_and_arrives_too(postgres, database, other, worker):
    await filled(postgres, database, worker)
    there = name_of(other)
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
    mine, there = rows(postgres, database, "anna"), name_of(other)

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
    await asyncio.to_thread(postgres.sql, MANY, database=name_of(database))
    moved = await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other))
    with capsys.disabled():
        print(f"10,000 turns ({moved.rows['entry']:,} entries): the owner's work waited for {moved.pause:.1f} s")
    assert moved.rows["inbox"] == 10_000
    assert moved.pause <= 5

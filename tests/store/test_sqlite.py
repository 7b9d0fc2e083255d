"""What is specific to SQLite: one file, group commit, migrations, and every way in which a file can fail."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from everloop.bus import InboundMessage
from everloop.errors import StoreError
from everloop.log import ModelAnswered, Noted, TurnEnded, UserSaid
from everloop.store.peers import alive, new_worker, process_of, retire
from everloop.store.sqlite import SQLiteStore, queries
from everloop.store.sqlite import store as sqlite_store
from everloop.store.sqlite import transactions as tx
from everloop.store.sqlite.schema import MIGRATIONS, migrate

from ..support.commands import until
from ..support.unflushed import flushed


@pytest.fixture
async def open_store(tmp_path) -> AsyncIterator[Callable[..., SQLiteStore]]:
    stores: list[SQLiteStore] = []

    def make(path: Path | None = None, **options: Any) -> SQLiteStore:
        stores.append(SQLiteStore(path or tmp_path / "data" / "store.db", **options))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
def store(open_store) -> SQLiteStore:
    return open_store()


def message(text: str = "hi", chat: str = "1", **options: Any) -> InboundMessage:
    return InboundMessage("test", "user", chat, text, **options).addressed()


async def in_writer(store: SQLiteStore, sql: str) -> Any:
    return await store.writer.submit(lambda db: db.execute(sql).fetchall())


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


# ---------------------------------------------------------------------------------------------- the file


async def test_nothing_is_opened_before_the_first_call(store):
    assert not store.path.parent.exists()
    await store.close()
    assert not store.path.parent.exists()


async def test_only_the_user_can_read_the_store(store):
    before = os.umask(0o000)
    try:
        await store.accept(message())
    finally:
        os.umask(before)
    for file in store.path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700


async def test_it_uses_a_write_ahead_log_that_is_flushed_at_every_commit(store, monkeypatch):
    flushed(monkeypatch)
    await store.accept(message())
    assert await in_writer(store, "PRAGMA journal_mode") == [("wal",)]
    assert await in_writer(store, "PRAGMA synchronous") == [(2,)]
    assert store.path.with_name("store.db-wal").exists()


async def test_a_closed_store_is_one_file(store):
    await store.accept(message())
    await store.sessions("me")
    await store.close()
    left = {file.name for file in store.path.parent.iterdir()}
    assert left == {"store.db", "store.db-commits"}  # the second only says that the first is as new as it was


async def test_an_old_file_keeps_its_rights_and_content(tmp_path, open_store):
    path = tmp_path / "mine.db"
    path.write_bytes(b"")
    path.chmod(0o640)
    await open_store(path).accept(message())
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


async def test_a_path_with_odd_characters_works(tmp_path, open_store):
    path = tmp_path / "a ?mode=ro#% é" / "store.db"
    await open_store(path).accept(message())
    assert path.exists()


# ---------------------------------------------------------------------------------------------- migrations


async def test_the_schema_has_a_version(store):
    await store.accept(message())
    assert await in_writer(store, "PRAGMA user_version") == [(len(MIGRATIONS),)]


async def test_a_file_of_a_newer_everloop_is_refused_and_not_touched(store, open_store):
    await store.accept(message())
    await in_writer(store, "PRAGMA user_version = 9999")
    await store.close()
    before = await asyncio.to_thread(store.path.read_bytes)
    with pytest.raises(StoreError, match="newer Everloop: update this one") as raised:
        await open_store().accept(message())
    one_line(raised.value)
    with pytest.raises(StoreError, match="newer Everloop"):
        await open_store().sessions("me")
    assert await asyncio.to_thread(store.path.read_bytes) == before


async def test_a_migration_that_fails_leaves_nothing_behind(open_store, tmp_path, monkeypatch):
    def broken(db: sqlite3.Connection) -> None:
        db.execute("CREATE TABLE half (x)")
        raise sqlite3.OperationalError("no")

    store = open_store()
    await store.accept(message())
    await store.close()
    monkeypatch.setattr("everloop.store.sqlite.schema.MIGRATIONS", (*MIGRATIONS, broken))
    with pytest.raises(StoreError):
        await open_store().accept(message())
    monkeypatch.undo()
    again = open_store(store.path)
    assert await in_writer(again, "SELECT name FROM sqlite_master WHERE name = 'half'") == []
    await again.accept(message())


async def test_the_tests_new_stores_are_what_the_migrations_make(store):
    await store.sessions("me")
    made, migrated = await asyncio.to_thread(_dumps, store.path)
    assert made == migrated


def _dumps(path: Path) -> tuple[list[str], list[str]]:
    with closing(sqlite3.connect(path)) as made, closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        migrate(db)
        return sorted(made.iterdump()), sorted(db.iterdump())


async def test_many_open_a_new_file_at_once(open_store, monkeypatch):
    monkeypatch.setattr("everloop.store.sqlite.store.migrate", migrate)  # the product's, and not that of the tests
    stores = [open_store() for _ in range(8)]
    await asyncio.gather(*(store.accept(message(str(n))) for n, store in enumerate(stores)))
    assert len(await in_writer(stores[0], "SELECT id FROM inbox")) == 8


async def test_many_processes_open_a_new_file_at_once(tmp_path):
    code = (
        "import asyncio, sys; from everloop.store.sqlite import SQLiteStore; from everloop.bus import InboundMessage\n"
        "async def main():\n"
        "    store = SQLiteStore(sys.argv[1])\n"
        "    await store.accept(InboundMessage('t', 'u', '1', 'hi').addressed())\n"
        "    await store.sessions('me'); await store.close()\n"
        "asyncio.run(main())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    path = str(tmp_path / "new" / "store.db")
    started = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, path, env=environment, stderr=asyncio.subprocess.PIPE
        )
        for _ in range(4)
    ]
    for process in started:
        _, error = await process.communicate()
        assert process.returncode == 0, error.decode()


# ---------------------------------------------------------------------------------------------- group commit


async def test_writes_that_wait_together_are_one_commit(store):
    await store.accept(message())
    before = store.writer.commits
    entered = threading.Event()
    go = threading.Event()

    def slow(db: sqlite3.Connection) -> None:
        entered.set()
        go.wait(30)

    first = store.writer.submit(slow)
    await asyncio.to_thread(entered.wait, 30)
    writes = [asyncio.ensure_future(store.accept(message(str(n)))) for n in range(100)]
    await asyncio.sleep(0.01)
    go.set()
    await first
    rows = await asyncio.gather(*writes)
    assert store.writer.commits - before <= 3
    assert [row.id for row in rows] == sorted(row.id for row in rows)


async def test_a_write_is_reported_only_after_the_commit(store):
    await store.accept(message())
    told: list[str] = []
    order: list[str] = []

    def hook(when: str) -> None:
        order.append(when)
        if when == "after":
            order.extend(told)

    unhook = store.writer.commit_hooks.add(hook)
    future = store.writer.submit(lambda db: None)
    future.add_done_callback(lambda _: told.append("told"))
    await future
    await asyncio.sleep(0)
    unhook()
    assert order == ["before", "after"]
    assert told == ["told"]


@pytest.mark.parametrize("first", [True, False])
async def test_a_failing_write_takes_no_other_with_it(store, first):
    await store.accept(message())
    claim = await store.begin("me", "test:1", new_worker(), message())
    assert claim is not None

    def bad(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO worker (id, address, at) VALUES ('half', 'done', 1)")
        raise ValueError("no")

    def worse(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO worker (id, address, at) VALUES ('half', 'done', 1)")
        db.execute("INSERT INTO nowhere VALUES (1)")

    gate = threading.Event()
    blocked = store.writer.submit((lambda db: gate.wait(30)) if not first else bad)
    jobs = [store.writer.submit(work) for work in (bad, worse)]
    good = [asyncio.ensure_future(store.accept(message(str(n)))) for n in range(3)]
    jobs.append(store.writer.submit(worse))
    good.append(asyncio.ensure_future(store.accept(message("last"))))
    await asyncio.sleep(0)
    gate.set()
    failed = await asyncio.gather(blocked, *jobs, return_exceptions=True)
    assert [type(error) for error in failed[1:]] == [ValueError, StoreError, StoreError]
    assert "no such table" in one_line(failed[2])
    assert len(await asyncio.gather(*good)) == 4
    assert await in_writer(store, "SELECT id FROM worker") == []
    assert len(await in_writer(store, "SELECT id FROM inbox")) == 6


async def test_when_sqlite_rolls_back_a_whole_transaction_all_its_writes_fail(store):
    await store.accept(message())

    def give_up(db: sqlite3.Connection) -> None:
        db.execute("ROLLBACK")  # as SQLite itself does when the disk is full
        raise sqlite3.OperationalError("database or disk is full")

    gate = threading.Event()
    blocked = store.writer.submit(lambda db: gate.wait(30))
    before = asyncio.ensure_future(store.accept(message("before")))
    await asyncio.sleep(0)
    killer = store.writer.submit(give_up)
    after = asyncio.ensure_future(store.accept(message("after")))
    await asyncio.sleep(0)
    gate.set()
    results = await asyncio.gather(blocked, before, killer, after, return_exceptions=True)
    assert isinstance(results[1], StoreError)
    assert isinstance(results[2], StoreError)
    rows = await in_writer(store, "SELECT json_extract(data, '$.content') FROM inbox")
    assert rows == [("hi",)] + ([("after",)] if not isinstance(results[3], BaseException) else [])


async def test_a_commit_that_fails_fails_every_write_in_it_and_the_next_one_works(store):
    await store.accept(message())

    def fail(when: str) -> None:
        if when == "before":
            raise sqlite3.OperationalError("the disk says no")

    unhook = store.writer.commit_hooks.add(fail)
    results = await asyncio.gather(*(store.accept(message()) for _ in range(5)), return_exceptions=True)
    unhook()
    assert all(isinstance(result, StoreError) and "the disk says no" in one_line(result) for result in results)
    await store.accept(message())
    assert len(await in_writer(store, "SELECT id FROM inbox")) == 2


async def test_a_submitted_write_cannot_be_cancelled(store):
    await store.accept(message())
    gate = threading.Event()
    blocked = store.writer.submit(lambda db: gate.wait(30))
    task = asyncio.create_task(store.accept(message("kept")))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0.01)
    assert not task.done()
    gate.set()
    await blocked
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await in_writer(store, "SELECT id FROM inbox")) == 2


async def test_reading_does_not_wait_for_writing(store):
    await store.accept(message())
    gate = threading.Event()
    blocked = store.writer.submit(lambda db: gate.wait(30))
    assert len(await asyncio.wait_for(store.sessions("me"), 20)) == 1
    gate.set()
    await blocked


async def test_a_store_is_used_while_it_is_being_closed(store):
    for n in range(20):
        await asyncio.gather(store.close(), store.accept(message(str(n))), store.sessions("me"))
    await store.close()
    assert len(await in_writer(store, "SELECT id FROM inbox")) == 20


async def test_a_read_that_begins_while_the_store_is_closed_keeps_its_connection(store):
    """SQLite fails on a connection that is closed during a query, and some versions of Python crash."""
    before, began, go_on = threading.Event(), threading.Event(), threading.Event()
    reading = asyncio.create_task(store._in_reader(lambda db: before.wait(30)))
    await until(lambda: store._readers is not None)
    ending = asyncio.create_task(store.close())
    await until(lambda: store._readers is None)

    def read(db):
        began.set()
        go_on.wait(30)
        return db.execute("SELECT 1").fetchall()

    late = asyncio.create_task(store._in_reader(read))
    await until(began.is_set)
    before.set()
    await ending
    go_on.set()
    assert await late == [(1,)]
    assert await reading


def test_a_store_serves_one_event_loop_after_another(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")

    async def use() -> None:
        await store.accept(message())
        await store.sessions("me")

    async def end() -> None:
        await store.close()

    for _ in range(3):
        asyncio.run(use())
    asyncio.run(end())
    assert store.note_now("me", "test:2", [Noted({"role": "user", "content": "x"})]) == 1
    assert len(store.read_now("me", "test:2")) == 1
    asyncio.run(end())


# ---------------------------------------------------------------------------------------------- what goes wrong


async def test_a_locked_file_is_waited_for_and_then_reported(open_store):
    store, patient = open_store(lock_seconds=0.1), open_store(lock_seconds=30)
    await store.accept(message())
    await patient.accept(message())
    other = await asyncio.to_thread(sqlite3.connect, store.path, check_same_thread=False)
    await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked by another program: close it") as raised:
        await store.accept(message())
    one_line(raised.value)
    waiting = asyncio.create_task(patient.accept(message()))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await asyncio.to_thread(other.close)
    await waiting


async def test_a_full_disk_is_reported_and_writes_continue_when_there_is_space(store):
    await store.accept(message())
    pages = (await in_writer(store, "PRAGMA page_count"))[0][0]
    await in_writer(store, f"PRAGMA max_page_count = {pages}")
    small = [store.accept(message(str(n))) for n in range(3)]
    results = await asyncio.gather(store.accept(message("x" * 100_000)), *small, return_exceptions=True)
    assert isinstance(results[0], StoreError)
    assert "is full: free some space" in one_line(results[0])
    await in_writer(store, "PRAGMA max_page_count = 1000000")
    await store.accept(message("x" * 100_000))
    told = sum(not isinstance(result, BaseException) for result in results)
    assert len(await in_writer(store, "SELECT id FROM inbox")) == 2 + told


async def test_a_read_only_file_is_reported(store):
    await store.accept(message())
    await store.writer.submit(lambda db: db.execute("PRAGMA query_only = ON").fetchall(), "reads")
    with pytest.raises(StoreError, match="read-only") as raised:
        await store.accept(message())
    one_line(raised.value)


@pytest.mark.parametrize("content", [b"hello" * 1000, b"SQLite format 3\x00" + b"\xff" * 5000])
async def test_a_file_that_is_no_database_is_reported_and_not_changed(tmp_path, open_store, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    store = open_store(path)
    for _ in range(2):
        with pytest.raises(StoreError, match="damaged or not a database") as raised:
            await store.accept(message())
        one_line(raised.value)
    with pytest.raises(StoreError, match="damaged or not a database"):
        await store.sessions("me")
    assert path.read_bytes() == content


async def test_an_error_goes_away_with_its_cause(tmp_path, open_store):
    path = tmp_path / "folder" / "store.db"
    path.mkdir(parents=True)
    store = open_store(path)
    with pytest.raises(StoreError, match="it is a folder"):
        await store.accept(message())
    path.rmdir()
    await store.accept(message())


async def test_an_unreadable_log_entry_is_reported_with_its_place(store):
    claim = await store.begin("me", "test:1", new_worker(), message())
    assert claim is not None
    await store.append(claim, [ModelAnswered("x")])
    await in_writer(store, 'UPDATE entry SET data = \'{"type":"answer","content":7}\' WHERE seq = 2')
    with pytest.raises(StoreError, match="entry 2") as raised:
        await store.read_log(claim.session)
    one_line(raised.value)


async def test_fields_of_a_later_version_are_ignored_when_an_old_log_is_read(store):
    claim = await store.begin("me", "test:1", new_worker(), message())
    assert claim is not None
    data = '{"type":"end","reason":"answer","text":"x","later":1}'
    await in_writer(store, f"UPDATE entry SET data = '{data}' WHERE seq = 1")
    assert [one.entry for one in await store.read_log(claim.session)] == [TurnEnded("answer", "x")]
    assert isinstance(UserSaid("x"), UserSaid)


# ---------------------------------------------------------------------------------------------- workers


def test_a_worker_is_alive_while_joined_and_its_process_runs():
    worker = new_worker()
    assert alive(worker)
    assert process_of(worker) == os.getpid()
    assert new_worker() != worker
    retire(worker)
    assert not alive(worker)


def test_a_reused_process_id_is_another_worker():
    boot, namespace, _pid, started, number = new_worker().split(".")
    parent = os.getppid()
    assert not alive(f"{boot}.{namespace}.{parent}.1.{number}")
    assert not alive(f"{boot}.{namespace}.999999999.{started}.{number}")


def test_no_worker_survives_a_reboot_and_an_unknown_one_counts_as_alive():
    boot, namespace, pid, started, number = new_worker().split(".")
    assert not alive(f"otherboot.{namespace}.{pid}.{started}.{number}")
    assert alive(f"{boot}.12345.{pid}.{started}.{number}")


def test_another_process_sees_a_worker_as_alive():
    worker = new_worker()
    code = f"from everloop.store.peers import alive; print(alive({worker!r}))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "True"
    retire(worker)


def test_no_search_for_work_grows_with_finished_work():
    db = sqlite3.connect(":memory:", isolation_level=None)
    migrate(db)
    looks = {
        tx.BEGIN: ("me", "a:b"),
        tx.MORE: (1,),
        tx.OPEN_TURN: (1,),
        queries.READY: (),
        queries.WAITING: ("me", "a:b"),
    }
    for sql, values in looks.items():
        plan = " / ".join(row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", values))
        assert "SCAN" not in plan.replace("SCAN inbox USING INDEX inbox_open", "").replace(
            "SCAN inbox USING COVERING INDEX inbox_open", ""
        ), plan
    db.close()


async def test_entries_are_text_in_the_file_whatever_they_are_written_from(store):
    claim = await store.begin("me", "test:1", new_worker(), message("Grüße 漢字"))
    assert claim is not None
    await store.append(claim, [ModelAnswered("für dich"), ModelAnswered("x")], flush=False)
    await store.append(claim, [ModelAnswered("ß")])
    rows = await in_writer(store, "SELECT typeof(data), data FROM entry ORDER BY seq")
    assert [kind for kind, _ in rows] == ["text"] * 4
    assert "Grüße 漢字" in rows[0][1]
    assert "für dich" in rows[1][1]
    said = await store.read_log(claim.session)
    assert [getattr(one.entry, "content", "") for one in said] == ["Grüße 漢字", "für dich", "x", "ß"]


@pytest.mark.parametrize(("failures", "opens"), [(3, True), (1_000_000, False)])
def test_an_io_error_when_the_log_is_enabled_is_retried_for_a_moment(tmp_path, monkeypatch, failures, opens):
    class Faulty(sqlite3.Connection):
        left = failures

        def execute(self, sql, *values):
            if "journal_mode" in sql and self.left:
                self.left -= 1
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise error
            return super().execute(sql, *values)

    monkeypatch.setattr(sqlite_store, "IO_ERROR_SECONDS", 0.2)
    with closing(sqlite3.connect(tmp_path / "a.db", factory=Faulty)) as connection:
        if opens:
            sqlite_store._use_wal(connection, 30.0)
            assert super(Faulty, connection).execute("PRAGMA journal_mode").fetchone() == ("wal",)
        else:
            with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
                sqlite_store._use_wal(connection, 30.0)


@pytest.mark.parametrize(
    ("flags", "free", "told"),
    [(0, 0, "is full: free some space"), (os.ST_RDONLY, 9, "is read-only"), (0, 9, "unable to open database file")],
)
def test_an_auxiliary_file_that_cannot_be_created_is_reported_with_the_cause(tmp_path, monkeypatch, flags, free, told):
    fields = list(os.statvfs(tmp_path))
    fields[4], fields[8] = free, flags
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    error = sqlite3.OperationalError("unable to open database file")
    error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
    assert told in one_line(SQLiteStore(tmp_path / "a.db")._explain(error))

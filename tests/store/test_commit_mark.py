"""A SQLite store that has lost its last commits says so."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from everloop.bus import InboundMessage
from everloop.store.sqlite import SQLiteStore
from everloop.store.sqlite.writer import PAGE_BYTES, mark_file

from ..support.commands import everloop

HEADER, FRAME = 32, 24 + PAGE_BYTES  # of a write-ahead log


async def killed(folder: Path, messages: int = 5) -> Path:
    """A store as left by a killed process: its last commits are in the write-ahead log."""
    live = folder / "live"
    store = SQLiteStore(live / "store.db")
    for n in range(messages):
        await store.accept(InboundMessage("test", "user", "1", str(n)).addressed())
    shutil.copytree(live, folder / "dead")
    await store.close()
    return folder / "dead" / "store.db"


def cut(database: Path, frames: int) -> None:
    """Remove the last frames of the write-ahead log."""
    wal = database.with_name(database.name + "-wal")
    whole = (wal.stat().st_size - HEADER) // FRAME
    with open(wal, "r+b") as file:
        file.truncate(HEADER + (whole - frames) * FRAME)


async def opened(database: Path) -> tuple[int, Any]:
    """Return how many messages a store has, and its overview."""
    store = SQLiteStore(database)
    try:
        waiting = await store.waiting("me", "test:1")
        return len(waiting), await store.overview()
    finally:
        await store.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "commits are missing" in record.getMessage()]


async def test_a_store_of_a_killed_process_has_lost_nothing_and_reports_nothing(tmp_path, caplog):
    messages, seen = await opened(await killed(tmp_path))
    assert (messages, seen.lost_at) == (5, None)
    assert warnings(caplog) == []


@pytest.mark.parametrize("lost", ["tail", "log"])
async def test_a_write_ahead_log_that_was_cut_off_is_noticed_once(tmp_path, caplog, lost):
    database = await killed(tmp_path)
    if lost == "tail":
        cut(database, 1)
    else:
        database.with_name("store.db-wal").unlink()
        database.with_name("store.db-shm").unlink()
    with caplog.at_level(logging.WARNING):
        messages, seen = await opened(database)
    assert messages == (4 if lost == "tail" else 0)
    assert len(warnings(caplog)) == 1
    assert seen.lost_at is not None
    assert seen.lost_commits == (1 if lost == "tail" else 5)
    caplog.clear()
    _, again = await opened(database)
    assert again.lost_at == seen.lost_at
    assert warnings(caplog) == []


async def test_an_older_copy_in_place_of_the_store_is_noticed(tmp_path, caplog):
    database = await killed(tmp_path)
    await opened(database)  # into the file itself
    shutil.copy(database, tmp_path / "copy.db")
    store = SQLiteStore(database)
    await store.accept(InboundMessage("test", "user", "1", "newer").addressed())
    await store.close()
    shutil.copy(tmp_path / "copy.db", database)
    _, seen = await opened(database)
    assert seen.lost_commits == 1
    assert len(warnings(caplog)) == 1


async def test_a_recreated_store_has_lost_nothing(tmp_path, caplog):
    database = await killed(tmp_path)
    for name in ("store.db", "store.db-wal", "store.db-shm"):
        database.with_name(name).unlink()
    assert mark_file(database).exists()
    _, seen = await opened(database)
    assert seen.lost_at is None
    assert warnings(caplog) == []


async def test_a_meaningless_mark_is_no_loss(tmp_path, caplog):
    database = await killed(tmp_path)
    mark_file(database).write_bytes(b"\0" * 20)
    _, seen = await opened(database)
    assert (seen.lost_at, warnings(caplog)) == (None, [])


async def test_every_flushed_commit_is_counted(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")
    for n in range(3):
        await store.accept(InboundMessage("test", "user", "1", str(n)).addressed())
    await store.writer.submit(lambda db: db.execute("DELETE FROM rate"), "written")
    commits = store.writer.flushes
    assert store.writer.commits == commits + 1
    await store.close()
    with closing(sqlite3.connect(tmp_path / "store.db")) as db:
        assert db.execute("SELECT number FROM commit_mark").fetchall() == [(commits,)]
    assert int(mark_file(tmp_path / "store.db").read_text()) == commits


async def test_the_doctor_reports_lost_commits_until_the_loss_is_accepted(tmp_path):
    database = await killed(tmp_path)
    cut(database, 1)
    done = await everloop("doctor", EVERLOOP_STORE=str(database))
    assert "✗ losses" in done.out
    assert "1 commit was missing" in done.out
    with closing(sqlite3.connect(database)) as db, db:
        db.execute("UPDATE commit_mark SET lost_at = NULL")
    assert "losses" not in (await everloop("doctor", EVERLOOP_STORE=str(database))).out

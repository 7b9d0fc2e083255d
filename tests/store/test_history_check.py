"""The history checker: silent on a valid store, even while turns run, and loud on each kind of damage."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from everloop import AgentLoop, MessageBus
from everloop.testing import ScriptedProvider, call

from ..support.commands import everloop
from .postgres.fixtures import database as database
from .postgres.fixtures import postgres as postgres
from .postgres.server import name_of


@pytest.fixture
async def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with two turns of one session, the first one with a call."""
    monkeypatch.setenv("EVERLOOP_HOME", str(tmp_path / "home"))
    file = tmp_path / "store.db"
    provider = ScriptedProvider([call("list_dir"), "One.", "Two."])
    async with AgentLoop(MessageBus(), provider, workspace=tmp_path, store=file) as agent:
        await agent.process_direct("first")
        await agent.process_direct("second")
    return file


def change(path: Path, sql: str) -> None:
    db = sqlite3.connect(path)
    assert db.execute(sql).rowcount > 0
    db.commit()
    db.close()


async def test_a_valid_store_has_no_violations(path):
    done = await everloop("check-history", "--store", str(path))
    assert (done.status, done.out) == (0, "1 session, 2 turns, 8 entries: no violations.\n")
    done = await everloop("check-history", "--json", "--store", str(path))
    assert done.json == {"sessions": 1, "turns": 2, "under_way": 0, "entries": 8, "violations": []}


@pytest.mark.parametrize(
    ("sql", "line"),
    [
        ("DELETE FROM entry WHERE kind = 'result'", "the log has gaps: entry 3 is missing"),
        (
            "UPDATE entry SET kind = 'note', data = replace(data, '\"result\"', '\"note\"') WHERE kind = 'result'",
            "decoded",
        ),
        (
            "UPDATE entry SET data = replace(data, 'call_', 'other_') WHERE kind = 'result'",
            "result without an open call",
        ),
        ("UPDATE entry SET data = replace(data, 'call_', 'other_') WHERE kind = 'result'", "precedes the results"),
        ("UPDATE entry SET turn = 'x' WHERE seq = 3", "overlaps with another"),
        ("UPDATE entry SET turn = 'x' WHERE seq = 8", "has 0 ends"),
        ("UPDATE entry SET data = '{' WHERE seq = 2", "entry 2 cannot be decoded"),
        ("UPDATE inbox SET turn = 'x' WHERE id = 1", "opened turn x, which has no log entries"),
        ("UPDATE inbox SET first_seq = 5 WHERE id = 1", "does not start at entry 5"),
        ("UPDATE inbox SET damaged = 'torn' WHERE id = 2", "1 row of the inbox is damaged"),
    ],
)
async def test_damage_is_reported(path, sql, line):
    change(path, sql)
    done = await everloop("check-history", "--store", str(path))
    assert done.status == 1
    assert line in done.out


async def test_a_turn_in_progress_is_no_violation(path):
    change(path, "DELETE FROM entry WHERE seq = 8")
    change(path, "UPDATE inbox SET state = 'taken', ended_at = NULL WHERE id = 2")
    done = await everloop("check-history", "--store", str(path))
    assert (done.status, done.out) == (0, "1 session, 2 turns (1 unfinished), 7 entries: no violations.\n")
    change(path, "UPDATE inbox SET state = 'done', ended_at = 1 WHERE id = 2")
    done = await everloop("check-history", "--store", str(path))
    assert "is marked as ended, but its log has no end" in done.out


async def test_a_file_that_is_no_store_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERLOOP_HOME", str(tmp_path / "home"))
    (tmp_path / "x.db").write_text("no database")
    for name in ("x.db", "missing.db"):
        done = await everloop("check-history", "--store", str(tmp_path / name))
        assert done.status == 2
        assert done.err.count("\n") == 1


async def test_a_postgresql_store_is_checked_by_the_same_command(postgres, database, tmp_path, monkeypatch):
    monkeypatch.setenv("EVERLOOP_HOME", str(tmp_path / "home"))
    provider = ScriptedProvider([call("list_dir"), "One."])
    async with AgentLoop(MessageBus(), provider, workspace=tmp_path, store=database) as agent:
        await agent.process_direct("first")
    done = await everloop("check-history", "--store", database)
    assert (done.status, done.out) == (0, "1 session, 1 turn, 5 entries: no violations.\n")
    name = name_of(database)
    postgres.sql("DELETE FROM entry WHERE kind = 'result'", database=name)
    done = await everloop("check-history", "--store", database)
    assert done.status == 1
    assert "the log has gaps: entry 3 is missing" in done.out


async def test_a_database_whose_tables_are_missing_or_altered_is_one_line(postgres, database):
    name = name_of(database)
    postgres.sql("DROP TABLE session CASCADE", database=name)
    done = await everloop("check-history", "--store", database)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "there is no store in postgresql://" in done.err
    postgres.sql("CREATE TABLE session (id bigint, owner text)", database=name)
    done = await everloop("check-history", "--store", database)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "were altered" in done.err

"""The search index in SQLite: updated by searches alone, in short transactions that can be interrupted."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from everloop.bus import InboundMessage
from everloop.errors import StoreError
from everloop.log import CallEnded, Cleared, ModelAnswered, Noted, TurnEnded
from everloop.store import search as indexing
from everloop.store.sqlite import SQLiteStore, search


@pytest.fixture
async def store(tmp_path) -> AsyncIterator[SQLiteStore]:
    store = SQLiteStore(tmp_path / "store.db")
    yield store
    await store.close()


async def keep(store: SQLiteStore, *texts: str, key: str = "test:1", owner: str = "me") -> None:
    await store.note(owner, key, [Noted({"role": "user", "content": text}) for text in texts])


def rows(path: Path, sql: str, *values: Any) -> list[Any]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(sql, values).fetchall()


def check(path: Path) -> int:
    """Return how many texts are indexed; each once, and the index is consistent."""
    with closing(sqlite3.connect(path)) as database:
        database.execute("INSERT INTO search (search) VALUES ('integrity-check')")
        (texts,) = database.execute("SELECT count(*) FROM search_docsize").fetchone()
        (entries,) = database.execute("SELECT count(*) FROM search_entry").fetchone()
        (places,) = database.execute("SELECT count(*) FROM (SELECT DISTINCT session, seq FROM search_entry)").fetchone()
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert texts == entries == places
    return int(texts)


# ---------------------------------------------------------------------------------------------- who pays for it


async def test_a_turn_writes_nothing_for_the_search(store):
    claim = await store.begin("me", "test:1", "worker", InboundMessage("test", "user", "1", "beans").addressed())
    assert claim is not None
    await store.finish(claim, [ModelAnswered("peas"), TurnEnded("answer", "peas")])
    for table in ("search_entry", "search_cursor"):
        assert rows(store.path, f"SELECT * FROM {table}") == []
    assert rows(store.path, "SELECT 1 FROM sqlite_master WHERE name = 'search'") == []


async def test_only_new_entries_are_read(store):
    await keep(store, "beans one", "beans two")
    assert len(await store.search("me", "beans")) == 2
    with closing(sqlite3.connect(store.path)) as database, database:  # indexed entries were not read again
        database.execute("UPDATE entry SET data = replace(data, 'two', 'peas') WHERE seq = 2")
    await keep(store, "beans three")
    assert len(await store.search("me", "beans")) == 3
    assert await store.search("me", "peas") == []
    before = store.writer.commits
    await store.search("me", "beans")
    assert store.writer.commits == before


async def test_a_search_indexes_only_its_owners_sessions(store):
    await keep(store, *["beans"] * 10, owner="you")
    await keep(store, "beans")
    await store.search("me", "beans")
    assert rows(store.path, "SELECT DISTINCT owner FROM search_entry") == [("me",)]
    assert check(store.path) == 1


async def test_a_long_past_is_indexed_in_short_transactions(store, monkeypatch):
    monkeypatch.setattr(indexing, "BATCH_ENTRIES", 10)
    monkeypatch.setattr(indexing, "BATCH_CHARACTERS", 200)
    for n in range(5):
        await keep(store, *(f"beans {n} {m}" for m in range(12)), key=f"test:{n}")
    await keep(store, "beans " + "x" * 150, "beans " + "y" * 150, "beans", key="test:9")
    sizes: list[int] = []
    store.writer.commit_hooks.add(lambda when: sizes.append(len(rows(store.path, "SELECT 1 FROM search_entry"))))
    assert len(await store.search("me", "beans", 100)) == 63
    steps = [after - before for before, after in itertools.pairwise(sizes) if after > before]
    assert sum(steps) + sizes[0] == 63
    assert max(steps) <= 10
    assert len(steps) >= 7
    assert check(store.path) == 63


async def test_long_texts_make_the_transactions_shorter(store, monkeypatch):
    monkeypatch.setattr(indexing, "BATCH_CHARACTERS", 200)
    await keep(store, *(f"beans {'x' * 150} {n}" for n in range(5)))
    sizes: list[int] = [0]
    store.writer.commit_hooks.add(lambda when: sizes.append(len(rows(store.path, "SELECT 1 FROM search_entry"))))
    assert len(await store.search("me", "beans")) == 5
    assert [after - before for before, after in itertools.pairwise(sizes) if after > before] == [2, 2, 1]


async def test_the_owners_rows_are_found_by_an_index_and_never_by_a_scan(store):
    await store.search("me", "beans")
    for sql, values in (
        (search.BEHIND, ("me",)),
        (search.ENTRIES, (1, 1, 1, 1)),
        (search.COPY, ("me", 1.0, 1, "")),
        (search.RANKED, ("beans", "me", 1.0, 1)),
        (search.WHOLE, (1, "me")),
    ):
        plan = [row[3] for row in rows(store.path, f"EXPLAIN QUERY PLAN {sql}", *values)]
        scans = [step for step in plan if step.startswith("SCAN") and "VIRTUAL TABLE" not in step]
        assert [step for step in scans if "subquery" not in step.lower()] == [], plan


# ---------------------------------------------------------------------------------------------- cut off, and many

SEARCH = """
import asyncio, os, signal, sys
from everloop.store import search as indexing
from everloop.store.sqlite import search
from everloop.store.sqlite import SQLiteStore

async def main(path, when, commits):
    indexing.BATCH_ENTRIES = 7
    store, left = SQLiteStore(path), int(commits)

    def hook(now):
        nonlocal left
        left -= now == when
        if now == when and left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    store.writer.commit_hooks.add(hook)
    print(len(await store.search("me", "beans", 1000)))
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def searching(path: Path, when: str = "", commits: int = 0) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", SEARCH, str(path), when, str(commits), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


async def many(store: SQLiteStore) -> int:
    """A past with an untrusted part, with this many texts about beans."""
    page = CallEnded("a", "web_fetch", "page", untrusted=True)
    for n in range(6):
        answers = [ModelAnswered(f"beans {n} {m}") for m in range(9)]
        await store.note("me", f"test:{n}", [*answers[:3], page, *answers[3:7], Cleared(), *answers[7:]])
    return 54


async def test_a_killed_search_loses_nothing_and_leaves_nothing_twice(store):
    wanted = await many(store)
    await store.close()
    for when, commits in (("before", 1), ("after", 1), ("before", 2), ("after", 2), ("before", 3), ("after", 4)):
        process = await searching(store.path, when, commits)
        await process.communicate()
        assert process.returncode == -9
    found = await store.search("me", "beans", 1000)
    assert len(found) == len({one.text for one in found}) == wanted
    assert {one.text for one in found if one.untrusted} == {f"beans {n} {m}" for n in range(6) for m in range(3, 7)}
    assert check(store.path) == wanted


async def test_processes_that_search_at_once_index_everything_once(store):
    wanted = await many(store)
    processes = [await searching(store.path) for _ in range(4)]
    outputs = [(await process.communicate())[0].decode().strip() for process in processes]
    assert outputs == [str(wanted)] * 4
    assert check(store.path) == wanted
    found = await store.search("me", "beans", 1000)
    assert {one.text for one in found if one.untrusted} == {f"beans {n} {m}" for n in range(6) for m in range(3, 7)}


async def test_different_texts_of_the_same_instant_and_place_are_no_copies(store):
    await keep(store, "beans one")
    await keep(store, "beans two", key="test:2")
    with closing(sqlite3.connect(store.path)) as database, database:
        database.execute("UPDATE entry SET at = 1700000000.25")
    assert {one.session: one.text for one in await store.search("me", "beans")} == {
        "test:1": "beans one",
        "test:2": "beans two",
    }


async def test_an_owners_term_is_no_word_that_can_be_searched(store):
    await keep(store, "beans")
    for query in (search._term("me"), f"beans {search._term('you')}", f"owner:{search._term('me')}"):
        assert {one.text for one in await store.search("me", query)} <= ({"beans"} if "beans" in query else set())


async def test_a_dropped_index_is_rebuilt(store):
    await keep(store, "beans")
    await store.search("me", "beans")
    await store.close()
    with closing(sqlite3.connect(store.path)) as database, database:
        for sql in ("DROP TABLE search", "DELETE FROM search_entry", "DELETE FROM search_cursor"):
            database.execute(sql)
    assert [one.text for one in await store.search("me", "beans")] == ["beans"]


# ---------------------------------------------------------------------------------------------- what is broken


async def test_without_fts5_a_search_says_so_and_everything_else_works(store, monkeypatch):
    monkeypatch.setattr(search, "CREATE", search.CREATE.replace("fts5", "fts_of_another_sqlite"))
    await keep(store, "beans")
    for _ in range(2):
        with pytest.raises(StoreError, match="FTS5") as raised:
            await store.search("me", "beans")
        assert "\n" not in str(raised.value)
    await keep(store, "more beans")
    assert rows(store.path, "SELECT * FROM search_cursor") == []
    monkeypatch.undo()
    assert len(await store.search("me", "beans")) == 2


async def test_a_file_that_was_searched_with_fts5_can_be_used_without(store):
    await keep(store, "beans")
    await store.search("me", "beans")
    await store.close()
    with closing(sqlite3.connect(store.path)) as database, database:
        database.execute("PRAGMA writable_schema = ON")
        database.execute("UPDATE sqlite_master SET sql = replace(sql, 'fts5', 'fts_none') WHERE name = 'search'")
    with pytest.raises(StoreError, match="FTS5"):
        await store.search("me", "beans")
    await keep(store, "more beans")
    with pytest.raises(StoreError, match="FTS5"):
        await store.search("me", "beans")


async def test_a_damaged_entry_is_left_out_and_later_ones_are_not_trusted(store):
    await store.note(
        "me", "test:1", [ModelAnswered("beans one"), ModelAnswered("beans two"), ModelAnswered("beans three")]
    )
    with closing(sqlite3.connect(store.path)) as database, database:
        database.execute("UPDATE entry SET data = '{' WHERE seq = 2")
    found = await store.search("me", "beans")
    assert {one.text: one.untrusted for one in found} == {"beans one": False, "beans three": True}


async def test_the_session_and_not_the_index_says_whose_a_text_is(store):
    await keep(store, "a long text, which is mine, and which says beans at its end")
    await keep(store, "beans", owner="you")
    (mine,) = await store.search("me", "beans")
    await store.search("you", "beans")
    with closing(sqlite3.connect(store.path)) as database, database:
        database.execute("INSERT INTO search (search) VALUES ('delete-all')")
        for id, text in ((1, mine.text), (2, "beans")):  # both under the term of one owner
            database.execute("INSERT INTO search (rowid, text, owner) VALUES (?, ?, ?)", (id, text, search._term("me")))
    assert await store.search("me", "beans", 1) == [mine]
    with closing(sqlite3.connect(store.path)) as database, database:
        database.execute("UPDATE search_entry SET owner = 'me'")
    assert await store.search("me", "beans") == [mine]

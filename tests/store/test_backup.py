"""Backups of a SQLite store: made while it is in use, checked, and restored without doing anything twice."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, InboundMessage, MessageBus, tool
from everloop.errors import StoreError
from everloop.log import CallEnded, TurnEnded
from everloop.runtime.durable_bus import DurableBus
from everloop.store.sqlite import SQLiteStore
from everloop.store.sqlite import backup as backups
from everloop.testing import ScriptedProvider, call

from ..server.test_readiness import fill_disk
from ..server.test_readiness import small_disk as small_disk
from ..support.commands import everloop


async def backup(store: Path, target: Path) -> backups.Contents:
    return await asyncio.to_thread(backups.backup, store, target)


async def restore(source: Path, store: Path) -> backups.Contents:
    return await asyncio.to_thread(backups.restore, source, store)


def agent_at(store: Path | SQLiteStore, provider: ScriptedProvider, bus: MessageBus | None = None) -> AgentLoop:
    folder = (store if isinstance(store, Path) else store.path).parent
    return AgentLoop(bus or MessageBus(), provider, workspace=folder, store=store)


async def one_turn(store: Path, said: str = "hello", answer: str = "Hi.") -> None:
    async with agent_at(store, ScriptedProvider([answer])) as agent:
        assert await agent.process_direct(said) == answer


async def test_a_backup_made_while_turns_run_is_complete_and_of_one_moment(tmp_path):
    store = tmp_path / "store.db"
    provider = ScriptedProvider([lambda messages, _: messages[-1]["content"]], repeat_last=True)
    async with agent_at(store, provider) as agent:
        await agent.process_direct("first", "cli:0")
        talk = asyncio.gather(*(agent.process_direct(f"{n}", f"cli:{n % 5}") for n in range(60)))
        found = [await backup(store, tmp_path / f"{number}.db") for number in range(3)]
        await talk
    assert found[0].entries <= found[1].entries <= found[2].entries
    for number in range(3):
        db = sqlite3.connect(tmp_path / f"{number}.db")
        ends = db.execute("SELECT count(*) FROM entry WHERE kind = 'end'").fetchone()
        assert ends == db.execute("SELECT count(*) FROM inbox WHERE ended_at IS NOT NULL").fetchone()
        gaps = "SELECT session FROM entry GROUP BY session HAVING count(*) <> max(seq)"
        assert db.execute(gaps).fetchall() == []
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        db.close()
    assert sorted(path.name for path in tmp_path.glob("?.db*")) == ["0.db", "1.db", "2.db"]
    assert (tmp_path / "0.db").stat().st_mode & 0o777 == 0o600


async def test_calls_that_may_have_run_since_the_backup_are_reported_and_do_not_run(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")
    mails: list[str] = []

    @tool(parallel=False)
    async def mail(to: str) -> str:
        """Send a mail."""
        if not mails:
            await backup(store.path, tmp_path / "backup.db")
        mails.append(to)
        return "sent"

    async with agent_at(store, ScriptedProvider([[call("mail", to="a"), call("mail", to="b")], "Done."])) as one:
        one.tools.register(mail)
        assert await one.process_direct("mail both") == "Done."
    assert mails == ["a", "b"]

    (tmp_path / "later").mkdir()
    found = await restore(tmp_path / "backup.db", tmp_path / "later" / "store.db")
    assert (found.open_turns, found.cut_off) == (1, 1)  # the other one's intent was on disk
    provider = ScriptedProvider(["I am not sure that they were sent."])
    async with agent_at(tmp_path / "later" / "store.db", provider) as later:
        later.tools.register(mail)
        await later.resume()
        session = await later.store.session("me", "cli:direct")
        assert session is not None
        log = await later.store.read_log(session.id)
    assert mails == ["a", "b"]
    ended = [entry.entry for entry in log if isinstance(entry.entry, CallEnded)]
    assert [one.status for one in ended] == ["interrupted", "interrupted"]
    assert isinstance(end := log[-1].entry, TurnEnded)
    assert end.text == "I am not sure that they were sent."


async def test_answers_that_may_have_been_sent_since_the_backup_are_marked(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")
    bus = DurableBus(store)
    async with agent_at(store, ScriptedProvider(["One."]), bus) as agent:
        await bus.publish_inbound(InboundMessage("chat", "ada", "1", "first", id="m1"))
        task = asyncio.create_task(agent.run())
        while not (await store.turns("me")) or (await store.turns("me"))[0].ended_at is None:
            await asyncio.sleep(0.01)
        agent.stop()
        await task
        await bus.publish_inbound(InboundMessage("chat", "ada", "2", "second", id="m2"))
        await backup(store.path, tmp_path / "backup.db")
        await bus.close()
    await store.close()
    found = await restore(tmp_path / "backup.db", tmp_path / "restored.db")
    assert (found.unsent, found.open_turns) == (1, 0)

    later = SQLiteStore(tmp_path / "restored.db")
    bus = DurableBus(later)
    async with agent_at(later, ScriptedProvider(["Two.", "Three."]), bus) as agent:
        task = asyncio.create_task(agent.run())
        heard = [await asyncio.wait_for(bus.consume_outbound(), 30) for _ in range(2)]
        assert sorted((one.content, one.repeat) for one in heard) == [("One.", True), ("Two.", True)]
        await bus.publish_inbound(InboundMessage("chat", "ada", "3", "new", id="m3"))
        new = await asyncio.wait_for(bus.consume_outbound(), 30)
        assert (new.content, new.repeat) == ("Three.", False)
        agent.stop()
        await task
        await bus.close()
    await later.close()


async def test_a_restored_store_keeps_the_earlier_one_and_warns_of_no_loss(tmp_path, caplog):
    store = tmp_path / "store.db"
    await one_turn(store, "before")
    await backup(store, tmp_path / "backup.db")
    await one_turn(store, "after")
    found = await restore(tmp_path / "backup.db", store)
    with caplog.at_level(logging.WARNING):
        await one_turn(store, "again")
    assert caplog.records == []

    def said(path: Path) -> list[Any]:
        db = sqlite3.connect(path)
        rows = db.execute("SELECT data ->> 'content' FROM entry WHERE kind = 'user' ORDER BY seq").fetchall()
        db.close()
        return [content.partition("\n")[0] for (content,) in rows]

    assert found.set_aside is not None
    assert said(found.set_aside) == ["before", "after"]
    assert said(store) == ["before", "again"]


async def test_a_store_in_use_is_not_replaced(tmp_path):
    store = tmp_path / "store.db"
    await one_turn(store)
    await backup(store, tmp_path / "backup.db")
    async with agent_at(store, ScriptedProvider(["Still here.", "And here."])) as agent:
        assert await agent.process_direct("hi") == "Still here."
        with pytest.raises(StoreError, match="is in use: stop Everloop first"):
            await restore(tmp_path / "backup.db", store)
        assert await agent.process_direct("hi") == "And here."
    assert [path.name for path in tmp_path.glob("*before-restore*")] == []


def spoilt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[2048:-1024] = b"\xff" * (len(data) - 3072)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda path: path.unlink(), "there is no backup"),
        (lambda path: path.write_text("not a database " * 100), r"backup.db is damaged \(file is not a database\)"),
        (lambda path: path.write_bytes(b""), "is not an Everloop store"),
        (spoilt, r"backup.db is damaged \("),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-9000]),
            r"backup.db is damaged \(.*: restore an older backup",
        ),
    ],
)
async def test_a_file_that_is_no_complete_backup_replaces_nothing(tmp_path, make, line):
    store = tmp_path / "store.db"
    await one_turn(store)
    await backup(store, tmp_path / "backup.db")
    await asyncio.to_thread(make, tmp_path / "backup.db")
    before = await asyncio.to_thread(store.read_bytes)
    with pytest.raises(StoreError, match=line):
        await restore(tmp_path / "backup.db", store)
    assert await asyncio.to_thread(store.read_bytes) == before
    assert [path.name for path in tmp_path.glob("*.part")] == []


@pytest.mark.parametrize("make", [lambda path: path.write_text("not a database " * 100), spoilt])
async def test_a_damaged_store_is_not_backed_up_and_is_what_the_error_names(tmp_path, make):
    store = tmp_path / "store.db"
    await one_turn(store)
    await asyncio.to_thread(make, store)
    with pytest.raises(StoreError, match=r"store.db is damaged \(.*\): restore an older backup"):
        await backup(store, tmp_path / "backup.db")
    assert not list(tmp_path.glob("backup*"))


async def test_a_full_disk_leaves_nothing_behind(tmp_path, small_disk):
    store = tmp_path / "store.db"
    await one_turn(store, "x" * 200_000)
    await backup(store, tmp_path / "backup.db")

    def fill() -> None:
        fill_disk(0, small_disk)
        os.truncate(small_disk / "filler", (small_disk / "filler").stat().st_size - 100_000)

    await asyncio.to_thread(fill)
    with pytest.raises(StoreError, match=r"cannot write the backup .*full"):
        await backup(store, small_disk / "second.db")
    with pytest.raises(StoreError, match=r"cannot restore .*full"):
        await restore(tmp_path / "backup.db", small_disk / "store.db")
    assert await asyncio.to_thread(os.listdir, small_disk) == ["filler"]


async def test_a_restore_that_is_cut_off_leaves_a_store(tmp_path, monkeypatch):
    """Killed after the store was set aside, and before the restored one has its name."""
    store = tmp_path / "store.db"
    await one_turn(store, "before")
    await backup(store, tmp_path / "backup.db")
    await one_turn(store, "after")

    class Killed(BaseException):
        pass

    def killed(path: Path, target: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            await restore(tmp_path / "backup.db", store)
    assert (await backup(store, tmp_path / "of both.db")).entries == 6
    assert (await restore(tmp_path / "backup.db", store)).entries == 3


async def test_a_damaged_store_is_replaced_by_its_backup(tmp_path):
    store = tmp_path / "store.db"
    await one_turn(store)
    await backup(store, tmp_path / "backup.db")
    store.write_text("no database any more")
    assert (await restore(tmp_path / "backup.db", store)).set_aside is not None
    await one_turn(store, "again")


async def test_the_commands_back_up_and_restore(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERLOOP_HOME", str(tmp_path / "home"))
    store, file = tmp_path / "store.db", tmp_path / "monday.db"
    await one_turn(store)
    done = await everloop("backup", str(file), "--store", str(store))
    assert done.status == 0, done.err
    assert f"{file}: 1 session, 3 entries; checked." in done.out
    again = await everloop("backup", str(file), "--store", str(store))
    assert (again.status, again.err) == (
        2,
        f"everloop: {file} exists already: name another file, or remove it first\n",
    )
    await one_turn(store, "later")
    done = await everloop("restore", str(file), "--store", str(store))
    assert done.status == 0, done.err
    assert "has 1 session, 3 entries." in done.out
    assert "is kept as" in done.out
    done = await everloop("backup", str(file), "--store", "postgresql://nobody@127.0.0.1:1/none")
    assert done.status == 2
    assert "docs/backup.md" in done.err

"""`everloop restore --in-place`: a database restored by pg_restore continues without doing anything twice."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from everloop import AgentLoop, InboundMessage, MessageBus, tool
from everloop.bus import OutboundMessage
from everloop.config.sources import DSN
from everloop.errors import OwnerMoved
from everloop.log import Call, CallEnded, ModelAnswered, TurnEnded
from everloop.store.base import Timer
from everloop.store.peers import new_worker, retire
from everloop.store.postgres.directory import owner_row
from everloop.store.postgres.move_owner import move_owner
from everloop.store.postgres.store import PostgresStore
from everloop.testing import ScriptedProvider
from tests.support.commands import everloop

from .server import Server, programs


@pytest.fixture
def empty(postgres: Server) -> Iterator[str]:
    name = f"restored_{os.getpid()}"
    postgres.sql(f"CREATE DATABASE {name}")
    yield postgres.dsn(name)
    postgres.sql(f"DROP DATABASE {name} WITH (FORCE)")


def run(program: str, *arguments: str) -> None:
    subprocess.run([str(programs() / program), *arguments], check=True, capture_output=True)


async def test_a_restored_database_repeats_no_call_and_marks_what_may_have_been_sent(database, empty, tmp_path: Path):
    """As `everloop restore` does for a file. The text contains characters that PostgreSQL's own JSON type refuses."""
    mails: list[str] = []

    @tool
    async def mail(to: str) -> str:
        """Send a mail."""
        mails.append(to)
        return "sent"

    store, worker = PostgresStore(database), new_worker()
    await store.accept(InboundMessage("chat", "ada", "2", "second \x00", id="m2").addressed())
    claim = await store.begin("me", "chat:1", worker, InboundMessage("chat", "ada", "1", "first", id="m1").addressed())
    assert claim is not None
    await store.finish(claim, [TurnEnded("answer", "One.")], [OutboundMessage("chat", "1", "One.")])
    claim = await store.begin("me", "cli:direct", worker, InboundMessage("cli", "user", "direct", "mail").addressed())
    assert claim is not None
    await store.append(
        claim, [ModelAnswered("", (Call("1", "mail", {"to": "a"}), Call("2", "mail", {"to": "b"})))]
    )  # and before its calls
    for key, value in (("olm:a", '{"encrypts":true}'), ("other", '{"encrypts":true}')):
        await store.set_channel_state("matrix:keys", key, value)
    dump = str(tmp_path / "everloop.dump")
    await asyncio.to_thread(run, "pg_dump", "--format=custom", f"--file={dump}", database)
    await store.close()
    retire(worker)

    await asyncio.to_thread(run, "pg_restore", "--no-owner", f"--dbname={empty}", dump)
    done = await everloop("restore", "--in-place", EVERLOOP_STORE=empty)
    assert (done.status, done.err) == (0, "")
    assert "1 unfinished turn: the next start continues there." in done.out
    assert "2 calls may have run since" in done.out
    assert "1 answer may have been sent since" in done.out

    provider = ScriptedProvider(["I am not sure that they were sent."])
    async with AgentLoop(MessageBus(), provider, workspace=tmp_path, store=empty) as later:
        later.tools.register(mail)
        await later.resume()
        session = await later.store.session("me", "cli:direct")
        assert session is not None
        log = await later.store.read_log(session.id)
    assert mails == []
    ended = [entry.entry for entry in log if isinstance(entry.entry, CallEnded)]
    assert [one.status for one in ended] == ["interrupted", "interrupted"]

    store = PostgresStore(empty)
    found = await store.find("me", "m2")
    assert found is not None
    assert (found.message.restored, found.message.content) == (True, "second \x00")
    worker = new_worker()
    outgoing = await store.take_outgoing(worker, 10)
    assert ("One.", True) in [(one.message.content, one.message.repeat) for one in outgoing]
    values = await store.channel_state("matrix:keys")
    assert values == {"olm:a": '{"encrypts":false}', "other": '{"encrypts":true}'}
    await store.close()
    retire(worker)


async def test_owners_who_have_moved_since_the_backup_are_deleted_where_it_is_restored(
    postgres, database, empty, tmp_path: Path
):
    """Otherwise two databases would go on with their turns and jobs."""
    store = PostgresStore(database)
    for owner in ("anna", "bob"):
        await store.accept(InboundMessage("chat", owner, "1", "hi", owner=owner).addressed())
        await store.set_timer(Timer(owner, "t", 1.0, {}))
    await store.close()
    dump = str(tmp_path / "everloop.dump")
    await asyncio.to_thread(run, "pg_dump", "--format=custom", f"--file={dump}", database)
    with postgres.database() as other, postgres.database() as directory:
        await asyncio.to_thread(move_owner, "anna", DSN(database), DSN(other), directory=DSN(directory))
        with owner_row("bob", DSN(directory)) as entry:  # the restored database, by another address
            await asyncio.to_thread(entry.put, DSN(f"{empty}&application_name=x"))
        await asyncio.to_thread(run, "pg_restore", "--no-owner", f"--dbname={empty}", dump)
        done = await everloop("restore", "--in-place", EVERLOOP_STORE=empty, EVERLOOP_STORE_DIRECTORY=directory)
        assert (done.status, done.err) == (0, "")
        assert f"anna has moved to {DSN(other)} since: what the backup had of them is deleted here." in done.out
        assert "bob" not in done.out
    store = PostgresStore(empty)
    assert [timer.owner for timer in await store.timers()] == ["bob"]
    assert await store.sessions("anna") == []
    assert len(await store.sessions("bob")) == 1
    with pytest.raises(OwnerMoved):
        await store.accept(InboundMessage("chat", "anna", "1", "hi", owner="anna").addressed())
    await store.close()


async def test_a_database_in_use_by_a_worker_is_not_marked_and_one_that_it_left_is(database, tmp_path: Path):
    store, worker = PostgresStore(database, lease_seconds=3.0), new_worker()
    peer = store.peer(worker, lambda _: None)
    await peer.join()
    home = tmp_path / "home"  # made by the fixture
    (home / "config.toml").write_text("[worker]\nlease_seconds = 3\n")
    settings = {"EVERLOOP_STORE": database, "EVERLOOP_HOME": str(home)}
    refused = await everloop("restore", "--in-place", **settings)
    assert (refused.status, len(refused.err.splitlines())) == (2, 1)
    assert "is in use: stop all servers and workers first" in refused.err
    await peer.leave()
    await store.close()
    done = await everloop("restore", "--in-place", **settings)
    assert (done.status, done.err) == (0, "")
    retire(worker)


async def test_each_kind_of_store_has_its_own_restore(database, tmp_path: Path):
    for arguments, store in (
        (["restore", "file"], database),
        (["restore"], database),
        (["restore", "--in-place"], str(tmp_path / "store.db")),
        (["restore"], str(tmp_path / "store.db")),
    ):
        done = await everloop(*arguments, EVERLOOP_STORE=store)
        assert (done.status, len(done.err.splitlines())) == (2, 1), arguments
        assert "--in-place" in done.err

"""A server that runs no turns, and workers that do: real processes over one store, of either kind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.bus import InboundMessage
from everloop.log import CallEnded, TurnEnded
from everloop.store.base import Store
from everloop.store.postgres.store import PostgresStore
from everloop.store.sqlite import SQLiteStore
from everloop.testing.openai_server import FakeOpenAI

from ..store.postgres.fixtures import *  # noqa: F403
from ..support.commands import until
from .serving import Client, call, process, refuses, text_of, worker


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: Any, tmp_path: Path) -> dict[str, str]:
    """The settings of a store."""
    if request.param == "sqlite":
        return {}
    return {"EVERLOOP_STORE": request.getfixturevalue("database")}


def opened(folder: Path, where: dict[str, str]) -> Store:
    return PostgresStore(where["EVERLOOP_STORE"]) if where else SQLiteStore(folder / "everloop.db")


@contextlib.asynccontextmanager
async def front(fake: FakeOpenAI, folder: Path, settings: dict[str, str]) -> AsyncIterator[Client]:
    (folder / "config.toml").write_text("[server]\nturns = false\n[worker]\nlease_seconds = 10\n")
    async with process(fake, folder, **settings) as (_, url), aiohttp.ClientSession() as http:
        yield Client(url, http)


async def test_requests_wait_for_a_worker_and_are_answered_by_it(tmp_path: Path, where: dict[str, str]):
    async with FakeOpenAI() as fake, front(fake, tmp_path, where) as client:
        fake.reply("from a worker")
        asked = asyncio.create_task(client.ask("hi"))
        await asyncio.sleep(0.5)
        assert not fake.requests
        async with worker(fake, tmp_path, **where):
            assert text_of(await asked) == "from a worker"
            fake.reply("streamed by a worker")
            streamed = await client.stream("again", {"X-Session": "kept"})
            assert (streamed.text, streamed.finish, streamed.done) == ("streamed by a worker", "stop", True)
            fake.fail(400, "no such thing")
            status, error = await client.fails("and again")
            assert (status, error["code"]) == (400, "model_refused")


async def test_a_worker_that_is_ended_hands_off_its_turn_after_the_step(tmp_path: Path, where: dict[str, str]):
    """The worker is terminated during a model call: the answer is kept, and the other worker runs its tool calls."""
    async with FakeOpenAI() as fake, front(fake, tmp_path, where) as client:
        async with worker(fake, tmp_path, **where) as first:
            fake.calls(call("exec", command="echo once >> runs.txt"), delay=1.5)
            fake.reply("done")
            asked = asyncio.create_task(client.ask("go"))
            await until(lambda: fake.requests)
            async with worker(fake, tmp_path, **where):
                first.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(first.wait(), 25) == 0
                assert text_of(await asyncio.wait_for(asked, 20)) == "done"
        assert len(fake.requests) == 2
        assert (tmp_path / "workspace" / "runs.txt").read_text() == "once\n"


async def test_a_request_whose_worker_is_killed_is_answered_by_another(tmp_path: Path, where: dict[str, str]):
    """Its client still waits at the server, so the request does not count as abandoned."""
    async with FakeOpenAI() as fake, front(fake, tmp_path, where) as client:
        async with worker(fake, tmp_path, **where) as first:
            fake.reply("never heard", delay=30)
            asked = asyncio.create_task(client.ask("go"))
            await until(lambda: fake.requests)
            first.kill()
            await first.wait()
        fake.reply("heard")
        async with worker(fake, tmp_path, **where):
            assert text_of(await asyncio.wait_for(asked, 20)) == "heard"


async def test_a_stop_and_a_status_reach_a_workers_turn(tmp_path: Path, where: dict[str, str]):
    kept = {"X-Session": "long"}
    async with FakeOpenAI() as fake, front(fake, tmp_path, where) as client, worker(fake, tmp_path, **where):
        fake.reply("never heard", delay=30)
        asked = asyncio.create_task(client.fails("go", kept))
        await until(lambda: fake.requests)
        assert "in another process" in text_of(await client.ask("/status", kept))
        assert "Stopped" in text_of(await client.ask("/stop", kept))
        status, error = await asyncio.wait_for(asked, 25)
        assert (status, error["code"]) == (409, "cancelled")
        fake.reply("goes on")
        assert text_of(await client.ask("and now?", kept)) == "goes on"


async def test_an_owner_whose_folder_cannot_be_created_does_not_block_the_others(tmp_path: Path, where: dict[str, str]):
    (tmp_path / "owners").mkdir()
    (tmp_path / "owners" / "bob").write_text("in the way")
    store = opened(tmp_path, where)
    try:
        await store.accept(InboundMessage("api", "bob", "c", "hi", owner="bob", reply=False).addressed())
    finally:
        await store.close()
    async with FakeOpenAI() as fake, front(fake, tmp_path, where) as client, worker(fake, tmp_path, **where) as working:
        fake.reply("from a worker")
        assert text_of(await asyncio.wait_for(client.ask("hi"), 20)) == "from a worker"
        assert working.returncode is None
        assert len(fake.requests) == 1


@pytest.mark.parametrize(("headers", "reason"), [({}, "abandoned"), ({"X-Session": "kept"}, "answer")])
async def test_the_turn_of_a_killed_server_ends_in_its_worker_unless_its_session_is_kept(
    tmp_path: Path, where: dict[str, str], headers: dict[str, str], reason: str
):
    """A lease that would end during the test could end the turn, too: it is longer."""
    (tmp_path / "config.toml").write_text("[server]\nturns = false\n[worker]\nlease_seconds = 3600\n")
    workspace, store = tmp_path / "workspace", opened(tmp_path, where)
    async with (
        FakeOpenAI() as fake,
        aiohttp.ClientSession() as http,
        process(fake, tmp_path, **where) as (server, url),
        worker(fake, tmp_path, **where),
    ):
        fake.calls(call("exec", command="touch begun; while [ ! -e go ]; do sleep 0.1; done; touch ended"))
        fake.reply("done")
        asking = asyncio.create_task(Client(url, http).ask("go", headers))
        await until((workspace / "begun").exists)
        (session,) = await store.sessions("me")
        server.kill()
        with pytest.raises(aiohttp.ClientError):
            await asking
        if reason == "answer":
            (workspace / "go").touch()
        async with asyncio.timeout(30):
            while not isinstance(last := (await store.read_log(session.id))[-1].entry, TurnEnded):
                await asyncio.sleep(0.05)
    await store.close()
    assert last.reason == reason
    assert (workspace / "ended").exists() == (reason == "answer")
    assert len(fake.requests) == (2 if reason == "answer" else 1)


@pytest.mark.parametrize("headers", [{}, {"X-Session": "kept"}])
async def test_no_model_is_called_for_a_client_that_left_before_a_worker_started(
    tmp_path: Path, where: dict[str, str], headers: dict[str, str]
):
    async with FakeOpenAI() as fake, front(fake, tmp_path, where) as client:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.ask("gone", headers), 0.7)
        await asyncio.sleep(0.5)
        store = opened(tmp_path, where)
        try:
            async with asyncio.timeout(20):
                while await store.ready("nobody"):  # until the server has seen all of them leave
                    await asyncio.sleep(0.05)
        finally:
            await store.close()
        async with worker(fake, tmp_path, **where):
            fake.reply("for one who waits")
            assert text_of(await asyncio.wait_for(client.ask("hi", headers), 20)) == "for one who waits"
            await asyncio.sleep(0.5)
        assert len(fake.requests) == 1


async def test_a_server_that_drains_hands_off_others_turns_after_their_step(tmp_path: Path, where: dict[str, str]):
    """It still waits for its own client; a turn it started for others now would be interrupted."""
    (tmp_path / "config.toml").write_text("[server]\ndrain_seconds = 6\n[worker]\nlease_seconds = 10\n")
    store = opened(tmp_path, where)
    async with FakeOpenAI() as fake, aiohttp.ClientSession() as http, process(fake, tmp_path, **where) as (made, url):
        fake.calls(call("exec", command="while [ ! -e go ]; do sleep 0.1; done; echo one >> runs.txt"))
        message = InboundMessage("chat", "ada", "c", "go", owner="me", reply=False).addressed()
        row = await store.accept(message)
        await store.wake()
        await until(lambda: fake.requests)
        async with worker(fake, tmp_path, **where):
            fake.hang(60)
            asking = asyncio.create_task(Client(url, http).ask("hi"))
            await until(lambda: len(fake.requests) == 2)
            fake.calls(call("exec", id="c2", command="sleep 4; echo two >> runs.txt"))
            fake.reply("done")
            made.send_signal(signal.SIGTERM)
            await refuses(url)
            (tmp_path / "workspace" / "go").touch()
            assert await asyncio.wait_for(made.wait(), 25) == 0
            with pytest.raises(aiohttp.ClientError):
                await asking
            async with asyncio.timeout(20):
                while not (found := await store.incoming(row.id)).done:
                    await asyncio.sleep(0.1)
        assert found.first_seq is not None
        entries = [one.entry for one in await store.read_turn(found.session, found.first_seq)]
        assert [one.status for one in entries if isinstance(one, CallEnded)] == ["ok", "ok"]
        assert (tmp_path / "workspace" / "runs.txt").read_text() == "one\ntwo\n"
    await store.close()

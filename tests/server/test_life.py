"""Clients that disconnect, servers that are killed or stopped, and the state on disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.bus import InboundMessage
from everloop.log import CallEnded, Entry, Request, TurnEnded
from everloop.runtime.dispatcher import Dispatcher
from everloop.runtime.session import Session, Stopped
from everloop.store.base import Claim
from everloop.store.sqlite import SQLiteStore
from everloop.testing.openai_server import FakeOpenAI

from ..runtime.test_dispatcher import Host
from .serving import Client, Serving, call, process, refuses, serving, text_of

ONCE = {"X-Session": "ada", "Idempotency-Key": "k1"}


async def until(true: Any, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def leave(server: Client, stream: bool, when: Any) -> None:
    """Send a request and hang up once something has happened."""
    asking = asyncio.create_task(server.stream("go") if stream else server.ask("go"))
    await until(when)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


# ---------------------------------------------------------------------------------------------- clients that go away


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_ends_the_model_call(server: Serving, stream: bool):
    server.fake.hang(60)
    await leave(server, stream, lambda: server.fake.requests)
    await until(lambda: server.fake.requests[0].gone)
    assert (await server.ended()).reason == "cancelled"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_tools_at_once(server: Serving, stream: bool):
    workspace = server.owners.config.workspace
    server.fake.calls(call("exec", command="echo started > mark; sleep 40; echo survived > canary"))
    await leave(server, stream, (workspace / "mark").exists)
    ended = await server.ended()
    assert ended.reason == "cancelled"
    results = [entry for entry in await server.entries() if isinstance(entry, CallEnded)]
    assert [result.status for result in results] == ["cancelled"]
    assert server.server._guard is not None
    await until(lambda: not server.server._guard.running)
    await asyncio.sleep(0.1)
    assert not (workspace / "canary").exists()


async def test_a_client_that_disconnects_mid_stream_keeps_what_was_said(server: Serving):
    server.fake.hang(60, after_chunks=2, text="one two three", tokens=["one", " two", " three"])
    async with server.post({"messages": [{"role": "user", "content": "go"}], "stream": True}) as response:
        async with asyncio.timeout(30):
            while b" two" not in await response.content.readline():
                pass
    ended = await server.ended()
    assert ended.reason == "cancelled"
    assert "one two" in str(await server.entries())


async def test_a_client_that_stays_gets_the_answer_although_the_others_disconnect(server: Serving, monkeypatch):
    """They leave just as it joins their turn, which then ends for lack of a waiter."""
    others = [await server.client(name, "ada") for name in ("first", "second")]
    stays = await server.client("stays", "ada")
    joined, counted, count = asyncio.Semaphore(0), asyncio.Event(), asyncio.Event()
    leaving, go = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]
    finish, accept, chat = server.store.finish, server.store.accept, server.server._turns
    ends = iter(range(2))

    def held(*given: Any, **named: Any) -> Any:
        number = next(ends, None)

        async def later() -> Any:
            if number is not None:
                leaving[number].set()
                await go[number].wait()
            return await finish(*given, **named)

        return asyncio.ensure_future(later())

    async def noted(*given: Any, **named: Any) -> Any:
        row = await accept(*given, **named)
        joined.release()
        return row

    async def counts(asked: Any) -> None:
        if asked.message.sender_id == "stays":
            counted.set()
            await count.wait()

    monkeypatch.setattr(server.store, "finish", held)
    monkeypatch.setattr(server.store, "accept", noted)
    monkeypatch.setattr(chat, "_count", counts)
    server.fake.hang(60)
    first = asyncio.create_task(others[0].ask("go", ONCE))
    async with asyncio.timeout(30):
        await until(lambda: len(server.fake.requests) == 1)
        first.cancel()
        await leaving[0].wait()
        second, third = (asyncio.create_task(one.ask("go", ONCE)) for one in (others[1], stays))
        await joined.acquire()
        await joined.acquire()
        server.fake.hang(60)
        go[0].set()
        await counted.wait()
        await until(lambda: len(server.fake.requests) == 2)
        second.cancel()
        await leaving[1].wait()
        server.fake.reply("for the one who stayed")
        count.set()
        await joined.acquire()
        go[1].set()
        assert text_of(await third) == "for the one who stayed"


# ---------------------------------------------------------------------------------------------- kill and restart


async def entries_of(home: Path, key: str | None = None) -> list[Entry]:
    store = SQLiteStore(home / "everloop.db")
    try:
        key = key or (await store.sessions("me", 1))[0].key
        info = await store.session("me", key)
        assert info is not None
        return [one.entry for one in await store.read_log(info.id)]
    finally:
        await store.close()


async def test_a_killed_server_finishes_a_kept_turn_and_the_repeated_request_gets_its_answer(
    tmp_path: Path, fake: FakeOpenAI, http: aiohttp.ClientSession
):
    fake.calls(call("exec", command="echo x >> ran.txt"))
    fake.hang(60)  # the second round is under way when the process dies
    async with process(fake, tmp_path) as (first, url):
        asking = asyncio.create_task(Client(url, http).ask("go", ONCE))
        await until(lambda: len(fake.requests) == 2)
        first.kill()
        await first.wait()
        with pytest.raises(aiohttp.ClientError):
            await asking
    fake.reply("it was done")
    async with process(fake, tmp_path) as (_, url):
        assert text_of(await Client(url, http).ask("go", ONCE)) == "it was done"
    assert (tmp_path / "workspace/ran.txt").read_text() == "x\n"
    assert len(fake.requests) == 3


async def test_a_killed_servers_stateless_turn_is_closed_as_abandoned_and_calls_no_model(
    tmp_path: Path, fake: FakeOpenAI, http: aiohttp.ClientSession
):
    fake.hang(60)
    async with process(fake, tmp_path) as (first, url):
        asking = asyncio.create_task(Client(url, http).ask("go"))
        await until(lambda: fake.requests)
        first.kill()
        await first.wait()
        with pytest.raises(aiohttp.ClientError):
            await asking
    async with process(fake, tmp_path) as (_, url):
        async with asyncio.timeout(30):
            while not isinstance(last := (await entries_of(tmp_path))[-1], TurnEnded):
                await asyncio.sleep(0.05)
    assert last.reason == "abandoned"
    assert len(fake.requests) == 1


# ---------------------------------------------------------------------------------------------- graceful shutdown


async def test_a_stopping_server_lets_requests_end_and_accepts_no_more(
    tmp_path: Path, fake: FakeOpenAI, http: aiohttp.ClientSession
):
    fake.reply("finished", delay=3.0)
    async with process(fake, tmp_path) as (server, url):
        asking = asyncio.create_task(Client(url, http).ask("go"))
        await until(lambda: fake.requests)
        server.send_signal(signal.SIGTERM)
        await refuses(url)
        with pytest.raises(aiohttp.ClientConnectorError):
            await Client(url, http).ask("too late")
        assert text_of(await asking) == "finished"
        assert await asyncio.wait_for(server.wait(), 25) == 0
    assert len(fake.requests) == 1


async def test_a_kept_turn_that_does_not_end_in_time_continues_at_the_next_start(
    tmp_path: Path, fake: FakeOpenAI, http: aiohttp.ClientSession
):
    (tmp_path / "config.toml").write_text("[server]\ndrain_seconds = 0.3\n")
    fake.hang(60)
    async with process(fake, tmp_path) as (server, url):
        asking = asyncio.create_task(Client(url, http).ask("go", ONCE))
        await until(lambda: fake.requests)
        server.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(server.wait(), 25) == 0
        with pytest.raises(aiohttp.ClientError):
            await asking
    fake.reply("after the restart")
    async with process(fake, tmp_path) as (_, url):
        assert text_of(await Client(url, http).ask("go", ONCE)) == "after the restart"
    assert len(fake.requests) == 2


async def test_a_server_ends_in_time_although_a_request_does_not(
    tmp_path: Path, fake: FakeOpenAI, http: aiohttp.ClientSession
):
    (tmp_path / "config.toml").write_text("[server]\ndrain_seconds = 8\n")
    fake.hang(60)
    async with process(fake, tmp_path) as (server, url):
        asking = asyncio.create_task(Client(url, http).ask("go"))
        await until(lambda: fake.requests)
        server.send_signal(signal.SIGTERM)
        async with asyncio.timeout(15):  # aiohttp alone would wait for sixteen
            assert await server.wait() == 0
        with pytest.raises(aiohttp.ClientError):
            await asking


async def test_requests_that_do_not_end_in_time_leave_no_error_in_the_log(tmp_path: Path, caplog: Any):
    async with serving(tmp_path, drain_seconds=0.2) as server:
        for _ in range(4):
            server.fake.hang(60)
        asking = [asyncio.create_task(server.stream("go")) for _ in range(4)]
        await until(lambda: len(server.fake.requests) == 4)
        await server.server.stop()
        await asyncio.gather(*asking, return_exceptions=True)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_a_second_signal_ends_a_server_at_once(
    tmp_path: Path, fake: FakeOpenAI, http: aiohttp.ClientSession, number: int, status: int
):
    fake.hang(60)
    async with process(fake, tmp_path) as (server, url):
        asking = asyncio.create_task(Client(url, http).ask("go", ONCE))
        await until(lambda: fake.requests)
        server.send_signal(number)
        await refuses(url)  # or the second would be taken for the first
        await asyncio.sleep(0.3)
        assert server.returncode is None  # it waits for the request
        server.send_signal(number)
        assert await asyncio.wait_for(server.wait(), 25) == status
        with pytest.raises(aiohttp.ClientError):
            await asking
        assert b"Traceback" not in await server.stderr.read()
    fake.reply("after the restart")
    async with process(fake, tmp_path) as (_, url):
        assert text_of(await Client(url, http).ask("go", ONCE)) == "after the restart"


async def test_control_c_ends_it_with_a_shells_status(tmp_path: Path, fake: FakeOpenAI):
    async with process(fake, tmp_path) as (server, _):
        server.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(server.wait(), 25) == 130
        assert b"Traceback" not in await server.stderr.read()


async def test_a_port_in_use_is_one_line(tmp_path: Path, fake: FakeOpenAI):
    from ..support.commands import everloop

    async with process(fake, tmp_path) as (_, url):
        port = url.rpartition(":")[2]
        done = await everloop("serve", "--port", port, server=fake, EVERLOOP_HOME=str(tmp_path / "other"))
        impossible = await everloop("serve", "--port", "99999", server=fake, EVERLOOP_HOME=str(tmp_path / "other"))
    for one in (done, impossible):
        assert one.status == 2
        assert len(one.err.splitlines()) == 1
        assert "--port" in one.err


async def test_without_a_token_it_only_listens_to_this_machine(tmp_path: Path, fake: FakeOpenAI):
    from ..support.commands import everloop

    done = await everloop("serve", "--host", "0.0.0.0", "--port", "0", server=fake, EVERLOOP_HOME=str(tmp_path))
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
    assert "everloop token add" in done.err


async def test_with_all_tokens_revoked_it_listens_only_locally_and_refuses_every_request(
    tmp_path: Path, fake: FakeOpenAI, http: aiohttp.ClientSession
):
    from ..support.commands import everloop

    home = str(tmp_path)
    assert (await everloop("token", "add", "ada", server=fake, EVERLOOP_HOME=home)).status == 0
    assert (await everloop("token", "revoke", "ada", server=fake, EVERLOOP_HOME=home)).status == 0
    done = await everloop("serve", "--host", "0.0.0.0", "--port", "0", server=fake, EVERLOOP_HOME=home)
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
    async with process(fake, tmp_path, first="all tokens are revoked") as (_, url):
        assert (await Client(url, http).fails("hi"))[0] == 401
        assert (await Client(url, http).get("/healthz"))[0] == 200
    assert not fake.requests


@pytest.mark.parametrize("kept", [False, True])
async def test_a_request_not_started_when_the_server_stopped_is_run_later_only_if_its_answer_can_be_read(
    tmp_path: Path, kept: bool
):
    store = SQLiteStore(tmp_path / "store.db")
    began: list[str] = []

    class Hangs(Host):
        async def run_claim(self, claim: Claim, session: Session) -> str:
            began.append(claim.key)
            await asyncio.sleep(60)
            return ""

    dispatcher = Dispatcher(store, Hangs(), at_once=1)
    answers = [
        await dispatcher.submit(
            InboundMessage("api", "client", id, "go", id=id, request=Request(kept=kept)).addressed()
        )
        for id in ("first", "second")
    ]
    await until(lambda: began)
    await dispatcher.stop()
    for answer in answers:
        with pytest.raises(Stopped):
            await answer
    assert began == ["api:first"]
    assert (await store.find("me", "second") is not None) == kept
    await store.close()


def held(pid: int) -> int:
    """Bytes of memory that a process holds by itself."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


async def test_a_server_does_not_grow_with_its_requests(tmp_path: Path, http: aiohttp.ClientSession):
    async with (
        FakeOpenAI(keep_bodies=False) as fake,
        process(fake, tmp_path, EVERLOOP_MODEL="tools-0x1") as (server, url),
    ):
        client = Client(url, http)
        sizes = []
        for _ in range(3):
            for _ in range(20):
                await asyncio.gather(*(client.ask("hello") for _ in range(10)))
            sizes.append(await asyncio.to_thread(held, server.pid))
        assert sizes[2] - sizes[1] < 1_500_000, sizes

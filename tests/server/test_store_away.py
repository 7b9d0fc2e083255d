"""A server whose database is unavailable: monitoring soon sees it, and the server can still be terminated."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import aiohttp
import pytest

from everloop.store.postgres.store import PostgresStore
from everloop.store.tokens import hash_of, new_token
from everloop.testing.openai_server import FakeOpenAI

from ..store.postgres.fixtures import *  # noqa: F403
from ..store.postgres.proxy import SOCKET, Proxy, proxied
from ..store.postgres.server import Server, name_of
from ..support.commands import until
from .serving import Client, process, refuses

SOON = 20.0  # seconds; a call to a store that is away is given up after thirty


def take_away(proxy: Proxy, folder: Path) -> None:
    (folder / SOCKET).rename(folder / "away")
    proxy.cut_all()


def asked_for(server: Server, database: str) -> bool:
    """Whether there is a message in the store."""
    name = name_of(database)
    return bool(server.sql("SELECT 1 FROM inbox", database=name))


def taken(url: str) -> bool:
    """Whether a client has connected to a server, which has read all that it was sent."""
    port = int(url.rpartition(":")[2])
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, queues, *_ = line.split()
        if int(local.partition(":")[2], 16) == port and state == "01":
            return not int(queues.partition(":")[2], 16)
    return False


async def test_a_server_whose_store_is_unavailable_soon_reports_that_it_is_not_ready(
    fake: FakeOpenAI, http: aiohttp.ClientSession, database: str, tmp_path: Path
):
    place = tmp_path / "socket"
    place.mkdir()
    async with proxied(database, place) as (proxy, dsn), process(fake, tmp_path, EVERLOOP_STORE=dsn) as (_, url):
        client = Client(url, http)
        assert (await client.get("/readyz"))[0] == 200
        take_away(proxy, place)
        async with asyncio.timeout(SOON):
            while (await client.get("/readyz"))[0] != 503:  # for a second, one answer serves all
                await asyncio.sleep(0.1)
        began = time.monotonic()
        answers = await asyncio.gather(*(client.get("/readyz") for _ in range(50)))
        assert {status for status, _ in answers} == {503}
        assert time.monotonic() - began < SOON
        (place / "away").rename(place / SOCKET)
        async with asyncio.timeout(20):
            while (await client.get("/readyz"))[0] != 200:
                await asyncio.sleep(0.1)


async def test_metrics_read_with_a_token_show_that_the_store_is_unavailable(
    fake: FakeOpenAI, http: aiohttp.ClientSession, database: str, tmp_path: Path
):
    place = tmp_path / "socket"
    place.mkdir()
    (tmp_path / "config.toml").write_text("[server]\ntokens = true\n")
    store, good = PostgresStore(database), new_token()
    await store.add_token("prometheus", "me", hash_of(good), ["admin"])
    await store.close()

    async def read(path: str, token: str) -> tuple[int, str]:
        async with http.get(url + path, headers={"Authorization": f"Bearer {token}"}) as answer:
            return answer.status, await answer.text()

    async with proxied(database, place) as (proxy, dsn), process(fake, tmp_path, EVERLOOP_STORE=dsn) as (_, url):
        assert "everloop_store_up 1" in (await read("/metrics", good))[1]
        take_away(proxy, place)
        await asyncio.sleep(2.1)  # during which one store query serves all
        async with asyncio.timeout(SOON):
            status, text = await read("/metrics", good)
        assert (status, "everloop_store_up 0" in text) == (200, True)
        with pytest.raises(TimeoutError):  # an unknown token waits for the store
            async with asyncio.timeout(5):
                await read("/metrics", new_token())


async def test_metrics_without_any_token_show_that_the_store_is_unavailable(
    fake: FakeOpenAI, http: aiohttp.ClientSession, database: str, tmp_path: Path
):
    place = tmp_path / "socket"
    place.mkdir()
    async with proxied(database, place) as (proxy, dsn), process(fake, tmp_path, EVERLOOP_STORE=dsn) as (_, url):

        async def read() -> str:
            async with http.get(url + "/metrics") as answer:
                return await answer.text()

        assert "everloop_store_up 1" in await read()
        take_away(proxy, place)
        async with asyncio.timeout(SOON):
            while "everloop_store_up 0" not in await read():
                await asyncio.sleep(0.1)


@pytest.mark.parametrize(("drain", "signals"), [(2, 1), (30, 2)])
@pytest.mark.parametrize("runs", [True, False])
async def test_a_server_whose_store_is_unavailable_ends_in_time_or_at_a_second_signal(
    fake: FakeOpenAI,
    http: aiohttp.ClientSession,
    postgres: Server,
    database: str,
    tmp_path: Path,
    drain: int,
    signals: int,
    runs: bool,
):
    place = tmp_path / "socket"
    place.mkdir()
    (tmp_path / "config.toml").write_text(f"[server]\ndrain_seconds = {drain}\nturns = {str(runs).lower()}\n")
    async with proxied(database, place) as (proxy, dsn), process(fake, tmp_path, EVERLOOP_STORE=dsn) as (made, url):
        fake.hang(60)
        asking = asyncio.create_task(Client(url, http).ask("go", {"X-Session": "kept"}))
        await until(lambda: fake.requests if runs else asked_for(postgres, database))
        take_away(proxy, place)
        made.send_signal(signal.SIGTERM)
        await refuses(url)
        if signals == 2:  # which would be taken for the first one before that was heard
            made.send_signal(signal.SIGTERM)
        async with asyncio.timeout(SOON):
            assert await made.wait() == 0
        with pytest.raises(aiohttp.ClientError):
            await asking


async def test_a_request_that_waits_for_an_unavailable_store_does_not_delay_the_end(
    fake: FakeOpenAI, http: aiohttp.ClientSession, database: str, tmp_path: Path
):
    place = tmp_path / "socket"
    place.mkdir()
    (tmp_path / "config.toml").write_text("[server]\ndrain_seconds = 15\n")
    async with proxied(database, place) as (proxy, dsn), process(fake, tmp_path, EVERLOOP_STORE=dsn) as (made, url):
        take_away(proxy, place)
        asking = asyncio.create_task(Client(url, http).ask("go", {"X-Session": "kept", "Idempotency-Key": "k"}))
        await until(lambda: taken(url))
        made.send_signal(signal.SIGTERM)
        async with asyncio.timeout(27):  # it would be twice the time that requests have
            assert await made.wait() == 0
        with pytest.raises((aiohttp.ClientError, AssertionError)):  # or it is told in time that there is no store
            await asking


async def test_control_c_ends_a_server_whose_store_is_unavailable_immediately(
    fake: FakeOpenAI, database: str, tmp_path: Path
):
    place = tmp_path / "socket"
    place.mkdir()
    async with proxied(database, place) as (proxy, dsn), process(fake, tmp_path, EVERLOOP_STORE=dsn) as (made, _):
        take_away(proxy, place)
        made.send_signal(signal.SIGINT)
        async with asyncio.timeout(SOON):
            assert await made.wait() == 130

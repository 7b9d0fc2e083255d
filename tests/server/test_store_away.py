"""A server whose database has gone away: whoever watches it hears so soon, and it can be told to end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import aiohttp

from everloop.testing.openai_server import FakeOpenAI

from ..postgres.fixtures import *  # noqa: F403
from ..postgres.proxy import SOCKET, Proxy, proxied
from .serving import Client, process

SOON = 10.0  # seconds; a call to a store that is away is given up after thirty


def take_away(proxy: Proxy, folder: Path) -> None:
    (folder / SOCKET).rename(folder / "away")
    proxy.cut_all()


async def test_a_server_whose_store_is_away_soon_says_that_it_is_not_ready(
    fake: FakeOpenAI, http: aiohttp.ClientSession, database: str, tmp_path: Path
):
    place = tmp_path / "socket"
    place.mkdir()
    async with proxied(database, place) as (proxy, dsn), process(fake, tmp_path, EVERLOOP_STORE=dsn) as (_, url):
        client = Client(url, http)
        assert (await client.get("/readyz"))[0] == 200
        take_away(proxy, place)
        began = time.monotonic()
        answers = await asyncio.gather(*(client.get("/readyz") for _ in range(50)))
        assert {status for status, _ in answers} == {503}
        assert time.monotonic() - began < SOON
        (place / "away").rename(place / SOCKET)
        async with asyncio.timeout(20):
            while (await client.get("/readyz"))[0] != 200:
                await asyncio.sleep(0.1)

"""What real servers and workers count of the turns that they run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from everloop.bus import InboundMessage
from everloop.store.base import Store
from everloop.store.postgres.store import PostgresStore
from everloop.store.sqlite import SQLiteStore
from everloop.testing.openai_server import FakeOpenAI
from tests.observability.reading import Family, read, value

from ..store.postgres.fixtures import database as database
from ..store.postgres.fixtures import postgres as postgres
from ..support.commands import environment, finished, start
from .serving import Client, call, process

TOOLS = "everloop_tool_calls_total"


async def scraped(url: str, until: Callable[[dict[str, Family]], object]) -> dict[str, Family]:
    """The numbers, once they are as expected."""
    async with asyncio.timeout(30), aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/metrics") as response:
                assert response.status == 200
                if until(found := read(await response.text())):
                    return found
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def working(fake: FakeOpenAI, **settings: str) -> AsyncIterator[tuple[Any, str]]:
    """A real worker with metrics, and their address."""
    made = await start("worker", "--metrics", "127.0.0.1:0", env=environment(fake, **settings))
    try:
        line = (await asyncio.wait_for(made.stderr.readline(), 30)).decode()
        found = re.fullmatch(r"everloop: metrics on (http://\S+)/metrics\n", line)
        assert found is not None, line
        yield made, found[1]
    finally:
        if made.returncode is None:
            made.terminate()
        await finished(made)


async def left_in_the_store(*texts: str, store: Store | None = None) -> None:
    store = store or SQLiteStore(Path(os.environ["EVERLOOP_HOME"]) / "everloop.db")
    for text in texts:
        await store.accept(InboundMessage("test", "me", text, text).addressed())
    await store.close()


def ended(count: int) -> Callable[[dict[str, Family]], bool]:
    return lambda found: value(found, "everloop_turns_total", reason="answer") == count


async def test_a_server_counts_its_turns_with_their_model_calls_tokens_and_tools(tmp_path):
    async with FakeOpenAI() as fake, process(fake, tmp_path) as (_, url), aiohttp.ClientSession() as http:
        fake.calls(call("list_dir", path="."), call("made_up_by_the_model", "c2"))
        fake.reply("Nothing there.")
        await Client(url, http).ask("what is there?")
        found = await scraped(url, ended(1))
    assert value(found, "everloop_messages_taken_total") == 1
    assert value(found, "everloop_model_calls_total") == 2
    assert value(found, "everloop_model_call_seconds_count") == 2
    assert value(found, "everloop_model_tokens_total", kind="input") > 0
    assert value(found, "everloop_model_tokens_total", kind="output") > 0
    assert value(found, TOOLS, tool="list_dir", status="ok") == 1
    assert value(found, TOOLS, tool="other", status="error") == 1
    assert "made_up_by_the_model" not in str(found)


async def test_a_worker_counts_what_it_takes_from_the_store():
    await left_in_the_store("one", "two")
    async with FakeOpenAI() as fake:
        fake.reply("Hello.")
        fake.reply("Hello.")
        async with working(fake) as (_, url):
            found = await scraped(url, ended(2))
    assert value(found, "everloop_messages_taken_total") == 2
    assert value(found, "everloop_turns_taken_over_total") == 0


async def test_a_killed_workers_turn_is_counted_as_taken_over():
    await left_in_the_store("one")
    async with FakeOpenAI() as fake:
        fake.hang(30)
        async with working(fake) as (first, _):
            async with asyncio.timeout(20):
                while not fake.requests:
                    await asyncio.sleep(0.02)
            first.kill()
            await first.wait()
        fake.reply("Hello.")
        async with working(fake) as (_, url):
            found = await scraped(url, ended(1))
    assert value(found, "everloop_turns_taken_over_total") == 1
    assert value(found, "everloop_messages_taken_total") == 0


async def test_a_write_of_a_worker_that_slept_past_its_lease_is_counted_as_refused(database):
    home = Path(os.environ["EVERLOOP_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text("[worker]\nlease_seconds = 1.0\n")
    await left_in_the_store("one", store=PostgresStore(database))
    async with FakeOpenAI() as fake, working(fake, EVERLOOP_STORE=database) as (first, url):
        fake.hang(3)
        async with asyncio.timeout(20):
            while not fake.requests:
                await asyncio.sleep(0.02)
        first.send_signal(signal.SIGSTOP)
        try:
            fake.reply("Hello.")
            async with working(fake, EVERLOOP_STORE=database) as (_, other):
                found = await scraped(other, ended(1))
                assert value(found, "everloop_turns_taken_over_total") == 1
        finally:
            first.send_signal(signal.SIGCONT)
        found = await scraped(url, lambda seen: value(seen, "everloop_stale_writes_total"))
    assert value(found, "everloop_turns_total", reason="answer") == 0

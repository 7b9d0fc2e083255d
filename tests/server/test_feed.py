"""The feed of a session: every entry and every word exactly once, whatever happens to connections and servers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.log import TurnEnded
from everloop.store.sqlite import SQLiteStore
from everloop.store.tokens import hash_of, new_token
from everloop.testing.openai_server import FakeOpenAI

from .feeds import Page, PageClient, is_over, page_client
from .serving import Serving, call, process, refuses, serving

WORDS = [f"word{number} " for number in range(40)]
TEXT = "".join(WORDS)


async def test_a_feed_has_the_entries_and_the_text_as_it_arrives(server: Serving, ada: PageClient):
    server.fake.reply(TEXT, tokens=WORDS, token_delay=0.02)
    feed = await ada.feed("web:1")
    await ada.say("web:1", "go")
    page = await feed.read(lambda page: "word3" in page.live and page.state["turn"] is not None)
    assert page.kinds == ["user"]
    page = await feed.read(is_over)
    assert page.kinds == ["user", "answer", "end"]
    assert page.entries[1]["text"] == "go"
    assert page.text.strip() == TEXT.strip()
    assert sum(event.name == "text" for event in page.events) >= 3
    feed.close()


async def test_from_every_id_of_a_feed_exactly_the_rest_follows(server: Serving, ada: PageClient):
    server.fake.reply("Let me look. ")
    server.fake.replies[-1].calls = [call("list_dir", path=".")]
    server.fake.reply("It is 😀 empty.", tokens=["It is ", "😀", " empty", "."], token_delay=0.1)
    whole = await ada.feed("web:1")
    await ada.say("web:1", "go")
    page = await whole.read(is_over)
    whole.close()
    assert len({event.id for event in page.events if event.id}) >= 6
    for number, event in enumerate(page.events):
        if event.id:
            again = Page()
            for before in page.events[: number + 1]:
                again.take(before)
            feed = await ada.feed("web:1", again)
            assert (await feed.read(is_over)).entries == page.entries
            assert again.live == ""
            feed.close()


async def test_a_client_that_reconnects_mid_stream_gets_every_word_once(server: Serving, ada: PageClient):
    server.fake.reply(TEXT, tokens=WORDS, token_delay=0.02)
    feed = await ada.feed("web:1")
    await ada.say("web:1", "go")
    page = await feed.read(lambda page: "word5" in page.live)
    feed.close()
    shown = page.live
    again = await ada.feed("web:1", page)
    assert (await again.read(lambda page: "word25" in page.live)).live.startswith(shown)
    assert again.page.live == TEXT[: len(again.page.live)]
    new = await ada.feed("web:1")  # a reload: all that was said so far comes, and then the rest
    page = await new.read(lambda page: "word30" in page.live)
    assert page.live == TEXT[: len(page.live)]
    assert (await new.read(is_over)).text.strip() == TEXT.strip()
    for one in (again, new):
        one.close()


async def test_a_feed_continues_at_another_server_when_one_is_killed(tmp_path: Path):
    token, page = new_token(), Page()
    async with FakeOpenAI() as fake, aiohttp.ClientSession() as http:
        store = SQLiteStore(tmp_path / "everloop.db")
        await store.add_token("ada", "me", hash_of(token))
        await store.close()
        fake.reply("once upon a time", tokens=["once ", "upon ", "a ", "time"], token_delay=0.2)
        fake.reply(
            "once upon a time there was a log", tokens=["once ", "upon ", "a ", "time there ", "was ", "a ", "log"]
        )
        async with process(fake, tmp_path) as (killed, url):
            client = PageClient(url, http, token)
            feed = await client.feed("web:1", page)
            await client.say("web:1", "go")
            await feed.read(lambda page: "upon" in page.live)
            os.kill(killed.pid, signal.SIGKILL)
            await killed.wait()
            feed.close()
        async with process(fake, tmp_path) as (_, url):
            feed = await PageClient(url, http, token).feed("web:1", page)
            await feed.read(is_over)
            feed.close()
    assert page.text == "once upon a time there was a log"
    assert "restart" not in [event.name for event in page.events]
    assert page.kinds == ["user", "answer", "end"]


async def test_an_id_whose_entry_was_lost_resumes_at_the_start_of_its_turn(server: Serving, ada: PageClient):
    for _ in range(2):
        server.fake.reply("fine")
    feed = await ada.feed("web:1")
    await ada.say("web:1", "one")
    await feed.read(is_over)
    await ada.say("web:1", "two")
    page = await feed.read(lambda page: page.kinds.count("end") == 2 and is_over(page))
    feed.close()
    first = next(seq for seq, one in page.entries.items() if one.get("text") == "two")
    for lost in (f"{first + 1}-00000bad", f"{first + 1}-00000bad.3.0000abcd", "99-0badf00d"):
        page.last_id = lost
        again = await ada.feed("web:1", page)
        await again.read(lambda page: page.events[-1].name == "state" and is_over(page))
        (start,) = [event for event in page.events if event.name == "start"][-1:]
        assert start.data["after"] == first - 1
        again.close()
    assert page.kinds == ["user", "answer", "end"] * 2


async def test_a_feed_ends_when_the_log_has_lost_what_it_showed(server: Serving, ada: PageClient):
    server.fake.reply("fine")
    feed = await ada.feed("web:1")
    await ada.say("web:1", "one")
    page = await feed.read(is_over)
    info = await server.store.session("ada", "web:1")
    assert info is not None
    assert isinstance(server.store, SQLiteStore)
    # What a power loss does to writes that were not flushed.
    await server.store.writer.submit(lambda db: db.execute("DELETE FROM entry WHERE seq = 3").rowcount)
    await feed.read()
    server.fake.reply("again")
    await ada.say("web:1", "two")
    again = await ada.feed("web:1", page)
    await again.read(lambda page: "two" in [one.get("text") for one in page.entries.values()] and is_over(page))
    again.close()


async def test_the_feed_of_a_session_shows_what_another_process_wrote(server: Serving, ada: PageClient):
    feed = await ada.feed("web:1")
    await feed.read(lambda page: bool(page.state))
    await server.store.note("ada", "web:1", [TurnEnded("answer", "from elsewhere")])
    page = await feed.read(lambda page: bool(page.entries))
    assert page.entries[1]["text"] == "from elsewhere"
    feed.close()


async def test_a_long_log_is_read_from_its_end_or_from_a_number(server: Serving, ada: PageClient):
    await server.store.note("ada", "web:1", [TurnEnded("answer", str(number)) for number in range(1, 701)])
    cases: list[tuple[dict[str, Any], int | None]] = [
        ({}, 1),
        ({"last": 5}, 696),
        ({"after": 690}, 691),
        ({"after": 9_999}, None),
    ]
    for query, first in cases:
        feed = await ada.feed("web:1", **query)
        page = await feed.read(lambda page: bool(page.state))
        assert list(page.entries) == (list(range(first, 701)) if first else [])
        feed.close()
    status, body = await ada.api("GET", "sessions/web:1/log?before=11&limit=4")
    assert (status, [one["seq"] for one in body["entries"]], body["more"]) == (200, [7, 8, 9, 10], True)
    status, body = await ada.api("GET", "sessions/web:1/log?before=3")
    assert ([one["seq"] for one in body["entries"]], body["more"]) == ([1, 2], False)


@pytest.mark.parametrize("query", [{"after": "x"}, {"after": "1-zz"}, {"last": "0"}, {"last": "many"}])
async def test_an_invalid_position_is_refused(ada: PageClient, query: dict[str, Any]):
    async with ada.http.get(f"{ada.url}/api/sessions/web:1/feed", params=query, headers=ada.headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == next(iter(query))


async def test_a_silent_feed_pings(tmp_path: Path):
    async with serving(tmp_path, ping_seconds=0.05) as server:
        ada = await page_client(server, "ada")
        feed = await ada.feed("web:1")
        async with asyncio.timeout(20):
            while feed.comments.count("ping") < 3:
                line = (await feed.response.content.readline()).decode()
                feed.comments += [line[1:].strip()] if line.startswith(":") else []
        feed.close()


async def test_feeds_end_when_the_server_stops(tmp_path: Path):
    token = new_token()
    async with FakeOpenAI() as fake, aiohttp.ClientSession() as http:
        store = SQLiteStore(tmp_path / "everloop.db")
        await store.add_token("ada", "me", hash_of(token))
        await store.close()
        async with process(fake, tmp_path) as (server, url):
            feed = await PageClient(url, http, token).feed("web:1")
            await feed.read(lambda page: bool(page.state))
            server.terminate()
            async with asyncio.timeout(10):  # sooner than the next sign of life
                await feed.read()  # to its end, which is a clean one
            await refuses(url)
            assert await asyncio.wait_for(server.wait(), 20) == 0

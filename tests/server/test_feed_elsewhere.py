"""Feeds of turns that other processes run, over a store of either kind."""

from __future__ import annotations

from pathlib import Path

from everloop.store.tokens import hash_of, new_token
from everloop.testing.openai_server import FakeOpenAI

from .feeds import Page, PageClient, is_over
from .serving import Client, call, worker
from .test_feed import TEXT, WORDS
from .test_front import database as database
from .test_front import front, opened
from .test_front import postgres as postgres
from .test_front import where as where


async def page_client(client: Client, folder: Path, where: dict[str, str]) -> PageClient:
    token, store = new_token(), opened(folder, where)
    try:
        await store.add_token("ada", "me", hash_of(token))
    finally:
        await store.close()
    return PageClient(client.url, client.http, token)


async def test_a_workers_text_reaches_the_feed_and_its_successor_repeats_none(tmp_path: Path, where: dict[str, str]):
    page = Page()
    async with FakeOpenAI() as fake, front(fake, tmp_path, where) as client:
        ada = await page_client(client, tmp_path, where)
        async with worker(fake, tmp_path, **where) as first:
            fake.reply("first")  # a worker hears of subscribers from its first turn on
            before = await ada.feed("web:0")
            await ada.say("web:0", "go")
            await before.read(is_over)
            before.close()
            feed = await ada.feed("web:1", page)
            fake.reply(TEXT, tokens=WORDS, token_delay=0.1)
            await ada.say("web:1", "go")
            relayed = bool(where)  # the processes of a SQLite store read the log instead
            await feed.read(lambda page: "word5" in page.live if relayed else page.kinds == ["user"])
            first.kill()
            await first.wait()
        fake.reply(TEXT, tokens=WORDS, token_delay=0.02)
        async with worker(fake, tmp_path, **where):
            await feed.read(is_over)
        feed.close()
        (turn,) = (await ada.api("GET", "sessions/web:1/turns"))[1]["turns"]
        _, timeline = await ada.api("GET", f"sessions/web:1/turns/{turn['id']}")
    assert [step["kind"] for step in timeline["steps"]] == ["said", "takeover", "model", "end"]
    assert timeline["steps"][1]["name"]  # the worker that went on
    assert page.kinds == ["user", "answer", "end"]
    assert page.text.strip() == TEXT.strip()
    assert "restart" not in [event.name for event in page.events]


async def test_a_workers_question_is_answered_at_the_server(tmp_path: Path, where: dict[str, str]):
    async with FakeOpenAI() as fake, front(fake, tmp_path, where) as client:
        with (tmp_path / "config.toml").open("a") as config:
            config.write('[[policy]]\ndo = "ask"\ntool = "write_file"\n')
        ada = await page_client(client, tmp_path, where)
        fake.calls(call("write_file", path="note.txt", content="hello"))
        fake.reply("done")
        async with worker(fake, tmp_path, **where):
            feed = await ada.feed("web:1")
            await ada.say("web:1", "write it")
            page = await feed.read(lambda page: page.state.get("parked") is True)
            assert (await ada.answer("web:1", page.question, True))[0] == 200
            await feed.read(is_over)
            feed.close()
    assert (tmp_path / "workspace" / "note.txt").read_text() == "hello"

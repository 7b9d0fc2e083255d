"""Real servers and workers on one database: a turn's text reaches its client once, wherever the turn runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.server.sse import RESTARTED
from everloop.store.postgres.store import PostgresStore
from everloop.store.tokens import hash_of, new_token
from everloop.testing.openai_server import FakeOpenAI
from tests.server import serving
from tests.server.serving import Client, call, process, text_of
from tests.server.test_resuming import Begun, begin

from .proxy import SOCKET, proxied

ONCE = {"X-Session": "ada", "Idempotency-Key": "k1"}
WORDS = [f"wörd{number} " for number in range(60)]
TEXT = "".join(WORDS)
SETTINGS = "[worker]\nlease_seconds = 10\n[server]\nturns = {}\n"


@contextlib.asynccontextmanager
async def server(fake: FakeOpenAI, folder: Path, dsn: str, turns: bool = True) -> AsyncIterator[tuple[Any, str]]:
    folder.mkdir()
    (folder / "config.toml").write_text(SETTINGS.format(str(turns).lower()))
    async with process(fake, folder, EVERLOOP_STORE=dsn) as made:
        yield made


@contextlib.asynccontextmanager
async def worker(fake: FakeOpenAI, folder: Path, dsn: str) -> AsyncIterator[Any]:
    folder.mkdir()
    (folder / "config.toml").write_text(SETTINGS.format("true"))
    async with serving.worker(fake, folder, EVERLOOP_STORE=dsn) as made:
        yield made


def back(begun: Begun) -> dict[str, str]:
    return {**ONCE, "Last-Event-ID": begun.ids[-1]}


async def test_a_stream_of_a_killed_server_continues_at_another_one(fake, http, database, tmp_path):
    fake.hang(60, after_chunks=30, text=TEXT, tokens=WORDS, token_delay=0.01)
    fake.reply(TEXT, tokens=WORDS, token_delay=0.01)  # the model is asked again, and gives the same answer
    async with server(fake, tmp_path / "b", database) as (_, b):
        async with server(fake, tmp_path / "a", database) as (made, a):
            first = await begin(Client(a, http), "wörd20 ")
            made.kill()
            await made.wait()
        second = await begin(Client(b, http), "", back(first))
        await second.read()
    assert first.text + second.text == TEXT
    assert second.finish == "stop"


async def test_a_client_is_told_when_the_model_gives_another_answer_the_second_time(fake, http, database, tmp_path):
    fake.hang(60, after_chunks=30, text=TEXT, tokens=WORDS, token_delay=0.01)
    fake.reply("quite another answer", token_delay=0.02)
    async with server(fake, tmp_path / "b", database) as (_, b):
        async with server(fake, tmp_path / "a", database) as (made, a):
            first = await begin(Client(a, http), "wörd20 ")
            looks_on = await begin(Client(b, http), "wörd20 ")
            made.kill()
            await made.wait()
        second = await begin(Client(b, http), "", back(first))
        await asyncio.gather(looks_on.read(), second.read())
    assert second.text == f"{RESTARTED}quite another answer"
    assert looks_on.text.endswith(f"{RESTARTED}quite another answer")


async def test_owners_see_only_their_own_turns(fake, http, database, tmp_path):
    tokens = {}
    store = PostgresStore(database)
    for name in ("ada", "bob"):
        tokens[name] = new_token()
        await store.add_token(name, name, hash_of(tokens[name]))
    await store.close()
    canary = [f"canary{number} " for number in range(40)]
    fake.reply("".join(canary), tokens=canary, token_delay=0.05)
    fake.reply(TEXT, tokens=WORDS, token_delay=0.01)
    async with server(fake, tmp_path / "a", database) as (_, a), server(fake, tmp_path / "b", database) as (_, b):
        ada = await begin(Client(a, http, tokens["ada"]), "canary5 ")
        bob = await begin(Client(b, http, tokens["bob"]), "")
        tries = await begin(Client(b, http, tokens["bob"]), "", back(ada))
        await asyncio.gather(ada.read(), bob.read(), tries.read())
    assert ada.text == "".join(canary)
    assert bob.text == TEXT
    assert "canary" not in tries.text


async def test_another_servers_turn_is_followed_as_it_is_written(fake, http, database, tmp_path):
    fake.reply(TEXT, tokens=WORDS, token_delay=0.1)
    async with server(fake, tmp_path / "a", database) as (_, a), server(fake, tmp_path / "b", database) as (_, b):
        first = await begin(Client(a, http), "wörd3 ")
        second = await begin(Client(b, http), "wörd5 ")
        assert "wörd50 " not in second.text
        await asyncio.gather(first.read(), second.read())
    assert first.text == second.text == TEXT
    assert len(second.chunks) > 10
    assert len(fake.requests) == 1


async def test_a_server_without_turns_streams_a_workers_answer(fake, http, database, tmp_path):
    fake.reply("Let me look. ", token_delay=0.05)
    fake.replies[-1].calls = [call("list_dir", path=".")]
    fake.reply(TEXT, tokens=WORDS, token_delay=0.06)
    async with (
        worker(fake, tmp_path / "w", database),
        server(fake, tmp_path / "a", database, turns=False) as (_, a),
    ):
        streamed = await begin(Client(a, http), "wörd9 ")
        assert "wörd50 " not in streamed.text
        await streamed.read()
    assert streamed.text == f"Let me look. \n\n{TEXT}"
    assert len(streamed.chunks) > 10
    assert [comment.count("list_dir") for comment in streamed.comments if "tool" in comment] == [1, 1]


async def test_cut_connections_to_the_database_lose_no_text_and_repeat_none(fake, http, database, tmp_path):
    fake.reply(TEXT, tokens=WORDS, token_delay=0.1)
    (tmp_path / "p").mkdir()
    async with (
        proxied(database, tmp_path / "p") as (proxy, through),
        server(fake, tmp_path / "a", database) as (_, a),
        server(fake, tmp_path / "b", through) as (_, b),
    ):
        first = await begin(Client(a, http), "wörd3 ")
        second = await begin(Client(b, http), "wörd6 ")
        for word in ("wörd12 ", "wörd25 "):
            for transport in list(proxy._open):
                transport.abort()
            await second.read(word)
        await asyncio.gather(first.read(), second.read())
    assert second.text == TEXT
    assert len(second.chunks) > 5


@pytest.mark.parametrize("letter", ["😀", "x", "\\", "\n"])
async def test_a_very_long_piece_arrives_whole(fake, http, database, tmp_path, letter):
    long = letter * (100_000 // len(letter.encode()))
    fake.reply(f"before{long}after", tokens=["before", long, "after"], token_delay=0.1)
    async with (
        worker(fake, tmp_path / "w", database),
        server(fake, tmp_path / "a", database, turns=False) as (_, a),
    ):
        streamed = await begin(Client(a, http), "")
        await streamed.read()
    assert streamed.text == f"before{long}after"


async def test_a_client_that_disconnects_ends_its_turn_at_the_worker(fake, http, database, tmp_path):
    fake.hang(60, after_chunks=10, text=TEXT, tokens=WORDS)
    async with (
        worker(fake, tmp_path / "w", database),
        server(fake, tmp_path / "a", database, turns=False) as (_, a),
    ):
        streamed = await begin(Client(a, http), "wörd5 ")
        streamed.leave()
        async with asyncio.timeout(25):
            while not fake.requests[0].gone:
                await asyncio.sleep(0.02)


async def test_a_turn_is_not_ended_by_one_client_while_another_waits_elsewhere(fake, http, database, tmp_path):
    fake.reply(TEXT, tokens=WORDS, token_delay=0.03)
    async with server(fake, tmp_path / "a", database) as (_, a), server(fake, tmp_path / "b", database) as (_, b):
        first = await begin(Client(a, http), "wörd3 ")
        second = await begin(Client(b, http), "wörd6 ")
        first.leave()
        await second.read()
    assert second.text == TEXT
    assert len(fake.requests) == 1


async def test_a_turn_at_a_worker_continues_while_one_of_its_clients_is_there(fake, http, database, tmp_path):
    fake.reply(TEXT, tokens=WORDS, token_delay=0.05)
    async with (
        worker(fake, tmp_path / "w", database),
        server(fake, tmp_path / "a", database, turns=False) as (_, a),
        server(fake, tmp_path / "b", database, turns=False) as (_, b),
    ):
        first = await begin(Client(a, http), "wörd3 ")
        second = await begin(Client(b, http), "wörd6 ")
        first.leave()
        await second.read()
    assert second.text == TEXT
    assert len(fake.requests) == 1


async def test_a_stopping_server_hands_off_its_turn_and_its_client_sees_all_of_it(fake, http, database, tmp_path):
    fake.reply("Let me look. ")
    fake.replies[-1].calls = [call("exec", command="sleep 1")]
    fake.reply(TEXT, tokens=WORDS, token_delay=0.01)
    async with server(fake, tmp_path / "b", database), server(fake, tmp_path / "a", database) as (made, a):
        streamed = await begin(Client(a, http), "Let me look. ")
        made.terminate()
        await streamed.read()
    assert streamed.text == f"Let me look. \n\n{TEXT}"
    assert [comment.count("exec") for comment in streamed.comments if "tool" in comment] == [1, 1]


async def test_all_clients_that_ask_for_one_answer_at_different_servers_get_it(fake, http, database, tmp_path):
    async with (
        server(fake, tmp_path / "one", database) as (_, here),
        server(fake, tmp_path / "two", database) as (_, there),
    ):
        fake.reply("heard by all", delay=1.0)
        asked = [asyncio.create_task(Client(here, http).ask("go", ONCE))]
        while not fake.requests:
            await asyncio.sleep(0.01)
        asked += [asyncio.create_task(Client(url, http).ask("go", ONCE)) for url in (there, here, there)]
        async with asyncio.timeout(25):
            answers = await asyncio.gather(*asked)
        assert {text_of(answer) for answer in answers} == {"heard by all"}
        assert len(fake.requests) == 1


async def test_an_answer_that_exists_before_its_server_knows_of_the_message_is_delivered(
    fake, http, database, tmp_path
):
    """The server writes the message and does not learn that it is written until a worker has answered it."""
    place = tmp_path / "socket"
    place.mkdir()
    async with (
        proxied(database, place) as (proxy, through),
        worker(fake, tmp_path / "w", database),
        server(fake, tmp_path / "a", through, turns=False) as (_, url),
    ):
        fake.reply("first")
        await Client(url, http).ask("hi")
        fake.reply("heard")
        (place / SOCKET).rename(place / "away")
        proxy.cut = "after"
        asked = asyncio.create_task(Client(url, http).ask("go"))
        store = PostgresStore(database)
        try:
            async with asyncio.timeout(25):
                while len(fake.requests) < 2:
                    await asyncio.sleep(0.1)
                    await store.wake()
        finally:
            await store.close()
        await asyncio.sleep(1.0)  # the answer is on disk, and announced
        (place / "away").rename(place / SOCKET)
        async with asyncio.timeout(25):
            assert text_of(await asked) == "heard"

"""Requests per minute: an exact limit per owner across all server processes of a store."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.config.sources import DSN
from everloop.store.base import Store
from everloop.store.location import store_at
from everloop.store.sqlite import SQLiteStore
from everloop.store.tokens import hash_of, new_token
from everloop.testing import FakeOpenAI

from ..store.postgres.fixtures import database as database
from ..store.postgres.fixtures import postgres as postgres
from .serving import Client, Serving, process, serving, text_of
from .test_life import until

ASK = {"messages": [{"role": "user", "content": "hi"}]}
MODEL, ANSWER = "tools-0x1", "done:?"
PROCESSES, ALLOWED = 4, 10


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path, requests_per_minute=2, model=MODEL) as running:
        yield running


async def test_requests_over_the_limit_get_an_openai_429_with_a_retry_time(server: Serving):
    for _ in range(2):
        assert text_of(await server.ask("hi")) == ANSWER
    for body in (ASK, {**ASK, "stream": True}):
        async with server.post(body) as response:
            error = (await response.json())["error"]
            assert response.status == 429
            assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
            assert 30 <= int(response.headers["Retry-After"]) <= 60
    assert len(server.fake.requests) == 2


async def test_the_reported_retry_time_is_correct(server: Serving):
    began = time.time()
    for _ in range(2):
        await server.ask("hi")
    await shift(server.store, 56.5 - (time.time() - began))
    async with server.post(ASK) as response:
        assert response.status == 429
        wait = int(response.headers["Retry-After"])
    assert 1 <= wait <= 10
    await asyncio.sleep(wait)
    assert text_of(await server.ask("hi")) == ANSWER


async def test_owners_have_separate_minutes(server: Serving):
    ada, phone, bob = await server.client("ada"), await server.client("phone", "ada"), await server.client("bob")
    await ada.ask("hi")
    await phone.ask("hi")  # another token of the same owner
    assert (await ada.fails("hi"))[0] == (await phone.fails("hi"))[0] == 429
    await bob.ask("hi")
    await server.ask("hi")


async def test_commands_of_a_session_are_accepted_and_not_counted(server: Serving):
    session = {"X-Session": "web:1"}
    for command in ("/status", "/new", "/help", "/stop"):
        await server.ask(command, session)
    for _ in range(2):
        await server.ask("hi", session)
    assert (await server.fails("hi", session))[0] == 429
    for command in ("/status", "/new", "/help", "/stop"):
        await server.ask(command, session)
    assert (await server.fails("/stop"))[0] == 429  # without a session it is a text like any other


async def test_a_full_minute_does_not_prevent_stopping_a_turn(server: Serving):
    session = {"X-Session": "web:1"}
    server.fake.hang(60)
    running = asyncio.create_task(server.fails("go on for long", session, stream=True))
    await until(lambda: server.fake.requests)
    await server.ask("hi")
    assert (await server.fails("hi"))[0] == 429
    await server.ask("/stop", session)
    await until(lambda: server.fake.requests[0].gone)
    async with asyncio.timeout(20):
        assert (await running)[1]["code"] == "cancelled"


async def test_a_repeated_request_gets_its_answer_and_is_not_counted(server: Serving):
    headers = {"X-Session": "web:1", "Idempotency-Key": "one"}
    await server.ask("hi", headers)
    await server.ask("hi", headers)
    await server.ask("hi", headers)
    assert len(server.fake.requests) == 1
    await server.ask("hi")
    assert (await server.fails("hi"))[0] == 429
    assert text_of(await server.ask("hi", headers)) == ANSWER


async def test_a_request_repeated_while_its_first_attempt_ends_is_counted_if_it_is_run_again(server: Serving):
    headers, leaving, joined, go = {"X-Session": "web:1", "Idempotency-Key": "one"}, *(asyncio.Event() for _ in "123")
    finish, accept = server.store.finish, server.store.accept

    def held(*given: Any, **named: Any) -> Any:
        async def later() -> Any:
            leaving.set()
            await go.wait()
            return await finish(*given, **named)

        return asyncio.ensure_future(later())

    async def noted(*given: Any, **named: Any) -> Any:
        row = await accept(*given, **named)
        joined.set()
        return row

    await server.ask("hi")
    server.fake.hang(60)
    server.store.finish, server.store.accept = held, noted  # type: ignore[method-assign]
    first = asyncio.create_task(server.ask("go", headers))
    await until(lambda: len(server.fake.requests) == 2)
    first.cancel()
    await asyncio.wait_for(leaving.wait(), 20)
    second = asyncio.create_task(server.fails("go", headers))
    await asyncio.wait_for(joined.wait(), 20)
    go.set()
    assert (await asyncio.wait_for(second, 20))[0] == 429
    assert len(server.fake.requests) == 2


async def test_requests_that_call_no_model_are_neither_counted_nor_refused(server: Serving):
    for _ in range(3):
        assert (await server.fails([]))[0] == 400
        assert (await server.get("/v1/models"))[0] == 200
    for _ in range(2):
        await server.ask("hi")
    assert (await server.fails("hi"))[0] == 429
    assert (await server.get("/v1/models"))[0] == 200
    assert (await server.get("/readyz"))[0] == 200


async def test_a_flood_of_refused_requests_writes_nothing(server: Serving):
    for _ in range(2):
        await server.ask("hi")
    assert (await server.fails("hi"))[0] == 429
    assert isinstance(server.store, SQLiteStore)
    before = server.store.writer.commits
    for _ in range(20):
        assert (await server.fails("hi"))[0] == 429
    assert server.store.writer.commits == before


async def test_without_a_limit_nothing_is_counted(tmp_path: Path):
    async with serving(tmp_path, model=MODEL) as server:
        for _ in range(5):
            await server.ask("hi")
        assert isinstance(server.store, SQLiteStore)
        assert await server.store.writer.submit(lambda db: db.execute("SELECT count(*) FROM rate").fetchone()) == (0,)


# ---------------------------------------------------------------------------------------------- several processes


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_several_server_processes_allow_as_many_as_one(kind: str, tmp_path: Path, request: Any):
    place = request.getfixturevalue("database") if kind == "postgres" else str(tmp_path / "shared.db")
    store = store_at(DSN(place) if kind == "postgres" else Path(place))
    token = new_token()
    await store.add_token("laptop", "ada", hash_of(token))
    async with contextlib.AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeOpenAI())
        http = await stack.enter_async_context(aiohttp.ClientSession())
        clients = []
        for number in range(PROCESSES):
            home = tmp_path / f"home{number}"
            home.mkdir()
            (home / "config.toml").write_text(f"[server]\nrequests_per_minute = {ALLOWED}\n")
            started = process(fake, home, EVERLOOP_STORE=place, EVERLOOP_MODEL=MODEL)
            _, url = await stack.enter_async_context(started)
            clients.append(Client(url, http, token))
        tries = await asyncio.gather(*(status_of(client) for client in clients * 6))
        assert sorted(tries) == [200] * ALLOWED + [429] * (6 * PROCESSES - ALLOWED)
        assert len(fake.requests) == ALLOWED
        assert [await status_of(client) for client in clients] == [429] * PROCESSES
        await shift(store, 60.0)  # the minute is over; what a process remembers of it is not
        await store.close()
        _, url = await stack.enter_async_context(process(fake, home, EVERLOOP_STORE=place, EVERLOOP_MODEL=MODEL))
        assert await status_of(Client(url, http, token)) == 200


async def status_of(client: Client) -> int:
    async with client.post(ASK) as response:
        await response.read()
        return int(response.status)


async def shift(store: Store, seconds: float) -> None:
    """Advance the clock of the counters."""

    def work(db: Any) -> None:
        db.execute(f"UPDATE rate SET began = began - {seconds}")

    await (store.writer.submit(work) if isinstance(store, SQLiteStore) else store.connections.submit("writes", work))  # type: ignore[attr-defined]

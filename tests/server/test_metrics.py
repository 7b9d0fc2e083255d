"""GET /metrics: who may read it, what is in it, and the listener of a worker."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from everloop.errors import StoreError
from everloop.store.sqlite import SQLiteStore
from everloop.store.tokens import hash_of, new_token
from everloop.testing.openai_server import FakeOpenAI
from tests.observability.reading import Family, read, value

from ..support.commands import environment, finished, start, until
from .serving import Client, Serving, serving

CANARY = "canary-8e1b40"
REQUESTS = "everloop_http_requests_total"


async def get(client: Client, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    """Status, content type and text."""
    async with client.http.get(client.url + path, headers={**client.headers, **headers}) as response:
        return response.status, response.headers["Content-Type"], await response.text()


async def scraped(client: Client) -> dict[str, Family]:
    status, kind, text = await get(client)
    assert status == 200, text
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    return read(text)


async def at_work(client: Client) -> dict[str, Family]:
    """What is told once the process is known to take work."""
    async with asyncio.timeout(20):
        while not value(found := await scraped(client), "everloop_workers"):
            await asyncio.sleep(0.2)
    assert value(found, "everloop_workers") == 1
    return found


@pytest.fixture
async def server(tmp_path) -> AsyncIterator[Serving]:
    async with serving(tmp_path) as made:
        yield made


async def test_the_machines_user_reads_it_without_a_token(server):
    found = await at_work(server)
    assert value(found, "everloop_store_up") == 1


@pytest.mark.parametrize("needed", [True, False])
async def test_only_a_token_with_the_right_admin_reads_it(tmp_path, needed):
    async with serving(tmp_path, server_tokens=needed) as server:
        for owner in ("me", "somebody"):
            status, _, text = await get(await server.client(f"{owner}-use", owner=owner))
            assert (status, "everloop_" in text) == (403, False)
            await scraped(await server.client(f"{owner}-admin", owner, "admin"))
        status, _, text = await get(Client(server.url, server.http))
        assert (status, "everloop_" in text) == (401, False)


async def test_a_page_of_another_origin_does_not_get_it(server):
    status, _, text = await get(server, Origin="https://elsewhere.example")
    assert (status, "everloop_" in text) == (403, False)
    status, _, text = await get(server, Host="elsewhere.example")
    assert (status, "everloop_" in text) == (403, False)


async def test_it_contains_no_message_text_and_no_names(server):
    owner = await server.client("somebody", owner=CANARY)
    server.fake.reply("Hello.")
    await owner.ask(CANARY, {"X-Session": f"web:{CANARY}"})
    await get(server, f"/{CANARY}?{CANARY}={CANARY}")
    _, _, text = await get(server)
    assert CANARY not in text


async def test_requests_are_counted_by_route_and_status(server):
    server.fake.reply("Hello.")
    await server.ask("hi")
    await server.fails("hi", temperature=CANARY)
    for path in ("/v1/models", "/v1/models/scripted", "/v1/models/nobody", "/nowhere", f"/{CANARY}", "/healthz"):
        await get(server, path)
    found = await scraped(server)
    expected = {
        ("/v1/chat/completions", "200"): 1,
        ("/v1/chat/completions", "400"): 1,
        ("/v1/models", "200"): 1,
        ("/v1/models/{id}", "200"): 1,
        ("/v1/models/{id}", "404"): 1,
        ("other", "404"): 2,
        ("/healthz", "200"): 1,
    }
    counted = {(dict(labels)["route"], dict(labels)["status"]): n for (_, labels), n in found[REQUESTS].samples.items()}
    assert counted == expected
    assert value(await scraped(server), REQUESTS, route="/metrics", status="200") == 1


async def test_a_request_refused_by_the_guard_is_counted(tmp_path):
    async with serving(tmp_path, server_tokens=True) as server:
        await server.fails("hi")
        found = await scraped(await server.client("prometheus", "me", "admin"))
        assert value(found, REQUESTS, route="/v1/chat/completions", status="401") == 1


async def test_a_client_that_disconnects_is_counted_as_such(server):
    server.fake.hang(20)
    asking = asyncio.create_task(server.ask("hi"))
    await until(lambda: server.fake.requests)
    asking.cancel()
    async with asyncio.timeout(20):
        while not value(await scraped(server), REQUESTS, route="/v1/chat/completions", status="499"):
            await asyncio.sleep(0.05)


# ---------------------------------------------------------------------------------------------- the listener


def settings(fake: FakeOpenAI, metrics: str, further: str = "") -> dict[str, str]:
    home = Path(os.environ["EVERLOOP_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(f'[worker]\nmetrics = "{metrics}"\n{further}')
    return environment(fake)


@contextlib.asynccontextmanager
async def working(fake: FakeOpenAI, metrics: str = "127.0.0.1:0", further: str = "") -> AsyncIterator[tuple[Any, str]]:
    """The real `everloop worker`, and the address of its listener."""
    process = await start("worker", env=settings(fake, metrics, further))
    try:
        line = (await asyncio.wait_for(process.stderr.readline(), 30)).decode()
        found = re.fullmatch(r"everloop: metrics on (http://\S+)/metrics\n", line)
        assert found is not None, line
        await asyncio.wait_for(process.stderr.readline(), 30)
        yield process, found[1]
    finally:
        if process.returncode is None:
            process.terminate()
        await finished(process)


async def test_a_worker_with_an_address_serves_its_metrics_and_nothing_else():
    async with FakeOpenAI() as fake, working(fake) as (_, url), aiohttp.ClientSession() as http:
        client = Client(url, http)
        await at_work(client)
        before = value(await scraped(client), REQUESTS, route="/metrics", status="200")
        assert (await get(client, "/healthz"))[0] == 200
        for path in ("/", "/v1/models", "/v1/chat/completions", "/readyz", "/openapi.json"):
            assert (await get(client, path))[0] == 404
        assert (await client.fails("hi"))[0] == 404
        status, _, text = await get(client, Host="elsewhere.example")
        assert (status, "everloop_" in text) == (403, False)
        assert value(await scraped(client), REQUESTS, route="/metrics", status="200") == before + 1


async def test_a_worker_requires_a_token_with_the_right_admin_once_there_is_one():
    store = SQLiteStore(Path(os.environ["EVERLOOP_HOME"]) / "everloop.db")
    tokens = {rights: new_token() for rights in ("use", "admin")}
    for rights, token in tokens.items():
        await store.add_token(rights, "me", hash_of(token), [rights])
    await store.close()
    for metrics, further in (("127.0.0.1:0", ""), ("0.0.0.0:0", "")):
        async with FakeOpenAI() as fake, working(fake, metrics, further) as (_, url), aiohttp.ClientSession() as http:
            url = url.replace("0.0.0.0", "127.0.0.1")
            for token, expected in (("", 401), ("wrong", 401), (tokens["use"], 403)):
                status, _, text = await get(Client(url, http, token))
                assert (status, "everloop_" in text) == (expected, False)
            await scraped(Client(url, http, tokens["admin"]))
            assert (await get(Client(url, http), "/healthz"))[0] == 200


async def test_a_worker_ends_promptly_with_a_scraper_connected():
    async with FakeOpenAI() as fake, working(fake) as (process, url), aiohttp.ClientSession() as http:
        await scraped(Client(url, http))
        process.terminate()
        async with asyncio.timeout(30):
            assert await process.wait() == 0


@pytest.mark.parametrize("wrong", ["9464", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:x", "a b:1", "0.0.0.0:0"])
async def test_an_invalid_address_or_one_that_others_could_reach_without_a_token_is_refused_at_the_start(wrong):
    async with FakeOpenAI() as fake:
        done = await finished(await start("worker", env=settings(fake, wrong)))
    assert done.status == 2
    assert len(done.err.splitlines()) == 1


async def test_a_port_in_use_is_one_line_for_metrics():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        async with FakeOpenAI() as fake:
            port = taken.getsockname()[1]
            done = await finished(await start("worker", env=settings(fake, f"127.0.0.1:{port}")))
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
    assert str(port) in done.err


async def test_a_client_that_disconnects_while_the_store_is_unavailable_causes_no_unhandled_error(server, monkeypatch):
    forgotten: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context["message"]))
    client = await server.client("prometheus", "me", "admin")
    assert (await get(client))[0] == 200
    asked, left, back = asyncio.Event(), asyncio.Event(), asyncio.Event()
    failed: list[Any] = []

    async def away(hash: str) -> Any:
        failed.append(asyncio.current_task())
        asked.set()
        await back.wait()
        raise StoreError("the store is away")

    monkeypatch.setattr(server.store, "token", away)
    monkeypatch.setattr(server.server._guard, "_on_response", lambda path, status: left.set())
    scraping = asyncio.create_task(get(client))
    async with asyncio.timeout(20):
        await asked.wait()
        scraping.cancel()
        await left.wait()
        back.set()
        await asyncio.wait(failed)
    failed.clear()
    gc.collect()
    assert not forgotten

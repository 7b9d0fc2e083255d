"""Usage, tokens, health and workers over the page's API: usage of one's own, and the rest for the operator alone."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everloop.config import Price
from everloop.log import Logged, ModelAnswered
from everloop.server.page_operation import SessionUsage
from everloop.store.tokens import PREFIX

from .feeds import PageClient, is_over, page_client, said
from .serving import Serving, call, serving

PRICES = (Price(model="scripted", input=10.0, output=20.0, cached=1.0),)
ADMIN_ONLY = ("tokens", "health", "workers")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path, prices=PRICES, day_tokens=1_000_000) as running:
        yield running


@pytest.fixture
async def operator(server: Serving) -> PageClient:
    client = PageClient(server.url, server.http)
    client.headers = (await server.client("ops", rights="use,admin")).headers
    return client


async def test_usage_is_counted_by_day_session_and_model(server: Serving, ada: PageClient):
    server.fake.calls(call("list_dir", path="."))
    server.fake.reply("nothing there")
    await said(ada, "web:1", "look")
    server.fake.reply("hello")
    await said(ada, "web:2", "hi")
    status, body = await ada.api("GET", "usage")
    assert status == 200
    today = time.strftime("%Y-%m-%d", time.gmtime())
    found = [(one["day"], one["session"], one["model"], one["calls"]) for one in body["usage"]]
    assert found == [(today, "web:1", "scripted", 2), (today, "web:2", "scripted", 1)]
    first = body["usage"][0]
    fresh = first["input_tokens"] - first["cached_tokens"]
    cost = (fresh * 10 + first["cached_tokens"] + first["output_tokens"] * 20) / 1e6
    assert first["cost"] == pytest.approx(cost)
    assert first["input_tokens"] > 0
    assert body["day_tokens"] == 1_000_000
    server.fake.reply("again")
    await said(ada, "web:2", "and again")  # what was counted before is not counted twice
    again = (await ada.api("GET", "usage?days=1"))[1]["usage"]
    assert [one["calls"] for one in again] == [2, 2]
    eve = await page_client(server, "eve")
    assert (await eve.api("GET", "usage"))[1]["usage"] == []
    assert (await eve.api("GET", "usage?days=0"))[0] == 400


def test_days_are_in_utc():
    used = SessionUsage()
    answers = [ModelAnswered("x", usage={"prompt_tokens": 5}, model="m") for _ in range(3)]
    ends = (86_400 * 20_000 - 1, 86_400 * 20_000, 86_400 * 20_001 - 1)
    used.add([Logged(n, "t", at, one) for n, (at, one) in enumerate(zip(ends, answers, strict=True), 1)], "usual")
    assert {key: count.calls for key, count in used.counts.items()} == {(19_999, "m"): 1, (20_000, "m"): 2}
    assert used.read == 3


async def test_tokens_are_made_and_revoked_by_the_operator(server: Serving, operator: PageClient, ada: PageClient):
    body = {"name": "garden", "owner": "gardener", "rights": ["use"]}
    status, made = await operator.api("POST", "tokens", body)
    assert status == 200
    assert made["token"].startswith(PREFIX)
    gardener = PageClient(server.url, server.http, made["token"])
    assert (await gardener.api("GET", "sessions"))[0] == 200
    listed = {one["name"]: one for one in (await operator.api("GET", "tokens"))[1]["tokens"]}
    assert (listed["garden"]["owner"], listed["garden"]["rights"]) == ("gardener", ["use"])
    assert made["token"] not in str(listed)
    for wrong in ({**body}, {**body, "name": "b d"}, {**body, "rights": ["root"]}, {**body, "owner": "../x"}):
        assert (await operator.api("POST", "tokens", wrong))[0] == 400, wrong
    id = made["item"]["id"]
    assert (await ada.api("POST", f"tokens/{id}/revoke", {}))[0] == 403
    assert (await gardener.api("GET", "sessions"))[0] == 200
    assert (await operator.api("POST", f"tokens/{id}/revoke", {}))[0] == 200
    assert (await gardener.api("GET", "sessions"))[0] == 401
    assert (await operator.api("POST", f"tokens/{id}/revoke", {}))[0] == 404


async def test_only_the_operator_sees_tokens_health_and_workers(server: Serving, ada: PageClient, operator: PageClient):
    before = len(await server.store.tokens())
    for path in ADMIN_ONLY:
        assert (await ada.api("GET", path))[0] == 403
        assert (await operator.api("GET", path))[0] == 200
    assert (await ada.api("POST", "tokens", {"name": "x", "owner": "ada", "rights": ["admin"]}))[0] == 403
    assert len(await server.store.tokens()) == before


async def test_a_client_that_is_only_local_sees_none_of_it(tmp_path: Path):
    async with serving(tmp_path) as server:
        stranger = PageClient(server.url, server.http)
        for path in (*ADMIN_ONLY, "usage", "files", "memory", "jobs", "agents"):
            assert (await stranger.api("GET", path))[0] == 401, path
        assert (await stranger.api("POST", "tokens", {"name": "x", "owner": "me", "rights": ["use"]}))[0] == 401
        assert await server.store.tokens() == []


async def test_health_is_that_of_doctor_and_workers_have_leases(server: Serving, operator: PageClient, ada: PageClient):
    server.fake.reply("slow", delay=30)
    feed = await ada.feed("web:1")
    await ada.say("web:1", "wait")
    await feed.read(lambda page: page.state.get("turn") is not None)
    status, body = await operator.api("GET", "health")
    names = [one["name"] for one in body["checks"]]
    assert (status, names[:2]) == (200, ["everloop", "provider"])
    assert {"workspace", "sandbox", "store", "workers", "sessions"} <= set(names)
    work = (await operator.api("GET", "workers"))[1]
    assert [(one["owner"], one["session"]) for one in work["leases"]] == [("ada", "web:1")]
    assert work["open_turns"] == 1
    assert any(one["held"] == 1 for one in work["workers"])
    await ada.api("POST", "sessions/web:1/stop", {})
    await feed.read(is_over)
    feed.close()

"""The timeline of a turn over the page's API, and the requests that its model calls sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from everloop.config import Config, Price
from everloop.log import Call as Called
from everloop.log import CallEnded, CallsAsked, CallsDecided, Logged, ModelAnswered, TurnEnded, UserSaid
from everloop.providers.openai import END_COUNTED
from everloop.server.page_timeline import timeline_of
from everloop.store.base import TurnInfo
from everloop.store.sqlite import SQLiteStore
from everloop.store.sqlite.writer import Writer
from tests.support.commands import until

from .feeds import PageClient, page_client, said
from .serving import Serving, call, function, serving

PRICES = (Price(model="scripted", input=10.0, output=20.0, cached=1.0),)
USAGE = {"prompt_tokens": 1000, "completion_tokens": 100, "cached_tokens": 600, "total_tokens": 1100}


@pytest.fixture
async def server(tmp_path: Path):
    async with serving(tmp_path, prices=PRICES) as running:
        yield running


async def sent_at(page: PageClient, key: str, seq: int, end: bytes = END_COUNTED) -> tuple[bytes, list[str]]:
    """The request of an answer as the page shows it, and what may differ in it. A streamed one has another end."""
    status, sent = await page.api("GET", f"sessions/{key}/requests/{seq}")
    assert status == 200
    return sent["body"].encode()[:-1] + end, sent["notes"]


async def texts(server: Serving) -> list[tuple[str, str, str]]:
    """The texts that are kept: owner, key and hash."""
    query = "SELECT owner, key, hash FROM request_text ORDER BY hash"
    return await writer_of(server).submit(lambda db: db.execute(query).fetchall())


def writer_of(server: Serving) -> Writer:
    assert isinstance(server.store, SQLiteStore)
    return server.store.writer


def logged(*entries: tuple[float, object]) -> list[Logged]:
    return [Logged(seq, "t1", at, entry) for seq, (at, entry) in enumerate(entries, 1)]  # type: ignore[arg-type]


def test_idle_time_is_cut_out_of_the_axis_and_costs_are_shown(tmp_path: Path):
    config = Config(home=tmp_path, workspace=tmp_path, prices=PRICES)
    turn = TurnInfo("t1", 1, "web:1", "me", 1, 100.0, 5000.0, "answer")
    entries = logged(
        (100.0, UserSaid("go")),
        (103.0, ModelAnswered(None, (Called("c1", "exec", {"command": "ls"}),), usage=USAGE, model="scripted",
                              seconds=2.9, first_token=0.4)),
        (103.1, CallsAsked(("c1",), "May it?")),
        (4103.0, CallsDecided(("c1",), True)),
        (4105.0, CallEnded("c1", "exec", "done", seconds=2.0)),
        (4106.0, ModelAnswered("fine", usage=USAGE, model="scripted", seconds=1.0)),
        (4106.0, TurnEnded("answer", "fine")),
    )  # fmt: skip
    found = timeline_of(turn, entries, config, 0.0)
    kinds = [(step.kind, step.status, round(step.offset, 1), round(step.seconds, 1)) for step in found.steps]
    assert kinds == [
        ("said", "request", 0.0, 0.0),
        ("model", "stop", 0.1, 2.9),
        ("question", "allowed", 3.1, 0.0),
        ("tool", "ok", 3.1, 2.0),
        ("model", "stop", 5.1, 1.0),
        ("end", "answer", 6.1, 0.0),
    ]
    assert [(round(gap.offset, 1), round(gap.seconds, 1)) for gap in found.gaps] == [(3.1, 3999.9)]
    assert (round(found.seconds, 1), round(found.idle, 1)) == (6.1, 3999.9)
    model, tool = found.steps[1], found.steps[3]
    assert (model.first_token, model.input_tokens, model.cached_tokens, model.output_tokens) == (0.4, 1000, 600, 100)
    assert model.cost == pytest.approx((400 * 10 + 600 * 1 + 100 * 20) / 1e6)
    assert found.cost == pytest.approx(2 * (model.cost or 0))
    assert (tool.arguments, tool.text, tool.call) == ({"command": "ls"}, "done", "c1")


def test_steps_in_progress_last_until_now(tmp_path: Path):
    config = Config(home=tmp_path, workspace=tmp_path)
    turn = TurnInfo("t1", 1, "web:1", "me", 1, 100.0, None, None)
    asked = timeline_of(turn, logged((100.0, UserSaid("go"))), config, 104.0)
    assert [(step.kind, step.status, step.seconds) for step in asked.steps] == [
        ("said", "request", 0.0),
        ("model", "running", 4.0),
    ]
    called = ModelAnswered(None, (Called("c1", "exec", {"command": "ls"}),), seconds=1.0)
    runs = timeline_of(turn, logged((100.0, UserSaid("go")), (101.0, called)), config, 107.0)
    assert [(step.kind, step.status, step.seconds) for step in runs.steps[2:]] == [("tool", "running", 6.0)]
    assert runs.cost is None


def test_a_retried_empty_answer_and_a_lost_worker_are_steps(tmp_path: Path):
    turn = TurnInfo("t1", 1, "web:1", "me", 1, 100.0, 120.0, "answer")
    calls = (Called("c1", "exec", {"command": "ls"}), Called("c2", "exec", {"command": "ls"}))
    entries = logged(
        (100.0, UserSaid("go")),
        (101.0, ModelAnswered("", seconds=1.0)),
        (102.0, ModelAnswered(None, calls, seconds=1.0)),
        (110.0, CallEnded("c1", "exec", "cut off", "interrupted")),
        (110.0, CallEnded("c2", "exec", "cut off", "interrupted")),
        (111.0, ModelAnswered("fine", seconds=1.0)),
        (111.0, TurnEnded("answer", "fine")),
    )
    found = timeline_of(turn, entries, Config(home=tmp_path, workspace=tmp_path), 0.0)
    kinds = [step.kind for step in found.steps]
    assert (kinds.count("retry"), kinds.count("takeover")) == (1, 1)
    assert kinds.index("retry") == 2
    assert "was lost" in found.steps[kinds.index("takeover")].text


def test_the_resuming_worker_and_flush_waits_are_shown(tmp_path: Path):
    turn = TurnInfo("t1", 1, "web:1", "me", 1, 100.0, 120.0, "answer")
    calls = (Called("c1", "exec", {"command": "ls"}), Called("c2", "exec", {"command": "ls"}))
    entries = logged(
        (100.0, UserSaid("go")),
        (101.0, ModelAnswered(None, calls, seconds=0.9, flushed=0.02)),
        (103.0, CallEnded("c1", "exec", "done", seconds=1.0, flushed=0.03, worker="second")),
        (110.0, CallEnded("c2", "exec", "cut off", "interrupted")),
        (112.0, ModelAnswered("fine", seconds=1.0, worker="third")),
        (112.0, TurnEnded("answer", "fine")),
    )
    found = timeline_of(turn, entries, Config(home=tmp_path, workspace=tmp_path), 0.0)
    told = [(step.kind, step.name) for step in found.steps if step.kind in ("takeover", "tool")]
    assert told == [("takeover", "second"), ("tool", "exec"), ("takeover", "third"), ("tool", "exec")]
    waits = [step.flushed for step in found.steps if step.kind in ("model", "tool")]
    assert waits == [0.02, 0.03, 0.0, 0.0]
    assert found.flushed == pytest.approx(0.05)


async def test_a_turn_has_a_timeline_and_its_requests_are_the_original_ones(server: Serving, ada: PageClient):
    server.fake.calls(call("write_file", path="a.txt", content="x"))
    server.fake.reply("It is written.")
    await said(ada, "web:1", "write it")
    server.fake.reply("Again.")
    await said(ada, "web:1", "and again")
    status, body = await ada.api("GET", "sessions/web:1/turns")
    assert (status, [one["title"] for one in body["turns"]]) == (200, ["and again", "write it"])
    assert [one["reason"] for one in body["turns"]] == ["answer", "answer"]
    status, timeline = await ada.api("GET", f"sessions/web:1/turns/{body['turns'][1]['id']}")
    assert status == 200
    assert [step["kind"] for step in timeline["steps"]] == ["said", "model", "tool", "model", "end"]
    assert timeline["cost"] > 0
    models = [step for step in timeline["steps"] if step["kind"] == "model"]
    for number, step in enumerate(models):
        assert await sent_at(ada, "web:1", step["seq"]) == (server.fake.requests[number].raw, [])


async def test_requests_after_a_new_conversation_and_a_summary_are_the_original_ones(server: Serving, ada: PageClient):
    for text in ("one", "two", "three"):
        server.fake.reply(f"{text} is answered at some length, so that a summary is shorter. " * 40)
        await said(ada, "web:1", text)
    server.fake.reply("They counted.")
    feed = await ada.feed("web:1")
    await ada.say("web:1", "/compact")
    await feed.read(lambda page: "compacted" in page.kinds)
    feed.close()
    server.fake.reply("fine")
    page = await said(ada, "web:1", "four")
    answers = [seq for seq, one in sorted(page.entries.items()) if one["kind"] == "answer"]
    body, notes = await sent_at(ada, "web:1", answers[-1])
    assert (body, notes) == (server.fake.requests[-1].raw, [])
    assert b"They counted." in body
    await ada.say("web:1", "/new")
    server.fake.reply("fresh")
    page = await said(ada, "web:1", "five")
    answers = [seq for seq, one in sorted(page.entries.items()) if one["kind"] == "answer"]
    assert await sent_at(ada, "web:1", answers[-1]) == (server.fake.requests[-1].raw, [])
    assert await sent_at(ada, "web:1", answers[0]) == (server.fake.requests[0].raw, [])


async def test_a_request_is_shown_as_sent_after_all_its_sources_have_changed(tmp_path: Path):
    async with serving(tmp_path) as server:
        ada = await page_client(server, "ada")
        server.fake.reply("one")
        await said(ada, "web:1", "hello")
        first, token = server.fake.requests[-1].raw, ada.headers
        (server.workspace("ada") / "AGENTS.md").write_text("Speak of roses only.")
    async with serving(tmp_path, temperature=0.5) as server:
        ada = PageClient(server.url, server.http)
        ada.headers = token
        (await server.owners.agent("ada")).tools.unregister("list_dir")
        server.fake.reply("two")
        page = await said(ada, "web:1", "and now?")
        second = server.fake.requests[-1].raw
        for words in (b"roses", b'"temperature":0.5', b'"list_dir"'):
            assert (words in second) != (words in first)
        answers = [seq for seq, one in sorted(page.entries.items()) if one["kind"] == "answer"]
        assert await sent_at(ada, "web:1", answers[0]) == (first, [])
        assert await sent_at(ada, "web:1", answers[1]) == (second, [])


async def test_a_known_prompt_and_known_tools_are_kept_once_and_cost_no_write(
    server: Serving, ada: PageClient, monkeypatch: pytest.MonkeyPatch
):
    written: list[list[str]] = []
    keep = server.store.keep_request_texts

    async def spy(owner: str, key: str, texts: Mapping[str, str]) -> None:
        written.append(list(texts))
        await keep(owner, key, texts)

    monkeypatch.setattr(server.store, "keep_request_texts", spy)
    for key, text in (("web:1", "one"), ("web:2", "two"), ("web:1", "three")):
        server.fake.calls(call("list_dir"))
        server.fake.reply("fine")
        await said(ada, key, text)
    assert [len(hashes) for hashes in written] == [2]
    assert await texts(server) == [("ada", "", hash) for hash in sorted(written[0])]
    (server.workspace("ada") / "AGENTS.md").write_text("Speak of roses only.")
    server.fake.reply("roses")
    await said(ada, "web:2", "four")
    assert [len(hashes) for hashes in written] == [2, 1]  # the tools are the same


async def test_an_api_clients_requests_are_shown_as_sent(server: Serving, ada: PageClient):
    client = await server.client("bea", owner="ada")
    weather = function("weather", city={"type": "string"})
    server.fake.reply("with our prompt")
    await client.ask([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}], temperature=0.25)
    server.fake.calls(call("weather", city="Rome"))
    await client.ask("and the weather?", tools=[weather], max_tokens=77)
    sessions = [one.key for one in await server.store.sessions("ada")]
    bodies = [server.fake.requests[number].raw for number in (1, 0)]  # the latest session first
    for key, raw in zip(sessions, bodies, strict=True):
        page = await (await ada.feed(key)).read(lambda page: "answer" in page.kinds)
        (seq,) = [seq for seq, one in page.entries.items() if one["kind"] == "answer"]
        body, notes = await sent_at(ada, key, seq, end=b"}")
        assert (body, notes) == (raw, [])
    for words, body in ((b"Be brief.", bodies[1]), (b"0.25", bodies[1]), (b"weather", bodies[0]), (b"77", bodies[0])):
        assert words in body


async def test_a_sub_agents_request_has_its_own_prompt_which_is_deleted_with_its_session(
    server: Serving, ada: PageClient
):
    server.fake.calls(call("spawn", task="Count the beans"))
    for text in ("started", "There are 12 beans.", "reported", "bye"):
        server.fake.reply(text)
    await said(ada, "web:1", "count them")
    await until(lambda: len(server.fake.requests) >= 4)
    (key,) = [one.key for one in await server.store.sessions("ada") if one.key.startswith("sub:")]
    page = await (await ada.feed(key)).read(lambda page: page.kinds[-1:] == ["end"])
    (seq,) = [seq for seq, one in page.entries.items() if one["kind"] == "answer"]
    (raw,) = [one.raw for one in server.fake.requests if b"## Your task" in one.raw]
    agent = await server.owners.agent("ada")
    (Path(agent.context.workspace) / "AGENTS.md").write_text("Speak of roses only.")
    body, notes = await sent_at(ada, key, seq, end=b"")
    assert (raw[: len(body)], notes) == (body, [])
    assert key in {one[1] for one in await texts(server)}
    await said(ada, "web:1", "thanks")  # the report was answered before
    assert await server.store.delete_session("ada", "web:1") is not None
    assert key not in {one[1] for one in await texts(server)}


async def test_a_request_that_is_not_kept_is_rebuilt_and_says_so(server: Serving, ada: PageClient):
    server.fake.reply("fine")
    page = await said(ada, "web:1", "hello")
    (seq,) = [seq for seq, one in page.entries.items() if one["kind"] == "answer"]
    await writer_of(server).submit(lambda db: db.execute("DELETE FROM request_text").rowcount)
    body, notes = await sent_at(ada, "web:1", seq)
    assert body == server.fake.requests[-1].raw  # nothing has changed
    assert [("prompt" in note, "tools" in note) for note in notes] == [(True, False), (False, True)]


async def test_failed_attempts_and_the_last_flush_wait_are_shown(tmp_path: Path):
    async with serving(tmp_path, retries=2, prices=PRICES) as server:
        ada = await page_client(server, "ada")
        mine = PageClient(server.url, server.http)
        mine.headers = (await server.client("me", owner="me", rights="use,admin")).headers
        for page in (ada, mine):
            server.fake.fail(503, "too many beans")
            server.fake.reply("at last")
            await said(page, "web:1", "hello")
            turn = (await page.api("GET", "sessions/web:1/turns"))[1]["turns"][0]["id"]
            shown = (await page.api("GET", f"sessions/web:1/turns/{turn}"))[1]
            assert [step["kind"] for step in shown["steps"]] == ["said", "retry", "model", "end"]
            retry, model = shown["steps"][1:3]
            assert 0 < retry["seconds"] < model["seconds"]
            assert ("beans" in retry["text"]) == (page is mine)  # others do not read what the server says

        async def end() -> dict[str, Any]:
            return (await ada.api("GET", f"sessions/web:1/turns/{turns[0]['id']}"))[1]

        turns = (await ada.api("GET", "sessions/web:1/turns"))[1]["turns"]
        async with asyncio.timeout(30):
            while not (shown := await end())["steps"][-1]["flushed_after"]:
                await asyncio.sleep(0.05)
        assert shown["flushed"] >= shown["steps"][-1]["flushed_after"]


async def test_another_owner_and_wrong_positions_get_nothing(server: Serving, ada: PageClient):
    server.fake.reply("fine")
    await said(ada, "web:1", "hello")
    turn = (await ada.api("GET", "sessions/web:1/turns"))[1]["turns"][0]["id"]
    eve = await page_client(server, "eve")
    for path in ("turns", f"turns/{turn}", "requests/2"):
        assert (await eve.api("GET", f"sessions/web:1/{path}"))[0] == 404
        assert (await ada.api("GET", f"sessions/web:1/{path}"))[0] == 200
    for path, status in (("requests/1", 404), ("requests/99", 404), ("requests/x", 400), (f"turns/{turn[:5]}", 404)):
        assert (await ada.api("GET", f"sessions/web:1/{path}"))[0] == status
    server.fake.reply("no")
    await said(eve, "web:1", "mine")
    assert (await eve.api("GET", f"sessions/web:1/turns/{turn}"))[0] == 404

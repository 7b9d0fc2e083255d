"""Budgets: a turn ends with a clear reply before a call that would exceed one, whichever agent caused the cost."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from everloop import AgentLoop, Config, LLMResponse, MessageBus
from everloop.config import Price
from everloop.log import ModelAnswered, TurnEnded
from everloop.store.base import Spent
from everloop.store.sqlite import SQLiteStore
from everloop.testing import ScriptedProvider, call


def answer(text: str = "fine", read: int = 3_000, written: int = 1_000, **more: int) -> LLMResponse:
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written, **more}
    return LLMResponse(text, usage=usage)


def calls(read: int = 3_000) -> LLMResponse:
    return LLMResponse(None, [call("list_dir", path=".")], usage={"prompt_tokens": read, "completion_tokens": 10})


def agent(tmp_path: Path, model: Any, **settings: Any) -> AgentLoop:
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    config = Config(home=tmp_path / "home", **settings)
    return AgentLoop(MessageBus(), model, work, config=config, store=tmp_path / "store.db")


async def log(tmp_path: Path, key: str = "cli:direct") -> list[Any]:
    store = SQLiteStore(tmp_path / "store.db")
    info = await store.session("me", key)
    logged = await store.read_log(info.id) if info else []
    await store.close()
    return [one.entry for one in logged]


async def test_a_turn_that_would_exceed_its_budget_ends_with_a_reply_and_keeps_its_work(tmp_path):
    model = ScriptedProvider([calls(9_000), calls(9_000), "NEVER"])
    async with agent(tmp_path, model, turn_tokens=20_000) as loop:
        said = await loop.process_direct("go")
        assert "20,000 tokens" in said
        assert "Sorry" not in said
        model.steps[2] = "a new turn"
        assert await loop.process_direct("go on") == "a new turn"  # each turn has its own
    entries = await log(tmp_path)
    assert sum(isinstance(entry, ModelAnswered) for entry in entries) == 3
    assert [entry.reason for entry in entries if isinstance(entry, TurnEnded)] == ["budget", "answer"]


async def test_a_prompt_that_exceeds_the_budget_is_not_sent(tmp_path):
    model = ScriptedProvider(["NEVER"])
    async with agent(tmp_path, model, turn_tokens=100) as loop:
        assert "100 tokens" in await loop.process_direct("go")
    assert model.requests == []


async def test_the_daily_budget_spans_sessions_and_restarts_and_resets_at_midnight(tmp_path, monkeypatch):
    model = ScriptedProvider([answer()] * 10)
    async with agent(tmp_path, model, day_tokens=10_000) as loop:
        assert await loop.process_direct("one", "cli:a") == "fine"
        assert await loop.process_direct("two", "cli:b") == "fine"
    async with agent(tmp_path, model, day_tokens=10_000) as loop:
        assert "today" in await loop.process_direct("three", "cli:c")
        monkeypatch.setattr(time, "strftime", lambda *form: "day 2099-01-01")
        assert await loop.process_direct("four", "cli:c") == "fine"


async def test_the_day_is_the_same_on_machines_of_different_time_zones(tmp_path, monkeypatch):
    now = time.gmtime()
    monkeypatch.setattr(time, "gmtime", lambda *_: now)
    model = ScriptedProvider([answer()] * 3)
    said = []
    try:
        for zone in ("Pacific/Kiritimati", "Etc/GMT+12", "Europe/Vienna"):  # the date always differs in the first two
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            async with agent(tmp_path, model, day_tokens=10_000) as loop:
                said.append(await loop.process_direct("go", f"cli:{zone}"))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert said[:2] == ["fine", "fine"]
    assert "resets at midnight UTC" in said[2]


async def test_money_is_counted_by_the_price_of_the_model_that_answered(tmp_path):
    prices = (Price(model="dear*", input=1_000.0, output=2_000.0, cached=100.0), Price(model="*", input=1.0))
    model = ScriptedProvider([answer(read=2_000, written=500, cached_tokens=1_000), "NEVER"], model="dear-1")
    async with agent(tmp_path, model, day_cost=50.0, prices=prices) as loop:
        # 1,000 read at 1,000 a million, 1,000 from the cache at 100, 500 written at 2,000: 1.0 + 0.1 + 1.0
        assert await loop.process_direct("one") == "fine"
        scope = time.strftime("day %Y-%m-%d")
        tokens, cost = (await loop.store.spent("me", [scope]))[scope]
        assert (tokens, round(cost, 6)) == (2_500, 2.1)
    async with agent(tmp_path, model, day_cost=2.2, prices=prices) as loop:
        assert "2.2" in await loop.process_direct("two")
    assert len(model.requests) == 1


async def test_sub_agents_use_the_budget_of_the_turn_that_started_them(tmp_path):
    async def script(messages: Any, tools: Any) -> Any:
        if "You are a sub-agent" in messages[0]["content"]:
            return answer("found", read=30_000)
        if messages[-1]["role"] == "tool":
            return "NEVER"
        return LLMResponse(None, [call("spawn", task="look", wait=True)], usage={"prompt_tokens": 3_000})

    model = ScriptedProvider([script], repeat_last=True)
    async with agent(tmp_path, model, turn_tokens=30_000) as loop:
        assert "30,000 tokens" in await loop.process_direct("go")


async def test_a_provider_that_counts_nothing_does_not_evade_the_budget(tmp_path):
    model = ScriptedProvider(["fine"] * 50)
    async with agent(tmp_path, model, day_tokens=30_000) as loop:
        said = [await loop.process_direct("go") for _ in range(50)]
    assert said[0] == "fine"
    assert "today" in said[-1]


async def test_usage_is_counted_per_owner(tmp_path):
    store = SQLiteStore(tmp_path / "store.db")
    await store.spend("me", [Spent("day x", 5, 0.5), Spent("day x", 5, 0.5)])
    assert await store.spent("me", ["day x", "day y"]) == {"day x": (10, 1.0)}
    assert await store.spent("you", ["day x"]) == {}
    await store.close()


async def test_summaries_count_and_are_skipped_if_they_do_not_fit_the_budget(tmp_path):
    model = ScriptedProvider([answer("x", 10, 10), answer("x", 10, 10), answer("x", 10, 10), answer("S", 5_000, 100)])
    async with agent(tmp_path, model, day_tokens=100_000) as loop:
        for text in ("one", "two", "three"):
            await loop.process_direct(f"{text} {'and more words ' * 100}")
        assert "now a summary" in await loop.process_direct("/compact")
        scope = time.strftime("day %Y-%m-%d")
        assert (await loop.store.spent("me", [scope]))[scope][0] == 5_160
    async with agent(tmp_path, model, day_tokens=5_200) as loop:
        assert "budget" in await loop.process_direct("four")


async def test_concurrent_turns_exceed_a_budget_by_at_most_their_running_calls(tmp_path):
    model = ScriptedProvider([answer(read=4_000, written=0)], repeat_last=True, delay=0.01)
    async with agent(tmp_path, model, day_tokens=40_000) as loop:
        said = await asyncio.gather(*(loop.process_direct("go", f"cli:{n}") for n in range(8)))
        said += [await loop.process_direct("go", f"cli:{n}") for n in range(8)]
    assert said.count("fine") <= 16
    assert "today" in said[-1]


async def test_a_money_budget_refuses_a_model_without_a_price(tmp_path):
    model = ScriptedProvider(["NEVER"], model="cheap-1")
    async with agent(tmp_path, model, day_cost=5.0, prices=(Price(model="gpt-*", input=1.0),)) as loop:
        assert "no [[price]] for the model cheap-1" in await loop.process_direct("go")
    assert model.requests == []


async def test_a_budget_smaller_than_one_request_says_what_to_do(tmp_path):
    model = ScriptedProvider(["NEVER"])
    async with agent(tmp_path, model, day_tokens=100) as loop:
        said = await loop.process_direct("go")
    assert "one request takes about" in said
    assert "Raise it" in said


@pytest.mark.parametrize("tokens", [10**30, 10**400])
async def test_an_invalid_token_count_does_not_fail_the_turn(tmp_path, tokens):
    model = ScriptedProvider([answer("first", read=tokens, written=0), "second"])
    async with agent(tmp_path, model, day_tokens=1_000_000) as loop:
        assert await loop.process_direct("go") == "first"
        assert await loop.process_direct("go on") == "second"

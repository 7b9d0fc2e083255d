"""Titles of sessions by the model."""

from __future__ import annotations

import time
from typing import Any

import pytest

from everloop import AgentLoop
from everloop.bus import MessageBus
from everloop.config import Config
from everloop.runtime.titles import title_of
from everloop.testing import ScriptedProvider
from tests.support.cases import each


@each(
    "answer",
    [
        "Feeding herons",
        "“Feeding herons”.",
        "# Feeding herons",
        "**Feeding herons**",
        "Title: Feeding herons",
        "\n\nFeeding herons\n\nThis title says what it is about.",
    ],
)
def test_an_answer_becomes_a_title(answer: str) -> None:
    assert title_of(answer) == "Feeding herons"


def test_an_unsuitable_title_is_dropped_and_a_long_one_truncated():
    assert title_of("") == title_of(" \n…\n") == ""
    assert len(title_of("word " * 100)) <= 60


def agent_of(tmp_path, model: ScriptedProvider, **settings: Any) -> AgentLoop:
    (tmp_path / "w").mkdir(exist_ok=True)
    config = Config(home=tmp_path, model="m", **{"titles": "model", **settings})
    return AgentLoop(MessageBus(), model, tmp_path / "w", config=config, store=tmp_path / "store.db")


async def test_a_session_is_titled_once_by_the_summary_model(tmp_path):
    provider = ScriptedProvider(["Fish.", "Feeding herons"])
    async with agent_of(tmp_path, provider, summary_model="small") as agent:
        assert await agent.name_session() == ""
        await agent.process_direct("What do herons eat?")
        assert await agent.name_session() == "Feeding herons"
        assert await agent.name_session() == ""
        info = await agent.store.session("me", "cli:direct")
        assert info is not None
        assert (info.title, info.named_by) == ("Feeding herons", "small")
    assert len(provider.requests) == 2
    assert provider.requests[-1].model == "small"


@pytest.mark.parametrize(
    "settings", [{"titles": "words"}, {"provider": "local"}, {"day_tokens": 1_000_000}], ids=lambda one: next(iter(one))
)
async def test_no_title_is_requested_if_disabled_local_or_over_budget(tmp_path, settings):
    provider = ScriptedProvider(["Fish.", "Feeding herons"])
    async with agent_of(tmp_path, provider, **settings) as agent:
        await agent.process_direct("What do herons eat?")
        if "day_tokens" in settings:
            from everloop.store.base import Spent

            await agent.store.spend("me", [Spent(time.strftime("day %Y-%m-%d", time.gmtime()), 1_000_000, 0.0)])
        assert await agent.name_session() == ""
    assert len(provider.requests) == 1


async def test_a_title_counts_for_the_budget_of_the_day(tmp_path):
    provider = ScriptedProvider(["Fish.", "Feeding herons"])
    day = time.strftime("day %Y-%m-%d", time.gmtime())
    async with agent_of(tmp_path, provider, day_tokens=1_000_000) as agent:
        await agent.process_direct("What do herons eat?")
        before = (await agent.store.spent("me", [day]))[day][0]
        assert await agent.name_session()
        assert (await agent.store.spent("me", [day]))[day][0] > before


async def test_a_model_that_fails_leaves_the_first_words(tmp_path):
    def fails(*_: Any) -> str:
        raise RuntimeError("no")

    provider = ScriptedProvider(["Fish.", fails, "Feeding herons"])
    async with agent_of(tmp_path, provider) as agent:
        await agent.process_direct("What do herons eat?")
        assert await agent.name_session() == ""
        assert await agent.name_session() == "Feeding herons"

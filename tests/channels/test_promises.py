"""What every network keeps: two workers share an account, a flood of one sender delays no other, and order."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from everloop import LLMProvider, LLMResponse
from everloop.testing.channels import Forker, Report, running, take_over

from .networks import NETWORKS
from .says import until

# The chats of two people, and how they write there, where the network's own person is always the same one.
CHATS = {
    "webhook": ("anna", "bert"),
    "telegram": ("7", "8"),
    "slack": ("D7", "D8"),
    "discord": ("7", "8"),
    "xmpp": ("anna@localhost", "bert@localhost"),
    "irc": ("anna", "bert"),
    "email": ("anna@example.org", "bert@example.org"),
}
WHO: dict[str, Callable[[str], dict[str, Any]]] = {
    "webhook": lambda chat: {"sender": chat},
    "telegram": lambda chat: {"sender": int(chat)},
    "slack": lambda chat: {"user": f"U{chat[1:]}"},
    "discord": lambda chat: {"user": chat},
}


def _oneself(chat: str) -> dict[str, Any]:
    return {}


ALLOWED = {"webhook": ["anna", "bert"], "telegram": ["7", "8"], "slack": ["U7", "U8"], "discord": ["7", "8"]}


@pytest.mark.timeout(300)
async def test_one_of_two_workers_polls_and_the_other_takes_over(tmp_path: Path) -> None:
    made = {kind: new() for kind, new in NETWORKS.items()}
    report = Report()
    async with Forker() as forker:
        for kind, network in made.items():
            report.add(await take_over(network.running, tmp_path / kind, chats=CHATS[kind], forker=forker))
    assert report.problems == []
    assert report.kills == len(NETWORKS)
    assert made["telegram"].conflicts == 0


class HoldsUp(LLMProvider):
    """Answers whatever it is asked, but keeps one person waiting until it is told otherwise."""

    default_model = "holds-up"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go_on = asyncio.Event()

    async def chat(self, messages: Any, tools: Any = None, model: str | None = None) -> LLMResponse:
        said = str(next(one["content"] for one in reversed(messages) if one["role"] == "user"))
        self.asked.append(said)
        if said.startswith("flood"):
            await self.go_on.wait()
        return LLMResponse(f"re: {said}")


def _taken(store: Path) -> list[str]:
    """What the inbox has of the flood."""
    with closing(sqlite3.connect(store)) as db:
        rows = [json.loads(data)["content"] for (data,) in db.execute("SELECT data FROM inbox ORDER BY id")]
    return [text for text in rows if text.startswith("flood")]


@pytest.mark.parametrize("kind", NETWORKS)
async def test_a_flood_of_one_person_delays_no_other_and_is_answered_in_its_order(kind: str, tmp_path: Path) -> None:
    loud, quiet = CHATS[kind]
    who, says = WHO.get(kind, _oneself), HoldsUp()
    async with NETWORKS[kind]().running() as network:
        network.settings |= {"per_minute": 4, "stream": False}
        if kind in ALLOWED:
            network.settings["allow"] = ALLOWED[kind]
        async with running(network.settings, tmp_path, says):
            for number in range(20):
                await network.say(loud, f"flood {number}", **who(loud))
            for number in range(3):
                await network.say(quiet, f"calm {number}", **who(quiet))
            await until(lambda: len(network.heard(quiet)) == 3)
            taken = await asyncio.to_thread(_taken, tmp_path / "store.db")
            asked_before = [text for text in says.asked if text.startswith("flood")]
            says.go_on.set()
            await until(lambda: len(network.heard(loud)) == 5)
    assert network.heard(quiet) == ["re: calm 0", "re: calm 1", "re: calm 2"]
    assert taken == ["flood 0", "flood 1", "flood 2", "flood 3"]
    assert len(asked_before) <= 1  # of a chat, the next message waits for the answer before
    answers = [text for text in network.heard(loud) if text.startswith("re:")]
    assert answers == ["re: flood 0", "re: flood 1", "re: flood 2", "re: flood 3"]
    assert next(text for text in network.heard(loud) if text not in answers).startswith("That was too fast")

"""Buttons below a question: they answer it once, and only for people who may answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from everloop.channels.access import Pairings
from everloop.config import Rule
from everloop.testing import ScriptedProvider, call
from everloop.testing.channels import running

from .fake_discord import FakeDiscord
from .fake_slack import ME, FakeSlack
from .fake_telegram import FakeTelegram
from .hooks import HookNetwork
from .says import until

ASKS = (Rule(do="ask", tool="write_file"),)


@dataclass
class Group:
    """A network with one group that is open to all its members; 7 is an owner."""

    network: Any
    chat: str
    mention: str
    who: str  # the name of the argument for the person who acts
    prefix: str = ""

    def person(self, number: int) -> dict[str, Any]:
        return {self.who: number if self.who == "sender" else f"{self.prefix}{number}"}

    async def say(self, text: str, number: int = 7) -> None:
        await self.network.say(self.chat, f"{self.mention} {text}", **self.person(number))

    async def press(self, label: str, number: int = 7, message: Any = None) -> None:
        more = {} if message is None else {("asked" if self.who == "sender" else "message"): message}
        await self.network.press(label, **self.person(number), **more)

    @property
    def questions(self) -> list[Any]:
        sent = self.network.sent if self.who == "sender" else self.network.posted
        return [one for one in sent if one.get("reply_markup") or one.get("blocks") or one.get("components")]

    @property
    def removed(self) -> int:
        """Return how often buttons were removed."""
        network = self.network
        if isinstance(network, FakeTelegram):
            return sum(not one["reply_markup"]["inline_keyboard"] for one in network.edited)
        if isinstance(network, FakeSlack):
            return sum(not any(block["type"] == "actions" for block in one["blocks"]) for one in network.updated)
        return sum(one == {"type": 7, "data": {"components": []}} for one in network.callbacks)


@pytest.fixture(params=["telegram", "slack", "discord"])
async def group(request: pytest.FixtureRequest) -> AsyncIterator[Group]:
    async with _network(request.param) as made:
        made.network.settings["groups"] = [made.chat]
        yield made


@asynccontextmanager
async def _network(name: str) -> AsyncIterator[Group]:
    if name == "telegram":
        async with FakeTelegram().running() as telegram:
            yield Group(telegram, "-100", "@ever_bot", "sender")
    elif name == "slack":
        async with FakeSlack().running() as slack:
            yield Group(slack, "C1", f"<@{ME}>", "user", "U")
    else:
        async with FakeDiscord().running() as discord:
            yield Group(discord, "91", "<@4242>", "user")


def writes(*names: str) -> ScriptedProvider:
    return ScriptedProvider([*(call("write_file", path=name, content="x") for name in names), "Written."])


async def test_a_button_works_only_for_a_person_who_may_answer(group: Group, tmp_path: Path) -> None:
    async with running(group.network.settings, tmp_path, writes("canary.txt"), policy=ASKS):
        await group.say("write it")
        await until(lambda: group.questions)
        await group.press("Approve", number=9)  # a group member
        await group.press("Always", number=9)
        await group.say("/status", number=7)  # button presses are handled in order
        await until(lambda: len(group.network.heard(group.chat)) == 2)
        assert not (tmp_path / "canary.txt").exists()
        assert group.removed == 0
        await group.press("Approve")
        await until(lambda: (tmp_path / "canary.txt").exists())
        await until(lambda: group.removed == 1)


async def test_a_button_answers_only_the_question_that_it_is_below(group: Group, tmp_path: Path) -> None:
    async with running(group.network.settings, tmp_path, writes("first.txt", "second.txt"), policy=ASKS):
        await group.say("write both")
        await until(lambda: group.questions)
        first = group.questions[0]
        await group.press("Approve", message=first)
        await until(lambda: (tmp_path / "first.txt").exists())
        await until(lambda: len(group.questions) == 2)
        heard = len(group.network.heard(group.chat))
        await group.press("Approve", message=first)
        await group.press("Always", message=first)
        await group.say("/status")
        await until(lambda: len(group.network.heard(group.chat)) > heard)
        assert not (tmp_path / "second.txt").exists()
        await group.press("Deny")
        await until(lambda: group.network.heard(group.chat)[-1] == "Written.")
        assert not (tmp_path / "second.txt").exists()


async def test_a_paired_person_answers_questions_that_their_own_message_caused(group: Group, tmp_path: Path) -> None:
    settings, name = group.network.settings, group.network.settings["name"]
    async with running(settings, tmp_path, writes("canary.txt"), policy=ASKS) as store:
        for number in (5, 6):
            sender = f"{group.prefix}{number}"
            code = f"ABCDEFG{number}"
            pending = f'{{"code":"{code}","sender":"{sender}","chat":"{group.chat}","name":"","at":{time.time()}}}'
            await store.set_channel_state(name, f"code:{code}", pending)
            assert await Pairings(store, name).confirm(code, "me") is not None
        await group.say("write it", number=5)
        await until(lambda: group.questions)
        await group.press("Approve", number=6)  # also paired, but the message was not theirs
        heard = len(group.network.heard(group.chat))
        await group.say("/status", number=6)
        await until(lambda: len(group.network.heard(group.chat)) > heard)
        assert not (tmp_path / "canary.txt").exists()
        await group.press("Approve", number=5)
        await until(lambda: (tmp_path / "canary.txt").exists())


async def test_a_network_without_buttons_asks_in_text_alone(tmp_path: Path) -> None:
    async with (
        HookNetwork().running() as network,
        running(network.settings, tmp_path, writes("canary.txt"), policy=ASKS) as store,
    ):
        await network.say("1", "write it")
        await until(lambda: network.heard("1"))
        assert not any(key.startswith("question:") for key in await store.channel_state("hook"))
        await network.say("1", "yes")
        await until(lambda: (tmp_path / "canary.txt").exists())

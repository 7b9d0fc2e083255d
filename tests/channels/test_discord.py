"""Discord, against a fake that speaks the gateway's protocol and the REST API."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from everloop.store.sqlite import SQLiteStore
from everloop.testing.channels import conform, running, storm

from .fake_discord import ME, TOKEN, FakeDiscord
from .says import Says, found, until

MENTION = f"<@{ME['id']}>"


@pytest.fixture
async def discord() -> AsyncIterator[FakeDiscord]:
    async with FakeDiscord().running() as made:
        yield made


@pytest.mark.timeout(300)
async def test_nothing_is_lost_or_doubled_whichever_write_is_the_last(tmp_path: Path) -> None:
    report = await conform(lambda: FakeDiscord().running(), tmp_path, step=6)
    assert report.problems == []
    assert report.kills >= 2


@pytest.mark.timeout(300)
async def test_a_rough_network_and_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    chats = [str(number) for number in range(1, 5)]
    report = await storm(lambda: FakeDiscord(rough=True).running(), tmp_path, chats=chats, each=4, kills=3)
    assert report.problems == []
    assert report.kills >= 1


@pytest.mark.parametrize(
    ("text", "more", "answered"),
    [
        ("hello", {}, False),
        (f"{MENTION} hello", {}, True),
        ("hello", {"referenced_message": {"author": ME}}, True),
        (f"{MENTION} hello", {"author": {"id": "9", "username": "other", "bot": True}}, False),
        (f"{MENTION} hello", {"user": "9"}, False),
        (f"{MENTION} hello", {"type": 7}, False),
    ],
)
async def test_in_a_server_only_mentions_of_and_replies_to_the_bot_cost_a_model_call(
    discord: FakeDiscord, tmp_path: Path, text: str, more: dict[str, Any], answered: bool
) -> None:
    says = Says("yes?")
    async with running(discord.settings, tmp_path, says):
        await discord.say("91", text, **more)
        await discord.say("91", f"{MENTION} last")
        await until(lambda: len(discord.posted) == 1 + answered)
    assert says.asked == ["Person 7: hello"] * answered + ["Person 7: last"]
    assert discord.posted[-1]["allowed_mentions"] == {"parse": [], "replied_user": True}


async def test_a_dropped_connection_is_resumed_and_a_lost_session_is_caught_up(
    discord: FakeDiscord, tmp_path: Path
) -> None:
    async with running(discord.settings, tmp_path):
        await discord.say("1", "one")
        await until(lambda: discord.heard("1") == ["re: one"])
        await discord.drop()
        await discord.say("1", "two")
        await until(lambda: len(discord.heard("1")) == 2)
        assert (discord.identified, discord.resumed) == (1, 1)
        await discord.say("91", f"{MENTION} in the garden")
        await until(lambda: len(discord.heard("91")) == 1)
        discord.forget_session()
        await discord.drop()
        await discord.say("1", "three")
        await discord.say("91", "nobody is meant")
        await until(lambda: len(discord.heard("1")) == 3)
    assert discord.heard("1") == ["re: one", "re: two", "re: three"]
    assert discord.identified == 2
    assert len(discord.heard("91")) == 1  # a message that is read later also belongs to a group


async def test_a_crash_during_catching_up_loses_nothing(discord: FakeDiscord, tmp_path: Path) -> None:
    says = Says("hi")
    async with running(discord.settings, tmp_path, says) as store:
        await discord.say("1", "one")
        await discord.say("2", "one")
        await until(lambda: len(says.asked) == 2)
    discord.forget_session()
    await discord.say("1", "two")
    await discord.say("2", "two")
    discord.unreadable.add("2")  # the connection breaks while the second chat is read
    async with running(discord.settings, tmp_path, says) as store:
        await until(lambda: len(says.asked) == 3)
        await found(lambda: _has_failed(store))
    discord.unreadable.clear()
    async with running(discord.settings, tmp_path, says):
        await until(lambda: len(says.asked) == 4)
    assert says.asked == ["one", "one", "two", "two"]


async def _has_failed(store: SQLiteStore) -> bool:
    return '"error":""' not in (await store.channel_state("discord"))["status"]


async def test_a_gateway_that_misses_heartbeats_is_disconnected(discord: FakeDiscord, tmp_path: Path) -> None:
    discord.beats, discord.interval = False, 50
    async with running(discord.settings, tmp_path):
        await until(lambda: discord.resumed >= 1)
        discord.beats = True
        await discord.say("1", "hello")
        await until(lambda: discord.heard("1") == ["re: hello"])


async def test_a_temporarily_refused_message_is_sent_again_and_appears_once(
    discord: FakeDiscord, tmp_path: Path
) -> None:
    discord.fail = [(429, {"message": "You are being rate limited.", "retry_after": 0.1, "global": False})]
    async with running(discord.settings, tmp_path):
        await discord.say("1", "hello")
        await until(lambda: discord.heard("1"))
    assert discord.heard("1") == ["re: hello"]


async def test_a_message_to_a_person_who_accepts_none_becomes_a_dead_letter(
    discord: FakeDiscord, tmp_path: Path
) -> None:
    discord.closed_to.add("1")
    async with running(discord.settings, tmp_path) as store:
        await discord.say("1", "hello")
        (dead,) = await found(lambda: store.dead_letters("discord"))
        assert discord.typing == ["1"]
    assert dead.reason == "403 Cannot send messages to this user (50007)"


async def test_an_invalid_token_is_reported_and_shown_nowhere(
    discord: FakeDiscord, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    discord.settings["token"] = wrong = "MTA.wrong.secret"
    async with running(discord.settings, tmp_path) as store:
        state = await found(lambda: store.channel_state("discord"))
    assert "401" in state["status"]
    for secret in (TOKEN, wrong):
        assert secret not in caplog.text
        assert secret not in str(state)


async def test_the_privileged_intent_is_requested_only_when_it_is_set(discord: FakeDiscord, tmp_path: Path) -> None:
    async with running(discord.settings, tmp_path):
        await until(lambda: discord.identified)
    assert discord.intents & 1 << 15 == 0
    async with FakeDiscord().running() as other:
        other.settings["message_content"] = True
        (tmp_path / "other").mkdir()
        async with running(other.settings, tmp_path / "other"):
            await until(lambda: other.identified)
        assert other.intents & 1 << 15
